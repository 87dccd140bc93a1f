"""Sandwich norms (Ding et al. 2021, CogView; Gemma-2): `x + N(f(N(x)))`, and a norm at the end.

x ──┬── N ── mixer ── N ──(+)──┬── N ── feedforward ── N ──(+)── …  ── N ──
    └──────────────────────┘   └────────────────────────────┘

With `laurel_rank` r the first branch of a layer, its mixer if it has one, is added with a learned residual of low rank
(LAuReL, Menghani et al. 2024; Gemma 3n, 2025), A [r, width], B [width, r]:

    u = N(x),   x ← (x + N(f(u)) + u + N(B A u)) / √2

With `altup_streams` n there are n streams X [n, width], of which a layer F processes the first: alternating updates
(AltUp, Baykal et al. 2023; Gemma 3n, 2025), with R [n, width], P [n², n] and C [n, n]:

    m(x) = tanh(R N(x) / width),   Y = X + (P m(X₁) as [n, n]) X
    y = F(Y₁),   X ← Y + (1 + C m(y)) (y − Y₁)ᵀ

X starts as the embedding x and E_i x, scaled to the root mean square of x. At the end the mean of X₁ and of D_i X_i,
scaled to the root mean square of X₁, is normalized. The branch of `embedding.per_layer` reads s ⊙ X₁, with s [width] 0
at first, and is added to all streams but the first.
"""

import math
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from heddle.config import PositiveFloat, PositiveInt
from heddle.numerics.dispatch import add_flops
from heddle.numerics.norms import at_least_float32, without_autocast
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import ResidualContext
from heddle.parts.modules.linear import Linear, SelfInitialized
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, FinalNormConfig, Residual


class SandwichConfig(FinalNormConfig):
    """laurel_rank: rank of the learned residual of a layer's first branch. altup_streams: n, for alternating updates.

    multiplier: factor of every branch's output, after its norm (HyperCLOVA X, 2025).
    """

    later_fields = (*FinalNormConfig.later_fields, "laurel_rank", "altup_streams", "multiplier")

    laurel_rank: PositiveInt | None = None  # None: no learned residual
    altup_streams: Annotated[int, Field(ge=2, le=64)] | None = None  # None: one stream
    multiplier: PositiveFloat | None = None

    @property
    def has_one_stream(self) -> bool:
        """True without `altup_streams`."""
        return self.altup_streams is None

    @property
    def takes_embeddings(self) -> bool:
        """True."""
        return True

    @property
    def keeps_stream(self) -> bool:
        """True without learned residuals and alternating updates."""
        return self.laurel_rank is None and self.altup_streams is None

    def build_expansion(self, width: int) -> nn.Module | None:
        """Build the projections of the other streams, with `altup_streams`."""
        return None if self.altup_streams is None else StreamExpansion(width, self.altup_streams)

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """Build the final norm or an identity, with `altup_streams` of the merged streams."""
        final = super().build_final_norm(width, norm)
        return final if self.altup_streams is None else MergedFinalNorm(width, self.altup_streams, final)

    def input_norm(self, branch: str, mixer: str) -> str | None:
        """The branch's own norm, unless the learned residual reads it, too."""
        is_first = branch == "mixer" or not mixer
        return None if is_first and self.laurel_rank is not None else f"norms.{branch}"

    def output_norm(self, branch: str, mixer: str) -> str:
        """The branch's own norm."""
        return f"after.{branch}"

    def build(self, context: ResidualContext) -> "Sandwich":
        """Build the block of one layer."""
        return Sandwich(context, self)


class LowRankResidual(nn.Module):
    """u + N(B A u)."""

    def __init__(self, width: int, rank: int, norm: NormConfig) -> None:
        super().__init__()
        self.down, self.up = Linear(width, rank), Linear(rank, width)
        self.norm = norm.build(width)

    def forward(self, u: Tensor) -> Tensor:
        """[B, T, width] -> the same shape."""
        y: Tensor = u + self.norm(self.up(self.down(u)))
        return y


