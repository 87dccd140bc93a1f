"""Libraries that a kernel may need: none is a dependency of heddle."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

NOT_CUDA = "it is for CUDA"  # why most kernels of libraries are not for a call


_modules: dict[str, ModuleType | None] = {}


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


def constant_in_graphs(function: Callable[[], bool]) -> Callable[[], bool]:
    """A compiler calls the function and keeps its answer: it traces no import.

    It is `torch.compiler.assume_constant_result`, which imports the whole compiler to set the same mark.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function
