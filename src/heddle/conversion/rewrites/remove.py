"""Remove a branch from layers; without a mixer they have no state (He et al. 2024, attention drop)."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor

from heddle.config import DesignError
from heddle.conversion.rewrite import Rewrite, replace_layers
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights
from heddle.model.config import LayerConfig, ModelConfig


class Remove(Rewrite):
    """`remove`: `mixer` or `feedforward`, of the layers that have both."""

    exact: ClassVar[bool] = False
    targets: ClassVar[Mapping[str, str]] = {"remove": "remove"}
    remove: Literal["mixer", "feedforward"]

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError for a layer with one branch, or if the other branch would read something else."""
        design = source.design
        if not design.residual.keeps_stream or design.residual.first_layer_differs:
            reason = f"kind {design.residual.kind} gives a layer more than the sum of its branches"
            raise DesignError("residual", f"{reason}; leave them in")
        changed: dict[int, LayerConfig] = {}
        for index in self.selected_layers(design):
            layer = design.layers[index]
            if layer.mixer is not None and layer.feedforward is not None:
                self._check_norm(design, index, layer.mixer.kind)
                changed[index] = layer.replace(**{self.remove: None})
            elif self.layers is not None:
                raise DesignError(f"layers.{index}", "has one branch; name layers with a mixer and a feedforward")
        if not changed:
            raise DesignError("layers", "have one branch each, so none can be removed; leave this rewrite out")
        weights = _Without(source, replace_layers(design, changed))
        for name, spec in weights.specs.items():
            if source.specs.get(name) != spec:
                raise DesignError(name, "depends on both branches of its layer; leave them in")
        return weights

    def _check_norm(self, design: ModelConfig, index: int, kind: str) -> None:
        residual = design.residual
        if self.remove == "mixer" and residual.input_norm("feedforward", kind) != residual.input_norm(
            "feedforward", ""
        ):
            reason = f"is placed by the mixer's kind {kind}"
            raise DesignError(f"layers.{index}.norm", f"{reason}; leave the mixer in")


class _Without(ConvertedWeights):
    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """What the layer of the new design has."""
        layer = self.source.layer(index)
        return {name: layer[name] for name in self.layer_names(index)}
