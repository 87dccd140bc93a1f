"""Mixtures lose the experts that a text chooses least, with their rows of the router (Lu et al. 2024, "Not All Experts
are Equal", prunes by an error instead).
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from heddle.config import Width, build_under
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.weights import PROJECTIONS, CalibrationText, ConvertedWeights, Weights
from heddle.parts.feedforwards import FeedforwardConfig
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

    @property
    def fits_on_text(self) -> bool:
        """False: choices of experts are counted."""
        return False

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if no layer, or not every named one, has more experts, chosen by scores without groups."""
        none = f"no layer has a mixture of more than {self.experts} experts without groups; give fewer"
        return _Fewer(source, self.change_feedforwards(source.design, self._fewer, none), text)

    def _fewer(self, mixture: FeedforwardConfig | None, path: str) -> FeedforwardConfig | str:
        if isinstance(mixture, MoEConfig) and mixture.experts > self.experts and mixture.groups is None:
            return build_under(path, lambda: mixture.replace(experts=self.experts))
        return f"has no more than {self.experts} experts, or groups of them"


class _Fewer(ConvertedWeights):
    @torch.no_grad()
    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer with the chosen experts, in their order."""
        layer = self.source.layer(index)
        if index not in self.changed:
            return layer
        activations, mixture = self.activations(index), self.design.layers[index].feedforward
        assert isinstance(mixture, MoEConfig)
        with record_router_statistics() as recorded:
            for stream, layout in zip(activations.streams, activations.layouts, strict=True):
                activations.layer(stream, layout)
        counts = torch.stack([entry.expert_counts for entry in recorded.entries]).sum(0).cpu()
        stays = counts.sort(descending=True, stable=True).indices[: mixture.experts].sort().values
        for name in (f"feedforward.{name}" for name in (*ROUTER, *PROJECTIONS)):
            if name in layer:
                layer[name] = layer[name][stays.to(layer[name].device)]
        return layer
