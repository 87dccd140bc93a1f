"""Stand-ins of optional libraries come and go with a test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle.numerics import dispatch

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture(autouse=True)
def libraries_are_imported_again() -> Iterator[None]:
    """What a test made importable is not found by the next one."""
    dispatch._modules.clear()
    yield
    dispatch._modules.clear()
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").is_relative_to(STAND_INS):
            del sys.modules[name]
