"""Widen the residual stream with dims that are zero.

With D of D′ dims not zero, the mean square is multiplied by D/D′, so RMSNorm's ε is multiplied by D/D′ and its gain by
√(D/D′). Projections that write to the stream write zeros to the new dims; those that read it get random weights for
them, so that they can be learned. Heads, ranks and hidden channels do not change.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from heddle.config import DesignError, Width
from heddle.conversion.branches import (
    branch_names,
    check_growth,
    gain_offset,
    input_projections,
    layer_modules,
    output_projections,
    scale_weight,
)
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.numerics.random import ParameterDraws
from heddle.parts.mixers.attention import Attention
from heddle.parts.modules.linear import Linear, fill_normal
from heddle.parts.norms.rms import RMSConfig, RMSNorm
from heddle.parts.positions.learned import LearnedConfig

# Norms within a mixer with the ε of the design, and the projections that their inputs are proportional to.
NORM_INPUTS: dict[type[nn.Module], dict[str, str]] = {Attention: {"q_norm": "q", "k_norm": "k"}}


class StreamWidth(Rewrite):
    """Widen the residual stream to `width`. `seed`: of the weights that read the new dims."""

    keeps: ClassVar[frozenset[str]] = frozenset({"attention"})
    exact: ClassVar[bool] = True
    targets: ClassVar[Mapping[str, str]] = {"width": "width"}
    width: Width
    seed: int = 0

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if the width does not grow, or for a part that depends on the width in another way."""
        self.refuse_layers("width")
        design, norm = source.design, source.design.norm
        check_growth("width", design.width, self.width)
        if not isinstance(norm, RMSConfig):
            reason = f"kind {norm.kind} cannot undo added zeros by its gain; only a design with rms can grow"
            raise DesignError("norm", reason)
        gain_offset(norm)  # refuses a norm without a weight
        if design.residual.stream_grows:
            reason = f"kind {design.residual.kind} weighs outputs by a norm over the width, which zeros change"
            raise DesignError("residual", f"{reason}; leave the width alone")
        if not design.residual.has_one_stream and design.residual.build_expansion(design.width) is not None:
            reason = f"kind {design.residual.kind} compares the sizes of its streams, which zeros change"
            raise DesignError("residual", f"{reason}; leave the width alone")
        position = design.embedding.position
        if position is not None and not isinstance(position, LearnedConfig):
            reason = f"kind {position.kind} adds width-dependent values to every dim, so new dims would not be zero"
            raise DesignError("embedding.position", f"{reason}; leave the width alone")
        wider_norm = norm.replace(eps=norm.eps * design.width / self.width)
        head = design.head
        if design.embedding.scale and head.tied:
            head = head.replace(scale=head.scale * (self.width / design.width) ** 0.5)
        return _Wider(source, design.replace(width=self.width, norm=wider_norm, head=head), self.seed)