class AltUp(SelfInitialized):
    """The maps of one layer. embedding_scale: of what the layer's own embedding reads, None without one."""

    def __init__(self, streams: int, context: ResidualContext) -> None:
        super().__init__()
        self.streams, self.width = streams, context.width
        self.norm = context.norm.build(context.width)
        self.router = Linear(context.width, streams)
        self.prediction, self.correction = Linear(streams, streams**2), Linear(streams, streams)
        self.embedding_scale = nn.Parameter(torch.empty(context.width)) if context.per_layer else None

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Zeros."""
        if self.embedding_scale is not None:
            nn.init.zeros_(self.embedding_scale)

    def predict(self, stream: Tensor) -> Tensor:
        """stream [B, T, n, width] -> Y of the same shape."""
        mixed = self.prediction(self._weights(stream[:, :, 0])).unflatten(-1, (self.streams, self.streams))
        add_flops(2 * mixed.numel() * self.width)
        with without_autocast(stream):
            predicted: Tensor = stream + mixed.to(stream.dtype) @ stream
        return predicted

    def correct(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Y [B, T, n, width] and the layer's output y [B, T, width] -> the new streams."""
        shares = 1 + self.correction(self._weights(y))
        corrected: Tensor = predicted + shares[..., None].to(y.dtype) * (y - predicted[:, :, 0])[:, :, None]
        return corrected

    def _weights(self, x: Tensor) -> Tensor:
        logits: Tensor = self.router(self.norm(x) / self.width)
        return at_least_float32(logits).tanh().to(x.dtype)


LEAST_SQUARE = 1e-5  # of the mean square that a projected stream is divided by the root of, as published


def with_size_of(y: Tensor, x: Tensor) -> Tensor:
    """y times the ratio of the root mean squares of x and y over the last dim, computed in at least float32."""
    wide, other = at_least_float32(y), at_least_float32(x)
    size = other.square().mean(-1, keepdim=True).clamp_min(torch.finfo(other.dtype).tiny).sqrt()
    return (wide * size / wide.square().mean(-1, keepdim=True).clamp_min(LEAST_SQUARE).sqrt()).to(y.dtype)


class StreamExpansion(nn.Module):
    """x and E_i x, each as large as x."""

    def __init__(self, width: int, streams: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList(Linear(width, width) for _ in range(streams - 1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, n, width]."""
        return torch.stack([x, *(with_size_of(projection(x), x) for projection in self.projections)], dim=2)


class MergedFinalNorm(nn.Module):
    """The final norm, or an identity, of the mean of X₁ and D_i X_i, each as large as X₁."""

    def __init__(self, width: int, streams: int, final: nn.Module) -> None:
        super().__init__()
        self.projections = nn.ModuleList(Linear(width, width) for _ in range(streams - 1))
        self.norm = getattr(final, "norm", final)

    def forward(self, stream: Tensor) -> Tensor:
        """[B, T, n, width] -> [B, T, width]."""
        first, *others = stream.unbind(2)
        projected = (projection(x) for projection, x in zip(self.projections, others, strict=True))
        merged = torch.stack([first, *(with_size_of(x, first) for x in projected)]).mean(0)
        y: Tensor = self.norm(merged)
        return y


class Sandwich(Residual):
    """The block: a norm before each branch and one `after` it. Dropout is last: a norm would undo 1/(1 − rate)."""

    def __init__(self, context: ResidualContext, config: SandwichConfig) -> None:
        super().__init__(context)
        self.norms, self.after = context.build_norms(), context.build_norms()
        self.multiplier = config.multiplier
        self.first, rank, streams = context.branches[0], config.laurel_rank, config.altup_streams
        self.laurel = None if rank is None else LowRankResidual(context.width, rank, context.norm)
        self.altup = None if streams is None else AltUp(streams, context)

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width], or [B, T, n, width] with `altup_streams` -> the same shape."""
        return self._updated(stream, lambda x: self._process(x, branches))

    def add_embedding(self, stream: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """With `altup_streams`, the branch reads the first stream, and is added to the others."""
        if self.altup is None:
            return stream + branch(stream)
        first = stream[:, :, 0]
        assert self.altup.embedding_scale is not None
        added = branch(first * self.altup.embedding_scale.to(first.dtype))
        return torch.cat((first[:, :, None], stream[:, :, 1:] + added[:, :, None]), dim=2)

    def _updated(self, stream: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """The stream or streams after the layer [B, T, width] -> the same shape."""
        if self.altup is None:
            return layer(stream)
        predicted = self.altup.predict(stream)
        return self.altup.correct(predicted, layer(predicted[:, :, 0]))

    def _process(self, stream: Tensor, branches: Branches) -> Tensor:
        for name, branch in branches.items():
            u = self.norms[name](stream)
            y = self.drops[name](self.after[name](branch(u)))
            added = stream + (y if self.multiplier is None else self.multiplier * y)
            stream = self._with_laurel(added, u) if name == self.first else added
        return stream

    def identity_output(self, stream: Tensor) -> Tensor:
        """The learned residual and the alternating updates alone."""
        return self._updated(stream, lambda x: self._with_laurel(x, self.norms[self.first](x)))

    def _with_laurel(self, added: Tensor, u: Tensor) -> Tensor:
        return added if self.laurel is None else (added + self.laurel(u)) * math.sqrt(0.5)
