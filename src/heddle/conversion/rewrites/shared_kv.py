"""Some layers read the keys and values of an earlier layer: less state, no k and v of their own (CLA, YOCO, Gemma 3n).

A layer shares with the last earlier layer that keeps its own and has the same window and direction. Its output
projection is refitted by ridge regression; then all its remaining parameters are fitted to its old outputs on the
user's text, reading the source's keys and values. A layer does not change if the keys and values that it reads equal
its own.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Self

import torch
from pydantic import model_validator
from torch import Tensor

from heddle.config import DesignError, PositiveInt, refuse
from heddle.conversion.fit import check_fit_text, fit_chunks
from heddle.conversion.head_parameters import state_elements
from heddle.conversion.mixer_replacement import FittedRewrite, NewMixers
from heddle.conversion.rewrite import replace_layers
from heddle.conversion.rewrites.kv_heads import fit_output
from heddle.conversion.sensitivity import StateBudget, count_layers, plan_sizes, replacement_losses, top_layers
from heddle.conversion.weights import CalibrationText, LayerActivations, Weights
from heddle.model.config import ModelConfig
from heddle.parts.build import BuildContext
from heddle.parts.layout import HandedOver, Layout
from heddle.parts.mixers import Mixer, merge_heads, split_heads
from heddle.parts.mixers.attention import Attention, AttentionConfig, SharedKeys
from heddle.parts.positions import RotationConfig
from heddle.progress import print_status

# Fields of keys and values, in which a layer must equal the one that it reads; besides the rotation.
FIELDS = (
    *("kv_heads", "head_dim", "value_dim", "qk_norm", "qk_norm_weight", "norm_after_rotation"),
    *("qkv_clip", "value_scale"),
)
CHOICES = ("every", "last", "keep", "state_budget")


class SharedKV(FittedRewrite):
    """Layers of `attention` read an earlier layer's keys and values; without an option, the named layers do.

    every: of this many neighboring layers with one window, the first keeps its own. last: how many of the last layers
    share. keep: how many layers that could share keep their own, or their share (1/4): the layers that raise the loss
    on the text the most when they alone share. state_budget: the share of the state per token to keep, chosen by the
    same losses. fit_steps, fit_learning_rate, seed: of the fit.
    """

    every: PositiveInt | None = None
    last: PositiveInt | None = None
    state_budget: StateBudget | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in CHOICES if getattr(self, name) is not None]
        if len(given) > 1:
            refuse(given[1], f"conflicts with {given[0]}; give one of the two")
        if not given and self.layers is None:
            refuse("every", "is missing; say which layers share: every, last, keep, state_budget, or layers by number")
        if self.every == 1:
            refuse("every", "1 lets every layer keep its own keys and values; give at least 2")
        return self

    @property
    def chooses_on_text(self) -> bool:
        """True if it chooses layers."""
        return self.keep is not None or self.state_budget is not None

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if no layer can share, for one that differs from its source, or for a text too short."""
        assert text is not None
        design = source.design
        check_fit_text(text, design.width)
        kinds = self._kinds(design)
        if self.keep is None and self.state_budget is None:
            return _SharedKeys(source, _sharing(design, self._named(kinds)), text, self)
        possible = [index for same in kinds.values() for index in same[1:]]
        keep = None if self.keep is None else count_layers(self.keep, len(possible))
        alone = _SharedKeys(source, _sharing(design, possible), text, self, _previous(kinds))
        added = replacement_losses(source, text, alone.replacement)
        own = self._budgeted(design, added) if keep is None else top_layers(added, keep)
        shown = ", ".join(f"layer {index} {value:.4g}" for index, value in added.items())
        print_status(f"{self.name}: loss increase of each layer alone: {shown}; their own: {list(own)}")
        chosen = [index for index in possible if index not in own]
        return _SharedKeys(source, _sharing(design, chosen), text, self, fitted=alone)

    def _kinds(self, design: ModelConfig) -> dict[Any, list[int]]:
        """The layers of each window and direction that may change. Raises DesignError for one without attention."""
        kinds: dict[Any, list[int]] = {}
        for index in self.selected_layers(design):
            mixer = design.layers[index].mixer
            if isinstance(mixer, AttentionConfig):
                kinds.setdefault(mixer.kv_kind, []).append(index)
            elif self.layers is not None:
                what = "no mixer" if mixer is None else f"a mixer of kind {mixer.kind}"
                raise DesignError(f"layers.{index}.mixer", f"has {what}, and attention shares keys; name other layers")
        if all(len(same) == 1 for same in kinds.values()) and (self.layers is None or len(self.layers) > 1):
            raise DesignError("layers", "no two layers have attention of one window and direction; convert another way")
        return kinds

    def _named(self, kinds: Mapping[Any, list[int]]) -> list[int]:
        """The layers that share, without a choice by the text."""
        every = sorted(index for same in kinds.values() for index in same)
        if self.every is not None:
            return [index for same in kinds.values() for place, index in enumerate(same) if place % self.every]
        if self.last is not None and self.last >= len(every):
            raise DesignError("last", f"{self.last} of {len(every)} layers leaves none to read; give fewer")
        return every if self.last is None else every[-self.last :]

    def _budgeted(self, design: ModelConfig, added: Mapping[int, float]) -> tuple[int, ...]:
        """The layers that keep their own keys and values within the budget."""
        assert self.state_budget is not None
        widths = {index: _state_width(design, index) for index in self.selected_layers(design)}
        total = sum(widths.values())
        least = total - sum(widths[index] for index in added)
        choices = [[(0, loss), (widths[index], 0.0)] for index, loss in added.items()]
        sizes = plan_sizes(choices, int(self.state_budget * total + 1e-9) - least)
        if sizes is None:
            reason = f"{self.state_budget:.4g} of the state per token is less than the {least / total:.4g} of layers"
            raise DesignError("state_budget", f"{reason} that have none to read; raise it")
        return tuple(index for index, size in zip(added, sizes, strict=True) if size)


