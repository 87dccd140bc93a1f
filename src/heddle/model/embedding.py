"""Both ends of a model: tokens -> embeddings, and hidden states -> logits."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import build_under
from heddle.model.config import EmbeddingConfig, HeadConfig
from heddle.numerics.cross_entropy import End, bounded
from heddle.numerics.linear import linear
from heddle.parts.context.layout import Layout
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.linear import Leaf, fill_normal


class Embedding(Leaf):
    """Token embeddings, scaled and positioned; padding becomes zero, whatever token stands there."""

    def __init__(self, vocab_size: int, width: int, config: EmbeddingConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.scale = _rounded(math.sqrt(width)) if config.scale else None
        self.position = None if config.position is None else build_under("position", config.position.build, width)
        self.dropout = Dropout(config.dropout)
        self.rows: nn.Module | None = None

    def lookup(self, rows: nn.Module) -> None:
        """Let a module of others (tokens [B, T] -> rows [B, T, width]) look tokens up, in a `weight` of its own."""
        weight = rows.get_parameter("weight")
        self.rows, self.weight = rows, weight

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Normal rows."""
        fill_normal(self.weight, std, generator)

    def forward(self, tokens: Tensor, layout: Layout | None = None) -> Tensor:
        """tokens int64 [B, T] -> [B, T, width]; plain rows without a layout, and such rows may stand for tokens."""
        if tokens.is_floating_point():
            x = tokens
        else:
            x = functional.embedding(tokens, self.weight) if self.rows is None else self.rows(tokens)
        if layout is None:
            return x
        if self.scale is not None:
            x = x * self.scale[x.dtype]
        if self.position is not None:
            x = self.position(x, layout)
        x = self.dropout(x)
        return x if layout.padding is None else x.masked_fill(layout.padding[..., None], 0.0)


def _rounded(number: float) -> dict[torch.dtype, float]:
    """A number in each dtype: Gemma's embeddings meet a scale of their own dtype, 55.5 in bfloat16 for sqrt(3072)."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return {dtype: torch.tensor(number, dtype=dtype, device="cpu").item() for dtype in dtypes}


class Head(Leaf):
    """Hidden states -> logits."""

    def __init__(self, weight: nn.Parameter, config: HeadConfig) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(weight.shape[0])) if config.bias else None
        self.tied, self.scale, self.softcap = config.tied, config.scale, config.softcap

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Normal rows, unless they are the embedding's; zero bias."""
        if not self.tied:
            fill_normal(self.weight, std, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def end(self) -> End:
        """What the loss needs of it."""
        return End(self.weight, self.bias, self.scale, self.softcap)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., vocab_size]."""
        return bounded(linear(hidden, self.weight, self.bias), self.scale, self.softcap)
