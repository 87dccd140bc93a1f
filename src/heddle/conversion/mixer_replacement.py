"""Shared by the rewrites whose mixers are fitted: the choice of layers, the initial weights, and the fit."""

import copy
import math
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from heddle.config import DesignError, PositiveFloat, PositiveInt
from heddle.conversion.branches import layer_modules
from heddle.conversion.fit import FitResult, check_fit_text, fit_mixer
from heddle.conversion.heads.parameters import repeat_key_heads
from heddle.conversion.rewrite import Rewrite, replace_layers
from heddle.conversion.sensitivity import LayerCount, count_layers, replacement_losses, top_layers
from heddle.conversion.weights import CalibrationText, ConvertedWeights, LayerActivations, Weights
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.initialization import initialize
from heddle.parts.mixers import Mixer, MixerConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.progress import print_status
from heddle.storage.tensor_file import read_tensor_file, write_tensor_file
from heddle.training.settings import Settings

# Fields of attention that change what it computes and that a recurrence has no field for, unless it says so.
FEATURES = ("bias", "qk_norm", "sink", "gate", "softcap", "temperature_beta", "exclusive", "qkv_clip", "value_scale")


class FittedRewrite(Rewrite, ABC):
    """Mixers become others, each fitted to the outputs of the one that it replaces.

    keep: how many layers stay as they are, or their share (1/4): those whose replacement alone raises the loss on the
    text the most. fit_steps, fit_learning_rate, seed: of the fit.
    """

    keep: LayerCount | None = None
    fit_steps: PositiveInt = 500
    fit_learning_rate: PositiveFloat | None = None  # default: 0.1 / sqrt(width)
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0

    @property
    def needs_text(self) -> bool:
        """Always: the new mixers are fitted on it."""
        return True

    def is_exact(self, design: ModelConfig) -> bool:
        """Never."""
        return False


class MixerReplacement(FittedRewrite, ABC):
    """Attention becomes another mixer, whose weights start from attention's and are fitted to its outputs.

    keep: how many layers stay as they are, or their share (1/4): those whose replacement alone raises the loss on the
    text the most. None: every layer is converted. drop: drop features that the new mixer lacks.
    fit_steps, fit_learning_rate, seed: of the fit.
    """

    drop: bool = False

    @abstractmethod
    def new_config(self, mixer: AttentionConfig) -> MixerConfig:
        """The config that replaces a resolved attention config."""

    @abstractmethod
    def missing_features(self, mixer: AttentionConfig) -> list[str]:
        """The names of the mixer's features that the new mixer lacks."""

    def first_values(self, mixer: Mixer) -> dict[str, Tensor]:
        """Initial parameters, by name, that neither attention nor a new model's initialization gives."""
        return {}

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if no layer can be converted, for a feature that would be lost, or a text too short."""
        assert text is not None
        design = source.design
        changed = self._changed_layers(design)
        check_fit_text(text, design.width)
        keep = None if self.keep is None else count_layers("keep", self.keep, len(changed))
        replaced = NewMixers(source, replace_layers(design, changed), text, self, frozenset(changed))
        if keep is None:
            return replaced
        increases = replacement_losses(source, text, lambda activations: replaced.new_mixer(activations.index))
        full = top_layers(increases, keep)
        shown = ", ".join(f"layer {index} {value:.4g}" for index, value in increases.items())
        print_status(f"{self.name}: loss increase of each layer alone: {shown}; unchanged: {list(full)}")
        chosen = {index: layer for index, layer in changed.items() if index not in full}
        return ChosenLayers(source, replace_layers(design, chosen), replaced, frozenset(chosen))

    def _changed_layers(self, design: ModelConfig) -> dict[int, LayerConfig]:
        changed: dict[int, LayerConfig] = {}
        for index in self.selected_layers(design):
            layer = design.layers[index]
            obstacle = _obstacle(layer.mixer)
            if obstacle is not None and self.layers is not None:
                raise DesignError(f"layers.{index}.mixer", f"{obstacle}; name layers of full causal attention")
            if isinstance(layer.mixer, AttentionConfig) and obstacle is None:
                lost = self.missing_features(layer.mixer)
                if lost and not self.drop:
                    reason = f"{self.name} has no {' and no '.join(lost)}; add drop=true to convert without"
                    raise DesignError(f"layers.{index}.mixer", reason)
                changed[index] = layer.replace(mixer=self.new_config(layer.mixer))
        if not changed:
            obstacles = {_obstacle(design.layers[index].mixer) for index in self.selected_layers(design)}
            reason = f"no layer can become {self.name}, because each {' or '.join(sorted(filter(None, obstacles)))}"
            raise DesignError("layers", f"{reason}; choose a design with full causal attention")
        return changed


def _obstacle(mixer: MixerConfig | None) -> str | None:
    """Why a mixer cannot be replaced, None if it can."""
    if mixer is None:
        return "has no mixer"
    if not isinstance(mixer, AttentionConfig):
        return f"has a mixer of kind {mixer.kind}"
    if not mixer.causal:
        return "is not causal"
    return None if mixer.window is None else "has a window already"


def features(mixer: AttentionConfig) -> list[str]:
    """The names of a mixer's features that few recurrences can hold. A score bias is named by its kind."""
    names = [name for name in FEATURES if getattr(mixer, name) not in (None, False)]
    return names if mixer.position is None else [*names, f"position {mixer.position.kind}"]


