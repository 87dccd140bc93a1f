"""The short convolution of recurrent mixers: a causal depthwise convolution over a few tokens, usually with SiLU.

y_t = SiLU(b + Σ_s w_s ⊙ x_{t−s}),   s from 0 to kernel − 1, within t's document
"""

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from heddle.numerics.philox import ParameterDraws
from heddle.numerics.recurrent.convolution import (
    Taps,
    causal_conv1d,
    find_input_indices,
    find_tokens_near_starts,
    next_conv_state,
)
from heddle.parts.context.layout import Layout
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.modules.linear import SelfInitialized, fill_normal


class ShortConvolution(SelfInitialized):
    """weight [channels, kernel]; the last weight is for the token itself. bias [channels] or None.

    silu: whether SiLU follows. Its state is the last kernel − 1 inputs of each row, [B, kernel − 1, channels].
    """

    def __init__(self, channels: int, kernel: int, bias: bool = False, silu: bool = True) -> None:
        super().__init__()
        self.silu = silu
        self.weight = nn.Parameter(torch.empty(channels, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal weights with standard deviation 1/sqrt(kernel), which keep the variance of the input. Zero bias."""
        fill_normal(self.weight, self.weight.shape[1] ** -0.5, draws("weight"))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, layout: Layout, conv_state: Tensor | None) -> Tensor:
        """x [B, T, channels] -> y of the same shape, in at least float32, zero at padding.

        It depends on the layout, so call it from a method marked as `eager` or `eager_on_cpu`.
        """
        y = self._convolve(x, conv_state, self._taps(layout))
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
            y = y if layout.padding is None else y.masked_fill(layout.padding[..., None], 0.0)
        return functional.silu(y) if self.silu else y

    def next_state(self, x: Tensor, layout: Layout, conv_state: Tensor) -> Tensor:
        """The state after a call with inputs x, in the dtype of the state before it."""
        return next_conv_state(x.to(conv_state.dtype), conv_state, self._taps(layout))

    @layout_dependent  # no compiler traces a library's kernel
    def _convolve(self, x: Tensor, conv_state: Tensor | None, taps: Taps | None) -> Tensor:
        return causal_conv1d(x, self.weight, conv_state, taps)

    @layout_dependent
    def _taps(self, layout: Layout) -> Taps | None:
        kernel = self.weight.shape[1]
        return layout.cached(("taps", kernel), lambda: _taps(layout, kernel))


def _taps(layout: Layout, kernel: int) -> Taps | None:
    """Which inputs the convolution reads for each token; None if they are always the tokens just before it."""
    padding, segment_ids = layout.padding, layout.call_segment_ids
    if padding is None and segment_ids is None:
        return None
    zeros = torch.zeros_like(layout.positions)
    index = find_input_indices(layout.positions >= 0, zeros if segment_ids is None else segment_ids, kernel)
    # A graph that read the lengths would serve these documents alone.
    known = padding is None and layout.doc_lengths is not None and not is_compiling()
    return Taps(
        index,
        find_tokens_near_starts(layout.doc_lengths, kernel, index.device) if known and layout.doc_lengths else None,
        segment_ids if padding is None else None,
    )
