"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2): modules that predict tokens further ahead.

The module of depth d reads the states h of depth d − 1 (at d = 1 the model's) and the embeddings e:

    x_t = W [N(e_{t+d}) ; N(h_t)],   h'_t = N(layer(x)_t),   logits of token t + 1 + d = head(h'_t)

The layer is one more of the design's last kind; embedding and head are the model's. W reads the embedding first, as the
published weights do, and h' is normalized before the next depth reads it. Training adds the modules' losses; afterwards
the first module can draft tokens for speculative decoding. Nothing that the model itself computes reads a module.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heddle.model.config import ModelConfig
from heddle.model.state import State
from heddle.parts.layout import Layout
from heddle.parts.modules.linear import Linear

CallLayer = Callable[
    [nn.Module, Any, Layout, Any], tuple[Any, Any]
]  # (layer, stream, layout, state) -> (stream, state)


class Prediction(NamedTuple):
    """The output of a module of depth d. hidden: [B, T − d, width]; the head turns it into logits of token t + 1 + d.

    layout: of the first T − d tokens. Tokens whose document ends before token t + d are marked as padding.
    """

    hidden: Tensor
    layout: Layout


class MultiTokenModule(nn.Module):
    """One depth: the norms and the projection of its inputs, a layer of the model, and a final norm."""

    def __init__(self, config: ModelConfig, layer: nn.Module) -> None:
        super().__init__()
        self.expand = config.residual.build_expansion(config.width) or config.residual.expand
        self.embedding_norm, self.hidden_norm = config.norm.build(config.width), config.norm.build(config.width)
        self.projection = Linear(2 * config.width, config.width)
        self.layer = layer
        self.final_norm = config.residual.build_final_norm(config.width, config.norm)

    def forward(
        self,
        hidden: Tensor,
        embedding: Tensor,
        layout: Layout,
        state: State | None = None,
        call: CallLayer | None = None,
    ) -> tuple[Tensor, State | None]:
        """hidden h_t and embedding e_{t+d}, both [B, T, width] -> (h'_t [B, T, width], new state or None).

        layout: of the tokens t. state: of `init_draft_state`; it is consumed. call: runs the layer; None: a plain call.
        """
        table, inner = None, None
        if state is not None:
            state.check_not_consumed()
            table, layout = state.table.extend(layout)
            state.consume()
            [inner] = state.layers
        padding = None if layout.padding is None else layout.padding[..., None]
        if padding is not None:  # NaN in padding must not reach a gradient
            hidden, embedding = hidden.masked_fill(padding, 0.0), embedding.masked_fill(padding, 0.0)
        x = self.projection(torch.cat((self.embedding_norm(embedding), self.hidden_norm(hidden)), dim=-1))
        stream = self.expand(x if padding is None else x.masked_fill(padding, 0.0))
        stream, inner = self.layer(stream, layout, inner) if call is None else call(self.layer, stream, layout, inner)
        new_state = None if state is None or table is None else State(table, [inner], state.fingerprint)
        return self.final_norm(stream), new_state


def predictions(
    modules: Iterable[nn.Module], hidden: Tensor, embedding: Tensor, layout: Layout, call: CallLayer
) -> list[Prediction]:
    """The predictions of all depths that have tokens. hidden, embedding: [B, T, width] of the tokens of `layout`."""
    results: list[Prediction] = []
    for depth, module in enumerate(modules, start=1):
        if layout.length <= depth:
            break
        ahead, index = layout_ahead(layout, depth)
        if index is None:
            next_embedding = embedding[:, depth:]
        else:
            next_embedding = embedding.gather(1, index[..., None].expand(-1, -1, embedding.shape[-1]))
        hidden, _ = module(hidden[:, : layout.length - depth], next_embedding, ahead, None, call)
        results.append(Prediction(hidden, ahead))
    return results


def layout_ahead(layout: Layout, depth: int) -> tuple[Layout, Tensor | None]:
    """The layout of the tokens [B, T − depth] that have a token `depth` further in their document; others are padding.

    Also that token's index in its row, int64 [B, T − depth]; None if it is always `depth` more than the token's own.
    """
    length = layout.length - depth
    sliced = [
        None if x is None else x[:, :length] for x in (layout.segment_ids, layout.coordinates, layout.token_types)
    ]
    segment_ids, coordinates, token_types = sliced
    ahead = Layout(
        layout.positions[:, :length],
        segment_ids,
        is_checked=True,
        encoder_output=layout.encoder_output,
        coordinates=coordinates,
        token_types=token_types,
        attention_backend=layout.attention_backend,
    )
    if layout.start is not None:
        return replace(ahead, start=layout.start, has_padding=False), None
    has_next, index = _tokens_ahead(layout, depth)
    doc_lengths = layout.doc_lengths
    if doc_lengths is not None:
        doc_lengths = tuple(tuple(size - depth for size in row if size > depth) for row in doc_lengths)
    positions = torch.where(has_next[:, :length], ahead.positions, -1)
    ahead = replace(ahead, positions=positions, doc_lengths=doc_lengths, max_position=layout.max_position)
    return ahead, index[:, :length]


def _tokens_ahead(layout: Layout, depth: int) -> tuple[Tensor, Tensor]:
    """Whether each token's document has a token `depth` further, bool [B, T], and its index in the row, int64."""
    ids, is_token = layout.dense_segment_ids, layout.positions >= 0
    has_next, index = is_token, (torch.arange(layout.length, device=ids.device) + depth).expand_as(ids)
    if layout.has_padding:  # the token whose number in its row is larger by the depth
        columns = is_token.int().argsort(dim=1, descending=True, stable=True)  # of the numbers 0, 1, …
        numbers = is_token.cumsum(1) - 1 + depth
        has_next = is_token & (numbers < is_token.sum(1, keepdim=True))
        index = columns.gather(1, numbers.clamp(0, layout.length - 1))
    index = index.clamp(max=layout.length - 1)
    return has_next & (ids.gather(1, index) == ids), index
