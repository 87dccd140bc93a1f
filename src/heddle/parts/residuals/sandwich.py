"""Sandwich norms (Ding et al. 2021, CogView; Gemma-2): `x + N(f(N(x)))`, and a norm at the end.

x ──┬── N ── mixer ── N ──(+)──┬── N ── feedforward ── N ──(+)── …  ── N ──
    └──────────────────────┘   └────────────────────────────┘
"""

from torch import Tensor

from heddle.parts.build import ResidualContext
from heddle.parts.residuals import Branches, FinalNormConfig, Residual


class SandwichConfig(FinalNormConfig):
    """No fields of its own."""

    keeps_stream = True

    def input_norm(self, branch: str, mixer: str) -> str:
        """The branch's own norm."""
        return f"norms.{branch}"

    def output_norm(self, branch: str, mixer: str) -> str:
        """The branch's own norm."""
        return f"after.{branch}"

    def build(self, context: ResidualContext) -> "Sandwich":
        """Build the block of one layer."""
        return Sandwich(context)


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
