"""Record each layer's attention weights in a call, computed exactly while fast kernels compute the output."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.notebook import Image, gray_image, html_table
from heddle.numerics.attention.observer import Observation, observing_attention
from heddle.parts.layout import Layout

_MAX_SHOWN = 8  # heads of a layer, in a notebook
_MAX_PIXELS = 96


class AttentionWeights(list[Tensor | None]):
    """The weights of each layer, [B, H, T, S] or None. A notebook shows the first sequence's as images."""

    def _repr_html_(self) -> str:
        rows = [(index, *_shown(index, weights)) for index, weights in enumerate(self)]
        return html_table(("layer", "heads", "weights, dark: 1"), rows, "attention weights of the first sequence")


def _shown(index: int, weights: Tensor | None) -> tuple[str, Image]:
    if weights is None:
        return "none", Image()
    heads = weights[0, :_MAX_SHOWN].float()
    pixels = (min(heads.shape[1], _MAX_PIXELS), min(heads.shape[2], _MAX_PIXELS))
    codes = (255 - adaptive_max_pool2d(heads.abs(), pixels).clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    images = (
        gray_image([bytes(row) for row in head.tolist()], f"layer {index}, head {number}")
        for number, head in enumerate(codes)
    )
    count = weights.shape[1]
    return f"{count}" if count <= _MAX_SHOWN else f"{_MAX_SHOWN} of {count}", Image("".join(images))


def attention_weights(
    model: Decoder, tokens: Tensor, layout: Layout | None = None, implied: bool = False
) -> AttentionWeights:
    """Return the attention weights [B, H, T, S] of each layer for tokens int64 [B, T]; None for a layer without any.

    Weights are in at least float32, before dropout. Each row sums to 1, or to less with a sink; rows of padding are
    zero. S is T, or the length of the encoder output that cross-attention reads. A layer has no weights if it has no
    mixer or its mixer has no softmax. With `implied`, mixers without a softmax return the factor of each value (after
    its convolution) in each output (before its norm and gate): these rows need not sum to 1 and may be negative;
    a mixer with several values per token has none. The heads of two mixers in one layer are concatenated. Raises
    ConfigError if these two read different lengths.
    """
    weights = AttentionWeights([None] * len(model.layers))

    def on_weights(index: int, observation: Observation) -> None:
        weights[index] = observation.weights

    forward_with_weights(model, tokens, layout, on_weights, implied)
    return weights


@torch.no_grad()
def forward_with_weights(
    model: Decoder,
    tokens: Tensor,
    layout: Layout | None,
    on_weights: Callable[[int, Observation], None],
    implied: bool = False,
) -> Tensor:
    """Call the model without a state and pass the weights of each layer to `on_weights(layer_index, observation)`.

    Only one layer's weights are in memory at a time. Returns the hidden states [B, T, width], bit-equal to those of
    a plain call. No other thread may call the model meanwhile. Raises ConfigError as `attention_weights` does.
    """
    with record_weights(model, on_weights, implied):
        hidden: Tensor = model(tokens, layout)[0]
    return hidden


@contextmanager
def record_weights(
    model: Decoder, on_weights: Callable[[int, Observation], None], implied: bool = False
) -> Iterator[None]:
    """Pass the weights of every call of the model within the block to `on_weights`, as `forward_with_weights` does.

    In a call with a state, S is the number of tokens in the mixer's cache.
    """
    observations: list[Observation] = []

    def before_mixer(*_: object) -> None:
        observations.clear()

    def after_mixer(index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if observations:
                on_weights(index, _concatenate_heads(index, observations))

        return hook

    with ExitStack() as stack:
        for index, mixer in enumerate(model.mixers()):
            if mixer is not None:
                stack.callback(mixer.register_forward_pre_hook(before_mixer).remove)
                stack.callback(mixer.register_forward_hook(after_mixer(index)).remove)
        stack.enter_context(observing_attention(observations.append, implied))
        yield


def _concatenate_heads(index: int, observations: list[Observation]) -> Observation:
    """Join the observations of the mixers of one layer along the heads."""
    if len(observations) == 1:
        return observations[0]
    lengths = sorted({observation.weights.shape[3] for observation in observations})
    if len(lengths) > 1:
        raise ConfigError(
            f"attention_weights: layer {index} attends to sequences of {lengths} tokens, and their weights do not fit "
            "in one tensor; collect them with heddle.numerics.attention.observer"
        )
    weights = torch.cat([observation.weights for observation in observations], dim=1)
    return Observation(weights, sum(observation.groups for observation in observations))
