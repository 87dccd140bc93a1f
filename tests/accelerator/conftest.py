"""Stand-ins of optional libraries come and go with a test."""

from collections.abc import Iterator

import pytest

from heddle.numerics.dispatch import libraries


@pytest.fixture(autouse=True)
def libraries_are_imported_again() -> Iterator[None]:
    """What a test made importable is not found by the next one."""
    libraries._modules.clear()
    yield
    libraries._modules.clear()