def _state_width(design: ModelConfig, index: int) -> int:
    """Elements of state per token of a layer's keys and values; 0 without attention."""
    mixer = design.layers[index].mixer
    return state_elements(mixer) if isinstance(mixer, AttentionConfig) else 0


def _previous(kinds: Mapping[Any, list[int]]) -> dict[int, int]:
    """For each layer but the first of its kind, the one before it."""
    return {index: before for same in kinds.values() for before, index in pairwise(same)}


def _sharing(design: ModelConfig, layers: Collection[int]) -> ModelConfig:
    """The design in which these layers share. Raises DesignError where a layer's source is missing or differs."""
    last: dict[Any, int] = {}
    changed = {}
    for index, layer in enumerate(design.layers):
        mixer = layer.mixer
        if not isinstance(mixer, AttentionConfig):
            continue
        path = f"layers.{index}.mixer"
        if index in layers:
            if mixer.kv_kind not in last:
                reason = "has no earlier layer of this window and direction with keys and values to read"
                raise DesignError(path, f"{reason}; let it keep its own")
            _check_fit(path, mixer, design, last[mixer.kv_kind])
            changed[index] = layer.replace(mixer=mixer.replace(shared_kv=True, value_scale=None))
        else:
            last[mixer.kv_kind] = index
    return replace_layers(design, changed)


def _check_fit(path: str, mixer: AttentionConfig, design: ModelConfig, source: int) -> None:
    other = design.layers[source].mixer
    assert isinstance(other, AttentionConfig)
    own, read = ({name: getattr(each, name) for name in FIELDS} for each in (mixer, other))
    for each, fields in ((mixer, own), (other, read)):
        fields["position"] = each.position if isinstance(each.position, RotationConfig) else None
    for name, value in own.items():
        if value != read[name]:
            reason = f"differs from layer {source}'s, whose keys and values it would read"
            raise DesignError(f"{path}.{name}", f"{reason}; let it keep its own")


class _ReadsInput(Attention):
    """Attention with `shared_kv` that reads keys and values from its input, behind x: [B, T, width + G (d_k + d_v)]."""

    def forward(self, x: Tensor, layout: Layout, state: Any = None) -> tuple[Tensor, Any]:
        """As attention, without a state."""
        widths = [self.kv_heads * self.head_dim, self.kv_heads * self.value_dim]
        x, *read = x.split([x.shape[-1] - sum(widths), *widths], dim=-1)
        k, v = (split_heads(each, self.kv_heads) for each in read)
        handed_over, self.kv_source = HandedOver(), 0
        mask = layout.attention_mask(self.window, self.causal, self.chunked)
        handed_over.by_layer[0] = SharedKeys(k, v, mask, v)
        return super().forward(x, replace(layout, handed_over=handed_over), state)


