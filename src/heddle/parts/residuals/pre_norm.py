"""Pre-norm (Xiong et al. 2020), as in GPT-2 and Llama: `x + f(N(x))`, and a norm at the end.

x ──┬── N ── mixer ──(+)──┬── N ── feedforward ──(+)── …  ── N ──
    └─────────────────┘   └───────────────────────┘
"""

from torch import Tensor, nn

from heddle.parts.context.build import ResidualContext
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, FinalNorm, Residual, ResidualConfig


class PreNormConfig(ResidualConfig):
    """No fields of its own."""

    aliases = ("prenorm",)
    keeps_stream = True

    def input_norm(self, branch: str) -> str:
        """Each branch has one."""
        return f"norms.{branch}"

    def build(self, context: ResidualContext) -> "PreNorm":
        """Build the block of one layer."""
        return PreNorm(context)

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """Build the final norm."""
        return FinalNorm(width, norm)


class PreNorm(Residual):
    """The block: one norm per branch."""

    def __init__(self, context: ResidualContext) -> None:
        super().__init__(context)
        self.norms = context.build_norms()

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width] -> the same shape."""
        for name, branch in branches.items():
            stream = stream + self.drops[name](branch(self.norms[name](stream)))
        return stream
