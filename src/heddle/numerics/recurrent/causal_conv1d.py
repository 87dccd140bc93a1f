"""Adapter to causal-conv1d (`causal_conv1d`): CUDA kernels of the short convolution, for 2 to 4 tokens.

Its tensors are [B, C, T], here views of heddle's [B, T, C], and so is its state [B, C, kernel_size − 1]. `seq_idx`
keeps the documents of a row apart. Signatures are those of version 1.6.1.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heddle.numerics.dispatch.libraries import NOT_CUDA, optional_module

if TYPE_CHECKING:
    from heddle.numerics.recurrent.convolution import ConvolutionFacts

MODULE = "causal_conv1d"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KERNEL_SIZES = range(2, 5)
ALIGNMENT = 8  # of channels


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
    return "causal-conv1d is not installed" if optional_module(MODULE) is None else None


def run_conv(x: Tensor, weight: Tensor, conv_state: Tensor | None, segment_ids: Tensor | None) -> Tensor:
    """x [B, T, C], weight [C, kernel_size], a state [B, kernel_size − 1, C] or None -> [B, T, C] in x's dtype.

    segment_ids: int64 [B, T], each token's document, or None if a row is one document.
    """
    if x.is_meta:  # `heddle show` on a machine that has the library
        return x.new_empty(x.shape)
    library = optional_module(MODULE)
    assert library is not None
    y: Tensor = library.causal_conv1d_fn(
        x.contiguous().mT,
        weight,
        seq_idx=None if segment_ids is None else segment_ids.int(),
        initial_states=None if conv_state is None else conv_state.to(x.dtype).contiguous().mT,
    )
    return y.mT
