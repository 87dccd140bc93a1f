"""The slot of residual connections: one choice for the model, one block per layer. Each file draws its figure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from heddle.config import Part, Probability
from heddle.parts.context.build import ResidualContext
from heddle.parts.modules.dropout import BranchDropout
from heddle.parts.norms import NormConfig

Stream = Any  # what passes from layer to layer: a tensor [B, T, width], or several
Branches = Mapping[str, Callable[[Tensor], Tensor]]  # "mixer" and "feedforward" in this order, or one of them


class ResidualConfig(Part, ABC):
    """Config of a residual block.

    drop_path: stochastic depth rate of the last layer; it grows linearly from 0 in the first layer. dropout: rate at
    which elements of a branch's output are dropped, the same in every layer (Vaswani et al. 2017, §5.4).
    """

    slot: ClassVar[str] = "residuals"

    drop_path: Probability = 0.0
    dropout: Probability = 0.0

    def expand(self, x: Tensor) -> Stream:
        """The stream that enters the first layer, made from the embedding x [B, T, width]."""
        return x

    @abstractmethod
    def build(self, context: ResidualContext) -> "Residual":
        """Build the block of one layer."""

    @abstractmethod
    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """Build the module that maps the last layer's stream to hidden states [B, T, width]."""


class Residual(nn.Module, ABC):
    """Adds the branches of one layer to the stream; each branch output passes through `drops[name]` first."""

    def __init__(self, context: ResidualContext) -> None:
        super().__init__()
        self.drops = nn.ModuleDict(
            {name: BranchDropout(context.dropout, context.drop_rate) for name in context.branches}
        )

    @abstractmethod
    def forward(self, stream: Stream, branches: Branches) -> Stream:
        """The stream after the layer."""

    def identity_output(self, stream: Stream) -> Stream:
        """The stream after this layer if no branch, here or in earlier layers, adds anything.

        It is unchanged, unless the block normalizes the stream itself.
        """
        return stream


class FinalNorm(nn.Module):
    """The final norm of a stream that is one tensor."""

    def __init__(self, width: int, norm: NormConfig) -> None:
        super().__init__()
        self.norm = norm.build(width)

    def forward(self, stream: Tensor) -> Tensor:
        """[B, T, width] -> the same shape."""
        y: Tensor = self.norm(stream)
        return y
