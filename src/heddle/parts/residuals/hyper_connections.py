"""Hyper-connections (Zhu et al. 2024; Xie et al. 2025, arXiv 2512.24880, manifold-constrained): n mixed streams.

X [n, width] are the streams of a token. Each branch f has its own φ, b and α; with z = N(vec X):

    R = σ(α₁ φ₁z + b₁ + log(1/(n−1)))   [n]      weights of the streams in the input of f
    W = 2σ(α₂ φ₂z + b₂)                 [n]      weights of the output of f in the streams
    M = Sinkhorn(α₃ φ₃z + b₃ + 4·I)     [n, n]   how the streams mix: rows and columns sum to 1
    X ← M X + W f(N(R X))ᵀ

X starts as n copies of the embedding, and the mean of the streams is normalized at the end. α and b are initialized to
zero. Then R is 1/n, W is 1, all streams are equal, and the block equals pre-norm up to rounding; the first updates of α
make the streams differ. (The paper initializes α to 0.01 and does not state b; the constants take its place.)

A feed-forward that reads and writes every stream has no maps: X ← X + f(X) (Qwen4's memories).

With `gate_rank`, z norms each stream, W = 2σ(φz / n), R = σ(U silu(D z / n)) [n, width], and f reads mean(R ⊙ z).

X ═╦═ R ── N ── mixer ── W ═(+)═╦═ R ── N ── feedforward ── W ═(+)═ …  ══ mean ── N ──
   ╚════════════ M ══════════╝  ╚══════════════ M ══════════════╝

| published form | fields |
| --- | --- |
| DeepSeek V4 | `norm_weight: false`, `eps: 1e-6`, `whole_bias: true`, `collapse: weighted` |
| GLM-5-Next | `norm_weight: false`, `eps: 1e-6`, `whole_bias: true` |
| Hy V4 | as DeepSeek V4, with `mixing: false`, `magnitude` |
| Qwen4 | `gate_rank`, `collapse: weighted`, `mixing: false` |
"""

import math
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import PositiveFloat, Width, refuse
from heddle.numerics.dispatch import add_flops
from heddle.numerics.norms import at_least_float32, sinkhorn, without_autocast
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import ResidualContext
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, FinalNorm, Residual, ResidualConfig

IDENTITY_BIAS = 4.0  # on the diagonal of M; four streams then start with 95 % of their weight on themselves


class HyperConnectionsConfig(ResidualConfig):
    """`streams` is n; `iterations` of Sinkhorn–Knopp.

    `eps` is added to R and, in Sinkhorn's steps, to elements and sums; without `mixing`, to R and W. With `collapse:
    weighted` an R, before the final norm, combines the streams at the end; with `gate_rank` no norm follows. With
    `whole_bias` the constants log(1/(n−1)) and 4·I are not added to b, which is drawn around them, by the design's std.
    """

    later_fields = (
        *ResidualConfig.later_fields, "mixing", "magnitude", "eps", "norm_weight", "gate_rank", "collapse",
        "whole_bias",
    )  # fmt: skip

    aliases = ("mhc",)

    streams: Annotated[int, Field(ge=2, le=64)] = 4
    iterations: Annotated[int, Field(ge=1, le=1000)] = 20
    mixing: bool = True  # without, M is the identity
    magnitude: PositiveFloat = 2.0  # the factor of W, 2 above
    eps: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.0  # added to weights
    norm_weight: bool = True  # whether the norm of vec X has weights
    gate_rank: Width | None = None  # rows of D
    collapse: Literal["mean", "weighted"] = "mean"  # of the streams after the last layer
    whole_bias: bool = False  # b holds the constants that are else added to it

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.mixing and self.iterations != type(self).model_fields["iterations"].default:
            refuse("iterations", "is for Sinkhorn's steps, but mixing is false; leave it out")
        if self.gate_rank is not None and self.mixing:
            refuse("gate_rank", "gates streams that are not mixed; set mixing to false, or leave it out")
        if self.gate_rank is not None and self.eps:
            refuse("eps", "is added to n weights, but gate_rank has gates in their place; leave it out")
        if self.gate_rank is not None and self.whole_bias:
            refuse("whole_bias", "is for b, but gate_rank has gates without b; leave it out")
        return self

    @property
    def has_one_stream(self) -> bool:
        """False."""
        return False

    @property
    def parallel_streams(self) -> int:
        """n."""
        return self.streams

    def expand(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, streams, width], all equal."""
        return x.unsqueeze(2).expand(-1, -1, self.streams, -1)

    def input_norm(self, branch: str, mixer: str) -> str | None:
        """The branch's own norm; none with gates, which read normalized streams."""
        return f"norms.{branch}" if self.gate_rank is None else None

    def build(self, context: ResidualContext) -> "HyperConnections":
        """Build the block of one layer."""
        return HyperConnections(self, context)

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """Build the norm of the streams' mean or weighted sum, or the last gates."""
        if self.collapse == "mean":
            return MeanFinalNorm(width, norm)
        return WeightedFinalNorm(self, width, norm) if self.gate_rank is None else GatedMean(self, width, norm)

    def build_maps(self, width: int, norm: NormConfig, is_last: bool = False) -> "MixingMaps | GateMaps":
        """Build the maps of one branch, or the one of the end."""
        norm = norm if self.norm_weight else norm.without_weight()
        return (MixingMaps if self.gate_rank is None else GateMaps)(self, width, norm, is_last)


