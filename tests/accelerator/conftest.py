"""Stand-ins of optional libraries come and go with a test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle.numerics.dispatch import libraries

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture(autouse=True)
def libraries_are_imported_again() -> Iterator[None]:
    """What a test made importable is not found by the next one."""
    libraries._modules.clear()
    yield
    libraries._modules.clear()
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").is_relative_to(STAND_INS):
            del sys.modules[name]
