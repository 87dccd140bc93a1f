"""Optimizers whose first step does not wait for torch's compiler.

torch keeps some methods of its optimizers out of compiled graphs, and imports the compiler for that: more than a second
before the first step. An optimizer here is never inside a compiled graph, and calls what torch wrapped.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch


class EagerOptimizer(torch.optim.Optimizer):
    """Base, before torch's own class, of an optimizer that is called outside compiled graphs."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch does."""
        inspect.unwrap(super().add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, or set them to zero."""
        inspect.unwrap(super().zero_grad)(self, set_to_none)


class EagerAdamw(EagerOptimizer, torch.optim.AdamW):
    """torch's AdamW, with the same numbers."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)
