"""Adapter to causal-conv1d (`causal_conv1d`): CUDA kernels of the short convolution, for 2 to 4 tokens.

Its tensors are [B, C, T], here views of heddle's [B, T, C], and so is its state [B, C, kernel_size − 1]. `seq_idx`
keeps the documents of a row apart. Signatures are those of version 1.6.1.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heddle.numerics.dispatch.libraries import NOT_CUDA, constant_in_graphs, optional_module
from heddle.numerics.recurrent.library_calls import LIBRARY_CALLS, LibraryCall, call_library

if TYPE_CHECKING:
    from heddle.numerics.recurrent.convolution import ConvolutionFacts

MODULE = "causal_conv1d"
FUNCTION = "causal_conv1d_fn"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KERNEL_SIZES = range(2, 5)
ALIGNMENT = 8  # of channels


@constant_in_graphs
def conv_installed() -> bool:
    """Whether the library's functions are there."""
    return optional_module(MODULE) is not None


def conv_unsupported(facts: "ConvolutionFacts") -> str | None:
    """Why the library cannot compute a call, or None."""
    if facts.device != "cuda":
        return NOT_CUDA
    if facts.dtype not in DTYPES:
        return f"its dtypes end at float32, here is {facts.dtype}"
    if facts.kernel_size not in KERNEL_SIZES or facts.channels % ALIGNMENT:
        return f"it takes 2 to 4 tokens of a multiple of 8 channels, here {facts.kernel_size} of {facts.channels}"
    if facts.taps and (facts.has_state or not facts.packed):
        return "documents follow a state or padding"
    return None if conv_installed() else "causal-conv1d is not installed"


def run_conv(x: Tensor, weight: Tensor, conv_state: Tensor | None, segment_ids: Tensor | None) -> Tensor:
    """x [B, T, C], weight [C, kernel_size], a state [B, kernel_size − 1, C] or None -> [B, T, C] in x's dtype.

    segment_ids: int64 [B, T], each token's document, or None if a row is one document.
    """
    if x.is_meta:  # `heddle show` on a machine that has the library
        return x.new_empty(x.shape)
    tensors = {"x": x, "weight": weight}
    if segment_ids is not None:
        tensors["seq_idx"] = segment_ids.int()
    if conv_state is not None:
        tensors["initial_states"] = conv_state.to(x.dtype)
    return call_library(FUNCTION, tensors)[0]


def _call(tensors: dict[str, Tensor]) -> tuple[Tensor]:
    library = optional_module(MODULE)
    assert library is not None
    states = tensors.get("initial_states")
    y: Tensor = library.causal_conv1d_fn(
        tensors["x"].contiguous().mT,
        tensors["weight"],
        seq_idx=tensors.get("seq_idx"),
        initial_states=None if states is None else states.contiguous().mT,
    )
    return (y.mT,)


LIBRARY_CALLS[FUNCTION] = LibraryCall(_call, lambda tensors: (tensors["x"].new_empty(tensors["x"].shape),))
