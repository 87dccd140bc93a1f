"""Reordered norms (OLMo-2, Team OLMo 2025): `x + N(f(x))`, and a norm at the end.

With `norms_first` layers whose mixer is of one of these kinds are `x + f(N(x))` (OLMo Hybrid, Team OLMo 2026).

x ──┬── mixer ── N ──(+)──┬── feedforward ── N ──(+)── …  ── N ──
    └─────────────────┘   └───────────────────────┘
"""

from collections.abc import Set

from torch import Tensor

from heddle.config import DesignError
from heddle.parts.build import ResidualContext
from heddle.parts.residuals import Branches, FinalNormConfig, Residual


class ReorderedConfig(FinalNormConfig):
    """`norms_first`: the kinds of mixers whose layers have norms before their branches, not after."""

    later_fields = (*FinalNormConfig.later_fields, "norms_first")

    norms_first: tuple[str, ...] | None = None  # kinds of mixers whose layers have norms before their branches

    def _is_first(self, mixer: str) -> bool:
        return self.norms_first is not None and mixer in self.norms_first

    def check_layers(self, depth: int, most_branches: int, mixers: Set[str]) -> None:
        """Raises DesignError, also if `norms_first` names no mixer of the design, or all of them."""
        super().check_layers(depth, most_branches, mixers)
        if self.norms_first is None:
            return
        if not self.norms_first:
            raise DesignError("norms_first", "names no mixer; leave it out")
        if unused := sorted(set(self.norms_first) - mixers):
            raise DesignError("norms_first", f"names {unused[0]!r}, but no layer has this mixer; leave it out")
        if mixers <= set(self.norms_first):
            raise DesignError("norms_first", "names the mixers of all layers; choose residual kind pre_norm")

    def input_norm(self, branch: str, mixer: str) -> str | None:
        """The branch's own norm, in the layers that `norms_first` names."""
        return f"norms.{branch}" if self._is_first(mixer) else None

    def output_norm(self, branch: str, mixer: str) -> str | None:
        """The branch's own norm, in the other layers."""
        return None if self._is_first(mixer) else f"norms.{branch}"

    def build(self, context: ResidualContext) -> "Reordered":
        """Build the block of one layer."""
        return Reordered(context, first=self._is_first(context.mixer))


class Reordered(Residual):
    """The block: one norm per branch, applied to its output, or with `first` to its input.

    Dropout is last: a norm would undo 1/(1 − rate).
    """

    def __init__(self, context: ResidualContext, first: bool = False) -> None:
        super().__init__(context)
        self.norms, self.first = context.build_norms(), first

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width] -> the same shape."""
        for name, branch in branches.items():
            norm = self.norms[name]
            stream = stream + self.drops[name](branch(norm(stream)) if self.first else norm(branch(stream)))
        return stream
