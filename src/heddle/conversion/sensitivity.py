"""Which layers a conversion changes: how much each one matters on the user's text, and how many stay unchanged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from heddle.config import DesignError, refuse
from heddle.conversion.head_parameters import rows_of
from heddle.conversion.weights import (
    CalibrationText,
    LayerActivations,
    Weights,
    fill_parameters,
    layer_activations,
    run_layer,
)
from heddle.model.decoder import Decoder, build
from heddle.numerics.attention.observer import Observation, observing_attention
from heddle.numerics.cross_entropy import token_losses
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer
from heddle.progress import progress_bar

SENSITIVITY_TOKENS = 2**14  # the streams of every replaced layer are in memory together

LayerCount = int | float | str  # a number of layers, or a share of them: 2, 0.25, "1/4"


def count_layers(value: LayerCount, layers: int) -> int:
    """The number of layers that the option `keep`, a count or a share of `layers`, stands for.

    Raises DesignError if it is not from 1 to layers − 1.
    """
    try:
        number = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise DesignError("keep", f"{value!r} is not a number; give a count of layers or a share, like 1/4") from None
    count = number if number >= 1 else number * layers
    if count.denominator != 1:
        raise DesignError("keep", f"{value} of {layers} layers is not a whole number; give a number of layers")
    if not 1 <= count < layers:
        reason = f"{value} of the {layers} layers that can be converted leaves none to convert or none to keep"
        raise DesignError("keep", f"{reason}; give 1 to {layers - 1}" if layers > 1 else f"{reason}; leave it out")
    return int(count)


def top_layers(values: Mapping[int, float], count: int) -> tuple[int, ...]:
    """The indices of the layers with the `count` largest values, ascending. Ties go to the lower layer."""
    return tuple(sorted(sorted(values, key=lambda index: (-values[index], index))[:count]))


@torch.no_grad()
def hidden_attention(activations: LayerActivations, window: int) -> float:
    """The attention weight that a token gives to keys hidden by a window, mean over tokens and heads, from 0 to 1.

    Raises DesignError for a mixer that has no attention weights.
    """
    mixer = activations.layer.mixer
    assert mixer is not None
    total, count = 0.0, 0
    for x, layout in zip(activations.mixer_inputs, activations.layouts, strict=True):
        for row in range(len(x)):
            row_layout = rows_of(layout, slice(row, row + 1))
            observations: list[Observation] = []
            with observing_attention(observations.append):
                mixer(x[row : row + 1], row_layout)
            is_token = row_layout.positions[0] >= 0
            hidden = ~row_layout.attention_mask(window, mixer.causal).materialize()[:, None]
            for observation in observations:
                beyond = (observation.weights * hidden).sum(-1)[..., is_token]
                total, count = total + float(beyond.double().sum()), count + beyond.numel()
    if not count:
        raise DesignError(f"layers.{activations.index}", "has no attention weights; measure the loss instead")
    return total / count


@torch.no_grad()
def replacement_losses(
    weights: Weights,
    text: CalibrationText,
    replacement: Callable[[LayerActivations], Mixer | None],
    label: str = "measuring layers",
) -> dict[int, float]:
    """The increase of the mean next-token loss, in nats, when one layer's mixer alone is replaced, by layer.

    replacement: the mixer in place of a layer's, or None for a layer that is not measured. The weights of one layer are
    in memory at a time. At most SENSITIVITY_TOKENS tokens of the text are read. label: of the progress bar.
    """
    text = _first_tokens(text, SENSITIVITY_TOKENS)
    replaced: dict[int, list[Any]] = {}
    streams: list[Any] = []
    with progress_bar(label, weights.design.depth, "layers") as bar:
        for activations in layer_activations(weights, text):
            layer, layouts = activations.layer, activations.layouts
            for index in replaced:
                replaced[index] = run_layer(index, layer, replaced[index], layouts).new_streams
            mixer = replacement(activations)
            if mixer is not None:
                original, layer.mixer = layer.mixer, mixer
                result = run_layer(activations.index, layer, activations.streams, layouts)
                replaced[activations.index] = result.new_streams
                layer.mixer = original
            streams = activations.new_streams
            bar.advance(1)
    top = _top(weights, text.device)
    loss = _mean_loss(top, text, streams)
    return {index: _mean_loss(top, text, changed) - loss for index, changed in replaced.items()}


def _first_tokens(text: CalibrationText, tokens: int) -> CalibrationText:
    """The first batches of a text, at least one."""
    batches: list[Tensor] = []
    layouts: list[Layout] = []
    count = 0
    for batch, layout in zip(text.batches, text.layouts, strict=True):
        if batches and count + batch.numel() > tokens:
            break
        batches.append(batch)
        layouts.append(layout)
        count += batch.numel()
    return replace(text, batches=batches, layouts=layouts)


def _top(weights: Weights, device: torch.device) -> Decoder:
    """A meta model whose final norm and head have their weights."""
    model = build(weights.design, device="meta").eval()
    fill_parameters(model.final_norm, "final_norm.", weights, device)
    if model.config.head.tied:
        model.head.weight = nn.Parameter(weights.tensor("embed.weight").to(device))
        if model.head.bias is not None:
            model.head.bias = nn.Parameter(weights.tensor("head.bias").to(device))
        if model.head.transform is not None:
            fill_parameters(model.head.transform, "head.transform.", weights, device)
    else:
        fill_parameters(model.head, "head.", weights, device)
    return model


def _mean_loss(top: Decoder, text: CalibrationText, streams: Sequence[Any]) -> float:
    """The mean next-token loss within documents, in nats."""
    total, count = 0.0, 0
    for batch, layout, stream in zip(text.batches, text.layouts, streams, strict=True):
        positions, ids = layout.positions, layout.dense_segment_ids
        scored = (positions[:, :-1] >= 0) & (positions[:, 1:] >= 0) & (ids[:, 1:] == ids[:, :-1])
        hidden, targets = top.final_norm(stream)[:, :-1][scored], batch[:, 1:][scored]
        total += float(token_losses(hidden, top.head.output_head, targets).double().sum())
        count += len(targets)
    return total / max(1, count)


# A budget for the state of all layers, given to the layers where it saves most.


Size = tuple[int, float]  # elements of state per token, and the layer's loss with them


def parse_share(value: Any) -> Any:
    """`25%` -> 0.25; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return float(value.removesuffix("%")) / 100 if value.endswith("%") else float(value)
    except ValueError:
        refuse("", f"'{value}' is not a share of the state per token; write 25% or 0.25")


