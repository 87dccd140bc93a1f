"""Post-norm (Vaswani et al. 2017), as in the first Transformer and BERT: `N(x + f(x))`, no norm at the end.

x ──┬── mixer ──(+)── N ──┬── feedforward ──(+)── N ── …
    └────────────┘        └──────────────────┘

With `outer_sum` the layer's input is added once more: `x + N(y + g(y))`, `y = N(x + f(x))`. Notebooks call this
ResiDual; the paper's ResiDual (`residual_dual`) carries two streams through the whole stack.
"""

from torch import Tensor, nn

from heddle.parts.build import ResidualContext
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, Residual, ResidualConfig


class PostNormConfig(ResidualConfig):
    """`outer_sum`: whether the input of each layer is added to its output, around both norms."""

    aliases = ("postnorm",)
    later_fields = (*ResidualConfig.later_fields, "outer_sum")

    outer_sum: bool = False

    def build(self, context: ResidualContext) -> "PostNorm":
        """Build the block of one layer."""
        return PostNorm(context, self)

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """An identity: the last layer ends in a norm, or in the outer sum."""
        return nn.Identity()


class PostNorm(Residual):
    """The block: one norm per branch, applied to the sum."""

    def __init__(self, context: ResidualContext, config: PostNormConfig) -> None:
        super().__init__(context)
        self.outer_sum = config.outer_sum
        self.norms = context.build_norms()

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width] -> the same shape."""
        x = stream
        for name, branch in branches.items():
            x = self.norms[name](x + self.drops[name](branch(x)))
        return stream + x if self.outer_sum else x

    def identity_output(self, stream: Tensor) -> Tensor:
        """The stream, normalized once per branch; with `outer_sum`, plus the stream itself."""
        x = stream
        for norm in self.norms.values():
            x = norm(x)
        return stream + x if self.outer_sum else x
