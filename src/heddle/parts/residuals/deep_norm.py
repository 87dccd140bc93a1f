"""DeepNorm (Wang et al. 2022, DeepNet): post-norm with a scaled stream, `N(α x + f(x))`, stable for very deep models.

With N layers, α = (2N)^(1/4), and the initial weights of values, outputs and feed-forwards are multiplied by
β = (8N)^(−1/4) (`initialization.depth_scaled`): the paper's constants of a decoder or an encoder alone. Other factors
of the stream and of each branch's output may be given: `N(alpha · x + multiplier · f(x))`, as in MiniMax-01.

x ──┬── mixer ──(+)── N ──┬── feedforward ──(+)── N ── …
    └─────── α ──┘        └────────── α ─────┘
"""

from torch import Tensor, nn

from heddle.config import PositiveFloat
from heddle.parts.build import ResidualContext
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, InitialScales, Residual, ResidualConfig


class DeepNormConfig(ResidualConfig):
    """`alpha` and `multiplier` apply to the mixer's branch, and to the feed-forward's unless it has its own."""

    aliases = ("deepnorm",)

    alpha: PositiveFloat | None = None  # default: (2N)^(1/4)
    feedforward_alpha: PositiveFloat | None = None  # default: alpha
    multiplier: PositiveFloat | None = None  # of a branch's output; default: 1
    feedforward_multiplier: PositiveFloat | None = None  # default: multiplier

    def initial_scales(self, depth: int) -> InitialScales:
        """β for values and outputs."""
        beta = float((8 * depth) ** -0.25)
        return InitialScales(values=beta, outputs=beta)

    def build(self, context: ResidualContext) -> "DeepNorm":
        """Build the block of one layer."""
        return DeepNorm(context, self)

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """An identity: the last layer ends in a norm already."""
        return nn.Identity()


class DeepNorm(Residual):
    """The block: one norm per branch, applied to the weighted sum."""

    def __init__(self, context: ResidualContext, config: DeepNormConfig) -> None:
        super().__init__(context)
        alpha, multiplier = config.alpha or (2 * context.depth) ** 0.25, config.multiplier or 1.0
        self.factors = dict.fromkeys(context.branches, (alpha, multiplier)) | {
            "feedforward": (config.feedforward_alpha or alpha, config.feedforward_multiplier or multiplier)
        }
        self.norms = context.build_norms()

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width] -> the same shape."""
        for name, branch in branches.items():
            alpha, multiplier = self.factors[name]
            y = self.drops[name](branch(stream))
            stream = self.norms[name](alpha * stream + (y if multiplier == 1.0 else multiplier * y))
        return stream

    def identity_output(self, stream: Tensor) -> Tensor:
        """α times the stream, normalized, once per branch."""
        for name, norm in self.norms.items():
            stream = norm(self.factors[name][0] * stream)
        return stream