# The share of the source's state per token to keep.
StateBudget = Annotated[float, Field(gt=0.0, le=1.0), BeforeValidator(parse_share)]


def plan_sizes(choices: Sequence[Sequence[Size]], budget: int) -> list[int] | None:
    """Choose a size for each layer so that the losses sum to nearly the minimum and the sizes to at most `budget`.

    choices: of each layer, in order of their sizes. Greedy on their convex hulls: from the smallest sizes on, the step
    of any layer that saves most per element is taken. None if the smallest sizes exceed the budget.
    """
    hulls = [_lower_hull(sizes) for sizes in choices]
    taken = [0] * len(hulls)
    rest = budget - sum(hull[0][0] for hull in hulls)
    if rest < 0:
        return None
    while True:
        steps = [
            ((hull[at][1] - hull[at + 1][1]) / (hull[at + 1][0] - hull[at][0]), index)
            for index, (hull, at) in enumerate(zip(hulls, taken, strict=True))
            if at + 1 < len(hull) and hull[at + 1][0] - hull[at][0] <= rest
        ]
        if not steps:
            return [hull[at][0] for hull, at in zip(hulls, taken, strict=True)]
        _, index = max(steps)
        hull, at = hulls[index], taken[index]
        rest -= hull[at + 1][0] - hull[at][0]
        taken[index] += 1


def _lower_hull(sizes: Sequence[Size]) -> list[Size]:
    """The lower convex hull of the choices."""
    hull: list[Size] = []
    for size, loss in sizes:
        if hull and loss >= hull[-1][1]:
            continue  # more state, and nothing saved
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (size - hull[-2][0]) >= (loss - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((size, loss))
    return hull
