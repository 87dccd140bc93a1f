"""Library calls as opaque operators of compiled graphs: a compiler does not look into their kernels.

An adapter adds its functions to `LIBRARY_CALLS`. Outside a graph the function itself is called. Within one it is the
operator `heddle::library_call`. Its backward pass, `heddle::library_gradients`, recomputes the call and differentiates
it by the library's own autograd: what a library saves for its backward pass is not public.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heddle.numerics.norms import without_autocast


class LibraryCall(NamedTuple):
    """A function of a library over named tensors: `run` calls it, `shapes` returns empty results of the same shapes."""

    run: Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
    shapes: Callable[[dict[str, Tensor]], tuple[Tensor, ...]]


LIBRARY_CALLS: dict[str, LibraryCall] = {}
_library = torch.library.Library("heddle", "FRAGMENT")
_library.define(
    "library_gradients(str name, str keys, Tensor[] tensors, int[] indices, Tensor[] output_gradients) -> Tensor[]"
)


def call_library(name: str, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Call a function of the table with these tensors. In a graph it is one operator, else the function itself."""
    if is_compiling():
        return tuple(library_operator(name, ",".join(tensors), list(tensors.values())))
    return LIBRARY_CALLS[name].run(tensors)


@torch.library.custom_op("heddle::library_call", mutates_args=())
def library_operator(name: str, keys: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A function of the table; keys: the names of its tensors, joined by commas. Its results are contiguous."""
    with torch.no_grad(), without_autocast(tensors[0]):
        return [x.contiguous() for x in LIBRARY_CALLS[name].run(_named(keys, tensors))]


@library_operator.register_fake
def _(name: str, keys: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(LIBRARY_CALLS[name].shapes(_named(keys, tensors)))


def _gradients(
    name: str, keys: str, tensors: Sequence[Tensor], indices: Sequence[int], output_gradients: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients of the tensors with these indices. A `custom_op` would disable autograd within it."""
    with torch.enable_grad(), without_autocast(tensors[0]):
        leaves = [x.detach().requires_grad_(i in indices) for i, x in enumerate(tensors)]
        results = LIBRARY_CALLS[name].run(_named(keys, leaves))
    gradients = torch.autograd.grad(results, [leaves[i] for i in indices], list(output_gradients))
    return [x.contiguous() for x in gradients]


_library.impl("library_gradients", _gradients, "CompositeExplicitAutograd")


def _gradient_shapes(
    name: str, keys: str, tensors: Sequence[Tensor], indices: Sequence[int], output_gradients: Sequence[Tensor]
) -> list[Tensor]:
    return [tensors[i].new_empty(tensors[i].shape) for i in indices]


torch.library.register_fake("heddle::library_gradients", _gradient_shapes, lib=_library)


def _save(ctx: Any, inputs: tuple[str, str, Sequence[Tensor]], output: list[Tensor]) -> None:
    ctx.name, ctx.keys, tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, output_gradients: Sequence[Tensor]) -> tuple[None, None, list[Tensor | None]]:
    indices = [i for i, needed in enumerate(ctx.needs_input_grad[2]) if needed]
    gradients = torch.ops.heddle.library_gradients(
        ctx.name, ctx.keys, list(ctx.saved_tensors), indices, list(output_gradients)
    )
    by_index = dict(zip(indices, gradients, strict=True))
    return None, None, [by_index.get(i) for i in range(len(ctx.saved_tensors))]


library_operator.register_autograd(_backward, setup_context=_save)


def _named(keys: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(keys.split(","), tensors, strict=True))
