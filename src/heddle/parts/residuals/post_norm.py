"""Post-norm (Vaswani et al. 2017), as in the first Transformer and BERT: `N(x + f(x))`, no norm at the end.

x ──┬── mixer ──(+)── N ──┬── feedforward ──(+)── N ── …
    └────────────┘        └──────────────────┘
"""

from torch import Tensor, nn

from heddle.parts.build import ResidualContext
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, Residual, ResidualConfig


class PostNormConfig(ResidualConfig):
    """No fields of its own."""

    aliases = ("postnorm",)

    def build(self, context: ResidualContext) -> "PostNorm":
        """Build the block of one layer."""
        return PostNorm(context)

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """An identity: the last layer ends in a norm already."""
        return nn.Identity()


class PostNorm(Residual):
    """The block: one norm per branch, applied to the sum."""

    def __init__(self, context: ResidualContext) -> None:
        super().__init__(context)
        self.norms = context.build_norms()

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width] -> the same shape."""
        for name, branch in branches.items():
            stream = self.norms[name](stream + self.drops[name](branch(stream)))
        return stream

    def identity_output(self, stream: Tensor) -> Tensor:
        """The stream, normalized once per branch."""
        for norm in self.norms.values():
            stream = norm(stream)
        return stream
