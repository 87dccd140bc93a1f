"""Parallel branches: `x + mixer(N(x)) + feedforward(N(x))`, one shared norm (GPT-J, PaLM) or two (GPT-NeoX).

x ──┬── N ──┬── mixer ───────┐
    │       └── feedforward ─┤
    └───────────────────────(+)── …  ── N ──
"""

from collections.abc import Set
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from torch import Tensor

from heddle.config import DesignError
from heddle.parts.build import ResidualContext
from heddle.parts.residuals import Branches, FinalNormConfig, Residual


class ParallelConfig(FinalNormConfig):
    """`norms`: 1 is one norm shared by the branches, 2 is one norm for each."""

    norms: Annotated[int, Field(ge=1, le=2)] = 1

    def check_layers(self, depth: int, most_branches: int, mixers: Set[str]) -> None:
        """Raises DesignError, also for two norms where every layer has only one branch."""
        super().check_layers(depth, most_branches, mixers)
        if self.norms == 2 and most_branches == 1:
            raise DesignError("norms", "2 is one norm for each branch, but every layer has only one; leave it out")

    def input_norm(self, branch: str, mixer: str) -> str:
        """The branch's own norm, or the one that both share."""
        return "norms.shared" if self.norms == 1 else f"norms.{branch}"

    def build(self, context: ResidualContext) -> "Parallel":
        """Build the block of one layer."""
        return Parallel(self, context)


class Parallel(Residual):
    def __init__(self, config: ParallelConfig, context: ResidualContext) -> None:
        super().__init__(context)
        self.norms = (
            context.build_norms() if config.norms == 2 else replace(context, branches=("shared",)).build_norms()
        )
        self.shared = config.norms == 1

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width] -> the same shape."""
        total = stream
        normed = self.norms["shared"](stream) if self.shared else None
        for name, branch in branches.items():
            total = total + self.drops[name](branch(self.norms[name](stream) if normed is None else normed))
        return total
