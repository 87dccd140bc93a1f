"""Collect the attention weights of every head on one text, quantized to a byte each, and their averages."""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.lab.compare.tables import NO_VALUE, format_bytes, format_context
from heddle.lab.pages.render import render
from heddle.model.attention_maps import forward_with_weights
from heddle.model.config import describe
from heddle.model.decoder import Decoder, build
from heddle.numerics.attention.observer import Observation
from heddle.parts.mixers import Mixer, MixerConfig

MAX_TOKENS = 512  # the most that a map can show
MAX_WEIGHTS = 2**25  # of all heads: 32 MB before compression
LONG_CONTEXT = 8192  # state sizes are listed at this context too


@dataclass(frozen=True)
class LayerWeights:
    """The attention weights of one layer and their averages.

    weight_codes: bytes of shape [heads, queries, keys]; a weight w is stored as round(255 · √w).
    The averages are over all heads and all queries but the first, which can only see itself.
    mean_distance: weighted, in tokens. self_share, first_token_share, sink_share: the weight on the token itself, on
    the first token, and on no token. mean_distance and self_share are None if keys are not the text's tokens.
    """

    heads: int
    groups: int
    keys: int
    weight_codes: bytes
    mean_distance: float | None
    self_share: float | None
    first_token_share: float
    sink_share: float


@dataclass(frozen=True)
class LayerInspection:
    """One layer.

    mixer: its config, in words. visible_range: the tokens it sees, in words. latent: what its heads share, in words,
    or "". state_bytes: at the text's length and at LONG_CONTEXT; None for a bidirectional design. weights: None if
    the mixer computes none.
    """

    mixer: str
    visible_range: str
    latent: str
    window: int | None
    causal: bool
    state_bytes: tuple[int, int] | None
    weights: LayerWeights | None


def inspect_layers(model: Decoder, tokens: list[int]) -> list[LayerInspection]:
    """Run the model on one sequence and collect every layer.

    Raises ConfigError if the design has no attention weights, or the sequence is too long for a page.
    """
    device = model.embed.weight.device
    text = torch.tensor([tokens], device=device)
    _check_size(model, text)
    weights: dict[int, LayerWeights] = {}

    def collect(layer: int, observation: Observation) -> None:
        weights[layer] = summarize_weights(observation)

    forward_with_weights(model, text, None, collect)
    states = _state_bytes(model, len(tokens))
    layers = enumerate(zip(model.config.expand(), model.mixers(), strict=True))
    return [
        _inspect_layer(config.mixer, mixer, states[index], weights.get(index)) for index, ((_, config), mixer) in layers
    ]


def _check_size(model: Decoder, text: Tensor) -> None:
    """Raise ConfigError unless a page can hold the weights; one token is enough to count the heads."""
    heads = 0

    def count(layer: int, observation: Observation) -> None:
        nonlocal heads
        heads += observation.weights.shape[1]

    forward_with_weights(model, text[:, :1], None, count)
    if not heads:
        raise ConfigError("inspect: no mixer of this design has attention weights; choose a design with attention")
    limit = min(MAX_TOKENS, int((MAX_WEIGHTS / heads) ** 0.5))
    if text.shape[1] > limit:
        raise ConfigError(
            f"text: has {text.shape[1]} tokens with the start token; a page of {heads} heads holds at most {limit}; "
            "give a shorter text"
        )


def summarize_weights(observation: Observation) -> LayerWeights:
    """The weights of the first sequence of a batch."""
    weights = observation.weights[0].double().cpu()
    heads, queries, keys = weights.shape
    codes = (weights.sqrt() * 255).round().to(torch.uint8)
    averaged = weights[:, 1:] if queries > 1 else weights
    total = float(averaged.sum().clamp(min=1e-12))
    keys_are_tokens = queries == keys
    distance = (torch.arange(queries)[:, None] - torch.arange(keys)).abs().double()
    distance = distance[1:] if queries > 1 else distance
    return LayerWeights(
        heads=heads,
        groups=observation.groups,
        keys=keys,
        weight_codes=codes.numpy().tobytes(),
        mean_distance=float((averaged * distance).sum()) / total if keys_are_tokens else None,
        self_share=float(averaged[distance.expand_as(averaged) == 0].sum()) / total if keys_are_tokens else None,
        first_token_share=float(averaged[:, :, 0].sum()) / total,
        sink_share=max(0.0, 1.0 - total / (heads * averaged.shape[1])),
    )


