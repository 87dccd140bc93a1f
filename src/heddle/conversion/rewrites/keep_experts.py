"""Mixtures lose the experts that a text chooses least, with their rows of the router (Lu et al. 2024, "Not All Experts
are Equal", prunes by an error instead).
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from heddle.config import DesignError, Width
from heddle.conversion.rewrite import Rewrite, replace_layers
from heddle.conversion.weights import PROJECTIONS, CalibrationText, ConvertedWeights, Weights
from heddle.model.config import LayerConfig, ModelConfig
from heddle.parts.feedforwards.moe import MoEConfig
from heddle.parts.modules.router_statistics import record_router_statistics

ROUTER = ("router.weight", "router.bias", "router.expert_bias")


class KeepExperts(Rewrite):
    """`keep_experts`: how many experts of each mixture stay: the ones that tokens of the text choose most."""

    keeps: ClassVar[frozenset[str]] = frozenset({"attention"})
    exact: ClassVar[bool] = False
    text_decides_weights: ClassVar[bool] = True
    targets: ClassVar[Mapping[str, str]] = {"keep_experts": "experts"}
    experts: Width

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if no layer, or not every named one, has more experts, chosen by scores without groups."""
        changed: dict[int, LayerConfig] = {}
        for index in self.selected_layers(source.design):
            layer = source.design.layers[index]
            mixture = layer.feedforward
            if isinstance(mixture, MoEConfig) and mixture.experts > self.experts and mixture.groups is None:
                changed[index] = layer.replace(feedforward=mixture.replace(experts=self.experts))
            elif self.layers is not None:
                reason = f"has no more than {self.experts} experts, or groups of them"
                raise DesignError(f"layers.{index}.feedforward", f"{reason}; leave this layer out")
        if not changed:
            reason = f"no layer has a mixture of more than {self.experts} experts without groups"
            raise DesignError("feedforward", f"{reason}; give fewer")
        return _Fewer(source, replace_layers(source.design, changed), text, self.experts, frozenset(changed))


class _Fewer(ConvertedWeights):
    def __init__(
        self, source: Weights, design: ModelConfig, text: CalibrationText | None, experts: int, changed: frozenset[int]
    ) -> None:
        super().__init__(source, design, text)
        self.experts, self.changed = experts, changed

    @torch.no_grad()
    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer with the chosen experts, in their order."""
        layer = self.source.layer(index)
        if index not in self.changed:
            return layer
        activations = self.activations(index)
        with record_router_statistics() as recorded:
            for stream, layout in zip(activations.streams, activations.layouts, strict=True):
                activations.layer(stream, layout)
        counts = torch.stack([entry.expert_counts for entry in recorded.entries]).sum(0).cpu()
        stays = counts.sort(descending=True, stable=True).indices[: self.experts].sort().values
        names = [*ROUTER, *(f"{module}.{kind}" for module in PROJECTIONS for kind in ("weight", "bias"))]
        for name in (f"feedforward.{name}" for name in names):
            if name in layer:
                layer[name] = layer[name][stays.to(layer[name].device)]
        return layer
