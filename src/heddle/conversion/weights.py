"""A design and its parameters by name, each read, or converted from another design, when it is looked up."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from heddle.data.samples import PLAIN_ROWS, RowProtocol
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, Layer, build
from heddle.model.initialization import set_parameter, storage_dtype
from heddle.parts.layout import HandedOver, Layout
from heddle.progress import progress_bar

# The parameters of a feed-forward's projections, and of those of all experts of a mixture.
PROJECTIONS = tuple(f"{module}.{kind}" for module in ("gate", "up", "down") for kind in ("weight", "bias"))

# The activations of a model on a text, with the weights of one layer in memory at a time.


@dataclass(frozen=True)
class CalibrationText:
    """Tokens that a model is run on.

    batches: int64 [B, T] each. layouts: of each batch. name, sha256: of the corpus. samples: how many samples of
    the corpus, in the order of seed 0, it reads. rows: how each row begins.
    """

    batches: Sequence[Tensor]
    layouts: Sequence[Layout]
    name: str = "text"
    sha256: str = ""
    samples: int = 0
    rows: RowProtocol = PLAIN_ROWS

    @property
    def device(self) -> torch.device:
        """Where its tokens are, and the model is run."""
        return self.batches[0].device

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(batch.numel() for batch in self.batches)


@dataclass
class LayerActivations:
    """One layer of a model, with its weights, and what its mixer reads and writes on a text.

    mixer_inputs: [B, T, width] of each batch, after the norm. mixer_outputs: [B, T, width], before the residual adds
    them. streams, new_streams: what enters and leaves the layer. mixer_inputs and mixer_outputs are empty for a layer
    without a mixer.
    """

    index: int
    layer: Layer
    layouts: Sequence[Layout]
    streams: list[Any]
    new_streams: list[Any]
    mixer_inputs: list[Tensor] = field(default_factory=list)
    mixer_outputs: list[Tensor] = field(default_factory=list)

    def inputs_of(self, module: nn.Module) -> Iterator[Tensor]:
        """Run the layer; yield what a module of it reads in each batch, without padding: [tokens, features]."""
        read = list[Tensor]()
        handle = module.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
        try:
            for stream, layout in zip(self.streams, self.layouts, strict=True):
                self.layer(stream, layout)
                yield read.pop()[layout.positions >= 0]
        finally:
            handle.remove()


@torch.no_grad()
def initial_streams(model: Decoder, weights: "Weights", text: CalibrationText) -> list[Any]:
    """The stream that enters the first layer, for each batch. The embedding's weights are freed afterwards."""
    fill_parameters(model.embed, "embed.", weights, text.device)
    if model.expansion is not None:
        fill_parameters(model.expansion, "expansion.", weights, text.device)
    streams = [
        model.expand_stream(model.embed(batch, layout))
        for batch, layout in zip(text.batches, text.layouts, strict=True)
    ]
    model.embed.to("meta")
    return streams


def layer_activations(weights: "Weights", text: CalibrationText) -> Iterator[LayerActivations]:
    """Run a model on a text and yield the activations of one layer after the other."""
    model = build(weights.design, device="meta").eval()
    layouts = [replace(layout, handed_over=HandedOver()) for layout in text.layouts]
    streams = initial_streams(model, weights, text)
    for index in range(weights.design.depth):
        layer = model.layers[index]
        assert isinstance(layer, Layer)
        fill_parameters(layer, f"layers.{index}.", weights, text.device)
        activations = run_layer(index, layer, streams, layouts)
        yield activations
        streams = activations.new_streams
        layer.to("meta")


def activations_of(
    weights: "Weights", text: CalibrationText, layers: Collection[int], label: str
) -> Iterator[LayerActivations]:
    """The activations of some layers; those above the last one are not run. label: of the progress bar."""
    last = max(layers)
    with progress_bar(label, last + 1, "layers") as bar:
        for activations in itertools.islice(layer_activations(weights, text), last + 1):
            if activations.index in layers:
                yield activations
            bar.advance(1)


