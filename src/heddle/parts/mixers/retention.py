"""Retention (Sun et al. 2023): sums with exponential decay, one rate per head, instead of a softmax.

    S_t = γ_h S_{t−1} + k_t v_tᵀ,   y_t = norm_h(q_tᵀ S_t),   output W_out (y ⊙ act(W_g x))

γ_h = 1 − 2^(−5−h) for head h = 0, 1, … unless set or learned. A rotary embedding may rotate q and k. The norm, by
default the model's, is over each head, with weights per head, or over all heads at once. `value_embedding` adds rows
of a table of token embeddings to v (see `ValueEmbeddingConfig`).

Lightning attention (Qin et al. 2024; MiniMax 2025) has an activation of q, k and v, different rates, and one norm over
all heads: `W_out (norm(y) ⊙ σ(W_g x))`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import Width, build_under, refuse
from heddle.numerics.activations import PLAIN
from heddle.numerics.attention.observer import notify_implied_weights
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.numerics.recurrent.causal_sums import causal_sums
from heddle.numerics.transfer import Constants
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import Activation as PlainActivation
from heddle.parts.layout import Layout
from heddle.parts.mixers import RecurrentMixer, check_norm_width, split_heads
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal, fused_projections
from heddle.parts.modules.value_embedding import EmbeddedValuesConfig, build_value_embedding
from heddle.parts.norms import NormConfig
from heddle.parts.positions import RotationConfig
from heddle.parts.states import RecurrentState, StateSpec, call_layout, without_padding

Factor = Annotated[float, Field(gt=0.0, le=1.0)]

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "sigmoid": torch.sigmoid}


class RetentionConfig(EmbeddedValuesConfig):
    """Fields of `retention`. None: off, or the default named in the comment."""

    aliases = ("retnet",)
    later_fields = ("value_embedding",)

    heads: Width
    head_dim: Width | None = None  # default: width / heads
    value_dim: Width | None = None  # default: head_dim
    decay: tuple[Factor, ...] | Literal["learned"] | None = None  # γ of each head; default: 1 − 2^(−5−h)
    gate: Literal["silu", "sigmoid"] | None = None  # of the output (Sun et al.: silu)
    activation: PlainActivation | None = None  # of q, k and v
    norm: NormConfig | None = None  # of the output; default: the model's norm
    output_norm: Literal["per_head", "projection"] = "per_head"  # over each head, or over all of them at once
    position: RotationConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.decay, tuple) and len(self.decay) != self.heads:
            refuse("decay", f"{len(self.decay)} factors for heads = {self.heads}; give one per head")
        return self

    def resolved(self, context: BuildContext) -> Self:
        """Widths, rotary dims and norm written out."""
        dim = context.head_dim(self.heads, self.head_dim)
        position = None if self.position is None else self.position.resolved(dim)
        norm = self.norm or context.norm
        fields = {"head_dim": dim, "value_dim": self.value_dim or dim, "position": position, "norm": norm}
        return super().resolved(context).replace(**fields)

    def build(self, context: BuildContext) -> "Retention":
        """Build the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return Retention(self, context)


class LearnedDecay(SelfInitialized):
    """A learned γ per head: the sigmoid of its weight, initialized near the fixed factors."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal around log(γ / (1 − γ)), with γ = 1 − 2^(−5−h)."""
        heads = torch.arange(self.weight.shape[0], dtype=torch.float32, device="cpu")
        fill_normal(self.weight, std, draws("weight"), torch.expm1((5 + heads) * math.log(2)).log())

    def forward(self) -> Tensor:
        """log γ [H], in at least float32."""
        return functional.logsigmoid(at_least_float32(self.weight))


