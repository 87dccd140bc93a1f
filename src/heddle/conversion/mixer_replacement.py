"""Shared by the rewrites whose mixers are fitted: the choice of layers, the initial weights, and the fit."""

import copy
import math
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from heddle.config import DesignError, PositiveFloat, PositiveInt
from heddle.conversion.branches import layer_modules
from heddle.conversion.fit import OUTPUT_ERROR, FitError, FitResult, check_fit_text, fit_mixer
from heddle.conversion.head_parameters import head_sizes, repeat_key_heads
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
FEATURES = (
    "bias",
    "qk_norm",
    "sink",
    "gate",
    "softcap",
    "temperature_beta",
    "exclusive",
    "qkv_clip",
    "value_scale",
    "forget",
    "relative_dim",
)


class FittedRewrite(Rewrite, ABC):
    """Mixers are replaced by other mixers, each fitted on a text.

    keep: how many layers stay unchanged, or their share (1/4): the layers that raise the loss on the text the most
    when converted alone. fit_steps, fit_learning_rate, seed: of the fit. lowered: the error that the fit lowers.
    """

    exact: ClassVar[bool] = False
    lowered: ClassVar[FitError] = OUTPUT_ERROR
    keep: LayerCount | None = None
    fit_steps: PositiveInt = 500
    fit_learning_rate: PositiveFloat | None = None  # default: 0.1 / sqrt(width)
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0

    @property
    def needs_text(self) -> bool:
        """Always: the new mixers are fitted on it."""
        return True

    @property
    def chooses_on_text(self) -> bool:
        """True if it chooses layers."""
        return self.keep is not None