class _SharedKeys(NewMixers):
    """sources: the layer that each sharing layer reads; by default the design's. fitted: where it was fitted before."""

    def __init__(
        self, source: Weights, design: ModelConfig, text: CalibrationText, rewrite: SharedKV,
        sources: Mapping[int, int] | None = None, fitted: "_SharedKeys | None" = None,
    ) -> None:  # fmt: skip
        read = {index: number for index, number in enumerate(design.kv_sources) if number is not None}
        self.sources = read if sources is None else {index: sources[index] for index in read}
        super().__init__(source, design, text, rewrite)
        self.fitted, self._read = fitted, dict[int, list[Tensor]]()

    def new_parameters(self, index: int) -> dict[str, Tensor]:
        """The parameters of an earlier fit to the same source, or of a new fit."""
        if self.fitted is not None and self.fitted.sources.get(index) == self.sources[index]:
            return self.fitted.new_parameters(index)
        return super().new_parameters(index)

    def replacement(self, activations: LayerActivations) -> Mixer | None:
        """The mixer of a layer that shares alone; a layer that is read hands its keys and values over."""
        index, needed = activations.index, self._needed(activations.index)
        for layout in activations.layouts:
            assert layout.handed_over is not None
            by_layer = layout.handed_over.by_layer
            layout.handed_over.by_layer = {number: by_layer[number] for number in needed if number < index}
        if index in self.sources.values():
            _hand_over(activations)
        mixer = self.new_mixer(index)
        if mixer is not None:
            mixer.kv_source = self.sources[index]
        return mixer

    def initial_mixer(self, index: int) -> tuple[Mixer, LayerActivations]:
        """The layer's own q and the rest, with its output projection refitted."""
        activations, config = self._with_keys(index), self.design.layers[index].mixer
        assert isinstance(config, AttentionConfig)
        device = activations.mixer_inputs[0].device
        with torch.device("meta"):
            mixer = _ReadsInput(config, BuildContext(self.design.width, self.design.norm, self.design.depth, index))
        names = [name for name, _ in mixer.named_parameters()]
        layer = {name: value.to(device, torch.float64) for name, value in self.source.layer(index).items()}
        mixer.load_state_dict({name: layer[f"mixer.{name}"] for name in names}, assign=True)
        chunks, _ = fit_chunks(activations)
        inputs, outputs, layouts = (list(each) for each in zip(*chunks, strict=True))
        fitted_on = replace(activations, mixer_inputs=inputs, mixer_outputs=outputs, layouts=layouts)
        layer = fit_output(layer, mixer.eval(), fitted_on)
        mixer.load_state_dict({name: layer[f"mixer.{name}"] for name in names}, assign=True)
        return mixer.to(torch.promote_types(self.source.dtype, torch.float32)), activations

    def _with_keys(self, index: int) -> LayerActivations:
        """The activations of a layer, with the keys and values that it reads appended to its inputs."""
        needed = self._needed(index)
        self._read = {number: keys for number, keys in self._read.items() if number in needed}
        for number in sorted(number for number in needed if number < index and number not in self._read):
            self._read[number] = _keys_and_values(self.activations(number))
        own, read = self.activations(index), self._read[self.sources[index]]
        inputs = [torch.cat((x, keys), dim=-1) for x, keys in zip(own.mixer_inputs, read, strict=True)]
        return replace(own, mixer_inputs=inputs)

    def _needed(self, index: int) -> set[int]:
        """The layers whose keys and values this layer or a later one reads."""
        return {source for reader, source in self.sources.items() if reader >= index}


@torch.no_grad()
def _hand_over(activations: LayerActivations) -> None:
    """Store a layer's keys and values on the text in its layouts."""
    mixer = activations.layer.mixer
    assert mixer is not None
    mixer.kv_target = activations.index
    for x, layout in zip(activations.mixer_inputs, activations.layouts, strict=True):
        mixer(x, layout)
    mixer.kv_target = None


def _keys_and_values(activations: LayerActivations) -> list[Tensor]:
    """A layer's keys and values of each batch, [B, T, G (d_k + d_v)]."""
    _hand_over(activations)
    read = []
    for layout in activations.layouts:
        assert layout.handed_over is not None
        shared = layout.handed_over.by_layer.pop(activations.index)
        read.append(torch.cat((merge_heads(shared.keys), merge_heads(shared.values)), dim=-1))
    return read
