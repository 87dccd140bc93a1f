"""The slot of residual wirings: one choice for the model, one block a layer; each file is the figure of its paper."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from heddle.config import Part, Rate
from heddle.parts.modules.dropout import Drop
from heddle.parts.norms import NormConfig

Stream = Any  # what runs from layer to layer: a tensor [B, T, width], or several
Branches = Mapping[str, Callable[[Tensor], Tensor]]  # "mixer" and "feedforward", in this order; either may miss


class Wiring(NamedTuple):
    """What the model tells a block when it is built: names of its branches, width, norm, and its two rates."""

    branches: tuple[str, ...]
    width: int
    norm: NormConfig
    drop_rate: float = 0.0
    dropout: float = 0.0

    def norms(self) -> nn.ModuleDict:
        """A norm of its own for each branch."""
        return nn.ModuleDict({name: self.norm.build(self.width) for name in self.branches})


class ResidualConfig(Part, ABC):
    """Config of a wiring. `drop_path` is the last layer's rate of stochastic depth; it grows linearly with depth.

    `dropout` drops elements of what a branch adds, in every layer alike (Vaswani et al. 2017, §5.4).
    """

    slot: ClassVar[str] = "residuals"

    drop_path: Rate = 0.0
    dropout: Rate = 0.0

    def open(self, x: Tensor) -> Stream:
        """The stream that enters the first layer, from the embedding."""
        return x

    @abstractmethod
    def build(self, wiring: Wiring) -> "Residual":
        """One layer's block."""

    @abstractmethod
    def build_close(self, width: int, norm: NormConfig) -> nn.Module:
        """The module that makes hidden states [B, T, width] of the last layer's stream."""


class Residual(nn.Module, ABC):
    """Wires the branches of one layer into the stream; what a branch adds goes through `drops[name]` just before."""

    def __init__(self, wiring: Wiring) -> None:
        super().__init__()
        self.drops = nn.ModuleDict({name: Drop(wiring.dropout, wiring.drop_rate) for name in wiring.branches})

    @abstractmethod
    def forward(self, stream: Stream, branches: Branches) -> Stream:
        """One layer."""

    def at_rest(self, stream: Stream) -> Stream:
        """The stream after a layer whose branches add nothing, nor did any before: as it was, unless it is normed."""
        return stream


class Close(nn.Module):
    """The end of a stream that is one tensor: the final norm."""

    def __init__(self, width: int, norm: NormConfig) -> None:
        super().__init__()
        self.norm = norm.build(width)

    def forward(self, stream: Tensor) -> Tensor:
        """[B, T, width] -> the same shape."""
        y: Tensor = self.norm(stream)
        return y
