"""The embedding (tokens -> vectors) and the head (hidden states -> logits) of a model."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import build_under
from heddle.errors import ConfigError
from heddle.model.config import EmbeddingConfig, HeadConfig, PerLayerConfig
from heddle.numerics.activations import activation
from heddle.numerics.cross_entropy import OutputHead, scale_and_cap
from heddle.numerics.dispatch import device_type
from heddle.numerics.linear import linear
from heddle.numerics.norms import rounded_to_dtypes
from heddle.numerics.random import ParameterDraws
from heddle.parts.layout import Layout
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal
from heddle.parts.norms import NormConfig

# Per-layer embeddings (Gemma 3n, 2025; Gemma 4, 2026): a second embedding of each token, read by every layer.
#
#     p_l = (N(P_l x / sqrt(width)) + sqrt(dim) · E_l[token]) / sqrt(2)      of layer l, from the embedding's output x
#     s  ← s + N(W_out (f(W_gate s) ⊙ p_l))                                  after the branches of layer l
#
# E is one table, a row for each token and `dim` columns for each layer; with
# `vocab_size` tokens beyond it read row 0. All layers share the norm over P_l x.


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


class TokenTypes(SelfInitialized):
    """A learned vector per token type (BERT, Devlin et al. 2019), added to the embedding."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number, width))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Draw the weight from normal(0, std)."""
        fill_normal(self.weight, std, draws("weight"))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> x + weight[token_types]. Raises ConfigError for types outside the table."""
        types = layout.token_types
        if types is None:
            return x + self.weight[0]
        if types.shape != layout.positions.shape or types.is_floating_point():
            expected = f"expected integers {list(layout.positions.shape)}"
            raise ConfigError(f"token_types: are {types.dtype} of shape {list(types.shape)}; {expected}")
        if layout.padding is not None:
            types = types.masked_fill(layout.padding, 0)
        if types.numel() and types.device.type != "meta":
            least, most = torch.stack(types.aminmax()).tolist()
            if least < 0 or most >= len(self.weight):
                wrong = least if least < 0 else most
                raise ConfigError(f"token_types: {wrong} is not one of this design's {len(self.weight)} types")
        return x + functional.embedding(types, self.weight)


class RowsAndWeight(torch.autograd.Function):
    """tokens int64 [B, T], weight [vocab, width] -> its rows [B, T, width], and the weight, for a head.

    The backward pass adds the gradient of the rows to the head's, in place: the same sums as autograd's, which has the
    rows' gradient as large as the whole weight. Nothing else may hold the head's gradient.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tokens)
        ctx.set_materialize_grads(False)
        ctx.shape = weight.shape
        return functional.embedding(tokens, weight), weight.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None]:
        (tokens,), (rows, total) = ctx.saved_tensors, gradients
        if rows is None:
            return None, total
        used, tokens = tokens.unique(return_inverse=True)
        if total is None:
            total = rows.new_zeros(ctx.shape)
        with torch.enable_grad():
            selected = rows.new_zeros(len(used), ctx.shape[1]).requires_grad_()
            (gradient,) = torch.autograd.grad(functional.embedding(tokens, selected), selected, rows)
        return None, total.index_add_(0, used, gradient)


class Embedding(SelfInitialized):
    """Token embeddings, scaled, with token types and absolute positions added, and optionally normalized.

    Padding gives zeros, whatever its tokens are. per_layer: what layers read beside it, which the model calls itself.
    """

    def __init__(self, vocab_size: int, width: int, depth: int, config: EmbeddingConfig, norm: NormConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.scale = rounded_to_dtypes(math.sqrt(width)) if config.scale else None
        self.multiplier = config.multiplier
        self.token_types = None if config.token_types is None else TokenTypes(config.token_types, width)
        self.position = None if config.position is None else build_under("position", config.position.build, width)
        self.norm = norm.build(width) if config.norm else None
        per_layer = config.per_layer
        self.per_layer = None if per_layer is None else PerLayerEmbedding(per_layer, vocab_size, width, depth, norm)
        self.dropout = Dropout(config.dropout)
        self.lookup_module: nn.Module | None = None

    def set_lookup(self, lookup_module: nn.Module) -> None:
        """Replace the lookup by a module (tokens [B, T] -> vectors [B, T, width]) and take over its `weight`."""
        weight = lookup_module.get_parameter("weight")
        self.lookup_module, self.weight = lookup_module, weight

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Draw the weight from normal(0, std)."""
        fill_normal(self.weight, std, draws("weight"))

    def share(self, layout: Layout) -> None:
        """Let lookups with this layout, in one step of a training on a CPU, share a gradient with a tied head.

        `shared(layout)` is then the weight for the head.
        """
        is_plain = self.lookup_module is None and type(self.weight) is nn.Parameter  # not one rank's shard
        if is_plain and self.weight.requires_grad and device_type(self.weight) == "cpu":
            layout.cache[self] = self.weight

    def shared(self, layout: Layout) -> Tensor:
        """The weight, or after `share` and a lookup what stands for it in this layout's graph."""
        weight: Tensor = layout.cache.pop(self, self.weight)
        return weight

    def forward(self, tokens: Tensor, layout: Layout | None = None) -> Tensor:
        """tokens int64 [B, T] -> [B, T, width]. Vectors [B, T, width] may replace tokens.

        Without a layout the plain rows are returned: without scale, multiplier, token types, positions, norm, dropout
        or padding. Raises ConfigError for token types of a layout that the design does not have.
        """
        x: Tensor
        shared = None if layout is None else layout.cache.get(self)
        if tokens.is_floating_point():
            x = tokens
        elif layout is not None and shared is not None:
            x, layout.cache[self] = RowsAndWeight.apply(tokens, shared)
        else:
            x = functional.embedding(tokens, self.weight) if self.lookup_module is None else self.lookup_module(tokens)
        if layout is None:
            return x
        if self.scale is not None:
            x = x * self.scale[x.dtype]
        if self.multiplier is not None:
            x = x * self.multiplier
        if self.token_types is not None:
            x = self.token_types(x, layout)
        elif layout.token_types is not None:
            raise ConfigError("token_types: this design has none; leave them out, or set embedding.token_types")
        if self.position is not None:
            x = self.position(x, layout)
        padding = None if layout.padding is None else layout.padding[..., None]
        if self.norm is not None:
            x = self.norm(x if padding is None else x.masked_fill(padding, 0.0))  # keeps NaN out of the gradients
        x = self.dropout(x)
        return x if padding is None else x.masked_fill(padding, 0.0)


class HeadTransform(nn.Module):
    """The transform of hidden states before the logits: `N(f(V h + c))`, as in BERT's masked language models."""

    def __init__(self, width: int, config: HeadConfig, norm: NormConfig) -> None:
        super().__init__()
        assert config.transform is not None
        self.dense = Linear(width, width, config.transform_bias)
        self.activation = activation(config.transform)
        self.norm = norm.build(width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        y: Tensor = self.norm(self.activation(self.dense(hidden)))
        return y


class Head(SelfInitialized):
    """Hidden states -> logits."""

    def __init__(self, weight: nn.Parameter, config: HeadConfig, norm: NormConfig) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(weight.shape[0])) if config.bias else None
        self.transform = None if config.transform is None else HeadTransform(weight.shape[1], config, norm)
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
        return OutputHead(weight, self.bias, self.scale, self.softcap, self.transform)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., vocab_size]."""
        projection = self.projection
        hidden = hidden if self.transform is None else self.transform(hidden)
        logits = linear(hidden, self.weight, self.bias) if projection is None else projection(hidden)
        return scale_and_cap(logits, self.scale, self.softcap)
