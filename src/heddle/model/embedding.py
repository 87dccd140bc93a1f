"""The embedding (tokens -> vectors) and the head (hidden states -> logits) of a model."""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import build_under
from heddle.model.config import EmbeddingConfig, HeadConfig
from heddle.numerics.cross_entropy import OutputHead
from heddle.numerics.linear import linear
from heddle.numerics.loss_steps import scale_and_cap
from heddle.numerics.philox import ParameterDraws
from heddle.parts.context.layout import Layout
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.linear import SelfInitialized, fill_normal


class Embedding(SelfInitialized):
    """Token embeddings, scaled, with absolute positions added. Padding becomes zero, whatever its token is."""

    def __init__(self, vocab_size: int, width: int, config: EmbeddingConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.scale = _rounded_to_dtypes(math.sqrt(width)) if config.scale else None
        self.multiplier = config.multiplier
        self.position = None if config.position is None else build_under("position", config.position.build, width)
        self.dropout = Dropout(config.dropout)
        self.lookup_module: nn.Module | None = None

    def set_lookup(self, lookup_module: nn.Module) -> None:
        """Use another module for the lookup (tokens [B, T] -> vectors [B, T, width]), and its `weight` for this one."""
        weight = lookup_module.get_parameter("weight")
        self.lookup_module, self.weight = lookup_module, weight

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Draw the weight from normal(0, std)."""
        fill_normal(self.weight, std, draws("weight"))

    def forward(self, tokens: Tensor, layout: Layout | None = None) -> Tensor:
        """tokens int64 [B, T] -> [B, T, width]. Vectors [B, T, width] may replace tokens.

        Without a layout the plain rows are returned: without scale, multiplier, positions, dropout or padding.
        """
        x: Tensor
        if tokens.is_floating_point():
            x = tokens
        else:
            x = functional.embedding(tokens, self.weight) if self.lookup_module is None else self.lookup_module(tokens)
        if layout is None:
            return x
        if self.scale is not None:
            x = x * self.scale[x.dtype]
        if self.multiplier is not None:
            x = x * self.multiplier
        if self.position is not None:
            x = self.position(x, layout)
        x = self.dropout(x)
        return x if layout.padding is None else x.masked_fill(layout.padding[..., None], 0.0)


def _rounded_to_dtypes(number: float) -> dict[torch.dtype, float]:
    """The number rounded to each dtype, as Gemma does with its scale: sqrt(3072) is 55.5 in bfloat16."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return {dtype: torch.tensor(number, dtype=dtype, device="cpu").item() for dtype in dtypes}


class Head(SelfInitialized):
    """Hidden states -> logits."""

    def __init__(self, weight: nn.Parameter, config: HeadConfig) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(weight.shape[0])) if config.bias else None
        self.tied, self.scale, self.softcap = config.tied, config.resolved().scale, config.softcap
        self.projection: nn.Module | None = None  # computes the logits instead of `weight`, as a quantized head does

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Draw an untied weight from normal(0, std) and set the bias to zero."""
        if not self.tied:
            fill_normal(self.weight, std, draws("weight"))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def output_head(self) -> OutputHead:
        """The weights and options that the loss needs."""
        weight = self.weight if self.projection is None else cast(Tensor, self.projection.weight)
        return OutputHead(weight, self.bias, self.scale, self.softcap)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., vocab_size]."""
        projection = self.projection
        logits = linear(hidden, self.weight, self.bias) if projection is None else projection(hidden)
        return scale_and_cap(logits, self.scale, self.softcap)
