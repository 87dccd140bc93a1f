"""Pre-norm (Xiong et al. 2020), as in GPT-2 and Llama: `x + f(N(x))`, and a norm at the end.

With `multiplier` m it is `x + m · f(N(x))` (Granite, IBM 2024). With `first_norm: false` the first branch of the first
layer reads x as it is; the embedding has a norm then (ModernBERT, Warner et al. 2024).

x ──┬── N ── mixer ──(+)──┬── N ── feedforward ──(+)── …  ── N ──
    └─────────────────┘   └───────────────────────┘
"""

from torch import Tensor, nn

from heddle.config import PositiveFloat
from heddle.parts.build import ResidualContext
from heddle.parts.residuals import Branches, FinalNormConfig, Residual


class PreNormConfig(FinalNormConfig):
    """`multiplier` scales every branch's output (Granite's residual_multiplier)."""

    aliases = ("prenorm",)

    multiplier: PositiveFloat | None = None
    first_norm: bool = True  # whether the first branch of the first layer has a norm

    @property
    def first_layer_differs(self) -> bool:
        """Whether the first layer lacks a norm."""
        return not self.first_norm

    def input_norm(self, branch: str, mixer: str) -> str:
        """The branch's own norm."""
        return f"norms.{branch}"

    def build(self, context: ResidualContext) -> "PreNorm":
        """Build the block of one layer."""
        return PreNorm(context, self.multiplier, has_first_norm=self.first_norm)


class PreNorm(Residual):
    """The block: one norm per branch, except for the model's first branch if `has_first_norm` is false."""

    def __init__(self, context: ResidualContext, multiplier: float | None = None, has_first_norm: bool = True) -> None:
        super().__init__(context)
        self.norms, self.multiplier = context.build_norms(), multiplier
        if not has_first_norm and context.layer_index == 0:
            self.norms[context.branches[0]] = nn.Identity()

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width] -> the same shape."""
        for name, branch in branches.items():
            y = self.drops[name](branch(self.norms[name](stream)))
            stream = stream + (y if self.multiplier is None else self.multiplier * y)
        return stream
