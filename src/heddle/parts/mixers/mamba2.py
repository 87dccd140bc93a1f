"""Mamba-2 (Dao & Gu 2024): a state space model with a data-dependent decay, one number per head.

    S_t = exp(−exp(A) Δ_t) S_{t−1} + Δ_t k_t v_tᵀ,   o_t = S_tᵀ q_t + D v_t,   y = W_out N(o ⊙ SiLU(z))
    Δ = softplus(a + b)

q, k and v are the paper's C, B and x: projections of the input after a causal depthwise convolution and SiLU. z and a
are plain projections; A, b and D are one number per head. Head h reads q and k of group h // (heads / groups), and the
norm is over a group's heads. The state S has state_size · head_dim elements per head, whatever the sequence length.

With `gated_norm: before` the output is W_out (N(o) ⊙ SiLU(z)), with `none` W_out (o ⊙ SiLU(z)) (Falcon-H1, 2025).
`multipliers` are constant factors of z, v, k, q and a.
"""

from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import DesignError, Part, PositiveFloat, Width, build_under, refuse
from heddle.numerics.attention.observer import notify_implied_weights
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.numerics.recurrent.ssd import SSDInputs, state_space_duality
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig, RecurrentMixer, check_head_groups, check_norm_width, split_heads
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Linear, SelfInitialized, fused_projections
from heddle.parts.modules.recurrent import GatedDecay
from heddle.parts.modules.short_convolution import ShortConvolution
from heddle.parts.norms import NormConfig
from heddle.parts.states import ConvRecurrentState, StateSpec, call_cu_seqlens, without_padding

TimeStep = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Mamba2Config(MixerConfig):
    """Fields of `mamba2`. None: off, or the default named in the comment."""

    heads: Width
    head_dim: Width | None = None  # default: 2 width / heads, which is the paper's expansion by 2
    state_size: Width = 128  # width of q and k, the paper's N
    groups: Width = 1  # groups of heads that share q and k
    conv_kernel: Width = 4  # tokens that the convolution reads, itself included
    conv_bias: bool = True
    bias: bool = False  # of the projections
    time_step_limit: tuple[TimeStep, ...] | None = None  # minimum and maximum of Δ
    norm: NormConfig | None = None  # of each group's gated output; default: the model's norm
    gated_norm: Literal["after", "before", "none"] = "after"  # the norm after the gate, before it, or no norm
    multipliers: tuple[PositiveFloat, ...] | None = None  # of z, v, k, q and a (Falcon-H1's ssm_multipliers)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_head_groups("groups", self.groups, self.heads)
        limits = self.time_step_limit
        if limits is not None and (len(limits) != 2 or limits[0] >= limits[1]):
            refuse("time_step_limit", f"{list(limits)} is not a range; give the minimum and a larger maximum time step")
        if self.multipliers is not None and len(self.multipliers) != 5:
            refuse("multipliers", f"{list(self.multipliers)} should be five numbers, for z, v, k, q and a")
        if self.gated_norm == "none" and self.norm is not None:
            refuse("norm", "has no effect with gated_norm: none; leave one of the two out")
        return self

    def resolved(self, context: BuildContext) -> Self:
        """Head width and norm written out."""
        norm = None if self.gated_norm == "none" else self.norm or context.norm
        return self.replace(head_dim=self.head_width(context.width), norm=norm)

    def head_width(self, width: int) -> int:
        """`head_dim`, or 2 width / heads. Raises DesignError if that is not a whole number."""
        if self.head_dim is None and 2 * width % self.heads:
            raise DesignError("heads", f"{self.heads} does not divide 2 width = {2 * width}; give head_dim")
        return self.head_dim or 2 * width // self.heads

    def head_shape(self, width: int) -> tuple[int, int]:
        """Heads, and their width."""
        return self.heads, self.head_dim or 2 * width // self.heads

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """A head_dim, if the heads of the previous mixer do not divide twice the width."""
        heads, dim = previous.head_shape(width) if isinstance(previous, MixerConfig) else (0, 0)
        return {"head_dim": dim} if heads and 2 * width % heads else {}

    def build(self, context: BuildContext) -> "Mamba2":
        """Build the module. Raises DesignError if 2 width is not divisible by heads and head_dim is not given."""
        return Mamba2(self, context)


