"""A mark for methods that `torch.compile` must leave alone: what depends on the layout differs from call to call.

The compiler is told when a model is compiled, and not before: `torch.compiler.disable` imports the whole compiler.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

F = TypeVar("F", bound=Callable[..., Any])

_marked: set[Any] = set()


def eager(method: F) -> F:
    """Keep a method of a module out of what is compiled: it runs between two compiled pieces."""
    _marked.add(method)
    return method


def eager_methods(module: nn.Module) -> Iterator[str]:
    """The names of a module's methods that carry the mark."""
    for cls in type(module).__mro__:
        yield from (name for name, value in vars(cls).items() if callable(value) and value in _marked)
