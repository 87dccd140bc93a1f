"""One attention layer with another number of key heads: which heads share one, and how each group becomes one head."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from heddle.conversion.heads.merge import Groups, Merge, MergedHeads, best_groups, contiguous_groups, head_outputs
from heddle.conversion.heads.parameters import (
    HeadStatistics,
    Parameters,
    batches,
    build_mixer,
    repeat_key_heads,
    text_statistics,
    weight_statistics,
)
from heddle.conversion.weights import LayerActivations
from heddle.model.config import ModelConfig
from heddle.parts.build import BuildContext
from heddle.parts.mixers.attention import AttentionConfig

# Refit an attention layer's output projection on a text, by ridge regression on the outputs of another layer.


RIDGE = 1e-3  # of the mean squared input of the projection


@torch.no_grad()
def fit_output(
    layer: Parameters, config: AttentionConfig, context: BuildContext, activations: LayerActivations
) -> dict[str, Tensor]:
    """The layer with W_o (and its bias) for which Σ |y − W_o z − b|² + λ |ΔW_o|² over the text is least.

    z: what the projection reads in this layer. y: what the mixer of `activations` wrote. λ is RIDGE times the text's
    tokens times the mean of z². ΔW_o: the change, so a layer that has no error stays as it is.
    """
    mixer = build_mixer(config, context, layer)
    weight, bias = layer["mixer.out.weight"].double(), layer.get("mixer.out.bias")
    inputs = weight.shape[1] + (bias is not None)
    square, cross = weight.new_zeros(inputs, inputs), weight.new_zeros(inputs, len(weight))
    for (x, layout), y in zip(batches(activations), activations.mixer_outputs, strict=True):
        z = head_outputs(mixer, x, layout).flatten(1)
        error = y[layout.positions >= 0].double() - mixer.out(z)
        z = z if bias is None else torch.cat((z, z.new_ones(len(z), 1)), dim=1)
        square += z.T @ z
        cross += z.T @ error
    ridge = RIDGE * square.diagonal().mean()
    change = torch.linalg.solve(square + ridge * torch.eye(inputs, dtype=square.dtype, device=square.device), cross).T
    result = dict(layer)
    result["mixer.out.weight"] = weight + change[:, : weight.shape[1]]
    if bias is not None:
        result["mixer.out.bias"] = bias.double() + change[:, -1]
    return result


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
