"""Learned absolute positions (GPT-2), added at the embedding: a table with a row for each position."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import Count
from heddle.errors import ConfigError
from heddle.parts.context.layout import Layout
from heddle.parts.modules.linear import Leaf, fill_normal
from heddle.parts.positions import Additive, AdditiveConfig


class LearnedConfig(AdditiveConfig):
    """`length` is the number of positions; later ones are refused."""

    length: Count

    def build(self, width: int) -> "Learned":
        """Make the module."""
        return Learned(self.length, width)


class Learned(Leaf, Additive):
    """The module."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Normal rows."""
        fill_normal(self.weight, std, generator)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> x + weight[positions]. Raises ConfigError for a position beyond the table."""
        length = self.weight.shape[0]
        if layout.start is not None:
            newest = layout.start + layout.length - 1
        elif layout.pieces is not None:
            newest = max(piece for row in layout.pieces for piece in row) - 1
        else:  # only such layouts hide their largest position in a tensor
            newest = int(layout.positions.max()) if layout.positions.numel() else -1
        if newest >= length:
            raise ConfigError(
                f"embedding.position: position {newest} is beyond the {length} learned ones; "
                "shorten the text or train with a larger length"
            )
        return x + functional.embedding(layout.positions.clamp(min=0), self.weight)
