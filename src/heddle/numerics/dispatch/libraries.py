"""Libraries that a kernel may need: none is a dependency of heddle."""

from functools import cache
from importlib import import_module
from types import ModuleType

NOT_CUDA = "it is for CUDA"  # why most kernels of libraries are not for a call


@cache
def optional_module(name: str) -> ModuleType | None:
    """A module of an optional library. None if it is not installed, or if its import finds no GPU."""
    try:
        return import_module(name)
    except (ImportError, RuntimeError):
        return None
