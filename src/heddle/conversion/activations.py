"""The activations of a model on a text, with the weights of one layer in memory at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from heddle.data.samples import PLAIN_ROWS, RowProtocol
from heddle.model.decoder import Decoder, Layer, build
from heddle.parts.context.layout import Layout

if TYPE_CHECKING:
    from heddle.conversion.weights import Weights


@dataclass(frozen=True)
class CalibrationText:
    """Tokens that a model is run on.

    batches: int64 [B, T] each. layouts: of each batch. name, sha256: of the corpus. samples: how many of the corpus, in
    the order of seed 0, these are. rows: how each row begins.
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


@torch.no_grad()
def initial_streams(model: Decoder, weights: "Weights", text: CalibrationText) -> list[Any]:
    """The stream that enters the first layer, for each batch. The embedding's weights are freed afterwards."""
    fill_parameters(model.embed, "embed.", weights, text.device)
    streams = [
        model.config.residual.expand(model.embed(batch, layout))
        for batch, layout in zip(text.batches, text.layouts, strict=True)
    ]
    model.embed.to("meta")
    return streams


def layer_activations(weights: "Weights", text: CalibrationText) -> Iterator[LayerActivations]:
    """Run a model on a text and yield the activations of one layer after the other."""
    model = build(weights.design, device="meta").eval()
    streams = initial_streams(model, weights, text)
    for index in range(weights.design.depth):
        layer = model.layers[index]
        assert isinstance(layer, Layer)
        fill_parameters(layer, f"layers.{index}.", weights, text.device)
        activations = run_layer(index, layer, streams, text.layouts)
        yield activations
        streams = activations.new_streams
        layer.to("meta")


@torch.no_grad()
def run_layer(index: int, layer: Layer, streams: Sequence[Any], layouts: Sequence[Layout]) -> LayerActivations:
    """Run one layer on the streams of a text and record what its mixer reads and writes."""
    result = LayerActivations(index, layer, layouts, list(streams), [])

    def record(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        result.mixer_inputs.append(arguments[0])
        result.mixer_outputs.append(output[0])

    handle = None if layer.mixer is None else layer.mixer.register_forward_hook(record)
    try:
        for stream, layout in zip(streams, layouts, strict=True):
            result.new_streams.append(layer(stream, layout)[0])
    finally:
        if handle is not None:
            handle.remove()
    return result


def fill_parameters(module: nn.Module, prefix: str, weights: "Weights", device: torch.device) -> None:
    """Give every parameter of a meta module its values, on a device."""
    for name, parameter in list(module.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        value = nn.Parameter(weights.tensor(prefix + name).to(device), requires_grad=parameter.requires_grad)
        setattr(module.get_submodule(owner), attribute, value)