class Retention(RecurrentMixer):
    """The module. Its state is a `RecurrentState` [B, H, d_k, d_v].

    Fixed decay factors are floats, not a tensor, so that no change of dtype rounds them.
    """

    input_projections: Sequence[str] | None = ("q", "k", "v", "gate")

    def __init__(self, config: RetentionConfig, context: BuildContext) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = context.head_dim(config.heads, config.head_dim)
        self.value_dim = config.value_dim or self.head_dim
        self.q = Linear(context.width, self.heads * self.head_dim)
        self.k = Linear(context.width, self.heads * self.head_dim)
        self.v = Linear(context.width, self.heads * self.value_dim, value_projection=True)
        self.value_embedding = build_value_embedding(config.value_embedding, context, self.heads, self.value_dim)
        if config.value_embedding is not None:
            self.input_projections = None  # its gate reads a part of x
        self.out = Linear(self.heads * self.value_dim, context.width, output_projection=True)
        check_norm_width("value_dim", self.value_dim)
        norm, self.norm_per_head = config.norm or context.norm, config.output_norm == "per_head"
        self.norm = (
            norm.build(self.value_dim, self.heads) if self.norm_per_head else norm.build(self.heads * self.value_dim)
        )
        self.activation = None if config.activation is None else PLAIN[config.activation]
        self.gate_function = None if config.gate is None else GATES[config.gate]
        self.gate = None if config.gate is None else Linear(context.width, self.heads * self.value_dim)
        self.decay = LearnedDecay(self.heads) if config.decay == "learned" else None
        factors = config.decay if isinstance(config.decay, tuple) else None
        default = tuple(math.log1p(-(2.0 ** (-5 - head))) for head in range(self.heads))
        self.log_decays = default if factors is None else tuple(math.log(factor) for factor in factors)
        self._constants = Constants()
        position = config.position
        self.position = None if position is None else build_under("position", position.build, self.head_dim)
        if self.position is not None:
            self.position.float64_angles = True

    @property
    def value_fields(self) -> Mapping[str, Any]:
        """The shape of the values."""
        return {"heads": self.heads, "value_dim": self.value_dim}

    def init_state(self, spec: StateSpec) -> RecurrentState:
        """Zeros; the size does not depend on the cache length."""
        return RecurrentState.empty((spec.batch, self.heads, self.head_dim, self.value_dim), spec.dtype, spec.device)

    def forward(
        self, x: Tensor, layout: Layout, state: RecurrentState | None = None
    ) -> tuple[Tensor, RecurrentState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        projections = fused_projections(x, self.q, self.k, self.v)
        if self.activation is not None:
            projections = [self.activation(y) for y in projections]
        q, k, v = (split_heads(y, self.heads) for y in projections)
        if self.value_embedding is not None:
            v = self.value_embedding(x, v, layout, self.table_source, self.table_target)
        if self.position is not None:
            q, k = self.position(q, layout), self.position(k, layout)
        y, state = self._retain(q, k, v, layout, state)
        y = y.transpose(1, 2).to(x.dtype)  # before the norm, otherwise its `cast` would do nothing
        y = self.norm(y).flatten(2) if self.norm_per_head else self.norm(y.flatten(2))
        if self.gate is not None and self.gate_function is not None:
            y = y * self.gate_function(self.gate(x))
        return self.out(y), state

    @eager  # layouts differ from call to call, so this stays out of compiled regions
    def _retain(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: RecurrentState | None
    ) -> tuple[Tensor, RecurrentState | None]:
        sums = None if state is None else state.kv_sums
        k, log_decay = without_padding(k, layout), self._log_decay(q)
        notify_implied_weights(
            lambda one_hot: causal_sums(q, k, one_hot, log_decay, call_layout(layout), None)[0], v, layout.padding
        )
        y, sums = causal_sums(q, k, v, log_decay, call_layout(layout), sums)
        return y, None if sums is None else RecurrentState(sums)

    def _log_decay(self, q: Tensor) -> Tensor:
        """log γ [H]."""
        if self.decay is not None:
            log_decay: Tensor = self.decay()
            return log_decay
        return self._constants.tensor(self.log_decays, at_least_float32(q[:0]).dtype, q.device)