class NewMixers(ConvertedWeights):
    """The weights of a design with some new mixers, each fitted when it is first read.

    Fitted mixers are stored in a temporary folder, since a layer may be read several times. results: by layer.
    """

    def __init__(
        self, source: Weights, design: ModelConfig, text: CalibrationText, rewrite: FittedRewrite,
        changed: frozenset[int],
    ) -> None:  # fmt: skip
        super().__init__(source, design, text)
        self.rewrite, self.changed = rewrite, changed
        self.results: dict[int, FitResult] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="heddle-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @cached_property
    def _meta_model(self) -> Decoder:
        """The new design on the meta device; a mixer has weights only while it is fitted."""
        return build(self.design, device="meta").eval()

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer with its new mixer."""
        layer = self.source.layer(index)
        if index not in self.changed:
            return layer
        rest = {name: value for name, value in layer.items() if not name.startswith("mixer.")}
        return rest | {f"mixer.{name}": value for name, value in self.new_parameters(index).items()}

    def new_mixer(self, index: int) -> Mixer | None:
        """The fitted mixer of a layer, None where the mixer stays."""
        if index not in self.changed:
            return None
        mixer = copy.deepcopy(self._empty_mixer(index))
        mixer.load_state_dict(self.new_parameters(index), assign=True)
        assert self.text is not None
        return mixer.to(self.text.batches[0].device, self.source.dtype)

    def new_parameters(self, index: int) -> dict[str, Tensor]:
        """The parameters of a layer's new mixer, fitted to the outputs of the old one."""
        path = self._folder / f"{index}.safetensors"
        if index not in self.results:
            mixer, result = self._fit(index)
            write_tensor_file(path, {name: parameter.detach() for name, parameter in mixer.named_parameters()})
            mixer.to("meta")
            self.results[index] = result
        return dict(read_tensor_file(path))

    def initial_mixer(self, index: int) -> tuple[Mixer, LayerActivations]:
        """The mixer of a layer before its fit, and the activations that it is fitted on."""
        activations, mixer = self.activations(index), self._empty_mixer(index)
        mixer.to_empty(device="cpu")
        own = {id(module) for module in mixer.modules()}
        initialize(self._meta_model, self.rewrite.seed, lambda module: id(module) in own)
        mixer.to(activations.mixer_inputs[0].device, torch.promote_types(self.source.dtype, torch.float32))
        mixer.load_state_dict(self._start(index), strict=False)
        return mixer, activations

    def _fit(self, index: int) -> tuple[Mixer, FitResult]:
        rewrite, (mixer, activations) = self.rewrite, self.initial_mixer(index)
        settings = Settings(
            steps=rewrite.fit_steps,
            learning_rate=rewrite.fit_learning_rate or 0.1 / math.sqrt(self.design.width),
            seed=rewrite.seed,
            schedule="linear",
        )
        result = fit_mixer(mixer, activations, settings)
        errors = f"{result.error_before:.3f} -> {result.error_after:.3f}"
        print_status(f"layer {index}: {rewrite.name} fitted, relative error {errors} in {result.steps} steps")
        return mixer, result

    def _empty_mixer(self, index: int) -> Mixer:
        mixer = layer_modules(self._meta_model, index).mixer
        assert mixer is not None
        return mixer

    def _start(self, index: int) -> dict[str, Tensor]:
        """The parameters copied from attention, with key and value heads repeated for the queries."""
        config = self.source.design.layers[index].mixer
        assert isinstance(config, AttentionConfig)
        assert config.kv_heads is not None
        layer = repeat_key_heads(self.source.layer(index), config, config.heads // config.kv_heads)
        old = {name.removeprefix("mixer."): value for name, value in layer.items()}
        mixer = self._empty_mixer(index)
        shapes = {name: parameter.shape for name, parameter in mixer.named_parameters()}
        same = {name: value for name, value in old.items() if shapes.get(name) == value.shape}
        assert isinstance(self.rewrite, MixerReplacement)
        return same | self.rewrite.first_values(mixer)


class ChosenLayers(ConvertedWeights):
    """The weights of a source with some layers replaced by another design's."""

    def __init__(self, source: Weights, design: ModelConfig, replaced: Weights, chosen: frozenset[int]) -> None:
        super().__init__(source, design)
        self.replaced, self.chosen = replaced, chosen

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer of the source, or the replaced one."""
        return (self.replaced if index in self.chosen else self.source).layer(index)
