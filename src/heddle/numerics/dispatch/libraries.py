"""Libraries that a kernel may need: none is a dependency of heddle."""

from importlib import import_module
from types import ModuleType

NOT_CUDA = "it is for CUDA"  # why most kernels of libraries are not for a call


_modules: dict[str, ModuleType | None] = {}  # a compiler traces a look-up, and no import


def optional_module(name: str) -> ModuleType | None:
    """A module of an optional library. None if it is not installed, or if its import finds no GPU."""
    if name not in _modules:
        _modules[name] = _imported(name)
    return _modules[name]


def _imported(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except (ImportError, RuntimeError):
        return None
