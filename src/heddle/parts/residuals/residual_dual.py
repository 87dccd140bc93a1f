"""ResiDual (Xie et al. 2023): a post-norm stream x that the branches read, and a dual stream d that only accumulates.

x₀ = d₀ = embedding;   for each branch x ← N(x + f(x)), d ← d + f(x);   hidden = x + N(d), with no norm after it.

x ──┬──────────┬── mixer ─┬─(+)── N ──┬────────────────┬── feedforward ─┬─(+)── N ── …  ────────(+)──
    │          └──────────│──┘        │                └────────────────│──┘                     │
    └─ d ────────────────(+)─────────────────────────────────────────(+)────────────── …  ── N ──┘
"""

from torch import Tensor, nn

from heddle.parts.build import ResidualContext
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, Residual, ResidualConfig


class ResidualDualConfig(ResidualConfig):
    """No fields of its own. Elements dropped from a branch output are dropped in both streams."""

    aliases = ("resi_dual",)

    @property
    def has_one_stream(self) -> bool:
        """False."""
        return False

    def expand(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both streams start as the embedding."""
        return x, x

    def build(self, context: ResidualContext) -> "ResidualDual":
        """Build the block of one layer."""
        return ResidualDual(context)

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """Build the module that adds the normalized dual stream to x."""
        return DualFinalNorm(width, norm)


class ResidualDual(Residual):
    """The block: one norm per branch, for the stream x."""

    def __init__(self, context: ResidualContext) -> None:
        super().__init__(context)
        self.norms = context.build_norms()

    def forward(self, stream: tuple[Tensor, Tensor], branches: Branches) -> tuple[Tensor, Tensor]:
        """Two tensors [B, T, width] -> two of the same shape."""
        x, dual = stream
        for name, branch in branches.items():
            y = self.drops[name](branch(x))
            x, dual = self.norms[name](x + y), dual + y
        return x, dual

    def identity_output(self, stream: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x is normalized once per branch; d is unchanged."""
        x, dual = stream
        for norm in self.norms.values():
            x = norm(x)
        return x, dual


class DualFinalNorm(nn.Module):
    """x + N(d)."""

    def __init__(self, width: int, norm: NormConfig) -> None:
        super().__init__()
        self.norm = norm.build(width)

    def forward(self, stream: tuple[Tensor, Tensor]) -> Tensor:
        """Two tensors [B, T, width] -> [B, T, width]."""
        x, dual = stream
        y: Tensor = x + self.norm(dual)
        return y
