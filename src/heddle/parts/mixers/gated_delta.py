"""Gated DeltaNet (Yang et al. 2024), the linear layers of Qwen3-Next: a state that decays and corrects itself.

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,   o_t = S_t q_t,   y = W_out (N(o) ⊙ SiLU(z))
    α = exp(−exp(A) · softplus(a + b)),   β = sigmoid(·),   q = q̂ / (|q̂| sqrt(d_k)),   k = k̂ / |k̂|

q̂, k̂ and v̂ are projections of x after a causal depthwise convolution and SiLU; a, z and the argument of β are plain
projections of x. Value head h reads key head h // (heads / key_heads). The state S has d_k · d_v elements per head,
whatever the length of the text.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import Width, build_under, refuse
from heddle.numerics.attention.observer import notify_implied_weights
from heddle.numerics.norms import at_least_float32
from heddle.numerics.philox import ParameterDraws
from heddle.numerics.recurrent.convolution import (
    Taps,
    causal_conv1d,
    find_input_indices,
    find_tokens_near_starts,
    next_conv_state,
)
from heddle.numerics.recurrent.gated_delta import DeltaInputs, gated_delta_rule, l2_normalize
from heddle.parts.context.build import BuildContext
from heddle.parts.context.layout import Layout
from heddle.parts.context.mixer_state import MixerState, StateSpec
from heddle.parts.mixers import Mixer, MixerConfig, split_heads
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal, fused_projections
from heddle.parts.norms import NormConfig


class GatedDeltaConfig(MixerConfig):
    """Fields of `gated_delta`. None: the default named in the comment."""

    heads: Width  # of values, states and outputs
    key_heads: Width | None = None  # of queries and keys; default: heads
    head_dim: Width | None = None  # of queries and keys; default: width / heads
    value_dim: Width | None = None  # default: head_dim
    conv_kernel: Width = 4  # tokens that the convolution reads, itself included
    norm: NormConfig | None = None  # of each head's output; default: the model's norm

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.key_heads is not None and self.heads % self.key_heads:
            refuse("key_heads", f"{self.key_heads} does not divide heads = {self.heads}; choose a divisor of it")
        return self

    def resolved(self, context: BuildContext) -> Self:
        """Heads, widths and norm written out."""
        dim = context.head_dim(self.heads, self.head_dim)
        return self.replace(
            key_heads=self.key_heads or self.heads,
            head_dim=dim,
            value_dim=self.value_dim or dim,
            norm=self.norm or context.norm,
        )

    def build(self, context: BuildContext) -> "GatedDelta":
        """Build the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return GatedDelta(self, context)


@dataclass(frozen=True, eq=False)
class GatedDeltaState(MixerState):
    """recurrent_state S [B, heads, d_k, d_v], in at least float32.

    conv_state [B, conv_kernel − 1, channels]: the last inputs of the convolution.
    """

    recurrent_state: Tensor
    conv_state: Tensor


class ShortConvolution(SelfInitialized):
    """A causal depthwise convolution with weight [channels, kernel]; the last weight is for the token itself."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal weights with standard deviation 1/sqrt(kernel), which keep the variance of the input."""
        fill_normal(self.weight, self.weight.shape[1] ** -0.5, draws("weight"))

    def forward(self, x: Tensor, conv_state: Tensor | None, taps: Taps | None) -> Tensor:
        """x [B, T, channels] -> the same shape, in at least float32."""
        x = at_least_float32(x)
        return causal_conv1d(x, self.weight.to(x.dtype), None if conv_state is None else conv_state.to(x.dtype), taps)


class GatedDecay(SelfInitialized):
    """a [B, T, heads] -> log α = −exp(A) · softplus(a + b) [B, heads, T], in at least float32."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.empty(heads))  # A
        self.bias = nn.Parameter(torch.empty(heads))  # b

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """exp(A) uniform in [1, 16], softplus(b) log-uniform in [0.001, 0.1], as the authors' code and Mamba-2 do."""
        rate, bias = (draws(name).uniform(0, len(self.rate)) for name in ("rate", "bias"))
        step = torch.exp(math.log(1e-3) + bias * math.log(100.0))
        with torch.no_grad():
            self.rate.copy_(torch.log(1.0 + 15.0 * rate))
            self.bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus

    def forward(self, a: Tensor) -> Tensor:
        """log α of each head at each token."""
        rate, bias = at_least_float32(self.rate), at_least_float32(self.bias)
        return (-rate.exp() * functional.softplus(at_least_float32(a) + bias)).transpose(1, 2)


