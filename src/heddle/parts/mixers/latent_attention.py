"""Multi-head latent attention (DeepSeek-V2 §2.1, eqs. 9–19): one latent a token holds the keys and values of all heads.

    c = N(W_dkv x),   k_rope = R(W_kr x),   k_h = [W_uk,h c ; k_rope],   v_h = W_uv,h c
    q_h = [q_nope ; R(q_rope)] of W_q x, or of W_uq N(W_dq x);   softmax(q_h k_hᵀ · scale + mask) v_h

The state keeps c and the turned k_rope, kv_rank + rope_dim elements a token; R turns rope_dim dims only, because a
rotation of c would stand between W_uk and the queries that absorb it.
"""

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from heddle.config import Count, DesignError, Positive, build_under, decode, refuse
from heddle.numerics.attention.latent import latent_attention
from heddle.parts.context.kv_cache import Cache
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.mixers import Mixer, MixerConfig, Place, narrow, widen
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Leaf, Linear, matrix, together
from heddle.parts.norms import NormConfig
from heddle.parts.positions import RotationConfig

# DeepSeek's epsilon, whatever the model's.
NORM = {"kind": "rms", "eps": 1e-6}

Normed = Literal["rms", "none"]


class LatentAttentionConfig(MixerConfig):
    """Fields of `latent_attention`; absent means off or the usual default."""

    heads: Count
    kv_rank: Count  # the width of the latent of keys and values
    query_rank: Count | None = None  # the width of the latent of queries; default: none, queries come of the stream
    nope_dim: Count  # dims of a head's keys and queries that are not turned
    rope_dim: Count | None = None  # dims that all heads share and `position` turns; default: none
    value_dim: Count | None = None  # default: nope_dim
    kv_norm: Normed | None = None  # default: rms
    query_norm: Normed | None = None  # default: rms
    scale: Positive | None = None  # default: 1 / sqrt(nope_dim + rope_dim); YaRN multiplies either
    bias: bool = False  # of the latents, of the shared keys and of out; queries without a latent have none (DeepSeek)
    position: RotationConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.position is not None and self.rope_dim is None:
            refuse("rope_dim", "is missing, so position has no dims to turn; give rope_dim, or leave position out")
        if self.position is not None and self.rope_dim is not None and self.rope_dim % 2:
            refuse("rope_dim", f"{self.rope_dim} is odd, and dims are turned in pairs; give an even number")
        if self.query_norm is not None and self.query_rank is None:
            refuse("query_norm", "norms a latent of queries, and there is none; give query_rank, or leave it out")
        return self

    def resolved(self, place: Place) -> Self:
        """Widths, norms, scale and turned dims written out."""
        head, turned = self.nope_dim + (self.rope_dim or 0), self.rope_dim
        return self.replace(
            value_dim=self.value_dim or self.nope_dim,
            kv_norm=self.kv_norm or "rms",
            query_norm=None if self.query_rank is None else self.query_norm or "rms",
            scale=self.scale or head**-0.5,
            position=self.position if self.position is None or turned is None else self.position.resolved(turned),
        )

    def build(self, place: Place) -> "LatentAttention":
        """Make the module. Raises DesignError if a latent is wider than the stream."""
        for name, rank in (("kv_rank", self.kv_rank), ("query_rank", self.query_rank)):
            if rank is not None and rank > place.width:
                raise DesignError(name, f"{rank} is larger than width = {place.width}, of which it is a part; lower it")
        return LatentAttention(self, place.width)


class LatentAttention(Mixer):
    """The module; its state is a `Cache` of one tensor: [B, 1, slots, kv_rank + rope_dim]."""

    def __init__(self, config: LatentAttentionConfig, width: int) -> None:
        super().__init__()
        self.reach, self.causal = None, True
        self.heads, self.nope_dim, self.rope_dim = config.heads, config.nope_dim, config.rope_dim or 0
        head, value = self.nope_dim + self.rope_dim, config.value_dim or self.nope_dim
        into, rank, query_rank = config.bias, config.kv_rank, config.query_rank
        self.q = Linear(width, self.heads * head) if query_rank is None else None
        self.q_down = None if query_rank is None else Linear(width, query_rank, bias=into)
        self.q_norm = None if query_rank is None else _norm(query_rank, config.query_norm)
        self.q_up = None if query_rank is None else Linear(query_rank, self.heads * head)
        self.kv_down = Linear(width, rank, bias=into)
        self.kv_norm = _norm(rank, config.kv_norm)
        self.k_rope = Linear(width, self.rope_dim, bias=into) if self.rope_dim else None
        self.k_up = Linear(rank, self.heads * self.nope_dim)
        self.v_up = Linear(rank, self.heads * value)
        self.out = Linear(self.heads * value, width, bias=into, last=True)
        position = config.position
        self.position = None if position is None else build_under("position", position.build, self.rope_dim)
        self.scale = (config.scale or head**-0.5) * (1.0 if self.position is None else self.position.score)

    def init_state(
        self,
        batch: int,
        capacity: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Memory | None = None,
        rewind: int = 0,
    ) -> Cache:
        """Latents of every token, as keys; values are their first dims, so none are kept (a width of 0)."""
        shape = (batch, 1, self.kv_down.weight.shape[0] + self.rope_dim, 0)
        return Cache.empty(shape, None, capacity, dtype=dtype, device=device)

    def forward(self, x: Tensor, layout: Layout, state: Cache | None = None) -> tuple[Tensor, Cache | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        first, latents, *turned = together(x, *self._projections)
        q_nope, q_rope = widen(self._queries(first), self.heads).split((self.nope_dim, self.rope_dim), dim=-1)
        latents = latents[:, None]
        if self.kv_norm is not None:
            latents = self.kv_norm(latents)
        if self.k_rope is not None:
            k_rope = turned[0][:, None]
            if self.position is not None:
                q_rope, k_rope = self.position(q_rope, layout), self.position(k_rope, layout)
            latents = torch.cat((latents, k_rope), dim=-1)
        y, state = self._attend(q_nope, q_rope, latents, layout, state)
        return self.out(narrow(y)), state

    @property
    def _projections(self) -> list[Linear]:
        """All of x: queries or their latent, the latent of keys and values, and what is turned of the keys."""
        every = (self.q if self.q_down is None else self.q_down, self.kv_down, self.k_rope)
        return [one for one in every if one is not None]

    def _queries(self, x: Tensor) -> Tensor:
        """Queries or their latent [B, T, ...] -> [B, T, heads · (nope_dim + rope_dim)]."""
        if self.q_up is None:
            return x
        up: Tensor = self.q_up(x if self.q_norm is None else self.q_norm(x))
        return up

    @eager  # layouts differ from call to call; what is compiled is around this
    def _attend(
        self, q_nope: Tensor, q_rope: Tensor, latents: Tensor, layout: Layout, state: Cache | None
    ) -> tuple[Tensor, Cache | None]:
        if state is None:
            seen = layout.seen(None, True)
        else:
            latents, _, seen, state = state.extend(latents, latents[..., :0], layout, None)
        up = matrix(self.k_up), matrix(self.v_up)
        return latent_attention(q_nope, q_rope, latents, *up, seen, self.scale), state


def _norm(rank: int, kind: Normed | None) -> Leaf | None:
    if kind == "none":
        return None
    config: NormConfig = decode(NormConfig, NORM)  # type: ignore[type-abstract]
    return config.build(rank)
