"""Stand-ins of optional libraries come and go with a test."""

from collections.abc import Iterator

import pytest

from heddle.numerics.dispatch.libraries import optional_module


@pytest.fixture(autouse=True)
def libraries_are_imported_again() -> Iterator[None]:
    """What a test made importable is not found by the next one."""
    optional_module.cache_clear()
    yield
    optional_module.cache_clear()