class GatedDelta(Mixer):
    """The module."""

    def __init__(self, config: GatedDeltaConfig, context: BuildContext) -> None:
        super().__init__()
        self.heads = config.heads
        self.key_heads = config.key_heads or config.heads
        self.head_dim = context.head_dim(config.heads, config.head_dim)
        self.value_dim = config.value_dim or self.head_dim
        self.conv_kernel = config.conv_kernel
        self.window, self.causal = None, True
        key_width, value_width = self.key_heads * self.head_dim, self.heads * self.value_dim
        self.conv_widths = [2 * key_width, value_width]
        self.q = Linear(context.width, key_width)
        self.k = Linear(context.width, key_width)
        self.v = Linear(context.width, value_width)
        self.gate = Linear(context.width, value_width)
        self.a = Linear(context.width, self.heads)
        self.beta = Linear(context.width, self.heads)
        self.convolution = ShortConvolution(sum(self.conv_widths), self.conv_kernel)
        self.decay = GatedDecay(self.heads)
        self.norm = build_under("norm", (config.norm or context.norm).build, self.value_dim)
        self.out = Linear(value_width, context.width, output_projection=True)

    @property
    def lookback(self) -> int:
        """0: the two states replace all earlier tokens."""
        return 0

    def init_state(self, spec: StateSpec) -> GatedDeltaState:
        """Zeros; the size does not depend on the cache length."""
        conv_shape = (spec.batch, self.conv_kernel - 1, sum(self.conv_widths))
        conv_state = torch.zeros(conv_shape, dtype=spec.dtype, device=spec.device)
        wide = torch.promote_types(spec.dtype, torch.float32)
        shape = (spec.batch, self.heads, self.head_dim, self.value_dim)
        recurrent_state = torch.zeros(shape, dtype=wide, device=spec.device)
        return GatedDeltaState(recurrent_state, conv_state)

    def _from_zero_state(self, inputs: DeltaInputs) -> Tensor:
        """The outputs o of the delta rule, started from a zero state."""
        wide = torch.promote_types(inputs.v.dtype, torch.float32)
        shape = (inputs.v.shape[0], self.heads, self.head_dim, inputs.v.shape[3])
        return gated_delta_rule(inputs, inputs.v.new_zeros(shape, dtype=wide))[0]

    def forward(
        self, x: Tensor, layout: Layout, state: GatedDeltaState | None = None
    ) -> tuple[Tensor, GatedDeltaState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v, a, beta, gate = fused_projections(x, self.q, self.k, self.v, self.a, self.beta, self.gate)
        qkv = torch.cat((q, k, v), dim=-1)
        y, state = self._delta_rule(qkv, self.decay(a), beta, layout, state)
        y = self.norm(y.transpose(1, 2).to(qkv.dtype))
        gate = functional.silu(gate.unflatten(-1, (self.heads, -1)))
        return self.out((y * gate).flatten(2)), state

    @eager  # layouts differ from call to call, so this stays out of compiled regions
    def _delta_rule(
        self, qkv: Tensor, log_decay: Tensor, beta: Tensor, layout: Layout, state: GatedDeltaState | None
    ) -> tuple[Tensor, GatedDeltaState | None]:
        """qkv [B, T, channels], log α [B, heads, T], beta [B, T, heads] -> o [B, heads, T, d_v] and the new state."""
        taps = layout.cached(("taps", self.conv_kernel), lambda: _taps(layout, self.conv_kernel))
        convolved = functional.silu(self.convolution(qkv, None if state is None else state.conv_state, taps))
        qk, v = convolved.split(self.conv_widths, dim=-1)
        q, k = l2_normalize(split_heads(qk, 2 * self.key_heads)).chunk(2, dim=1)
        if layout.padding is not None:  # its keys and values are zero already; it must not let the state decay either
            log_decay = log_decay.masked_fill(layout.padding[:, None], 0.0)
        inputs = DeltaInputs(
            q * self.head_dim**-0.5,
            k,
            split_heads(v, self.heads),
            log_decay,
            at_least_float32(beta).sigmoid().transpose(1, 2),
            layout.call_segment_ids,
        )
        if state is None:
            notify_implied_weights(
                lambda one_hot: self._from_zero_state(inputs._replace(v=one_hot)), inputs.v, layout.padding
            )
            return self._from_zero_state(inputs), None
        y, recurrent_state = gated_delta_rule(inputs, state.recurrent_state)
        return y, GatedDeltaState(
            recurrent_state, next_conv_state(qkv.to(state.conv_state.dtype), state.conv_state, taps)
        )


def _taps(layout: Layout, kernel: int) -> Taps | None:
    """Which inputs the convolution reads for each token; None if they are always the tokens just before it."""
    padding, segment_ids = layout.padding, layout.call_segment_ids
    if padding is None and segment_ids is None:
        return None
    zeros = torch.zeros_like(layout.positions)
    index = find_input_indices(layout.positions >= 0, zeros if segment_ids is None else segment_ids, kernel)
    known = padding is None and layout.doc_lengths is not None
    return Taps(
        index,
        find_tokens_near_starts(layout.doc_lengths, kernel, index.device) if known and layout.doc_lengths else None,
    )
