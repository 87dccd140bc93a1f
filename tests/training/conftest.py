"""Texts that every file trains on."""

import pytest

from heddle.data.corpus import Corpus
from tests import small


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Thirty short documents, tokenized once."""
    return small.corpus(tmp_path_factory.mktemp("text"))
