"""A decorator for methods that `torch.compile` must not trace, because they depend on the layout of the call.

The decorator only collects the methods. `torch.compiler.disable` is applied when a model is compiled, since it imports
the whole compiler.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

F = TypeVar("F", bound=Callable[..., Any])

_marked: set[Any] = set()


def eager(method: F) -> F:
    """Keep a method of a module out of compiled regions: it runs eagerly between two of them."""
    _marked.add(method)
    return method


def eager_methods(module: nn.Module) -> Iterator[str]:
    """The names of a module's methods that have the decorator."""
    for cls in type(module).__mro__:
        yield from (name for name, value in vars(cls).items() if callable(value) and value in _marked)
