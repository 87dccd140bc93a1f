"""Which parameters of a layer read the residual stream, which write to it, and the gains of the norms between them."""

import torch
from torch import Tensor, nn

from heddle.config import DesignError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, Layer
from heddle.parts.feedforwards import Feedforward
from heddle.parts.feedforwards.moe import ExpertLinear
from heddle.parts.mixers import Mixer
from heddle.parts.modules.linear import Linear
from heddle.parts.norms import NormConfig

BRANCHES = ("mixer", "feedforward")
BLOCK = 2**22  # elements that are multiplied in float64 at a time


def layer_modules(model: Decoder, index: int) -> Layer:
    """The modules of a layer."""
    layer = model.layers[index]
    assert isinstance(layer, Layer)
    return layer


def mixer_kind(design: ModelConfig, index: int) -> str:
    """The kind of a layer's mixer, "" if it has none."""
    _, layer = list(design.expand())[index]
    return "" if layer.mixer is None else layer.mixer.kind


def branch_names(layer: nn.Module) -> list[str]:
    """The branches that a layer has."""
    return [name for name in BRANCHES if getattr(layer, name) is not None]


def input_projections(layer: nn.Module, branch: str, path: str) -> list[str]:
    """The paths in the layer of all projections that read the branch's input.

    Raises DesignError, with the path of the layer, for a part that does not say which ones do.
    """
    module = layer.get_submodule(branch)
    assert isinstance(module, Mixer | Feedforward)
    names = module.input_projections
    if names is None:
        kind = type(module).__name__
        reason = f"{kind} does not state its input_projections, so the readers of its input are unknown"
        raise DesignError(f"{path}.{branch}", f"{reason}; state them in the part's file")
    present = {name for name, inner in module.named_modules() if inner is not module}
    return [f"{branch}.{name}" for name in names if name in present]


def output_projections(layer: nn.Module, branch: str) -> list[str]:
    """The paths in the layer of the last projections of a branch, whose sum is its output."""
    return [
        name
        for name, module in layer.get_submodule(branch).named_modules(prefix=branch)
        if isinstance(module, Linear | ExpertLinear) and module.output_projection
    ]


def gain_offset(norm: NormConfig) -> float:
    """What a norm adds to its weight: it multiplies by `offset + weight`.

    Raises DesignError for a norm without the field `weight`, whose gain is unknown, and for one without a weight.
    """
    has_weight = getattr(norm, "weight", None)
    if has_weight is None:
        reason = f"kind {norm.kind} has no field weight, so its gain is unknown; choose a norm that has it"
        raise DesignError("norm", reason)
    if not has_weight:
        raise DesignError("norm.weight", "is false, so there is no gain to rewrite; choose a norm with a weight")
    return float(getattr(norm, "offset", 0.0))


def check_growth(field: str, before: int, after: int) -> None:
    """Raises DesignError unless a number grows."""
    if after == before:
        raise DesignError(field, f"the design has {after} already; ask for more")
    if after < before:
        reason = f"{after} is less than the design's {before}; only growth keeps the logits, so ask for more"
        raise DesignError(field, reason)


def scale_weight(weight: Tensor, factor: Tensor | float) -> Tensor:
    """weight [..., n] times a number or [n], in the weight's dtype: each product in float64, rounded once.

    Blocks of rows are computed one after the other, because a whole head in float64 would take much memory.
    """
    result = torch.empty_like(weight)
    rows = max(1, BLOCK // weight.shape[-1])
    source, target = weight.reshape(-1, weight.shape[-1]), result.view(-1, weight.shape[-1])
    for start in range(0, len(source), rows):
        target[start : start + rows] = source[start : start + rows].double().mul_(factor)
    return result
