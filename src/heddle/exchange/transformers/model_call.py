"""One call of HeddleModel: what it was given, and the layout that follows.

What `torch.compile` must not trace is kept out of its graphs here: masks and positions are checked by their values, a
cache changes with each token, and recorded outputs come through hooks.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heddle.exchange.transformers.cache import HeddleCacheLayer
from heddle.exchange.transformers.masks import CachedTokens, LayoutAndMask, layout_from_inputs
from heddle.exchange.transformers.outputs import RecordedOutputs, record_outputs
from heddle.model.decoder import Decoder
from heddle.parts.context.layout import Layout


@dataclass(frozen=True)
class ModelCall:
    """tokens [B, T], or embeddings [B, T, width]; the masks and positions beside them; and what is to be returned.

    token_types: the type of each token [B, T], for designs that have any.
    """

    tokens: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    cache_layer: HeddleCacheLayer | None
    return_states: bool
    return_weights: bool
    kwargs: Mapping[str, Any]
    token_types: Tensor | None = None

    @property
    def traceable(self) -> bool:
        """Whether `torch.compile` may trace the decoder in this call."""
        return self.cache_layer is None and not self.return_states and not self.return_weights

    def layout(self, cached: CachedTokens, has_external_attention: bool) -> LayoutAndMask:
        """The layout of this call after `cached`. Raises ConfigError for what no layout can express."""
        mask, position_ids = self.attention_mask, self.position_ids
        if mask is None and position_ids is None:
            return LayoutAndMask(None, None)
        if has_external_attention and mask is None and position_ids is not None:  # reads no value
            positions = position_ids.expand(self.tokens.shape[:2])
            return LayoutAndMask(Layout(positions, has_padding=False, is_checked=True), None)
        inputs: LayoutAndMask = layout_from_inputs(self.tokens, mask, position_ids, cached)
        return inputs

    def record_outputs(self, decoder: Decoder) -> AbstractContextManager[RecordedOutputs]:
        """Record what is to be returned besides the last hidden states."""
        return record_outputs(decoder, self.return_states, self.return_weights)
