"""Recurrences with one state matrix per head: the kernels of such an operation, and one call of it.

A kernel maps (inputs, state S [B, H, d_k, d_v]) to (output [B, H, T, d_v], the state after the last token).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from heddle.numerics.dispatch.operation import Kernel, Operation
from heddle.numerics.norms import without_autocast

RecurrenceKernel = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


class RecurrenceFacts(NamedTuple):
    """What decides the kernel of a recurrence: the number of tokens, and whether gradients are required."""

    tokens: int
    gradients: bool


class RecurrenceInputs(Protocol):
    """A named tuple of tensors, or None, with keys k [B, G, T, d_k] and values v [B, H, T, d_v] among them."""

    @property
    def k(self) -> Tensor: ...

    @property
    def v(self) -> Tensor: ...

    def __iter__(self) -> Iterator[Tensor | None]: ...


def _step_unsupported(facts: RecurrenceFacts) -> str | None:
    if facts.tokens != 1:
        return f"it takes one token, here are {facts.tokens}"
    return "gradients are wanted" if facts.gradients else None


def _chunked_unsupported(facts: RecurrenceFacts) -> str | None:
    return None if facts.tokens else "there is no token"


def recurrence_operation(
    name: str, step: RecurrenceKernel, chunked: RecurrenceKernel, reference: RecurrenceKernel
) -> Operation[RecurrenceFacts]:
    """The operation: `step` for one token without gradients, `chunked` for one token or more, `reference` for any."""
    return Operation(
        name,
        (
            Kernel("step", step, _step_unsupported),
            Kernel("chunked", chunked, _chunked_unsupported),
            Kernel("reference", reference, lambda facts: None),
        ),
    )


def run_recurrence(
    operation: Operation[RecurrenceFacts], inputs: RecurrenceInputs, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """state S [B, H, d_k, d_v] (None: zeros) -> (output [B, H, T, d_v], the state after the last token).

    Inputs in half precision give an output and a state in float32, under autocast too. May update the state in place.
    """
    v = inputs.v
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    kernel = operation.choose(RecurrenceFacts(v.shape[2], gradients))
    if state is None:
        wide = torch.promote_types(v.dtype, torch.float32)
        state = v.new_zeros(*v.shape[:2], inputs.k.shape[3], v.shape[3], dtype=wide)
    with without_autocast(v):
        result: tuple[Tensor, Tensor] = kernel.run(inputs, state)
    return result
