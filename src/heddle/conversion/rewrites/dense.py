"""Replace a mixture of identical experts by one feed-forward: the inverse of `experts`."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from heddle.config import DesignError
from heddle.conversion.branches import scale_weight
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.weights import PROJECTIONS, CalibrationText, ConvertedWeights, Weights
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.feedforwards.gated import GatedConfig
from heddle.parts.feedforwards.mlp import MLPConfig
from heddle.parts.feedforwards.moe import MoEConfig


class Dense(Rewrite):
    """Replace identical experts by one feed-forward. Layers with different experts are refused."""

    keeps: ClassVar[frozenset[str]] = frozenset({"attention"})
    exact: ClassVar[bool] = True  # experts that differ are refused

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if experts differ, if their gates do not sum to one number, or if there are none."""
        none = "no layer has experts, so nothing would change; leave it out"

        def dense(mixture: FeedforwardConfig | None, path: str) -> FeedforwardConfig | str:
            if not isinstance(mixture, MoEConfig):
                return "has no experts"
            _check_gates(mixture, path)
            _check_equal(source, path)
            return _feedforward(mixture)

        return _Dense(source, self.change_feedforwards(source.design, dense, none))


class _Dense(ConvertedWeights):
    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The first expert, times the sum of the gates."""
        layer = self.source.layer(index)
        if index not in self.changed:
            return layer
        mixture = self.source.design.layers[index].feedforward
        assert isinstance(mixture, MoEConfig)
        converted = {name: value for name, value in layer.items() if not name.startswith("feedforward.")}
        for name in (f"feedforward.{name}" for name in PROJECTIONS):
            if name in layer:
                expert = layer[name][0]
                converted[name] = scale_weight(expert, mixture.scale) if ".down." in name else expert
        return converted


def _check_gates(config: MoEConfig, path: str) -> None:
    """Raises DesignError unless the output is the experts' common output times a constant."""
    if config.shared is not None:
        raise DesignError(f"{path}.shared", "a shared expert is added to the others; leave this layer out")
    if config.output_norm:
        raise DesignError(f"{path}.output_norm", "normalizes the experts' output; leave this layer out")
    if config.renormalize_eps is not None:
        raise DesignError(f"{path}.renormalize_eps", "lets the sum of the gates vary; leave this layer out")
    if config.weighted == "inputs":
        reason = "puts gates before the experts, so even identical experts are not one feed-forward"
        raise DesignError(f"{path}.weighted", f"{reason}; leave this layer out")
    if not config.renormalize and config.routing != "topk_softmax":
        reason = "false lets the sum of the gates vary, so even identical experts are not one feed-forward"
        raise DesignError(f"{path}.renormalize", f"{reason}; leave this layer out")


def _check_equal(source: Weights, path: str) -> None:
    """Raises DesignError if the experts of a layer differ."""
    for name in (f"{path}.{name}" for name in PROJECTIONS):
        if name not in source.specs:
            continue
        experts = source.tensor(name)
        for number, expert in enumerate(experts):
            if not torch.equal(expert, experts[0]):
                reason = f"expert {number} differs from expert 0 in {name.rpartition('feedforward.')[2]}"
                raise DesignError(
                    path, f"{reason}; only identical experts are one feed-forward, so leave this layer out"
                )


def _feedforward(config: MoEConfig) -> FeedforwardConfig:
    fields: dict[str, Any] = {
        "hidden": config.hidden,
        "activation": config.expert_activation,
        "bias": config.bias is True,
        "dropout": config.dropout,
    }
    return (
        MLPConfig(**fields) if config.expert == "mlp" else GatedConfig(**fields, limit=config.limit, alpha=config.alpha)
    )
