"""Per-layer embeddings (Gemma 3n, 2025; Gemma 4, 2026): a second embedding of each token, read by every layer.

    p_l = (N(P_l x / sqrt(width)) + sqrt(dim) · E_l[token]) / sqrt(2)      of layer l, from the embedding's output x
    s  ← s + N(W_out (f(W_gate s) ⊙ p_l))                                  after the branches of layer l

E is one table, a row for each token and `dim` columns for each layer; with
`vocab_size` tokens beyond it read row 0. All layers share the norm over P_l x.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from heddle.errors import ConfigError
from heddle.model.config import PerLayerConfig
from heddle.numerics.activations import activation
from heddle.numerics.norms import rounded_to_dtypes
from heddle.numerics.random import ParameterDraws
from heddle.parts.layout import Layout
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal
from heddle.parts.norms import NormConfig


class PerLayerEmbedding(SelfInitialized):
    """What every layer reads, from the tokens and the embedding's output. Padding gives zeros."""

    def __init__(self, config: PerLayerConfig, vocab_size: int, width: int, layers: int, norm: NormConfig) -> None:
        super().__init__()
        self.rows = vocab_size if config.vocab_size is None else config.vocab_size
        self.is_smaller = self.rows < vocab_size
        self.weight = nn.Parameter(torch.empty(self.rows, layers * config.dim))
        self.scale = rounded_to_dtypes(math.sqrt(config.dim))
        self.dim, self.projection_scale = config.dim, width**-0.5
        self.projection = Linear(width, layers * config.dim)
        self.norm = norm.build(config.dim)

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Draw the weight from normal(0, std)."""
        fill_normal(self.weight, std, draws("weight"))

    def forward(self, tokens: Tensor, x: Tensor, layout: Layout) -> Tensor:
        """tokens int64 [B, T], x [B, T, width] -> [B, T, layers, dim]. Raises ConfigError for vectors as tokens."""
        if tokens.is_floating_point():
            raise ConfigError("tokens: are vectors, but embedding.per_layer looks up the ids of tokens; give ids")
        of_text = self.norm((self.projection(x) * self.projection_scale).unflatten(-1, (-1, self.dim)))
        if self.is_smaller:
            tokens = tokens.masked_fill(tokens >= self.rows, 0)
        of_token = (functional.embedding(tokens, self.weight) * self.scale[x.dtype]).unflatten(-1, (-1, self.dim))
        inputs: Tensor = (of_text + of_token) * 2.0**-0.5
        return inputs if layout.padding is None else inputs.masked_fill(layout.padding[..., None, None], 0.0)


class PerLayerBranch(nn.Module):
    """What a layer adds to its stream."""

    def __init__(self, config: PerLayerConfig, width: int, norm: NormConfig) -> None:
        super().__init__()
        self.gate = Linear(width, config.dim, value_projection=True)
        self.activation = activation(config.activation)
        self.out = Linear(config.dim, width, output_projection=True)
        self.norm = norm.build(width)

    def forward(self, stream: Tensor, inputs: Tensor) -> Tensor:
        """stream [B, T, width], inputs [B, T, dim] -> [B, T, width]."""
        y: Tensor = self.norm(self.out(self.activation(inputs, self.gate(stream))))
        return y
