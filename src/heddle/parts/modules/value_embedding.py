"""Value embeddings: rows of a table of token embeddings, added to the values of a layer.

    v_h ← v_h + b σ(g_h · x[:c]) e_h     mix: gate (nanochat, 2026: c = 32, b = 2, at first g = 0 and the factor is 1)
    v_h ← λ₁ v_h + λ₂ e_h                mix: learned (modded-nanogpt, 2024: at first λ₁ = λ₂ = 0.5), or two numbers

for each head h of the values, where e = E[token] and x is the layer's input. They are added to the projected values,
after any convolution, norm, scale and activation of these, and before a value residual mixes them.

A layer has a table E of its own, or with `shared` the table of the last earlier layer of its kind with the same `table`
number, or none (modded-nanogpt: the first layers and the last ones share three tables). E begins as the projection to
values does. The state has no token ids: caches and sums hold the values with what was added.
"""

from abc import ABC
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import Config, DesignError, FiniteFloat, PositiveFloat, Width, refuse
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import token_ids
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig, split_heads
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal

GATE_CHANNELS, GATE_BOUND = 32, 2.0


class ValueEmbeddingConfig(Config):
    """Fields of `value_embedding`.

    mix: how rows are added: with a gate of each token and head, or by two factors, of values and of rows, learned or
    given.
    """

    mix: tuple[FiniteFloat, ...] | Literal["gate", "learned"] = "gate"
    gate_channels: Width | None = None  # the gate reads the first ones of x; default: 32, or all if these are fewer
    gate_bound: PositiveFloat | None = None  # upper bound of the gate; default: 2
    shared: bool = False  # reads the table of the last earlier layer that has its own
    table: Annotated[int, Field(ge=0, le=2**20)] | None = None  # a number by which several tables are told apart

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("gate_channels", "gate_bound"):
            if self.mix != "gate" and getattr(self, name) is not None:
                refuse(name, "is for a gate, but mix gives two factors; leave it out, or choose mix: gate")
        if isinstance(self.mix, tuple) and len(self.mix) != 2:
            refuse("mix", f"{list(self.mix)} should be two numbers, for the values and for the rows")
        if isinstance(self.mix, tuple) and self.mix[1] == 0.0:
            refuse("mix", "adds nothing if its second number is 0; leave value_embedding out, or give another")
        return self

    def resolved(self, width: int) -> Self:
        """The gate's defaults written out."""
        if self.mix != "gate":
            return self
        channels = self.gate_channels or min(GATE_CHANNELS, width)
        return self.replace(gate_channels=channels, gate_bound=self.gate_bound or GATE_BOUND)


class EmbeddedValuesConfig(MixerConfig, ABC):
    """Config of a mixer whose values may have rows of a table added."""

    value_embedding: ValueEmbeddingConfig | None = None  # adds rows of a table of token embeddings to the values

    @property
    def reads_tokens(self) -> bool:
        """Whether it has `value_embedding`."""
        return self.value_embedding is not None

    @property
    def value_table(self) -> ValueEmbeddingConfig | None:
        """The `value_embedding`."""
        return self.value_embedding

    def resolved(self, context: BuildContext) -> Self:
        """The defaults of `value_embedding` written out."""
        embedding = self.value_embedding
        return self if embedding is None else self.replace(value_embedding=embedding.resolved(context.width))


class ValueEmbedding(SelfInitialized):
    """The module. `weight` [vocabulary, heads · d_v] is the table; None with `shared`."""

    matrix_parameters: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ValueEmbeddingConfig, context: BuildContext, heads: int, value_dim: int) -> None:
        super().__init__()
        resolved = config.resolved(context.width)
        self.heads, self.channels, self.bound = heads, resolved.gate_channels, resolved.gate_bound
        if self.channels is not None and self.channels > context.width:
            reason = f"{self.channels} is more than width = {context.width}; give at most as many"
            raise DesignError("gate_channels", reason)
        rows = context.vocab_size
        self.weight = None if config.shared else nn.Parameter(torch.empty(rows, heads * value_dim))
        self.gate = None if self.channels is None else Linear(self.channels, heads, initial_std=0.0)
        self.factors = config.mix if isinstance(config.mix, tuple) else None  # λ₁ and λ₂
        self.mix = nn.Parameter(torch.empty(2)) if config.mix == "learned" else None  # the same

    @property
    def inactive_parameters(self) -> int:
        """Number of elements in the rows that a token does not read."""
        return 0 if self.weight is None else self.weight.numel() - self.weight.shape[1]

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """The table is normal, as the projection to values; λ₁ and λ₂ are 0.5. The gate begins at zero."""
        if self.weight is not None:
            fill_normal(self.weight, std * self.value_scale, draws("weight"))
        if self.mix is not None:
            nn.init.constant_(self.mix, 0.5)

    def forward(self, x: Tensor, v: Tensor, layout: Layout, source: int | None, target: int | None) -> Tensor:
        """x [B, T, width], v [B, heads, T, d_v] -> v with the rows added.

        source: index of the layer whose table is read; None: its own. target: index under which later layers read it.
        """
        rows = split_heads(self._rows(layout, source, target), self.heads).to(v.dtype)
        if self.gate is not None:
            assert self.bound is not None
            gates = self.bound * at_least_float32(self.gate(x[..., : self.channels])).sigmoid()
            return v + gates.to(v.dtype).transpose(1, 2)[..., None] * rows
        factors = self.factors if self.mix is None else self.mix.to(v.dtype).unbind()
        assert factors is not None
        mixed: Tensor = factors[0] * v + factors[1] * rows
        return mixed

    @layout_dependent
    def _rows(self, layout: Layout, source: int | None, target: int | None) -> Tensor:
        """E[token] [B, T, heads · d_v]."""
        if self.weight is None:
            assert layout.handed_over is not None
            assert source is not None
            return layout.handed_over.value_rows[source]
        rows = functional.embedding(token_ids(layout, "value_embedding"), self.weight)
        if target is not None and layout.handed_over is not None:
            layout.handed_over.value_rows[target] = rows
        return rows


def build_value_embedding(
    config: ValueEmbeddingConfig | None, context: BuildContext, heads: int, value_dim: int
) -> ValueEmbedding | None:
    """The module of `value_embedding`, if it is set. Raises DesignError for more gate channels than the model has."""
    if config is None:
        return None
    try:
        return ValueEmbedding(config, context, heads, value_dim)
    except DesignError as error:
        raise error.under("value_embedding") from None
