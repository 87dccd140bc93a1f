"""Fold the gains of norms into the projections that read them: `W (γ ⊙ n + β) = (W diag γ) n + W β`.

Afterwards these norms have gain 1 and β = 0. Rotations of the stream and quantization need this (Ashkboos et al. 2024).
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from heddle.config import DesignError
from heddle.conversion.branches import (
    branch_names,
    gain_offset,
    input_projections,
    layer_modules,
    mixer_kind,
    scale_weight,
)
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.parts.residuals import FinalNorm

FINAL_NORM, HEAD = "final_norm.norm", "head"

_Readers = dict[str, list[str]]  # the path of a norm -> the paths of the projections that read it


class FoldNorms(Rewrite):
    """Fold norms into the projections after them. `final_norm`: also into the head; default: if no layers are named."""

    keeps: ClassVar[frozenset[str]] = frozenset({"attention"})
    exact: ClassVar[bool] = True
    final_norm: bool | None = None

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError for a norm that cannot be folded, and if there is none."""
        design, model = source.design, build(source.design, device="meta")
        offset = gain_offset(design.norm)
        readers: dict[int, _Readers] = {}
        for index in self.selected_layers(design):
            layer, path = layer_modules(model, index), f"layers.{index}"
            readers[index] = _readers(layer, design, index, path)
            for norm, projections in readers[index].items():
                _check_biases(layer, norm, projections, path)
        folds_final = self.layers is None if self.final_norm is None else self.final_norm
        if folds_final and isinstance(model.final_norm, FinalNorm):
            if design.head.tied:
                reason = "the embedding shares the head's weight, so the final norm cannot be folded into it"
                raise DesignError("head.tied", f"{reason}; untie it first (head.tied=false), or give final_norm=false")
            if design.head.transform is not None:
                reason = "stands between the final norm and the head's weight, so the norm cannot be folded"
                raise DesignError("head.transform", f"{reason}; give final_norm=false")
            _check_biases(model, FINAL_NORM, [HEAD], "")
        else:
            folds_final = False
        if not folds_final and not any(readers.values()):
            kind = design.residual.kind
            raise DesignError("residual", f"kind {kind} has no norm that only projections read; nothing can be folded")
        return _Folded(source, readers, folds_final, offset)


class _Folded(ConvertedWeights):
    def __init__(self, source: Weights, readers: dict[int, _Readers], folds_final: bool, offset: float) -> None:
        super().__init__(source, source.design)
        self.readers, self.folds_final, self.offset = readers, folds_final, offset

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer with its norms' gains in the projections."""
        layer = self.source.layer(index)
        for norm, projections in self.readers.get(index, {}).items():
            gain, shift = self._gain(layer[f"{norm}.weight"]), layer.get(f"{norm}.bias")
            for name in projections:
                weight, bias = layer[f"{name}.weight"], layer.get(f"{name}.bias")
                if shift is not None:
                    assert bias is not None
                    layer[f"{name}.bias"] = bias.double() + weight.double() @ shift.double()
                layer[f"{name}.weight"] = scale_weight(weight, gain)
            layer[f"{norm}.weight"] = torch.full_like(gain, 1.0 - self.offset)
            if shift is not None:
                layer[f"{norm}.bias"] = torch.zeros_like(shift)
        return layer

    def convert_other(self, name: str) -> Tensor:
        """The final norm and the head, if the norm is folded into it."""
        value = self.source.tensor(name)
        if not self.folds_final:
            return value
        if name == f"{FINAL_NORM}.weight":
            return torch.full_like(value, 1.0 - self.offset)
        if name == f"{FINAL_NORM}.bias":
            return torch.zeros_like(value)
        if name == f"{HEAD}.weight":
            return scale_weight(value, self._gain(self.source.tensor(f"{FINAL_NORM}.weight")))
        if name == f"{HEAD}.bias" and f"{FINAL_NORM}.bias" in self.source.specs:
            shift = self.source.tensor(f"{FINAL_NORM}.bias").double()
            return value.double() + self.source.tensor(f"{HEAD}.weight").double() @ shift
        return value

    def _gain(self, weight: Tensor) -> Tensor:
        return self.offset + weight.double()


def _readers(layer: nn.Module, design: ModelConfig, index: int, path: str) -> _Readers:
    """The norms before the branches of a layer, and all that reads them."""
    readers: _Readers = {}
    mixer = mixer_kind(design, index)
    for branch in branch_names(layer):
        norm = design.residual.input_norm(branch, mixer)
        if norm is not None and not isinstance(layer.get_submodule(f"residual.{norm}"), nn.Identity):
            readers.setdefault(f"residual.{norm}", []).extend(input_projections(layer, branch, path))
    return readers


def _check_biases(owner: nn.Module, norm: str, projections: list[str], path: str) -> None:
    """Raises DesignError if a norm has a bias, but a projection that reads it has none to absorb it."""
    if getattr(owner.get_submodule(norm), "bias", None) is None:
        return
    for name in projections:
        if owner.get_submodule(name).bias is None:
            full_name = ".".join(filter(None, (path, name)))
            reason = "has no bias to absorb the bias of the norm before it"
            raise DesignError(full_name, f"{reason}; give other layers, or choose a norm without a bias")
