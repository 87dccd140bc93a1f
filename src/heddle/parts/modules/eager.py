"""Decorators for methods that `torch.compile` should not trace: most depend on the layout of the call.

The decorators only collect the methods. `torch.compiler.disable` is applied when a model is compiled, since it imports
the whole compiler.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

F = TypeVar("F", bound=Callable[..., Any])

_marked: set[Any] = set()
_traceable: set[Any] = set()
_traced_on_cuda: set[Any] = set()
_disabled: set[Any] = set()


def eager(method: F) -> F:
    """Keep a method of a module out of compiled regions: it runs eagerly between two of them."""
    _marked.add(method)
    return method


def layout_dependent(method: F) -> F:
    """As `eager` for compiled layers. Where a whole model is compiled, layouts are made in the graph: it is traced."""
    _traceable.add(method)
    return eager(method)


def eager_on_cpu(method: F) -> F:
    """As `eager`, but layers compiled for CUDA trace it: only kernels of a CPU read lengths and indices on the host."""
    _traced_on_cuda.add(method)
    return eager(method)


def disable_compilation(model: nn.Module) -> None:
    """Keep `eager` methods of the classes in a model out of every graph, whoever compiles it. Imports the compiler."""
    for cls in {cls for module in model.modules() for cls in type(module).__mro__}:
        for name, value in list(vars(cls).items()):
            if callable(value) and value in _marked - _traceable and value not in _disabled:
                disabled = eager(torch.compiler.disable(value))
                _disabled.add(disabled)
                setattr(cls, name, disabled)


def eager_methods(module: nn.Module, device: str) -> Iterator[str]:
    """The names of a module's methods that stay out of layers compiled for a device type, such as "cuda"."""
    marked = _marked - _traced_on_cuda if device == "cuda" else _marked
    for cls in type(module).__mro__:
        yield from (name for name, value in vars(cls).items() if callable(value) and value in marked)
