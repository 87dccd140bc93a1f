"""One attention layer with another number of key heads: which heads share one, and how each group becomes one head."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from heddle.conversion.activations import LayerActivations
from heddle.conversion.heads.fit import fit_output
from heddle.conversion.heads.groups import Groups, best_groups, contiguous_groups
from heddle.conversion.heads.merge import Merge, MergedHeads
from heddle.conversion.heads.parameters import Parameters, repeat_key_heads
from heddle.conversion.heads.statistics import HeadStatistics, text_statistics, weight_statistics
from heddle.model.config import ModelConfig
from heddle.parts.context.build import BuildContext
from heddle.parts.mixers.attention import AttentionConfig

Grouping = Literal["contiguous", "similar-queries", "similar-keys-values", "similar-outputs"]


@dataclass(frozen=True)
class HeadConversion:
    """groups: which heads share one. merge: how they become one. similarity: whether both are decided on a text."""

    groups: Grouping
    merge: Merge
    similarity: Literal["text", "weights"]

    @property
    def compares(self) -> bool:
        """Whether `similarity` matters: heads are compared, but not by an option that is defined on a text only."""
        return self.groups in ("similar-queries", "similar-keys-values") or self.merge == "aligned"

    @property
    def needs_text(self) -> bool:
        """Whether heads are merged on a text."""
        on_text = self.groups == "similar-outputs" or self.merge == "least-squares"
        return on_text or (self.compares and self.similarity == "text")

    def convert(
        self,
        layer: Parameters,
        design: ModelConfig,
        index: int,
        kv_heads: int,
        activations: Callable[[], LayerActivations],
    ) -> dict[str, Tensor]:
        """The parameters of layer `index` of a resolved design with `kv_heads` key heads.

        Where that is no divisor of the heads there are, these are repeated first, up to a common multiple.
        activations: of the layer on the calibration text; only called if one is needed.
        """
        config = design.layers[index].mixer
        assert isinstance(config, AttentionConfig)
        assert config.kv_heads is not None
        common = math.lcm(config.kv_heads, kv_heads)
        layer = repeat_key_heads(layer, config, common // config.kv_heads)
        config = config.replace(kv_heads=common)
        if common == kv_heads:
            return layer
        context = BuildContext(design.width, design.norm, design.depth, index)
        merger = MergedHeads(layer, config, context, self._statistics(layer, config, context, activations), self.merge)
        result = merger.merge_groups(self._groups(merger, kv_heads, activations))
        if self.merge == "least-squares":
            return fit_output(result, config.replace(kv_heads=kv_heads), context, activations())
        return result

    def _statistics(
        self,
        layer: Parameters,
        config: AttentionConfig,
        context: BuildContext,
        activations: Callable[[], LayerActivations],
    ) -> HeadStatistics:
        if self.merge == "least-squares" or (self.compares and self.similarity == "text"):
            return text_statistics(layer, config, context, activations())
        return weight_statistics(layer, config)

    def _groups(self, merger: MergedHeads, groups: int, activations: Callable[[], LayerActivations]) -> Groups:
        if self.groups == "contiguous":
            return contiguous_groups(merger.heads, groups)
        if groups == 1:
            return [list(range(merger.heads))]
        if self.groups == "similar-outputs":
            costs = merger.similar_outputs(activations())
        else:
            is_queries = self.groups == "similar-queries"
            costs = merger.similar_queries() if is_queries else merger.similar_keys_values()
        return best_groups(costs, groups)