def _state_bytes(model: Decoder, length: int) -> list[tuple[int, int] | None]:
    """Bytes of each layer's state at two contexts, from a copy of the model on the meta device."""
    if not model.causal:
        return [None] * len(model.layers)
    meta_model = build(model.config, dtype=model.embed.weight.dtype, device="meta")
    sizes = [meta_model.init_state(1, context).layer_bytes for context in (length, LONG_CONTEXT)]
    return list(zip(*sizes, strict=True))


def _inspect_layer(
    config: MixerConfig | None, mixer: Mixer | None, state_bytes: tuple[int, int] | None, weights: LayerWeights | None
) -> LayerInspection:
    if mixer is None or config is None:
        return LayerInspection("none", "nothing", "", None, True, None, None)
    if mixer.chunked:
        visible_range = f"its chunk of {mixer.window} tokens" + (", up to itself" if mixer.causal else "")
    elif mixer.window is not None:
        visible_range = (
            f"{mixer.window} tokens, itself included" if mixer.causal else f"{mixer.window} tokens to each side"
        )
    else:
        visible_range = "every earlier token" if mixer.causal else "every token"
    return LayerInspection(
        describe(config), visible_range, mixer.state_note, mixer.window, mixer.causal, state_bytes, weights
    )


# The page of an inspected model: maps of every head's attention weights, and a table of the layers.


MIN_SINK_SHARE = 1e-6  # a smaller one is rounding


@dataclass(frozen=True)
class InspectedModel:
    """A model and its input: its name, its number of parameters, and the text of each token."""

    name: str
    parameters: int
    token_texts: Sequence[str]


def inspect_page(model: InspectedModel, layers: Sequence[LayerInspection]) -> str:
    """The page as one HTML document; the same input gives the same bytes."""
    tokens = [visible_token(text) for text in model.token_texts]
    return render(
        "inspect.html",
        title=f"heddle inspect: {model.name}",
        model=model,
        layer_count=len(layers),
        head_count=sum(layer.weights.heads for layer in layers if layer.weights is not None),
        tokens=tokens,
        state_contexts=[format_context(context) for context in (len(tokens), LONG_CONTEXT)],
        rows=[(_mixer_words(layers, index), _cells(layer)) for index, layer in enumerate(layers)],
        weights={"tokens": tokens, "layers": [_script_data(layer) for layer in layers]},
    )


def visible_token(text: str) -> str:
    """A token in printable form: line breaks, tabs, a token of spaces and an empty token get a symbol."""
    symbols = text if text.strip() else text.replace(" ", "·")
    return symbols.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍") or "∅"


def _mixer_words(layers: Sequence[LayerInspection], index: int) -> str:
    """The mixer of a layer, or the first layer with the same one."""
    first = next(number for number, layer in enumerate(layers) if layer.mixer == layers[index].mixer)
    return layers[index].mixer if first == index else f"as layer {first}"


def _cells(layer: LayerInspection) -> list[str]:
    """A row of the table: heads, groups, visible range, four averages, and the state at two contexts."""
    states = [NO_VALUE] * 2 if layer.state_bytes is None else [format_bytes(size) for size in layer.state_bytes]
    weights = layer.weights
    if weights is None:
        return [NO_VALUE, NO_VALUE, layer.visible_range, *[NO_VALUE] * 4, *states]
    return [
        str(weights.heads),
        layer.latent or str(weights.groups),
        layer.visible_range,
        NO_VALUE if weights.mean_distance is None else f"{weights.mean_distance:.1f} tokens",
        NO_VALUE if weights.self_share is None else f"{weights.self_share:.0%}",
        f"{weights.first_token_share:.0%}",
        f"{weights.sink_share:.0%}" if weights.sink_share > MIN_SINK_SHARE else NO_VALUE,
        *states,
    ]


def _script_data(layer: LayerInspection) -> dict[str, Any]:
    """A layer's data for the script. codes: the weights' bytes, compressed with zlib, in base64."""
    data: dict[str, Any] = {
        "kind": layer.mixer.split(" ")[0],
        "visible_range": layer.visible_range,
        "latent": layer.latent,
    }
    if layer.weights is not None:
        data |= {
            "heads": layer.weights.heads,
            "groups": layer.weights.groups,
            "keys": layer.weights.keys,
            "codes": base64.b64encode(zlib.compress(layer.weights.weight_codes, 9)).decode("ascii"),
            "window": layer.window,
            "causal": layer.causal,
        }
    return data
