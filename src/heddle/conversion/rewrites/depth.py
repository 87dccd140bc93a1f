"""Add layers that are the identity at first: their output projections are zero (Wu et al. 2024, LLaMA Pro).

A new layer is a copy of the layer below it, so that only its output has to be learned. Where a norm follows the
branch (sandwich, reordered), the gain of that norm is zero instead.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from heddle.config import DesignError, PositiveInt
from heddle.conversion.branches import (
    branch_names,
    check_growth,
    gain_offset,
    layer_modules,
    mixer_kind,
    output_projections,
)
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights
from heddle.model.config import ModelConfig
from heddle.model.decoder import build


class Depth(Rewrite):
    """`depth`: the number of layers. `at`: new layers `spread` evenly between the old ones, or all at the `end`."""

    exact: ClassVar[bool] = True
    targets: ClassVar[Mapping[str, str]] = {"depth": "depth"}
    depth: PositiveInt
    at: Literal["spread", "end"] = "spread"

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if the depth does not grow, or if no layer of the design can be the identity."""
        self.refuse_layers("depth")
        design = source.design
        check_growth("depth", design.depth, self.depth)
        if design.residual.layer_scalar:
            reason = "multiplies the stream in every layer, so no layer can be the identity"
            raise DesignError("residual.layer_scalar", f"{reason}; leave the depth alone")
        if not design.residual.keeps_stream:
            reason = f"kind {design.residual.kind} changes the stream in every layer, so no layer can be the identity"
            raise DesignError("residual", f"{reason}; only a design such as pre_norm can grow")
        if design.residual.first_layer_differs:
            reason = "leaves the first layer without a norm, which a copy of it would need"
            raise DesignError("residual.first_norm", f"{reason}; leave the depth alone")
        if design.embedding.per_layer is not None:
            reason = "holds a part for each layer, and new layers would need one"
            raise DesignError("embedding.per_layer", f"{reason}; leave the depth alone")
        origins = self.layer_sources(design.depth)
        self._check_indices(design, origins)
        new_design = design.replace(layers=tuple(design.layers[origin] for origin, _ in origins))
        return _Deeper(source, new_design, origins)

    def layer_sources(self, depth: int) -> list[tuple[int, bool]]:
        """For each new layer: the index of the old layer that it is or copies, and whether it is a copy."""
        added = self.depth - depth
        result = []
        for index in range(depth):
            at_end = added if index == depth - 1 else 0
            even = (index + 1) * added // depth - index * added // depth
            copies = even if self.at == "spread" else at_end
            result += [(index, False), *[(index, True)] * copies]
        return result

    def _check_indices(self, design: ModelConfig, origins: list[tuple[int, bool]]) -> None:
        """Raises DesignError if an old layer that depends on its index would get another one."""
        model = build(design, device="meta")
        for new_index, (index, is_copy) in enumerate(origins):
            mixer = layer_modules(model, index).mixer
            if mixer is not None and mixer.uses_layer_index and not is_copy and new_index != index:
                config = design.layers[index].mixer
                assert config is not None
                reason = f"kind {config.kind} depends on the index of its layer, which would become {new_index}"
                raise DesignError(f"layers.{index}.mixer", f"{reason}; give at=end")


class _Deeper(ConvertedWeights):
    def __init__(self, source: Weights, design: ModelConfig, origins: list[tuple[int, bool]]) -> None:
        super().__init__(source, design)
        self.origins, self.model = origins, build(source.design, device="meta")

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """An old layer, or a copy of one that writes zero."""
        origin, is_copy = self.origins[index]
        layer = self.source.layer(origin)
        return self._silent(layer, origin) if is_copy else layer

    def _silent(self, layer: dict[str, Tensor], origin: int) -> dict[str, Tensor]:
        modules, residual = layer_modules(self.model, origin), self.design.residual
        for branch in branch_names(modules):
            norm = residual.output_norm(branch, mixer_kind(self.source.design, origin))
            written = output_projections(modules, branch) if norm is None else [f"residual.{norm}"]
            weight = 0.0 if norm is None else -gain_offset(self.design.norm)
            for name in written:
                layer[f"{name}.weight"] = torch.full_like(layer[f"{name}.weight"], weight)
                if f"{name}.bias" in layer:
                    layer[f"{name}.bias"] = torch.zeros_like(layer[f"{name}.bias"])
            if (bias := f"{branch}.output_norm.bias") in layer:  # of a mixture's norm, which zeros pass
                layer[bias] = torch.zeros_like(layer[bias])
        return layer
