"""RWKV-7's time mixing (Peng et al. 2025, "RWKV-7 Goose", arXiv 2503.14456): a delta rule with vector-valued gates.

    S_t = S_{t−1} (diag(w_t) − κ̂_tᵀ (a_t ⊙ κ̂_t)) + v_tᵀ k̃_t,   o_t = S_t r_tᵀ,   S [d_v, d_k] for each head
    y = W_out (g ⊙ (N(o) + (r · (ρ ⊙ k̃)) v)),   g = σ(x_g G₁) G₂
    w = exp(−e^{−1/2} σ(w₀ + tanh(x_w A₁) A₂)),   a = σ(a₀ + x_a B₁ B₂)
    κ̂ = κ / |κ|, κ = k ⊙ ξ,   k̃ = k ⊙ (1 + (a − 1) ⊙ α),   r = W_r x_r, k = W_k x_k, v = W_v x_v

Each of x_r, x_w, x_k, x_v, x_a and x_g is x + μ ⊙ (x' − x), where x' is the token before (token shift; zero before the
first token) and μ has a number for each channel. w is above exp(−e^{−1/2}) = 0.545. a is the in-context learning rate,
κ̂ the removal key, k̃ the replacement key, ρ the bonus of the token itself. N normalizes each head with its own
weights. The modules q, k and v are W_r, W_k and W_v.

With `value_residual` v is v + σ(v₀ + x_v C₁ C₂) ⊙ (v₁ − v), where v₁ are the values of the first layer with this mixer.
In the paper's models every layer but the first has it, and norms are `{kind: layer, eps: 64e-5}`, where ε is 1e-5 times
the head dimension. The paper's channel mixing is an `mlp` with `relu2` and a `token_shift` by `short_convolution`.

The state is the matrix S [d_k, d_v] of each head and the last token, whatever the sequence length.
"""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import Width, build_under, refuse
from heddle.numerics.attention.observer import notify_implied_weights
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.numerics.recurrent.general_delta import GeneralDeltaInputs, general_delta_rule
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig, RecurrentMixer, check_norm_width, split_heads
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal
from heddle.parts.modules.recurrent import last_token, token_before
from heddle.parts.norms import NormConfig
from heddle.parts.states import ConvRecurrentState, StateSpec, without_padding

RATE = math.exp(-0.5)  # upper bound of −log w
SHIFTED = ("r", "w", "k", "v", "a", "g")
# Exponents of the initial μ: 1 − (channel / width)^(exponent · (1 − layer / depth)).
SHIFT_EXPONENTS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
RANK_FACTORS = {"decay_rank": 2.5, "rate_rank": 2.5, "gate_rank": 5.0, "value_rank": 1.7}  # times sqrt(width)


class RWKV7Config(MixerConfig):
    """Fields of `rwkv7`. None: the default named in the comment."""

    aliases = ("rwkv",)

    heads: Width
    head_dim: Width | None = None  # of r and k; default: width / heads
    value_dim: Width | None = None  # default: head_dim
    decay_rank: Width | None = None  # of w's projection; default: near 2.5 sqrt(width), a multiple of 32
    rate_rank: Width | None = None  # of a's; default: as decay_rank
    gate_rank: Width | None = None  # of g's; default: near 5 sqrt(width), a multiple of 32
    value_rank: Width | None = None  # of the value residual's; default: near 1.7 sqrt(width), a multiple of 32
    value_residual: bool = False  # values mixed with those of the first layer with this mixer
    norm: NormConfig | None = None  # of each head's output; default: the model's norm

    def resolved(self, context: BuildContext) -> Self:
        """Widths, ranks and norm written out."""
        dim = context.head_dim(self.heads, self.head_dim)
        ranks = {
            name: self.rank(name, context.width) for name in RANK_FACTORS if self.value_residual or name != "value_rank"
        }
        return self.replace(head_dim=dim, value_dim=self.value_dim or dim, norm=self.norm or context.norm, **ranks)

    def rank(self, name: str, width: int) -> int:
        """The rank of a projection in a model of this width: the nearest multiple of 32, rounded down on a tie."""
        given: int | None = getattr(self, name)
        return given or 32 * max(1, math.ceil(RANK_FACTORS[name] * math.sqrt(width) / 32 - 0.5))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.value_rank is not None and not self.value_residual:
            refuse("value_rank", "does nothing without value_residual; leave it out, or give value_residual: true")
        return self

    @property
    def adds_first_values(self) -> bool:
        """Whether `value_residual` is set."""
        return self.value_residual

    @property
    def hands_values(self) -> bool:
        """True: every layer has its own values."""
        return True

    def build(self, context: BuildContext) -> "RWKV7":
        """Build the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return RWKV7(self, context)


def low_rank(inputs: int, rank: int, outputs: int) -> tuple[Linear, Linear]:
    """The two matrices of a low-rank projection; the first begins at zero, and so does the output."""
    return Linear(inputs, rank, initial_std=0.0), Linear(rank, outputs, initial_std=0.1 * outputs**-0.5)


def power(base: Tensor, exponent: float) -> Tensor:
    """Rounded from float64, so that all CPUs draw the same weights: in float32 their vector instructions differ."""
    return (base.double() ** exponent).float()


def channel_patterns(heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Two patterns over the channels of all heads [heads · dim], float32 on the CPU.

    One goes from 0 to 1. The other goes from −1 to 1 over each head, squared with its sign.
    """
    index = torch.arange(heads * dim, dtype=torch.float32, device="cpu")
    centered = (index % dim - (dim - 1) / 2) / max(0.5, (dim - 1) / 2)
    return index / max(1, heads * dim - 1), centered * centered.abs()


