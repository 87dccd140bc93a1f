"""DeepNorm (Wang et al. 2022, DeepNet): post-norm with a heavier stream, `N(α x + f(x))`, stable for very deep models.

With N layers, α = (2N)^(1/4), and the initial weights of values, outputs and feed-forwards are multiplied by
β = (8N)^(−1/4) (`initialization.depth_scaled`): the paper's constants of a decoder or an encoder alone.

x ──┬── mixer ──(+)── N ──┬── feedforward ──(+)── N ── …
    └─────── α ──┘        └────────── α ─────┘
"""

from torch import Tensor, nn

from heddle.parts.context.build import ResidualContext
from heddle.parts.context.costs import Costs, Quantities
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, InitialScales, Residual, ResidualConfig


class DeepNormConfig(ResidualConfig):
    """No fields of its own."""

    aliases = ("deepnorm",)

    def initial_scales(self, depth: int) -> InitialScales:
        """β for all of them."""
        beta = float((8 * depth) ** -0.25)
        return InitialScales(values=beta, outputs=beta)

    @classmethod
    def final_costs(cls, n: Quantities) -> Costs:
        """Nothing."""
        return Costs()

    def build(self, context: ResidualContext) -> "DeepNorm":
        """Build the block of one layer."""
        return DeepNorm(context)

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """An identity: the last layer ends in a norm already."""
        return nn.Identity()


class DeepNorm(Residual):
    """The block: one norm per branch, applied to the weighted sum."""

    def __init__(self, context: ResidualContext) -> None:
        super().__init__(context)
        self.alpha = (2 * context.depth) ** 0.25
        self.norms = context.build_norms()

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width] -> the same shape."""
        for name, branch in branches.items():
            stream = self.norms[name](self.alpha * stream + self.drops[name](branch(stream)))
        return stream

    def identity_output(self, stream: Tensor) -> Tensor:
        """α times the stream, normalized, once per branch."""
        for norm in self.norms.values():
            stream = norm(self.alpha * stream)
        return stream
