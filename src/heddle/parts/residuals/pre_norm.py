"""Pre-norm (Xiong et al. 2020), as in GPT-2 and Llama: `x + f(N(x))`, and a norm at the end.

With `multiplier` m it is `x + m · f(N(x))` (Granite, IBM 2024). With `first_norm: false` the first branch of the first
layer reads x itself; the embedding then has a norm (ModernBERT, Warner et al. 2024). With `gate_rank` r a branch
reads y ⊙ σ(U silu(D y)) in place of y = N(x), with its own D [r, width] and U [width, r] (gated norm; A.X K2, 2026).
There feed-forwards without experts have none: `gated_feedforwards: mixtures`.

x ──┬── N ── mixer ──(+)──┬── N ── feedforward ──(+)── …  ── N ──
    └─────────────────┘   └───────────────────────┘
"""

from typing import Literal, Self

from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import PositiveFloat, Width, refuse
from heddle.numerics.norms import at_least_float32
from heddle.parts.build import ResidualContext
from heddle.parts.modules.linear import Linear
from heddle.parts.residuals import Branches, FinalNormConfig, Residual


class PreNormConfig(FinalNormConfig):
    """`multiplier` scales every branch's output (Granite's residual_multiplier)."""

    aliases = ("prenorm",)
    later_fields = (*FinalNormConfig.later_fields, "gate_rank", "gated_feedforwards")

    multiplier: PositiveFloat | None = None
    first_norm: bool = True  # whether the first branch of the first layer has a norm
    gate_rank: Width | None = None  # of the gates of the norms
    gated_feedforwards: Literal["all", "mixtures"] = "all"  # which feed-forwards have one

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gate_rank is not None and not self.first_norm:
            refuse("gate_rank", "gates every norm, but first_norm: false leaves a branch without one; drop one of them")
        if self.gate_rank is None and self.gated_feedforwards != "all":
            refuse("gated_feedforwards", "is about gates of norms, but there are none; give gate_rank, or leave it out")
        return self

    @property
    def first_layer_differs(self) -> bool:
        """Whether the first layer lacks a norm."""
        return not self.first_norm

    def input_norm(self, branch: str, mixer: str) -> str | None:
        """The branch's own norm, unless a gate reads it too."""
        return f"norms.{branch}" if self.gate_rank is None else None

    def build(self, context: ResidualContext) -> "PreNorm":
        """Build the block of one layer."""
        return PreNorm(context, self)


class NormGate(nn.Module):
    """y ⊙ σ(U silu(D y)), the gate in at least float32."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = Linear(width, rank), Linear(rank, width)

    def forward(self, y: Tensor) -> Tensor:
        """y [B, T, width] -> the same shape."""
        gate = at_least_float32(self.up(functional.silu(self.down(y)))).sigmoid()
        return (y * gate).to(y.dtype)


class PreNorm(Residual):
    """The block: one norm per branch, except for the model's first branch if `first_norm` is false; gates, if any."""

    def __init__(self, context: ResidualContext, config: PreNormConfig) -> None:
        super().__init__(context)
        self.norms, self.multiplier, rank = context.build_norms(), config.multiplier, config.gate_rank
        if not config.first_norm and context.layer_index == 0:
            self.norms[context.branches[0]] = nn.Identity()
        is_dense = config.gated_feedforwards == "mixtures" and context.feedforward != "moe"
        gated = [name for name in context.branches if rank is not None and not (is_dense and name == "feedforward")]
        self.gated = frozenset(gated)
        self.gates = nn.ModuleDict({name: NormGate(context.width, rank or 1) for name in gated})

    def forward(self, stream: Tensor, branches: Branches) -> Tensor:
        """stream [B, T, width] -> the same shape."""
        for name, branch in branches.items():
            read = self.norms[name](stream)
            y = self.drops[name](branch(self.gates[name](read) if name in self.gated else read))
            stream = stream + (y if self.multiplier is None else self.multiplier * y)
        return stream
