"""Manifold-constrained hyper-connections (Zhu et al. 2024; Xie et al. 2025, arXiv 2512.24880): n mixed streams.

X [n, width] are the streams of a token. Each branch f has its own φ, b and α; with z = N(vec X):

    R = σ(α₁ φ₁z + b₁ + log(1/(n−1)))   [n]      weights of the streams in the input of f
    W = 2σ(α₂ φ₂z + b₂)                 [n]      weights of the output of f in the streams
    M = Sinkhorn(α₃ φ₃z + b₃ + 4·I)     [n, n]   how the streams mix: rows and columns sum to 1
    X ← M X + W f(N(R X))ᵀ

X starts as n copies of the embedding, and the mean of the streams is normalized at the end. α and b are initialized to
zero. Then R is 1/n, W is 1, all streams are equal, and the block equals pre-norm up to rounding; the first updates of α
make the streams differ. (The paper initializes α to 0.01 and does not state b; the constants here stand for such a b.)

X ═╦═ R ── N ── mixer ── W ═(+)═╦═ R ── N ── feedforward ── W ═(+)═ …  ══ mean ── N ──
   ╚════════════ M ══════════╝  ╚══════════════ M ══════════════╝
"""

import math
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from heddle.numerics.dispatch import add_flops
from heddle.numerics.norms import at_least_float32, sinkhorn, without_autocast
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import ResidualContext
from heddle.parts.modules.linear import Linear, SelfInitialized
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, FinalNorm, Residual, ResidualConfig

IDENTITY_BIAS = 4.0  # on the diagonal of M; four streams then start with 95 % of their weight on themselves


class HyperConnectionsConfig(ResidualConfig):
    """`streams` is n; `iterations` of Sinkhorn–Knopp."""

    aliases = ("mhc",)

    streams: Annotated[int, Field(ge=2, le=64)] = 4
    iterations: Annotated[int, Field(ge=1, le=1000)] = 20

    @property
    def has_one_stream(self) -> bool:
        """False."""
        return False

    def expand(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, streams, width], all equal."""
        return x.unsqueeze(2).expand(-1, -1, self.streams, -1)

    def input_norm(self, branch: str, mixer: str) -> str:
        """The branch's own norm."""
        return f"norms.{branch}"

    def build(self, context: ResidualContext) -> "HyperConnections":
        """Build the block of one layer."""
        return HyperConnections(self, context)

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """Build the norm of the streams' mean."""
        return MeanFinalNorm(width, norm)


class Mixing(NamedTuple):
    """R [B, T, 1, n], W [B, T, n, 1] and M [B, T, n, n] of each token."""

    read: Tensor
    write: Tensor
    mix: Tensor


class MixingMaps(SelfInitialized):
    """The three maps R, W and M of one branch, computed from all streams of a token."""

    def __init__(self, config: HyperConnectionsConfig, context: ResidualContext) -> None:
        super().__init__()
        n = config.streams
        self.streams, self.iterations = n, config.iterations
        self.norm = context.norm.build(n * context.width)
        self.projection = Linear(n * context.width, n * (n + 2))
        self.gain = nn.Parameter(torch.empty(3))  # α
        self.bias = nn.Parameter(torch.empty(n * (n + 2)))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Zeros: no map depends on the token yet, and every stream is read with the same weight."""
        nn.init.zeros_(self.gain)
        nn.init.zeros_(self.bias)

    def forward(self, stream: Tensor) -> Mixing:
        """stream [B, T, n, width] -> R, W and M, in the stream's dtype."""
        n = self.streams
        sizes = (n, n, n * n)
        logits = at_least_float32(self.projection(self.norm(stream.flatten(2)))).split(sizes, dim=-1)
        gain, bias = at_least_float32(self.gain), at_least_float32(self.bias).split(sizes)
        read, write, mix = (gain[i] * logits[i] + bias[i] for i in range(3))
        identity = IDENTITY_BIAS * torch.eye(n, dtype=mix.dtype, device=mix.device)
        mixing = Mixing(
            (read - math.log(n - 1)).sigmoid().unsqueeze(-2),
            2 * write.sigmoid().unsqueeze(-1),
            sinkhorn(mix.unflatten(-1, (n, n)) + identity, self.iterations),
        )
        return Mixing(*(x.to(stream.dtype) for x in mixing))


def _mix_streams(weights: Tensor, stream: Tensor) -> Tensor:
    """weights [B, T, m, n] @ stream [B, T, n, width] -> [B, T, m, width], in the stream's dtype also under autocast."""
    add_flops(2 * weights.numel() * stream.shape[-1])
    with without_autocast(stream):
        return weights @ stream


class HyperConnections(Residual):
    """The block: a norm and three maps per branch."""

    def __init__(self, config: HyperConnectionsConfig, context: ResidualContext) -> None:
        super().__init__(context)
        self.norms = context.build_norms()
        self.maps = nn.ModuleDict({name: MixingMaps(config, context) for name in context.branches})

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, n, width] -> the same shape."""
        for name, branch in branches.items():
            read, write, mix = self.maps[name](stream)
            y = self.drops[name](branch(self.norms[name](_mix_streams(read, stream).squeeze(2))))
            stream = _mix_streams(mix, stream) + write * y.unsqueeze(2)
        return stream


class MeanFinalNorm(FinalNorm):
    """The final norm, of the streams' mean."""

    def forward(self, stream: Tensor) -> Tensor:
        """[B, T, n, width] -> [B, T, width]."""
        return super().forward(stream.mean(2))
