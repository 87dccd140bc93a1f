"""Retention (Sun et al. 2023): sums that decay, a rate a head, in place of a softmax.

    S_t = γ_h S_{t−1} + k_t v_tᵀ,   y_t = norm_h(q_tᵀ S_t),   output W_out (y ⊙ act(W_g x))

γ_h = 1 − 2^(−5−h) for head h = 0, 1, … unless given or learned; other slopes make it lightning attention (Qin et al.
2024). A rotation turns q and k. The norm is the model's, over each head, with weights a head.
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import Count, build_under, refuse
from heddle.numerics.attention.observer import imply
from heddle.numerics.norms import at_least_float32
from heddle.numerics.recurrent.causal_sums import causal_sums
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.context.recurrent_state import Sums, places, without_padding
from heddle.parts.mixers import Mixer, MixerConfig, Place, widen
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Leaf, Linear, fill_normal, together
from heddle.parts.positions import RotationConfig

Factor = Annotated[float, Field(gt=0.0, le=1.0)]

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "sigmoid": torch.sigmoid}


class RetentionConfig(MixerConfig):
    """Fields of `retention`."""

    heads: Count
    head_dim: Count | None = None  # default: width / heads
    value_dim: Count | None = None  # default: head_dim
    decay: tuple[Factor, ...] | Literal["learned"] | None = None  # γ of each head; default: 1 − 2^(−5−h)
    gate: Literal["silu", "sigmoid"] | None = None  # of the output (Sun et al.: silu)
    position: RotationConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.decay, tuple) and len(self.decay) != self.heads:
            refuse("decay", f"{len(self.decay)} factors for heads = {self.heads}; give one a head")
        return self

    def resolved(self, place: Place) -> Self:
        """Widths and turned dims written out."""
        dim = place.head_dim(self.heads, self.head_dim)
        position = None if self.position is None else self.position.resolved(dim)
        return self.replace(head_dim=dim, value_dim=self.value_dim or dim, position=position)

    def build(self, place: Place) -> "Retention":
        """Make the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return Retention(self, place)


class Decay(Leaf):
    """Learned γ of each head: the sigmoid of its weight, which starts near retention's own factors."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Normal numbers around log(γ / (1 − γ)) of `1 − 2^(−5−h)`."""
        heads = torch.arange(self.weight.shape[0], dtype=torch.float32, device="cpu")
        fill_normal(self.weight, std, generator, torch.expm1((5 + heads) * math.log(2)).log())

    def forward(self) -> Tensor:
        """log γ [H], in at least float32."""
        return functional.logsigmoid(at_least_float32(self.weight))


class Retention(Mixer):
    """The module; its state is a `Sums` [B, H, d_k, d_v]. Fixed factors are no tensor, so no dtype rounds them."""

    def __init__(self, config: RetentionConfig, place: Place) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = place.head_dim(config.heads, config.head_dim)
        self.value_dim = config.value_dim or self.head_dim
        self.reach, self.causal = None, True
        self.q = Linear(place.width, self.heads * self.head_dim)
        self.k = Linear(place.width, self.heads * self.head_dim)
        self.v = Linear(place.width, self.heads * self.value_dim)
        self.out = Linear(self.heads * self.value_dim, place.width, last=True)
        self.norm = place.norm.build(self.value_dim, self.heads)
        self.activation = None if config.gate is None else GATES[config.gate]
        self.gate = None if config.gate is None else Linear(place.width, self.heads * self.value_dim)
        self.decay = Decay(self.heads) if config.decay == "learned" else None
        given = config.decay if isinstance(config.decay, tuple) else None
        own = tuple(math.log1p(-(2.0 ** (-5 - head))) for head in range(self.heads))
        self.log_decays = own if given is None else tuple(math.log(factor) for factor in given)
        position = config.position
        self.position = None if position is None else build_under("position", position.build, self.head_dim)
        if self.position is not None:
            self.position.exact = True

    @property
    def looks_back(self) -> int:
        """No earlier position is asked for: the sums are all there is."""
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
    ) -> Sums:
        """Nothing seen yet; the size does not depend on the capacity."""
        return Sums.empty((batch, self.heads, self.head_dim, self.value_dim), dtype, device)

    def forward(self, x: Tensor, layout: Layout, state: Sums | None = None) -> tuple[Tensor, Sums | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v = (widen(one, self.heads) for one in together(x, self.q, self.k, self.v))
        if self.position is not None:
            q, k = self.position(q, layout), self.position(k, layout)
        y, state = self._retain(q, k, v, layout, state)
        y = self.norm(y.transpose(1, 2)).flatten(2).to(x.dtype)
        if self.gate is not None and self.activation is not None:
            y = y * self.activation(self.gate(x))
        return self.out(y), state

    @eager  # layouts differ from call to call; what is compiled is around this
    def _retain(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: Sums | None
    ) -> tuple[Tensor, Sums | None]:
        held = None if state is None else state.sums
        k, log_decay = without_padding(k, layout), self._log_decay(q, layout)
        imply(lambda one_hot: causal_sums(q, k, one_hot, log_decay, places(layout), None)[0], v, layout.padding)
        y, held = causal_sums(q, k, v, log_decay, places(layout), held)
        return y, None if held is None else Sums(held)

    def _log_decay(self, q: Tensor, layout: Layout) -> Tensor:
        """log γ [H]; fixed ones are made a tensor once for all layers that share them."""
        if self.decay is not None:
            return self.decay()
        like = at_least_float32(q[:0])
        make = lambda: torch.tensor(self.log_decays, dtype=like.dtype, device=like.device)  # noqa: E731
        return layout.once(("log decay", self.log_decays, like.dtype), make)