class _Wider(ConvertedWeights):
    def __init__(self, source: Weights, design: ModelConfig, seed: int) -> None:
        super().__init__(source, design)
        self.seed, self.old, self.new = seed, build(source.design, device="meta"), build(design, device="meta")
        self.ratio = source.design.width / design.width
        self.gains = {f"{path}.weight" for path in _grown_norms(self.old, self.new)}
        self.readers, self.scaled = {"head.weight"}, set[str]()
        if source.design.embedding.scale:  # √width grows
            self.scaled = {"embed.weight", "head.bias"} if source.design.head.tied else {"embed.weight"}
        for index in range(design.depth):
            self._check_layer(index)

    def _check_layer(self, index: int) -> None:
        """Note the projections that read the stream, and those whose output is normalized with the design's ε.

        Raises DesignError for a layer in which more than readers and writers of the stream depend on the width.
        """
        old, new, path = layer_modules(self.old, index), layer_modules(self.new, index), f"layers.{index}"
        self._check_block(old.residual, new.residual, f"{path}.residual")
        for branch in branch_names(new):
            read = {f"{name}.weight" for name in input_projections(new, branch, path)}
            written = {f"{name}.{kind}" for name in output_projections(new, branch) for kind in ("weight", "bias")}
            self.readers |= {f"{path}.{name}" for name in read}
            for name, parameter in new.get_submodule(branch).named_parameters(prefix=branch):
                before = old.get_parameter(name).shape
                grows = [a != b for a, b in zip(before, parameter.shape, strict=True)]
                if sum(grows) > (name in read) + (name in written) or (name in read and not grows[-1]):
                    reason = "depends on the width in a way that zeros do not preserve; state its sizes in the design"
                    raise DesignError(f"{path}.{name}", reason)
            for norm in _changed_norms(old.get_submodule(branch), new.get_submodule(branch)):
                owner, _, name = f"{branch}.{norm}".rpartition(".")
                projection = NORM_INPUTS.get(type(new.get_submodule(owner)), {}).get(name)
                if projection is None:
                    reason = "takes its ε from the design's norm, which a wider stream changes"
                    raise DesignError(f"{path}.{owner}.{name}", f"{reason}; leave the width alone")
                _check_scaled(new.get_submodule(owner), projection, f"{path}.{owner}")
                self.scaled |= {f"{path}.{owner}.{projection}.{kind}" for kind in ("weight", "bias")}

    def _check_block(self, old: nn.Module, new: nn.Module, path: str) -> None:
        """Raises DesignError for a residual block in which more than norms and projections depend on the width."""
        for name, parameter in new.named_parameters():
            owner = new.get_submodule(name.rpartition(".")[0])
            if f"{path}.{name}" in self.gains or isinstance(owner, Linear):
                continue
            if parameter.shape != old.get_parameter(name).shape:
                reason = "depends on the width in a way that zeros do not preserve; leave the width alone"
                raise DesignError(f"{path}.{name}", reason)

    def convert_parameter(self, name: str, value: Tensor) -> Tensor:
        """The parameter with its new dims; zeros are written to those of the stream. The encoder stays."""
        if name in self.scaled:
            value = scale_weight(value, self.ratio**0.5)
        return value if name.startswith("encoder.") else self._extended(name, value)

    def _extended(self, name: str, value: Tensor) -> Tensor:
        """The value with new dims: zeros, or random numbers where they are multiplied by zeros."""
        shape = self.specs[name][1]
        if name in self.gains:
            assert isinstance(self.design.norm, RMSConfig)
            offset = self.design.norm.offset
            gain = torch.ones(shape, dtype=torch.float64, device=value.device)
            return self._filled(gain, offset + value.double()).mul_(self.ratio**0.5) - offset
        if tuple(value.shape) == shape:
            return value
        if name not in self.readers:
            return self._filled(value.new_zeros(shape), value)
        drawn = torch.empty(shape, dtype=value.dtype)
        fill_normal(drawn, self.design.initialization.std, ParameterDraws(self.seed, "width")(name))
        return self._filled(drawn.to(value.device), value)

    def _filled(self, result: Tensor, value: Tensor) -> Tensor:
        """The result with the value in its first dims; a dim of several streams is filled stream by stream."""
        blocks, index = result, []
        for dim, (new, old) in enumerate(zip(result.shape, value.shape, strict=True)):
            streams = old // self.source.design.width if new != old else 1
            blocks = blocks.unflatten(2 * dim, (streams, new // streams))
            value = value.unflatten(2 * dim, (streams, old // streams))
            index += [slice(None), slice(old // streams)]
        blocks[tuple(index)] = value.to(result.dtype)
        return result


def _check_scaled(attention: nn.Module, projection: str, path: str) -> None:
    """Raises DesignError unless the norm alone reads a projection, or something that scales as it does."""
    assert isinstance(attention, Attention)
    are_values = projection == "k" and attention.v is None
    for name, found in (("qkv_clip", attention.qkv_clip), ("k_eq_v", are_values)):
        if found:
            reason = f"reads what the norm of {projection} reads, which a wider stream scales; leave the width alone"
            raise DesignError(f"{path}.{name}", reason)


def _changed_norms(old: nn.Module, new: nn.Module) -> list[str]:
    """The paths of the norms with a different ε."""
    before = {path: module.eps for path, module in old.named_modules() if isinstance(module, RMSNorm)}
    after = {path: module.eps for path, module in new.named_modules() if isinstance(module, RMSNorm)}
    return [path for path, eps in after.items() if eps != before[path]]


def _grown_norms(old: Decoder, new: Decoder) -> list[str]:
    """The paths of the norms over the stream."""
    before, after = (dict(model.named_parameters()) for model in (old, new))
    weights = {path: f"{path}.weight" for path in _changed_norms(old, new)}
    return [path for path, name in weights.items() if name in after and after[name].shape != before[name].shape]
