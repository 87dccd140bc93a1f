"""Reordered norms (OLMo-2, Team OLMo 2025): `x + N(f(x))`, and a norm at the end.

x ──┬── mixer ── N ──(+)──┬── feedforward ── N ──(+)── …  ── N ──
    └─────────────────┘   └───────────────────────┘
"""

from torch import Tensor

from heddle.parts.build import ResidualContext
from heddle.parts.residuals import Branches, FinalNormConfig, Residual


class ReorderedConfig(FinalNormConfig):
    """No fields of its own."""

    keeps_stream = True

    def output_norm(self, branch: str) -> str:
        """The branch's own norm."""
        return f"norms.{branch}"

    def build(self, context: ResidualContext) -> "Reordered":
        """Build the block of one layer."""
        return Reordered(context)


class Reordered(Residual):
    """The block: one norm per branch, applied to its output. Dropout is last: a norm would undo 1/(1 − rate)."""

    def __init__(self, context: ResidualContext) -> None:
        super().__init__(context)
        self.norms = context.build_norms()

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width] -> the same shape."""
        for name, branch in branches.items():
            stream = stream + self.drops[name](self.norms[name](branch(stream)))
        return stream