class RWKV7(SelfInitialized, RecurrentMixer):
    """The module. Its state is a `ConvRecurrentState` whose conv_state [B, 1, width] is the last token.

    The initial weights follow the authors' code, as the paper asks: μ, w₀, a₀, v₀, ξ, α and ρ are patterns over
    channels and layers; low-rank projections and the output projection begin at zero. Where the authors draw orthogonal
    matrices, these are normal with the same standard deviation, and patterns have normal noise of the design's
    `initialization.std` (ρ: a tenth of it), so that every element has its own draw, whichever rank fills it. The
    weights of the norm begin at 1, not at ((layer + 1) / depth)^0.7.
    """

    def __init__(self, config: RWKV7Config, context: BuildContext) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, context.head_dim(config.heads, config.head_dim)
        self.value_dim = config.value_dim or self.head_dim
        self.width, self.layer, self.depth = context.width, context.layer_index, context.depth
        keys, values, width = self.heads * self.head_dim, self.heads * self.value_dim, context.width
        ranks = {name: config.rank(name, width) for name in RANK_FACTORS}
        std = 0.5 * (3 * width) ** -0.5  # of numbers uniform in ± 1 / (2 sqrt(width))
        self.shift = nn.Parameter(torch.empty(len(SHIFTED) * width))  # μ of r, w, k, v, a and g
        self.q = Linear(width, keys, initial_std=std)
        self.k = Linear(width, keys, initial_std=0.1 * std)
        self.v = Linear(width, values, value_projection=True, initial_std=std)
        self.decay_down, self.decay_up = low_rank(width, ranks["decay_rank"], keys)
        self.rate_down, self.rate_up = low_rank(width, ranks["rate_rank"], keys)
        self.gate_down, self.gate_up = low_rank(width, ranks["gate_rank"], values)
        self.decay_bias, self.rate_bias = (nn.Parameter(torch.empty(keys)) for _ in range(2))  # w₀ and a₀
        self.value_residual = config.value_residual
        if self.value_residual:
            self.value_down, self.value_up = low_rank(width, ranks["value_rank"], values)
            self.value_bias = nn.Parameter(torch.empty(values))  # v₀
        self.removal, self.replacement, self.bonus = (nn.Parameter(torch.empty(keys)) for _ in range(3))  # ξ, α and ρ
        check_norm_width("value_dim", self.value_dim)
        self.norm = build_under("norm", (config.norm or context.norm).build, self.value_dim, self.heads)
        self.out = Linear(values, width, output_projection=True, initial_std=0.0)

    @property
    def value_fields(self) -> Mapping[str, Any]:
        """The shape of the values."""
        return {"heads": self.heads, "value_dim": self.value_dim}

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Patterns over channels, with noise; the projections and the norm initialize themselves."""
        channel = torch.arange(self.width, dtype=torch.float32, device="cpu") / self.width
        progress, left = self.layer / max(1, self.depth - 1), 1.0 - self.layer / self.depth
        shift = torch.cat([1.0 - power(channel, SHIFT_EXPONENTS[name] * left) for name in SHIFTED])
        fill_normal(self.shift, std, draws("shift"), shift)
        share, zigzag = channel_patterns(self.heads, self.head_dim)
        decay = 6.0 * power(share, 1.0 + progress**0.3) - 5.5 + 2.5 * zigzag
        fill_normal(self.decay_bias, std, draws("decay_bias"), decay)
        fill_normal(self.rate_bias, std, draws("rate_bias"), 0.3 * zigzag + 0.4 * (share - 0.5) - 0.19)
        fill_normal(self.removal, std, draws("removal"), 0.71 - 0.1 * (share - 0.5))
        fill_normal(self.replacement, std, draws("replacement"), 1.02)
        fill_normal(self.bonus, 0.1 * std, draws("bonus"), -0.04)
        if self.value_residual:
            share, _ = channel_patterns(self.heads, self.value_dim)
            fill_normal(self.value_bias, std, draws("value_bias"), 0.73 - 0.4 * (share - 0.5))

    def init_state(self, spec: StateSpec) -> ConvRecurrentState:
        """Zeros; the size does not depend on the cache length."""
        return ConvRecurrentState.empty(spec, (self.heads, self.head_dim, self.value_dim), (1, self.width))

    def forward(
        self, x: Tensor, layout: Layout, state: ConvRecurrentState | None = None
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        difference = self._token_before(x, layout, state) - x
        x_r, x_w, x_k, x_v, x_a, x_g = (x + mix * difference for mix in self.shift.to(x.dtype).chunk(len(SHIFTED)))
        r, k, v = self.q(x_r), self.k(x_k), self.v(x_v)
        log_decay = -RATE * self._gate(self.decay_up(self.decay_down(x_w).tanh()), self.decay_bias)
        rate = self._gate(self.rate_up(self.rate_down(x_a)), self.rate_bias)
        gate = self.gate_up(self.gate_down(x_g).sigmoid())
        mix = None
        if self.value_residual:
            mix = self._gate(self.value_up(self.value_down(x_v)), self.value_bias).to(v.dtype)
        wide = at_least_float32(k)
        removal = functional.normalize(self._heads(wide * self.removal.to(wide.dtype)), dim=-1)
        replacement = wide + wide * (rate - 1.0) * self.replacement.to(wide.dtype)
        keys = (removal, self._heads(replacement), self._heads(rate))
        o, v, state = self._recurrence(x, at_least_float32(r), keys, (v, mix), log_decay, layout, state)
        o = self.norm(o.transpose(1, 2).to(x.dtype))
        own = self._heads(at_least_float32(r) * replacement * self.bonus.to(wide.dtype)).sum(-1, keepdim=True)
        y = o + (own * split_heads(v, self.heads)).transpose(1, 2).to(x.dtype)
        return self.out(y.flatten(2) * gate), state

    @staticmethod
    def _gate(x: Tensor, bias: Tensor) -> Tensor:
        """σ(x + bias), in at least float32."""
        wide = at_least_float32(x)
        return (wide + bias.to(wide.dtype)).sigmoid()

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, heads · d] -> [B, heads, T, d]."""
        return split_heads(x, self.heads)

    @eager  # layouts differ from call to call, so this stays out of compiled regions
    def _token_before(self, x: Tensor, layout: Layout, state: ConvRecurrentState | None) -> Tensor:
        return token_before(x, layout, None if state is None else state.conv_state)

    @eager
    def _recurrence(
        self,
        x: Tensor,
        r: Tensor,
        keys: tuple[Tensor, Tensor, Tensor],
        values: tuple[Tensor, Tensor | None],
        log_decay: Tensor,
        layout: Layout,
        state: ConvRecurrentState | None,
    ) -> tuple[Tensor, Tensor, ConvRecurrentState | None]:
        """o [B, heads, T, d_v], the values after the value residual [B, T, heads · d_v], and the new state.

        keys: κ̂, k̃ and a, [B, heads, T, d_k]. values: v and its share of the first layer's values, [B, T, heads · d_v].
        """
        (removal, replacement, rate), (v, mix) = keys, values
        if mix is not None:
            assert layout.handed_over is not None
            assert self.value_source is not None
            v = v + mix * (layout.handed_over.by_layer[self.value_source] - v)
        if self.kv_target is not None and layout.handed_over is not None:
            layout.handed_over.by_layer[self.kv_target] = v
        log_decay = self._heads(log_decay)
        inputs = GeneralDeltaInputs(
            self._heads(r),
            without_padding(replacement, layout),
            self._heads(at_least_float32(v)),
            without_padding(removal * rate, layout),
            removal * (-log_decay).exp(),  # the rule reads the state after its decay, the paper before it
            without_padding(log_decay, layout),
            layout.call_segment_ids,
            None,
            v.dtype,
        )
        if state is None:
            notify_implied_weights(
                lambda one_hot: general_delta_rule(inputs._replace(v=one_hot), None)[0], inputs.v, layout.padding
            )
            return general_delta_rule(inputs, None)[0], v, None
        o, recurrent_state = general_delta_rule(inputs, state.recurrent_state)
        return o, v, ConvRecurrentState(recurrent_state, last_token(x, layout, state.conv_state))
