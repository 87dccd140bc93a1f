"""RG-LRU, the recurrence of Griffin and RecurrentGemma (De et al. 2024): a decay for each channel and token.

    h_t = a_t ⊙ h_{t−1} + √(1 − a_t²) ⊙ i_t ⊙ v_t,   log a_t = −8 softplus(Λ) ⊙ r_t,   y = W_out (h ⊙ GELU(W_z x))
    r = σ(R v + b_r),   i = σ(I v + b_i),   v = conv(W_v x)

All have `hidden` channels. R and I are block-diagonal: each of the `heads` blocks reads its own channels. The square
root keeps the variance of h; at position 0 it is 1, as nothing decays there. Its gradient is at most 1000, since near 0
it would overflow (both as in the authors' code). The state is h, one number per channel.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from heddle.config import DesignError, Part, Width
from heddle.numerics.activations import activation
from heddle.numerics.attention.observer import notify_implied_weights
from heddle.numerics.dispatch import add_flops
from heddle.numerics.linear import linear_flops
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.numerics.recurrent.selective_scan import DiagonalInputs, diagonal_recurrence
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import Activation
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig, RecurrentMixer
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal, fused_projections
from heddle.parts.modules.recurrent import softplus
from heddle.parts.modules.short_convolution import ShortConvolution
from heddle.parts.states import ConvRecurrentState, StateSpec, without_padding

RATE = 8.0  # the paper's c
STEEPEST = 1000.0  # gradient of the square root


class RGLRUConfig(MixerConfig):
    """Fields of `rg_lru`. None: the default named in the comment."""

    aliases = ("griffin",)
    width_fields = ("heads", "hidden")

    heads: Width  # blocks of the gates
    hidden: Width | None = None  # channels; default: the width
    conv_kernel: Width = 4  # tokens that the convolution reads, itself included
    activation: Activation = "gelu_tanh"  # of the branch that h is multiplied by
    bias: bool = True  # of the projections; the convolution and the gates always have one

    def resolved(self, context: BuildContext) -> Self:
        """Channels written out."""
        return self.replace(hidden=self.hidden or context.width)

    def head_shape(self, width: int) -> tuple[int, int]:
        """Blocks, and their channels."""
        return self.heads, (self.hidden or width) // self.heads

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """Channels, if the heads of the previous mixer do not divide the width."""
        heads, dim = previous.head_shape(width) if isinstance(previous, MixerConfig) else (0, 0)
        return {"hidden": heads * dim} if heads and width % heads else {}

    def build(self, context: BuildContext) -> "RGLRU":
        """Build the module. Raises DesignError if the heads do not divide the channels."""
        hidden = self.hidden or context.width
        if hidden % self.heads:
            raise DesignError("heads", f"{self.heads} does not divide hidden = {hidden}; choose a divisor of it")
        return RGLRU(self, context.width, hidden)


class BlockGate(SelfInitialized):
    """A block-diagonal matrix and a bias: weight [heads, dim (outputs), dim (inputs)], bias [heads · dim]."""

    matrix_parameters = ("weight",)

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, dim, dim))
        self.bias = nn.Parameter(torch.empty(heads * dim))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal weights with variance 0.01 / dim, zero bias, as in the authors' code."""
        fill_normal(self.weight, 0.1 * self.weight.shape[1] ** -0.5, draws("weight"))
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, heads · dim] -> the argument of the gate, of the same shape."""
        heads, dim, _ = self.weight.shape
        add_flops(linear_flops(x.shape[0] * x.shape[1] * heads, dim, dim))
        blocks = x.unflatten(-1, (heads, dim)).flatten(0, 1).transpose(0, 1)  # [heads, B · T, dim]
        y: Tensor = (blocks @ self.weight.mT).transpose(0, 1).reshape(x.shape) + self.bias
        return y


class RGLRU(SelfInitialized, RecurrentMixer):
    """The module. Its state is a `ConvRecurrentState` with a head for each channel, and d_k = d_v = 1."""

    input_projections = ("v", "gate")
    absolute_positions = True  # position 0 has no factor

    def __init__(self, config: RGLRUConfig, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.conv_kernel = hidden, config.conv_kernel
        self.v = Linear(width, hidden, config.bias, value_projection=True)
        self.gate = Linear(width, hidden, config.bias)
        self.convolution = ShortConvolution(hidden, config.conv_kernel, bias=True, silu=False)
        self.input_gate, self.decay_gate = (BlockGate(config.heads, hidden // config.heads) for _ in range(2))
        self.rate = nn.Parameter(torch.empty(hidden))  # Λ
        self.activation = activation(config.activation)
        self.out = Linear(hidden, width, config.bias, output_projection=True)

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """exp(−2 softplus(Λ)) uniform in [0.9², 0.999²], as in the authors' code."""
        square = 0.9**2 + (0.999**2 - 0.9**2) * draws("rate").uniform(0, self.hidden)
        with torch.no_grad():
            self.rate.copy_(torch.log(torch.expm1(-0.5 * torch.log(square))))

    def init_state(self, spec: StateSpec) -> ConvRecurrentState:
        """Zeros; the size does not depend on the cache length."""
        return ConvRecurrentState.empty(spec, (self.hidden, 1, 1), (self.conv_kernel - 1, self.hidden))

    def forward(
        self, x: Tensor, layout: Layout, state: ConvRecurrentState | None = None
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        v, gate = fused_projections(x, self.v, self.gate)
        convolved = self._convolve(v, layout, state)
        narrow = convolved.to(v.dtype)
        gates = [at_least_float32(module(narrow)).sigmoid() for module in (self.input_gate, self.decay_gate)]
        h, state = self._recurrence(v, convolved, gates, layout, state)
        return self.out(self.activation(h, at_least_float32(gate)).to(gate.dtype)), state

    @eager  # layouts differ from call to call, so this stays out of compiled regions
    def _convolve(self, v: Tensor, layout: Layout, state: ConvRecurrentState | None) -> Tensor:
        y: Tensor = self.convolution(v, layout, None if state is None else state.conv_state)
        return y

    @eager
    def _recurrence(
        self, v: Tensor, convolved: Tensor, gates: list[Tensor], layout: Layout, state: ConvRecurrentState | None
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """v before and after the convolution, and i and r, [B, T, hidden] each -> h, in at least float32; the state."""
        log_decay = -RATE * softplus(at_least_float32(self.rate)) * gates[1]
        factor = bounded_sqrt(-torch.expm1(2 * log_decay))
        factor = gates[0] * factor.masked_fill(layout.positions[..., None] == 0, 1.0)
        channels, factor, log_decay = (x.mT[..., None] for x in (at_least_float32(convolved), factor, log_decay))
        factor, log_decay = (without_padding(y, layout) for y in (factor, log_decay))  # padding changes nothing
        inputs = DiagonalInputs(channels, factor, log_decay, layout.call_segment_ids, v.dtype)
        if state is None:
            notify_implied_weights(
                lambda one_hot: diagonal_recurrence(inputs._replace(v=one_hot), None)[0], inputs.v, layout.padding
            )
            return diagonal_recurrence(inputs, None)[0][..., 0].mT, None
        h, recurrent_state = diagonal_recurrence(inputs, state.recurrent_state)
        conv_state = self.convolution.next_state(v, layout, state.conv_state)
        return h[..., 0].mT, ConvRecurrentState(recurrent_state, conv_state)


def bounded_sqrt(x: Tensor) -> Tensor:
    """√x for x ≥ 0, with a gradient of at most STEEPEST."""
    near = 0.25 * STEEPEST**-2  # here the gradient is STEEPEST
    line = x.detach().sqrt() + STEEPEST * (x - x.detach())
    return torch.where(x < near, line, x.clamp(min=near).sqrt())