class FittedMixers(FittedRewrite, ABC):
    """Mixers get new configs; their weights start from the old mixers' weights.

    keep: None: every layer is converted. convertible: what a layer must have.
    """

    convertible: ClassVar[str]

    @abstractmethod
    def obstacle(self, mixer: MixerConfig | None) -> str | None:
        """Why a layer with this mixer cannot be converted, None if it can. Layers that are not named are left out."""

    @abstractmethod
    def converted(self, mixer: Any, path: str) -> MixerConfig:
        """The config that replaces a resolved one. Raises DesignError with the path if it would lose a feature."""

    @abstractmethod
    def start(self, source: Weights, index: int, mixer: Mixer) -> dict[str, Tensor]:
        """The parameters that a layer's new mixer starts from, by name; others are initialized as in a new model."""

    def is_fitted(self, name: str) -> bool:
        """Whether the fit changes this parameter of the new mixers."""
        return True

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if no layer can be converted, for a feature that would be lost, or a text too short."""
        design = source.design
        changed = self._changed_layers(design)
        keep = None if self.keep is None else count_layers(self.keep, len(changed))
        if text is not None:
            check_fit_text(text, design.width)
        replaced = NewMixers(source, replace_layers(design, changed), text, self)
        if keep is None:
            return replaced
        assert text is not None
        increases = replacement_losses(source, text, lambda activations: replaced.new_mixer(activations.index))
        full = top_layers(increases, keep)
        shown = ", ".join(f"layer {index} {value:.4g}" for index, value in increases.items())
        print_status(f"{self.name}: loss increase of each layer alone: {shown}; unchanged: {list(full)}")
        chosen = {index: layer for index, layer in changed.items() if index not in full}
        return ChosenLayers(source, replace_layers(design, chosen), replaced)

    def _changed_layers(self, design: ModelConfig) -> dict[int, LayerConfig]:
        changed: dict[int, LayerConfig] = {}
        obstacles = set[str]()
        for index in self.selected_layers(design):
            layer, path = design.layers[index], f"layers.{index}.mixer"
            obstacle = self.obstacle(layer.mixer)
            if obstacle is not None and self.layers is not None:
                raise DesignError(path, f"{obstacle}; name layers of {self.convertible}")
            if obstacle is None:
                changed[index] = layer.replace(mixer=self.converted(layer.mixer, path))
            else:
                obstacles.add(obstacle)
        if not changed:
            reason = f"{self.name} can convert no layer, because each {' or '.join(sorted(obstacles))}"
            raise DesignError("layers", f"{reason}; choose a design with {self.convertible}")
        return changed


class MixerReplacement(FittedMixers, ABC):
    """Attention becomes another mixer, fitted to its outputs.

    new: the config of the other mixer. drop: drop features that the new mixer lacks.
    """

    convertible: ClassVar[str] = "full causal attention"
    new: ClassVar[type[Any]]
    drop: bool = False

    def new_config(self, mixer: AttentionConfig) -> MixerConfig:
        """The config that replaces a resolved attention config: the same heads and head dims."""
        config: MixerConfig = self.new(heads=mixer.heads, head_dim=mixer.head_dim, value_dim=mixer.value_dim)
        return config

    def missing_features(self, mixer: AttentionConfig) -> list[str]:
        """The names of the mixer's features that the new mixer lacks: all but positions, which a recurrence encodes."""
        return [name for name in features(mixer) if not name.startswith("position")]

    def first_values(self, mixer: Mixer) -> dict[str, Tensor]:
        """Initial parameters, by name, that neither attention nor a new model's initialization gives.

        A short convolution passes its input on: a quarter less error than a random one leaves.
        """
        convolution = getattr(mixer, "convolution", None)
        if convolution is None:
            return {}
        weight = torch.zeros(convolution.weight.shape)
        weight[:, -1] = 1.0
        return {"convolution.weight": weight}

    def obstacle(self, mixer: MixerConfig | None) -> str | None:
        """Anything but causal attention without a window."""
        if isinstance(mixer, AttentionConfig) and not mixer.causal:
            return "is not causal"
        return softmax_obstacle(mixer, AttentionConfig)

    def converted(self, mixer: AttentionConfig, path: str) -> MixerConfig:
        """As in `FittedMixers`."""
        lost = self.missing_features(mixer)
        if lost and not self.drop:
            reason = f"{self.name} has no {' and no '.join(lost)}; add drop=true to convert without"
            raise DesignError(path, reason)
        return self.new_config(mixer)

    def start(self, source: Weights, index: int, mixer: Mixer) -> dict[str, Tensor]:
        """The parameters copied from attention, with key and value heads repeated for the queries."""
        config = source.design.layers[index].mixer
        assert isinstance(config, AttentionConfig)
        layer = repeat_key_heads(source.layer(index), config, config.heads // head_sizes(config)[0])
        old = {name.removeprefix("mixer."): value for name, value in layer.items()}
        shapes = {name: parameter.shape for name, parameter in mixer.named_parameters()}
        same = {name: value for name, value in old.items() if shapes.get(name) == value.shape}
        return same | self.first_values(mixer)


def softmax_obstacle(mixer: MixerConfig | None, *kinds: type[MixerConfig]) -> str | None:
    """Why a mixer is not attention of one of these kinds over all tokens, None if it is."""
    if mixer is None:
        return "has no mixer"
    if not isinstance(mixer, kinds):
        return f"has a mixer of kind {mixer.kind}"
    return "has a window already" if mixer.windows else None


def features(mixer: AttentionConfig) -> list[str]:
    """The names of a mixer's features that few recurrences can hold. A score bias is named by its kind."""
    names = [name for name in FEATURES if getattr(mixer, name) not in (None, False)]
    return names if mixer.position is None else [*names, f"position {mixer.position.kind}"]


class NewMixers(ConvertedWeights):
    """The weights of a design with some new mixers, each fitted when it is first read.

    Fitted mixers are stored in a temporary folder, since a layer may be read several times. results: by layer.
    """

    def __init__(
        self, source: Weights, design: ModelConfig, text: CalibrationText | None, rewrite: FittedRewrite
    ) -> None:
        super().__init__(source, design, text)
        self.rewrite = rewrite
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
        return mixer.to(self.text.device, self.source.dtype)

    def new_parameters(self, index: int) -> dict[str, Tensor]:
        """The parameters of a layer's new mixer, fitted to the outputs of the old one."""
        path = self._folder / f"{index}.safetensors"
        if not path.is_file():
            mixer, result = self._fit(index)
            write_tensor_file(path, {name: parameter.detach() for name, parameter in mixer.named_parameters()})
            mixer.to("meta")
            if result is not None:
                self.results[index] = result
        return dict(read_tensor_file(path))

    def initial_mixer(self, index: int) -> tuple[Mixer, LayerActivations | None]:
        """The mixer of a layer before its fit, and what it is fitted on; None without a text or parameters to fit."""
        rewrite, mixer = self.rewrite, self._empty_mixer(index)
        assert isinstance(rewrite, FittedMixers)
        mixer.to_empty(device="cpu")
        own = {id(module) for module in mixer.modules()}
        initialize(self._meta_model, rewrite.seed, lambda module: id(module) in own)
        mixer.to(dtype=torch.promote_types(self.source.dtype, torch.float32))
        mixer.load_state_dict(rewrite.start(self.source, index, mixer), strict=False)
        fitted = [parameter.requires_grad_(rewrite.is_fitted(name)) for name, parameter in mixer.named_parameters()]
        if self.text is None or not any(parameter.requires_grad for parameter in fitted):
            return mixer, None
        return mixer.to(self.text.device), self.activations(index)

    def _fit(self, index: int) -> tuple[Mixer, FitResult | None]:
        rewrite, (mixer, activations) = self.rewrite, self.initial_mixer(index)
        if activations is None:
            return mixer, None
        settings = Settings(
            steps=rewrite.fit_steps,
            learning_rate=rewrite.fit_learning_rate or 0.1 / math.sqrt(self.design.width),
            seed=rewrite.seed,
            schedule="linear",
        )
        result = fit_mixer(mixer, activations, settings, rewrite.lowered)
        errors = f"{result.error_before:.3f} -> {result.error_after:.3f}"
        print_status(f"layer {index}: {rewrite.name} fitted, {rewrite.lowered.name} {errors} in {result.steps} steps")
        return mixer, result

    def _empty_mixer(self, index: int) -> Mixer:
        mixer = layer_modules(self._meta_model, index).mixer
        assert mixer is not None
        return mixer


class ChosenLayers(ConvertedWeights):
    """The weights of a source with the changed layers of `replaced`."""

    def __init__(self, source: Weights, design: ModelConfig, replaced: Weights) -> None:
        super().__init__(source, design)
        self.replaced = replaced

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer of the source, or the replaced one."""
        return (self.replaced if index in self.changed else self.source).layer(index)
