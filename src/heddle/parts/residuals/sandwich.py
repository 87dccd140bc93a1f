"""Sandwich norms (Ding et al. 2021, CogView; Gemma-2): `x + N(f(N(x)))`, and a norm at the end.

x ──┬── N ── mixer ── N ──(+)──┬── N ── feedforward ── N ──(+)── …  ── N ──
    └──────────────────────┘   └────────────────────────────┘
"""

from torch import Tensor, nn

from heddle.parts.build import ResidualContext
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, FinalNorm, Residual, ResidualConfig


class SandwichConfig(ResidualConfig):
    """No fields of its own."""

    keeps_stream = True

    def input_norm(self, branch: str) -> str:
        """Each branch has one."""
        return f"norms.{branch}"

    def output_norm(self, branch: str) -> str:
        """Each branch has one."""
        return f"after.{branch}"

    def build(self, context: ResidualContext) -> "Sandwich":
        """Build the block of one layer."""
        return Sandwich(context)

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """Build the final norm."""
        return FinalNorm(width, norm)


class Sandwich(Residual):
    """The block: a norm before each branch and one `after` it. Dropout is last: a norm would undo 1/(1 − rate)."""

    def __init__(self, context: ResidualContext) -> None:
        super().__init__(context)
        self.norms, self.after = context.build_norms(), context.build_norms()

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width] -> the same shape."""
        for name, branch in branches.items():
            stream = stream + self.drops[name](self.after[name](branch(self.norms[name](stream))))
        return stream
