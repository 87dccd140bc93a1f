"""Manifold-constrained hyper-connections (Zhu et al. 2024; Xie et al. 2025, arXiv 2512.24880): n streams, mixed.

Of a token's streams X [n, width], for each branch f, with z = N(vec X) and φ, b, α of its own:

    R = σ(α₁ φ₁z + b₁ + log(1/(n−1)))   [n]      what f reads of each stream
    W = 2σ(α₂ φ₂z + b₂)                 [n]      what each stream gets of it
    M = Sinkhorn(α₃ φ₃z + b₃ + 4·I)     [n, n]   how streams mix: rows and columns sum to 1
    X ← M X + W f(N(R X))ᵀ

X starts as n copies of the embedding, and the mean of the streams is normed at the end. α and b start at zero: R is
then 1/n, W is 1, the streams stay equal, and the wiring is pre-norm to rounding; it is the gradient of α that first
tells them apart. (The paper starts α at 0.01 and leaves its b open; the constants here stand for such a b.)

X ═╦═ R ── N ── mixer ── W ═(+)═╦═ R ── N ── feedforward ── W ═(+)═ …  ══ mean ── N ──
   ╚════════════ M ══════════╝  ╚══════════════ M ══════════════╝
"""

import math
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.norms import at_least_float32, without_autocast
from heddle.numerics.sinkhorn import sinkhorn
from heddle.parts.modules.linear import Leaf, Linear
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, Residual, ResidualConfig, Wiring

KEPT = 4.0  # with it on the diagonal, four streams start by keeping 95 % of themselves


class HyperConnectionsConfig(ResidualConfig):
    """`iterations` of Sinkhorn–Knopp."""

    streams: Annotated[int, Field(ge=2, le=64)] = 4
    iterations: Annotated[int, Field(ge=1, le=1000)] = 20

    def open(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, streams, width], all equal."""
        return x.unsqueeze(2).expand(-1, -1, self.streams, -1)

    def build(self, wiring: Wiring) -> "HyperConnections":
        """One layer's block."""
        return HyperConnections(self, wiring)

    def build_close(self, width: int, norm: NormConfig) -> nn.Module:
        """The norm of the streams' mean."""
        return MeanClose(width, norm)


class Mixing(NamedTuple):
    """For each token what a branch reads [B, T, 1, n], what it writes [B, T, n, 1] and how streams mix [B, T, n, n]."""

    read: Tensor
    write: Tensor
    mix: Tensor


class Maps(Leaf):
    """The three maps of one branch, made of all streams of a token."""

    def __init__(self, config: HyperConnectionsConfig, wiring: Wiring) -> None:
        super().__init__()
        n = config.streams
        self.streams, self.iterations = n, config.iterations
        self.norm = wiring.norm.build(n * wiring.width)
        self.weigh = Linear(n * wiring.width, n * (n + 2))
        self.gain = nn.Parameter(torch.empty(3))  # α
        self.bias = nn.Parameter(torch.empty(n * (n + 2)))

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Nothing depends on the token yet, and the streams are kept and read alike."""
        nn.init.zeros_(self.gain)
        nn.init.zeros_(self.bias)

    def forward(self, stream: Tensor) -> Mixing:
        """stream [B, T, n, width] -> its maps, in the stream's dtype."""
        n = self.streams
        sizes = (n, n, n * n)
        found = at_least_float32(self.weigh(self.norm(stream.flatten(2)))).split(sizes, dim=-1)
        gain, bias = at_least_float32(self.gain), at_least_float32(self.bias).split(sizes)
        read, write, mix = (gain[i] * found[i] + bias[i] for i in range(3))
        kept = KEPT * torch.eye(n, dtype=mix.dtype, device=mix.device)
        mixing = Mixing(
            (read - math.log(n - 1)).sigmoid().unsqueeze(-2),
            2 * write.sigmoid().unsqueeze(-1),
            sinkhorn(mix.unflatten(-1, (n, n)) + kept, self.iterations),
        )
        return Mixing(*(x.to(stream.dtype) for x in mixing))


def _mixed(weights: Tensor, stream: Tensor) -> Tensor:
    """weights [B, T, m, n] of stream [B, T, n, width] -> [B, T, m, width], in the stream's dtype whatever autocast."""
    count(2 * weights.numel() * stream.shape[-1])
    with without_autocast(stream):
        return weights @ stream


class HyperConnections(Residual):
    """The block: a norm and three maps a branch."""

    def __init__(self, config: HyperConnectionsConfig, wiring: Wiring) -> None:
        super().__init__(wiring)
        self.norms = wiring.norms()
        self.maps = nn.ModuleDict({name: Maps(config, wiring) for name in wiring.branches})

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, n, width] -> the same shape."""
        for name, branch in branches.items():
            read, write, mix = self.maps[name](stream)
            y = self.drops[name](branch(self.norms[name](_mixed(read, stream).squeeze(2))))
            stream = _mixed(mix, stream) + write * y.unsqueeze(2)
        return stream


class MeanClose(nn.Module):
    """The end of the streams: the norm of their mean."""

    def __init__(self, width: int, norm: NormConfig) -> None:
        super().__init__()
        self.norm = norm.build(width)

    def forward(self, stream: Tensor) -> Tensor:
        """[B, T, n, width] -> [B, T, width]."""
        hidden: Tensor = self.norm(stream.mean(2))
        return hidden
