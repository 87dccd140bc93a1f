"""Gated short convolution (Poli et al. 2023), the layers of LFM2 without attention: a convolution between two gates.

    y_t = W_out (q_t ⊙ (b + Σ_s w_s ⊙ k_{t−s} ⊙ v_{t−s})),   s from 0 to conv_kernel − 1, within t's document

q, k and v are projections of the input; LFM2 names them C, B and x. Each channel has its own weights w. The state is
the last conv_kernel − 1 products k ⊙ v, whatever the sequence length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.config import Width
from heddle.numerics.norms import at_least_float32
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig, RecurrentMixer
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Linear, fused_projections
from heddle.parts.modules.short_convolution import ShortConvolution
from heddle.parts.states import MixerState, StateSpec


class ShortConvConfig(MixerConfig):
    """Fields of `short_conv`."""

    conv_kernel: Width = 3  # tokens that the convolution reads, itself included
    conv_bias: bool = False
    bias: bool = False  # of the projections

    @property
    def windows(self) -> tuple[int, ...]:
        """The tokens that the convolution reads."""
        return (self.conv_kernel,)

    def build(self, context: BuildContext) -> "ShortConv":
        """Build the module."""
        return ShortConv(self, context.width)


@dataclass(frozen=True, eq=False)
class ShortConvState(MixerState):
    """conv_state [B, conv_kernel − 1, width]: the last inputs of the convolution."""

    conv_state: Tensor


class ShortConv(RecurrentMixer):
    """The module. Its state is a `ShortConvState`."""

    input_projections = ("q", "k", "v")
    state_note = "only the last tokens"

    def __init__(self, config: ShortConvConfig, width: int) -> None:
        super().__init__()
        self.window = config.conv_kernel
        self.q = Linear(width, width, config.bias)
        self.k = Linear(width, width, config.bias)
        self.v = Linear(width, width, config.bias, value_projection=True)
        self.convolution = ShortConvolution(width, config.conv_kernel, config.conv_bias, silu=False)
        self.out = Linear(width, width, config.bias, output_projection=True)

    def init_state(self, spec: StateSpec) -> ShortConvState:
        """Zeros; the size does not depend on the cache length."""
        channels, kernel = self.convolution.weight.shape
        return ShortConvState(torch.zeros(spec.batch, kernel - 1, channels, dtype=spec.dtype, device=spec.device))

    def forward(
        self, x: Tensor, layout: Layout, state: ShortConvState | None = None
    ) -> tuple[Tensor, ShortConvState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v = fused_projections(x, self.q, self.k, self.v)
        y, state = self._convolve(k * v, layout, state)
        return self.out((at_least_float32(q) * y).to(x.dtype)), state

    @eager  # layouts differ from call to call, so this stays out of compiled regions
    def _convolve(
        self, kv: Tensor, layout: Layout, state: ShortConvState | None
    ) -> tuple[Tensor, ShortConvState | None]:
        """kv [B, T, width] -> its convolution, and the new state."""
        y = self.convolution(kv, layout, None if state is None else state.conv_state)
        if state is not None:
            state = ShortConvState(self.convolution.next_state(kv, layout, state.conv_state))
        return y, state
