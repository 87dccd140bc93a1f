"""Linear attention (Katharopoulos et al. 2020), and the double softmax of efficient attention (Shen et al. 2018).

    kernel           S_t = S_{t−1} + ψ(k_t) v_tᵀ,  z_t = z_{t−1} + ψ(k_t),   y_t = φ(q_t)ᵀ S_t / φ(q_t)ᵀ z_t
    double_softmax   softmax_d(Q) (softmax_n(K)ᵀ V),   n over the tokens, d over a head's channels

φ and ψ are elu + 1, relu, or learned (Hedgehog, Zhang et al. 2024): [softmax(W x) ; softmax(−W x)], a W a head. Where
the denominator is zero the answer is zero. A rotation turns φ(q) and ψ(k) in the numerator only (RoFormer, eq. 19).
With `causal: false`, S and z are the sums of the whole document.
"""

from collections.abc import Callable
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heddle.config import Count, build_under, refuse
from heddle.numerics.attention.observer import imply
from heddle.numerics.norms import at_least_float32
from heddle.numerics.recurrent.causal_sums import causal_means, causal_sums
from heddle.numerics.recurrent.chunked_sums import inverse
from heddle.numerics.recurrent.linear_attention import document_sums, elu, learned, relu, softmax_over_tokens
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.context.recurrent_state import Sums, places, without_padding
from heddle.parts.mixers import Mixer, MixerConfig, Place, narrow, widen
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Leaf, Linear, fill_normal, together
from heddle.parts.positions import RotationConfig

Map = Literal["elu", "relu", "learned"]

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {"elu": elu, "relu": relu}


class LinearAttentionConfig(MixerConfig):
    """Fields of `linear_attention`; feature maps and a rotation belong to normalisation kernel."""

    heads: Count
    head_dim: Count | None = None  # default: width / heads
    value_dim: Count | None = None  # default: head_dim
    feature_map: Map | None = None  # φ, of queries; default: elu
    key_feature_map: Map | None = None  # ψ, of keys; default: feature_map
    normalisation: Literal["kernel", "double_softmax"] = "kernel"
    causal: bool = True
    position: RotationConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.normalisation == "double_softmax":
            if self.causal:
                refuse("causal", "the softmax over tokens of double_softmax sees later ones; set it to false")
            for name in ("feature_map", "key_feature_map", "position"):
                if getattr(self, name) is not None:
                    refuse(name, "belongs to normalisation kernel; leave it out with double_softmax")
        if (self.maps[0] == "learned") != (self.maps[1] == "learned"):
            refuse("key_feature_map", f"{self.maps[1]} and {self.maps[0]} differ in width; learned needs learned")
        return self

    @property
    def maps(self) -> tuple[str, str]:
        """φ and ψ."""
        return self.feature_map or "elu", self.key_feature_map or self.feature_map or "elu"

    def resolved(self, place: Place) -> Self:
        """Widths and turned dims written out."""
        dim = place.head_dim(self.heads, self.head_dim)
        turned = 2 * dim if self.maps[0] == "learned" else dim
        position = None if self.position is None else self.position.resolved(turned)
        return self.replace(head_dim=dim, value_dim=self.value_dim or dim, position=position)

    def build(self, place: Place) -> "LinearAttention":
        """Make the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return LinearAttention(self, place)


class FeatureMap(Leaf):
    """The learned map, a matrix a head, which starts near the identity."""

    maps = ("weight",)

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, dim, dim))

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Identity, and normal numbers."""
        fill_normal(self.weight, std, generator, torch.eye(self.weight.shape[1], device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, T, dim] -> [B, H, T, 2 dim]."""
        return learned(x, self.weight)


class LinearAttention(Mixer):
    """The module; its state is a `Sums` [B, H, d_φ, d_v + 1]: S, and z as the last column."""

    def __init__(self, config: LinearAttentionConfig, place: Place) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = place.head_dim(config.heads, config.head_dim)
        self.value_dim = config.value_dim or self.head_dim
        self.reach, self.causal = None, config.causal
        self.kernel = config.normalisation == "kernel"
        self.q = Linear(place.width, self.heads * self.head_dim)
        self.k = Linear(place.width, self.heads * self.head_dim)
        self.v = Linear(place.width, self.heads * self.value_dim)
        self.out = Linear(self.heads * self.value_dim, place.width, last=True)
        self.q_map, self.k_map = (PLAIN.get(name) or FeatureMap(self.heads, self.head_dim) for name in config.maps)
        self.features = self.head_dim * (2 if config.maps[0] == "learned" else 1)
        position = config.position
        self.position = None if position is None else build_under("position", position.build, self.features)

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
        return Sums.empty((batch, self.heads, self.features, self.value_dim + 1), dtype, device)

    def forward(self, x: Tensor, layout: Layout, state: Sums | None = None) -> tuple[Tensor, Sums | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v = (widen(one, self.heads) for one in together(x, self.q, self.k, self.v))
        if self.kernel:
            y, state = self._attend(self.q_map(q), self.k_map(k), v, layout, state)
        else:
            y = self._double_softmax(q, k, v, layout)
        return self.out(narrow(y).to(x.dtype)), state

    @eager  # layouts differ from call to call; what is compiled is around this
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: Sums | None
    ) -> tuple[Tensor, Sums | None]:
        """φ(q), ψ(k) [B, H, T, d_φ], v [B, H, T, d_v] -> [B, H, T, d_v] and the new state."""
        k = without_padding(k, layout)
        imply(lambda one_hot: self._sums(q, k, one_hot, layout, None)[0], v, layout.padding)
        return self._sums(q, k, v, layout, state)

    def _sums(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: Sums | None) -> tuple[Tensor, Sums | None]:
        held = None if state is None else state.sums
        if self.causal and self.position is None:
            y, held = causal_means(q, k, v, places(layout), held)
            return y, None if held is None else Sums(held)
        ones = torch.ones_like(v[..., :1])
        turned_q, turned_k = (x if self.position is None else self.position(x, layout) for x in (q, k))
        if not self.causal:
            above = document_sums(turned_q, turned_k, v, layout.segments)
            return above * inverse(document_sums(q, k, ones, layout.segments)), None
        parts = (None, None) if held is None else (held[..., :-1], held[..., -1:])
        above, for_above = causal_sums(turned_q, turned_k, v, None, places(layout), parts[0])
        below, for_below = causal_sums(q, k, ones, None, places(layout), parts[1])
        y = above * inverse(below)
        if for_above is None or for_below is None:
            return y, None
        return y, Sums(torch.cat((for_above, for_below), dim=-1))

    @eager
    def _double_softmax(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        q, k = at_least_float32(q).softmax(-1), softmax_over_tokens(k, layout.padding, layout.segments)
        imply(lambda one_hot: document_sums(q, k, one_hot, layout.segments), v, layout.padding)
        return document_sums(q, k, v, layout.segments)