class Mamba2(SelfInitialized, RecurrentMixer):
    """The module. Its state is a `ConvRecurrentState`."""

    input_projections = ("q", "k", "v", "gate", "a")

    def __init__(self, config: Mamba2Config, context: BuildContext) -> None:
        super().__init__()
        self.heads, self.groups = config.heads, config.groups
        self.head_dim, self.state_size = config.head_width(context.width), config.state_size
        self.conv_kernel = config.conv_kernel
        value_width, key_width = self.heads * self.head_dim, self.groups * self.state_size
        self.conv_widths = [value_width, key_width, key_width]
        self.q = Linear(context.width, key_width, config.bias)
        self.k = Linear(context.width, key_width, config.bias)
        self.v = Linear(context.width, value_width, config.bias, value_projection=True)
        self.gate = Linear(context.width, value_width, config.bias)
        self.a = Linear(context.width, self.heads, config.bias)
        self.convolution = ShortConvolution(sum(self.conv_widths), self.conv_kernel, config.conv_bias)
        self.decay = GatedDecay(self.heads, limits=config.time_step_limit)
        self.skip = nn.Parameter(torch.empty(self.heads))  # D
        norm_shape = (value_width, None) if self.groups == 1 else (value_width // self.groups, self.groups)
        self.gated_norm, self.multipliers = config.gated_norm, config.multipliers
        self.norm: nn.Module | None = None
        if self.gated_norm != "none":
            check_norm_width("groups", norm_shape[0])
            self.norm = build_under("norm", (config.norm or context.norm).build, *norm_shape)
        self.out = Linear(value_width, context.width, config.bias, output_projection=True)

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """D is 1; the projections, the convolution and the decay initialize themselves."""
        nn.init.ones_(self.skip)

    def init_state(self, spec: StateSpec) -> ConvRecurrentState:
        """Zeros; the size does not depend on the cache length."""
        shape = (self.heads, self.state_size, self.head_dim)
        return ConvRecurrentState.empty(spec, shape, (self.conv_kernel - 1, sum(self.conv_widths)))

    def forward(
        self, x: Tensor, layout: Layout, state: ConvRecurrentState | None = None
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v, a, gate = fused_projections(x, self.q, self.k, self.v, self.a, self.gate)
        if self.multipliers is not None:
            gate, v, k, q, a = (y * m for y, m in zip((gate, v, k, q, a), self.multipliers, strict=True))
        log_decay, time_step = self.decay(a)
        o, state = self._scan(torch.cat((v, k, q), dim=-1), log_decay, time_step, layout, state)
        o = o.transpose(1, 2).flatten(2)
        if self.gated_norm == "before":
            o = self._normed(o, gate.dtype)
        o = o * functional.silu(at_least_float32(gate))
        if self.gated_norm == "after":
            o = self._normed(o, gate.dtype)
        return self.out(o.to(gate.dtype)), state

    def _normed(self, o: Tensor, dtype: torch.dtype) -> Tensor:
        """o [B, T, heads · head_dim] -> the same shape, each group normed, in `dtype`."""
        assert self.norm is not None
        o = _without_overflow(o if self.groups == 1 else o.unflatten(-1, (self.groups, -1)))
        y: Tensor = self.norm(o.to(dtype)).flatten(2)
        return y

    @eager  # layouts differ from call to call, so this stays out of compiled regions
    def _scan(
        self, vkq: Tensor, log_decay: Tensor, time_step: Tensor, layout: Layout, state: ConvRecurrentState | None
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """vkq [B, T, channels], log α and Δ [B, heads, T, 1] -> o [B, heads, T, head_dim] and the new state."""
        convolved = self.convolution(vkq, layout, None if state is None else state.conv_state)
        v, k, q = convolved.split(self.conv_widths, dim=-1)
        inputs = SSDInputs(
            split_heads(q, self.groups),
            split_heads(k, self.groups),
            split_heads(v, self.heads),
            without_padding(log_decay, layout),  # padding, whose keys and values are zero, does not decay the state
            time_step,
            self.skip.to(v.dtype),
            layout.call_segment_ids,
            call_cu_seqlens(layout),
            vkq.dtype,
        )
        if state is None:
            notify_implied_weights(
                lambda one_hot: state_space_duality(inputs._replace(v=one_hot), None)[0], inputs.v, layout.padding
            )
            return state_space_duality(inputs, None)[0], None
        o, recurrent_state = state_space_duality(inputs, state.recurrent_state)
        return o, ConvRecurrentState(recurrent_state, self.convolution.next_state(vkq, layout, state.conv_state))


def _without_overflow(o: Tensor) -> Tensor:
    """o [..., n] times a number ≤ 1, which the norm cancels: o is a product of five projections, so o² may overflow.

    The number is 1 if no element is above 2³⁰. Beyond that a norm's ε has no influence.
    """
    return o / (o.detach().abs().amax(-1, keepdim=True) * 2.0**-30).clamp(min=1.0)
