"""Adapter to causal-conv1d (`causal_conv1d`): CUDA kernels of the short convolution, for 2 to 4 tokens.

Its tensors are [B, C, T], here views of heddle's [B, T, C], and so is its state [B, C, kernel_size − 1]. `seq_idx`
keeps the documents of a row apart. Signatures are those of version 1.6.1.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from heddle.numerics.recurrent.convolution import ConvolutionFacts

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KERNEL_SIZES = range(2, 5)
ALIGNMENT = 8  # of channels


@cache
def conv_function() -> Callable[..., Tensor] | None:
    """`causal_conv1d_fn`, or None if the library is not installed or finds no GPU."""
    try:
        function: Callable[..., Tensor] = import_module("causal_conv1d").causal_conv1d_fn
    except (ImportError, RuntimeError):
        return None
    return function


def conv_unsupported(facts: "ConvolutionFacts") -> str | None:
    """Why the library cannot compute a call, or None."""
    if facts.device != "cuda":
        return "it needs a CUDA device"
    if facts.dtype not in DTYPES:
        return f"its dtypes end at float32, here is {facts.dtype}"
    if facts.kernel_size not in KERNEL_SIZES or facts.channels % ALIGNMENT:
        return f"it takes 2 to 4 tokens of a multiple of 8 channels, here {facts.kernel_size} of {facts.channels}"
    if facts.taps and (facts.has_state or not facts.packed):
        return "documents follow a state or padding"
    return "causal-conv1d is not installed" if conv_function() is None else None


def run_conv(x: Tensor, weight: Tensor, conv_state: Tensor | None, segment_ids: Tensor | None) -> Tensor:
    """x [B, T, C], weight [C, kernel_size], a state [B, kernel_size − 1, C] or None -> [B, T, C] in x's dtype.

    segment_ids: int64 [B, T], each token's document, or None if a row is one document.
    """
    function = conv_function()
    assert function is not None
    y = function(
        x.contiguous().mT,
        weight,
        seq_idx=None if segment_ids is None else segment_ids.int(),
        initial_states=None if conv_state is None else conv_state.to(x.dtype).contiguous().mT,
    )
    return y.mT