class Mixing(NamedTuple):
    """What a branch reads [B, T, width]; W [B, T, n, 1] and M [B, T, n, n] of each token, None where there is none."""

    read: Tensor
    write: Tensor | None = None
    mix: Tensor | None = None


class MixingMaps(SelfInitialized):
    """The maps R, W and M of one branch, computed from all streams of a token; at the end R alone."""

    def __init__(self, config: HyperConnectionsConfig, width: int, norm: NormConfig, is_last: bool) -> None:
        super().__init__()
        n = config.streams
        self.config, self.sizes = config, (n,) if is_last else (n, n, n * n) if config.mixing else (n, n)
        self.norm = norm.build(n * width)
        self.projection = Linear(n * width, sum(self.sizes))
        self.gain = nn.Parameter(torch.empty(len(self.sizes)))  # α
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Zeros: no map depends on the token yet, and every stream is read with the same weight.

        A bias that holds its constants is drawn around them.
        """
        nn.init.zeros_(self.gain)
        if self.config.whole_bias:
            fill_normal(self.bias, std, draws("bias"), mean=self._constants())
        else:
            nn.init.zeros_(self.bias)

    def _constants(self) -> Tensor:
        """What b starts from: log(1/(n−1)) for R, 0 for W and 4·I for M, on the CPU."""
        n = self.config.streams
        with torch.device("cpu"):
            parts = torch.full((n,), -math.log(n - 1)), torch.zeros(n), IDENTITY_BIAS * torch.eye(n).flatten()
            return torch.cat(parts[: len(self.sizes)])

    def forward(self, stream: Tensor) -> Mixing:
        """stream [B, T, n, width] -> the mixing, in the stream's dtype."""
        n, eps = self.config.streams, self.config.eps
        logits = at_least_float32(self.projection(self.norm(stream.flatten(2)))).split(self.sizes, dim=-1)
        gain, bias = at_least_float32(self.gain), at_least_float32(self.bias).split(self.sizes)
        read, *others = (gain[i] * each + bias[i] for i, each in enumerate(logits))
        whole = self.config.whole_bias
        weights = (read if whole else read - math.log(n - 1)).sigmoid().unsqueeze(-2) + eps
        x = _mix_streams(weights.to(stream.dtype), stream).squeeze(2)
        if not others:
            return Mixing(x)
        write = self.config.magnitude * others[0].sigmoid().unsqueeze(-1)
        if not self.config.mixing:
            return Mixing(x, (write + eps).to(stream.dtype))
        mix = others[1].unflatten(-1, (n, n))
        mix = mix if whole else mix + IDENTITY_BIAS * torch.eye(n, dtype=write.dtype, device=write.device)
        mix = sinkhorn(mix, self.config.iterations, eps)
        return Mixing(x, write.to(stream.dtype), mix.to(stream.dtype))


