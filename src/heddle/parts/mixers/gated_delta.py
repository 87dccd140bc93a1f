"""Gated DeltaNet (Yang et al. 2024), the linear layers of Qwen3-Next: a state that decays and corrects itself.

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,   o_t = S_t q_t,   y = W_out (N(o) ⊙ SiLU(z))
    α = exp(−exp(A) · softplus(a + b)),   β = sigmoid(·),   q = q̂ / (|q̂| sqrt(d_k)),   k = k̂ / |k̂|

q̂, k̂ and v̂ are projections of x after a causal depthwise convolution and SiLU; a, z and the argument of β are plain
projections of x. Value head h reads key head h // (heads / key_heads). The state S has d_k · d_v elements per head,
whatever the length of the text.
"""

from typing import Self

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn import functional

from heddle.config import Width, build_under, refuse
from heddle.numerics.attention.observer import notify_implied_weights
from heddle.numerics.norms import at_least_float32
from heddle.numerics.recurrent.gated_delta import DeltaInputs, gated_delta_rule, l2_normalize
from heddle.parts.context.build import BuildContext
from heddle.parts.context.layout import Layout
from heddle.parts.context.mixer_state import StateSpec
from heddle.parts.context.recurrent_state import ConvRecurrentState, without_padding
from heddle.parts.context.shrink import ShrinkContext, small_head_count
from heddle.parts.mixers import Mixer, MixerConfig, split_heads
from heddle.parts.modules.eager import eager
from heddle.parts.modules.gated_decay import GatedDecay
from heddle.parts.modules.linear import Linear, fused_projections
from heddle.parts.modules.short_convolution import ShortConvolution
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

    def shrunk(self, context: ShrinkContext) -> Self:
        """Few small heads."""
        small = context.small_heads(self.heads, self.key_heads, self.head_dim, self.value_dim)
        return self.replace(
            heads=small.heads, key_heads=small.groups, head_dim=small.head_dim, value_dim=small.value_dim
        )

    def head_counts(self) -> tuple[tuple[int, int], ...]:
        """The heads, if their width follows from the model's."""
        return () if self.head_dim else ((self.heads, small_head_count(self.heads, self.key_heads)),)

    def build(self, context: BuildContext) -> "GatedDelta":
        """Build the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return GatedDelta(self, context)


class GatedDelta(Mixer):
    """The module. Its state is a `ConvRecurrentState`."""

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
        self.v = Linear(context.width, value_width, value_projection=True)
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

    def init_state(self, spec: StateSpec) -> ConvRecurrentState:
        """Zeros; the size does not depend on the cache length."""
        shape = (self.heads, self.head_dim, self.value_dim)
        return ConvRecurrentState.empty(spec, shape, (self.conv_kernel - 1, sum(self.conv_widths)))

    def forward(
        self, x: Tensor, layout: Layout, state: ConvRecurrentState | None = None
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v, a, beta, gate = fused_projections(x, self.q, self.k, self.v, self.a, self.beta, self.gate)
        qkv, (log_decay, _) = torch.cat((q, k, v), dim=-1), self.decay(a)
        y, state = self._delta_rule(qkv, log_decay, beta, layout, state)
        y = self.norm(y.transpose(1, 2).to(qkv.dtype))
        gate = functional.silu(gate.unflatten(-1, (self.heads, -1)))
        return self.out((y * gate).flatten(2)), state

    @eager  # layouts differ from call to call, so this stays out of compiled regions
    def _delta_rule(
        self, qkv: Tensor, log_decay: Tensor, beta: Tensor, layout: Layout, state: ConvRecurrentState | None
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """qkv [B, T, channels], log α [B, heads, T, 1], beta [B, T, heads] -> o [B, heads, T, d_v], new state."""
        convolved = self.convolution(qkv, layout, None if state is None else state.conv_state)
        qk, v = convolved.split(self.conv_widths, dim=-1)
        q, k = l2_normalize(split_heads(qk, 2 * self.key_heads)).chunk(2, dim=1)
        inputs = DeltaInputs(
            q * self.head_dim**-0.5,
            k,
            split_heads(v, self.heads),
            without_padding(log_decay, layout),  # padding, whose keys and values are zero, does not decay the state
            at_least_float32(beta).sigmoid().transpose(1, 2),
            layout.call_segment_ids,
        )
        if state is None:
            notify_implied_weights(
                lambda one_hot: gated_delta_rule(inputs._replace(v=one_hot), None)[0], inputs.v, layout.padding
            )
            return gated_delta_rule(inputs, None)[0], None
        o, recurrent_state = gated_delta_rule(inputs, state.recurrent_state)
        return o, ConvRecurrentState(recurrent_state, self.convolution.next_state(qkv, layout, state.conv_state))
