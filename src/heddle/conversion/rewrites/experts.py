"""Replace a feed-forward by a mixture of identical copies: sparse upcycling (Komatsuzaki et al. 2023).

The gates of the chosen experts sum to 1, so the mixture computes what the feed-forward did. The router is small and
random: a router of zeros would send every token to the same experts, and the others would never be trained.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from heddle.config import DesignError, PositiveFloat, Width
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights
from heddle.model.config import ModelConfig
from heddle.numerics.random import ParameterDraws
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.feedforwards.gated import GatedConfig
from heddle.parts.feedforwards.mlp import MLPConfig
from heddle.parts.feedforwards.moe import MoEConfig
from heddle.parts.modules.linear import fill_normal


class Experts(Rewrite):
    """Copy each feed-forward into `experts` identical experts, of which each token uses `top_k`.

    router_std: standard deviation of the router's weights; default: the design's `initialization.std`. aux_loss: as in
    `moe`. seed: of the router. With `top_k: 1` every gate is 1, so that only `aux_loss` would train the router.
    """

    keeps: ClassVar[frozenset[str]] = frozenset({"attention"})
    exact: ClassVar[bool] = True
    targets: ClassVar[Mapping[str, str]] = {"experts": "experts"}
    experts: Width
    top_k: Width = 2
    router_std: PositiveFloat | None = None
    aux_loss: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    seed: int = 0

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if no layer, or not every named one, has an `mlp` or `gated` feed-forward."""
        none = "no layer has an mlp or gated feed-forward to copy; leave it out"
        return _Experts(source, self.change_feedforwards(source.design, self._copied, none), self)

    def _copied(self, feedforward: FeedforwardConfig | None, path: str) -> FeedforwardConfig | str:
        if not isinstance(feedforward, MLPConfig | GatedConfig):
            return "is neither mlp nor gated"
        if isinstance(feedforward, GatedConfig):
            _check_multipliers(feedforward, path)
        return self.mixture(feedforward)

    def mixture(self, feedforward: MLPConfig | GatedConfig) -> MoEConfig:
        """The config of experts that are copies of a feed-forward."""
        settings: dict[str, Any] = (
            {} if isinstance(feedforward, MLPConfig) else {"limit": feedforward.limit, "alpha": feedforward.alpha}
        )
        return MoEConfig(
            experts=self.experts,
            top_k=self.top_k,
            hidden=feedforward.hidden,
            expert="mlp" if isinstance(feedforward, MLPConfig) else "gated",
            activation=feedforward.activation,
            bias=feedforward.bias,
            dropout=feedforward.dropout,
            aux_loss=self.aux_loss,
            **settings,
        )


def _check_multipliers(feedforward: GatedConfig, path: str) -> None:
    """Raises DesignError for numbers that experts have no fields for."""
    for name in ("gate_multiplier", "multiplier", "sparsity"):
        if getattr(feedforward, name) is not None:
            raise DesignError(f"{path}.{name}", "is not supported in experts; leave this layer out")


class _Experts(ConvertedWeights):
    def __init__(self, source: Weights, design: ModelConfig, options: Experts) -> None:
        super().__init__(source, design)
        self.options = options

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """Repeat each projection for every expert, and add a router."""
        layer = self.source.layer(index)
        if index not in self.changed:
            return layer
        prefix, router = "feedforward.", "feedforward.router.weight"
        converted = {
            name: value.expand(self.options.experts, *value.shape) if name.startswith(prefix) else value
            for name, value in layer.items()
        }
        converted[router] = torch.empty(self.options.experts, self.design.width)
        draws = ParameterDraws(self.options.seed, f"layers.{index}.feedforward.router")
        std = self.options.router_std or self.source.design.initialization.std
        fill_normal(converted[router], std, draws("weight"))
        return converted