class GateMaps(nn.Module):
    """The gates R and the weights W of one branch; at the end R alone."""

    def __init__(self, config: HyperConnectionsConfig, width: int, norm: NormConfig, is_last: bool) -> None:
        super().__init__()
        n, rank = config.streams, config.gate_rank
        assert rank is not None
        self.config = config
        self.norm = norm.build(width, n)
        self.down, self.up = Linear(n * width, rank), Linear(rank, n * width)
        self.write = None if is_last else Linear(n * width, n)

    def forward(self, stream: Tensor) -> Mixing:
        """stream [B, T, n, width] -> the mixing, in the stream's dtype."""
        n, normed = self.config.streams, self.norm(stream)
        flat = normed.flatten(2)
        gates = self.up(functional.silu(self.down(flat) / n)).sigmoid()
        x = (gates.view_as(normed) * normed).mean(2).to(stream.dtype)
        if self.write is None:
            return Mixing(x)
        write = self.config.magnitude * (self.write(flat) / n).sigmoid()
        return Mixing(x, write.unsqueeze(-1).to(stream.dtype))


def _mix_streams(weights: Tensor, stream: Tensor) -> Tensor:
    """weights [B, T, m, n] @ stream [B, T, n, width] -> [B, T, m, width], in the stream's dtype also under autocast."""
    add_flops(2 * weights.numel() * stream.shape[-1])
    with without_autocast(stream):
        return weights @ stream


class HyperConnections(Residual):
    """The block: a norm and maps per branch."""

    def __init__(self, config: HyperConnectionsConfig, context: ResidualContext) -> None:
        super().__init__(context)
        self.has_eps = config.eps > 0
        own = {"feedforward"} if context.on_streams else set[str]()
        mixed = replace(context, branches=tuple(name for name in context.branches if name not in own))
        self.norms = mixed.build_norms() if config.gate_rank is None else nn.ModuleDict()
        maps = {name: config.build_maps(context.width, context.norm) for name in mixed.branches}
        self.maps = nn.ModuleDict(maps)

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, n, width] -> the same shape."""
        for name, branch in branches.items():
            if name not in self.maps:
                stream = stream + self.drops[name](branch(stream))
                continue
            read, write, mix = self.maps[name](stream)
            y = self.drops[name](branch(self.norms[name](read) if name in self.norms else read))
            stream = (stream if mix is None else _mix_streams(mix, stream)) + write * y.unsqueeze(2)
        return stream

    def identity_output(self, stream: Tensor) -> Tensor:
        """Equal streams pass unchanged where rows of M sum to 1; `eps` makes the sums a little smaller."""
        for maps in self.maps.values() if self.has_eps else ():
            mix = maps(stream).mix
            stream = stream if mix is None else _mix_streams(mix, stream)
        return stream


class MeanFinalNorm(FinalNorm):
    """The final norm, of the streams' mean."""

    def forward(self, stream: Tensor) -> Tensor:
        """[B, T, n, width] -> [B, T, width]."""
        return super().forward(stream.mean(2))


class WeightedFinalNorm(FinalNorm):
    """The final norm, of a weighted sum of the streams."""

    def __init__(self, config: HyperConnectionsConfig, width: int, norm: NormConfig) -> None:
        super().__init__(width, norm)
        self.maps = config.build_maps(width, norm, is_last=True)

    def forward(self, stream: Tensor) -> Tensor:
        """[B, T, n, width] -> [B, T, width]."""
        return super().forward(self.maps(stream).read)


class GatedMean(nn.Module):
    """The mean of the streams' gated norms."""

    def __init__(self, config: HyperConnectionsConfig, width: int, norm: NormConfig) -> None:
        super().__init__()
        self.maps = config.build_maps(width, norm, is_last=True)

    def forward(self, stream: Tensor) -> Tensor:
        """[B, T, n, width] -> [B, T, width]."""
        hidden: Tensor = self.maps(stream).read
        return hidden
