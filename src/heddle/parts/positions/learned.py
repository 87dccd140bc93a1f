"""Learned absolute positions (GPT-2), added to the embedding: a table with one row per position.

With `offset` the table begins with that many unused rows, as in RoBERTa (Liu et al. 2019), which has a row for each id
up to the padding token's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import Part, PositiveInt
from heddle.errors import ConfigError
from heddle.numerics.random import ParameterDraws
from heddle.parts.layout import Layout
from heddle.parts.modules.linear import SelfInitialized, fill_normal
from heddle.parts.positions import AdditivePosition, AdditivePositionConfig


class LearnedConfig(AdditivePositionConfig):
    """`length` is the number of positions; a later position raises ConfigError."""

    length: PositiveInt
    offset: PositiveInt | None = None  # default: 0

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """2048 positions."""
        return {"length": 2048}

    def build(self, width: int) -> "Learned":
        """Build the module."""
        return Learned(self, width)


class Learned(SelfInitialized, AdditivePosition):
    """The module: weight [offset + length, width]."""

    def __init__(self, config: LearnedConfig, width: int) -> None:
        super().__init__()
        self.offset = config.offset or 0
        self.weight = nn.Parameter(torch.empty(config.length + self.offset, width))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal rows."""
        fill_normal(self.weight, std, draws("weight"))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> x + weight[offset + positions]. Raises ConfigError for a position beyond the table."""
        length = self.weight.shape[0] - self.offset
        newest = layout.max_position if layout.start is None else layout.start + layout.length - 1
        if layout.start is None and (newest is None or newest >= length):  # the exact one is known only on the device
            newest = int(layout.positions.max()) if layout.positions.numel() else -1
        assert newest is not None
        if newest >= length:
            raise ConfigError(
                f"embedding.position: position {newest} is beyond the {length} learned positions; "
                "shorten the text or train with a larger length"
            )
        return x + functional.embedding(layout.positions.clamp(min=0) + self.offset, self.weight)