@torch.no_grad()
def run_layer(index: int, layer: Layer, streams: Sequence[Any], layouts: Sequence[Layout]) -> LayerActivations:
    """Run one layer on the streams of a text and record what its mixer reads and writes."""
    result = LayerActivations(index, layer, layouts, list(streams), [])

    def record(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        result.mixer_inputs.append(arguments[0])
        result.mixer_outputs.append(output[0])

    handle = None if layer.mixer is None else layer.mixer.register_forward_hook(record)
    try:
        with progress_bar(f"reading the text, layer {index}", len(layouts), "batches") as bar:
            for stream, layout in zip(streams, layouts, strict=True):
                result.new_streams.append(layer(stream, layout)[0])
                bar.advance(1)
    finally:
        if handle is not None:
            handle.remove()
    return result


def fill_parameters(module: nn.Module, prefix: str, weights: "Weights", device: torch.device) -> None:
    """Give every parameter of a meta module its values, on a device."""
    for name, parameter in list(module.named_parameters()):
        set_parameter(module, name, weights.tensor(prefix + name).to(device), parameter.requires_grad)


LAYER_PREFIX = "layers."

TensorSpec = tuple[torch.dtype, tuple[int, ...]]  # the dtype and shape of a parameter


class Weights(ABC):
    """The parameters of a design.

    design: resolved, so that every layer and every default is written out.
    """

    design: ModelConfig

    @property
    @abstractmethod
    def specs(self) -> Mapping[str, TensorSpec]:
        """The dtype and shape of every parameter, by name. A tied head has no weight of its own."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Read or make one parameter, such as `layers.3.mixer.q.weight`, in its own memory."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding, taken as the model's."""
        return self.specs["embed.weight"][0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters."""
        return tuple(self.specs)

    def layer_names(self, index: int) -> list[str]:
        """The names of a layer's parameters, relative to it: `mixer.q.weight`."""
        prefix = f"{LAYER_PREFIX}{index}."
        return [name.removeprefix(prefix) for name in self.specs if name.startswith(prefix)]

    def layer(self, index: int) -> dict[str, Tensor]:
        """The parameters of a layer, by their names relative to it."""
        return {name: self.tensor(f"{LAYER_PREFIX}{index}.{name}") for name in self.layer_names(index)}


class ModelWeights(Weights):
    """The parameters of a model in memory."""

    def __init__(self, model: Decoder) -> None:
        self.design = model.config.resolved()
        self._parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """As in `Weights`."""
        return {name: (value.dtype, tuple(value.shape)) for name, value in self._parameters.items()}

    def tensor(self, name: str) -> Tensor:
        """As in `Weights`."""
        return self._parameters[name].clone()


class ConvertedWeights(Weights):
    """The parameters of a rewritten design, converted layer by layer from the source's.

    A rewrite overrides `convert_layer` and `convert_other`, or `convert_parameter`; everything else is the source's.
    Results may have any floating point dtype: they are stored in the source's. text: what `activations` runs the source
    on.
    """

    def __init__(self, source: Weights, design: ModelConfig, text: CalibrationText | None = None) -> None:
        self.source, self.design, self.text = source, design.resolved(), text
        self._converted: tuple[int, dict[str, Tensor]] | None = None  # the newest layer
        self._walk: Iterator[LayerActivations] | None = None
        self._activations: LayerActivations | None = None

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """As in `Weights`."""
        return parameter_specs(self.design, self.source.dtype)

    @cached_property
    def changed(self) -> frozenset[int]:
        """The layers with another config than in the source, which has as many."""
        pairs = zip(self.design.layers, self.source.design.layers, strict=True)
        return frozenset(index for index, (new, old) in enumerate(pairs) if new != old)

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The parameters of a layer of the new design, by their names relative to it."""
        prefix = f"{LAYER_PREFIX}{index}."
        return {name: self.convert_parameter(prefix + name, value) for name, value in self.source.layer(index).items()}

    def convert_other(self, name: str) -> Tensor:
        """A parameter outside the layers: of the embedding, the final norm, the head or the encoder."""
        return self.convert_parameter(name, self.source.tensor(name))

    def convert_parameter(self, name: str, value: Tensor) -> Tensor:
        """A parameter of the source under its whole name, for rewrites that change each by itself."""
        return value

    def activations(self, index: int) -> LayerActivations:
        """The source layer's activations on the calibration text. In ascending order of index, each layer runs once."""
        assert self.text is not None, f"{type(self).__name__} has no calibration text"
        if self._activations is None or self._activations.index > index:
            self._walk, self._activations = layer_activations(self.source, self.text), None
        assert self._walk is not None
        while self._activations is None or self._activations.index < index:
            self._activations = None  # frees the layer before the next one is read
            self._activations = next(self._walk)
        return self._activations

    def tensor(self, name: str) -> Tensor:
        """As in `Weights`: converts the layer of the parameter, if it is not the newest one."""
        dtype, shape = self.specs[name]
        if name.startswith(LAYER_PREFIX):
            number, _, relative = name.removeprefix(LAYER_PREFIX).partition(".")
            if self._converted is None or self._converted[0] != int(number):
                self._converted = None  # frees the layer before the next one is made
                layer, prefix = self.convert_layer(int(number)), f"{LAYER_PREFIX}{number}."
                self._converted = int(number), {key: x.to(self.specs[prefix + key][0]) for key, x in layer.items()}
            value = self._converted[1][relative]
        else:
            value = self.convert_other(name)
        assert tuple(value.shape) == shape, f"{type(self).__name__}: {name} is {list(value.shape)}, not {list(shape)}"
        return value.to(dtype).contiguous()


class OneDtype(ConvertedWeights):
    """The parameters of a source in one dtype, without a change of the design."""

    def __init__(self, source: Weights, dtype: torch.dtype) -> None:
        super().__init__(source, source.design)
        self._dtype = dtype

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """As in `Weights`."""
        return parameter_specs(self.design, self._dtype)


def parameter_specs(design: ModelConfig, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """The dtype and shape of every parameter of a design that is stored in `dtype`."""
    model = build(design, device="meta")
    return {
        name: (storage_dtype(parameter, dtype), tuple(parameter.shape)) for name, parameter in model.named_parameters()
    }


def build_model(weights: Weights) -> Decoder:
    """A model in memory with these weights, in eval mode."""
    model = build(weights.design, device="meta")
    for name, parameter in list(model.named_parameters()):
        set_parameter(model, name, weights.tensor(name), parameter.requires_grad)
    model.tie()
    return model.eval()
