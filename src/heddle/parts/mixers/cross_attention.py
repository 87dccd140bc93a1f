"""Cross-attention (Vaswani et al. 2017): queries of the text; keys and values of a memory, of its own length and width.

    softmax:         softmax(Q Kᵀ / sqrt(d_k)) V,              Q = W_q x,  K = W_k m,  V = W_v m
    double_softmax:  softmax_d(Q) (softmax_s(K)ᵀ V),           linear in both lengths (Shen et al. 2018)

Every token sees every real token of its row's memory, whatever the order; a row without any gets zeros. A memory is
projected once, when the state is made. Keys and values may come of different sequences (`Memory.values`).
"""

from dataclasses import dataclass
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from heddle.config import Count, Positive, refuse
from heddle.numerics.attention.softmax import attention
from heddle.numerics.attention.visibility import Visibility
from heddle.numerics.recurrent.double_softmax import double_softmax, read, summarise
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.context.mixer_state import MixerState
from heddle.parts.context.position_table import PositionTable
from heddle.parts.mixers import Mixer, MixerConfig, Place, narrow, widen
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Linear


class CrossAttentionConfig(MixerConfig):
    """Fields of `cross_attention`; absent means off or the usual default."""

    heads: Count
    kv_heads: Count | None = None  # default: heads
    head_dim: Count | None = None  # default: width / heads
    value_dim: Count | None = None  # default: head_dim
    memory_width: Count | None = None  # default: the model's width
    normalisation: Literal["softmax", "double_softmax"] = "softmax"
    bias: bool | Literal["qkv"] = False  # true: q, k, v and out; qkv: those three
    scale: Positive | None = None  # default: 1 / sqrt(head_dim)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kv_heads is not None and self.heads % self.kv_heads:
            refuse("kv_heads", f"{self.kv_heads} does not divide heads = {self.heads}; choose a divisor of it")
        if self.scale is not None and self.normalisation == "double_softmax":
            refuse("scale", "double_softmax makes no scores to scale; leave it out")
        return self

    def resolved(self, place: Place) -> Self:
        """Heads and widths written out, and the scale where scores are made."""
        dim = place.head_dim(self.heads, self.head_dim)
        return self.replace(
            kv_heads=self.kv_heads or self.heads,
            head_dim=dim,
            value_dim=self.value_dim or dim,
            memory_width=self.memory_width or place.width,
            scale=None if self.normalisation == "double_softmax" else self.scale or dim**-0.5,
        )

    def build(self, place: Place) -> "CrossAttention":
        """Make the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return CrossAttention(self, place)


@dataclass(frozen=True, eq=False)
class Projected(MixerState):
    """keys [B, G, S, d_k], values [B, G, S, d_v] of a memory; positions int64 [B, S], −1 at padding; None: all real."""

    keys: Tensor
    values: Tensor
    positions: Tensor | None

    def goes_back(self, tokens: int, table: PositionTable) -> bool:
        """Always: it does not depend on the text."""
        return True


@dataclass(frozen=True, eq=False)
class Summarised(MixerState):
    """All that double softmax needs of a memory, whatever its length: summary [B, G, d_k, d_v], at least float32."""

    summary: Tensor

    def goes_back(self, tokens: int, table: PositionTable) -> bool:
        """Always: it does not depend on the text."""
        return True


class CrossAttention(Mixer):
    """The module; its state is the projected memory, which no call changes."""

    def __init__(self, config: CrossAttentionConfig, place: Place) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        head_dim = place.head_dim(config.heads, config.head_dim)
        value_dim = config.value_dim or head_dim
        self.scale = config.scale or head_dim**-0.5
        self.reach, self.causal = 1, True
        self.memory_width = config.memory_width or place.width
        self.normalisation = config.normalisation
        into = bool(config.bias)
        self.q = Linear(place.width, self.heads * head_dim, bias=into)
        self.k = Linear(self.memory_width, self.kv_heads * head_dim, bias=into)
        self.v = Linear(self.memory_width, self.kv_heads * value_dim, bias=into)
        self.out = Linear(self.heads * value_dim, place.width, bias=config.bias is True, last=True)

    @property
    def looks_back(self) -> int:
        """No earlier position of the text is asked for."""
        return 0

    def init_state(
        self,
        batch: int,
        capacity: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Memory | None = None,
        rewind: int = 0,
    ) -> Projected | Summarised:
        """The projected memory; its size does not depend on the capacity."""
        assert memory is not None  # the model has checked it
        made = self._project(memory)
        if self.normalisation == "double_softmax":
            return Summarised(summarise(made.keys, made.values, memory.real))
        return made.map(lambda _, x: x.contiguous())

    def forward(
        self, x: Tensor, layout: Layout, state: Projected | Summarised | None = None
    ) -> tuple[Tensor, Projected | Summarised | None]:
        """x [B, T, width] -> ([B, T, width], the same state)."""
        y = self._read(widen(self.q(x), self.heads), layout, state)
        return self.out(narrow(y)), state

    @eager  # memories differ from call to call; what is compiled is around this
    def _read(self, q: Tensor, layout: Layout, state: Projected | Summarised | None) -> Tensor:
        if isinstance(state, Summarised):
            return read(q, state.summary)
        if state is None:
            assert layout.memory is not None  # the model has checked it
            state = self._project(layout.memory)
            if self.normalisation == "double_softmax":
                return double_softmax(q, state.keys, state.values, layout.memory.real)
        return attention(q, state.keys, state.values, _seen(layout, state), self.scale)

    def _project(self, memory: Memory) -> Projected:
        """Keys and values, in the model's dtype."""
        keys, values = (x.to(self.k.weight.dtype) for x in memory.clean())
        positions = None if memory.real is None else memory.real.long() - 1
        return Projected(widen(self.k(keys), self.kv_heads), widen(self.v(values), self.kv_heads), positions)


def _seen(layout: Layout, state: Projected) -> Visibility:
    """Each token sees every real token of the memory."""
    some, length = state.positions is not None, state.keys.shape[2]
    held = layout.positions.new_zeros(1, 1).expand(layout.batch, length) if state.positions is None else state.positions
    return Visibility(layout.positions, held, causal=False, everything=not some and length > 0, ragged=some)
