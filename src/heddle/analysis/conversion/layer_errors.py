"""How far each layer of a converted model is from the original's, on held-out text, with two layers in memory."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from heddle.analysis.conversion.results import LayerError
from heddle.conversion.activations import CalibrationText, layer_activations, run_layer
from heddle.conversion.weights import Weights
from heddle.data.samples import Batch
from heddle.parts.context.layout import Layout


@torch.no_grad()
def layer_errors(
    original: Weights, converted: Weights, rows: Sequence[Batch], bos_ids: Sequence[int] = ()
) -> list[LayerError]:
    """Compare two models layer by layer; empty where they differ in depth, so that no layer stands for another.

    bos_ids: tokens that are left out. The stream of BOS can be a hundred times as large as that of any other token, and
    hardly changes (massive activations, Sun et al. 2024, https://arxiv.org/abs/2402.17762).
    """
    if original.design.depth != converted.design.depth:
        return []
    tokens = [torch.from_numpy(batch.tokens[:, :-1].copy()) for batch in rows]
    layouts = [Layout.packed(batch.doc_lengths, batch.targets.shape[1]) for batch in rows]
    text = CalibrationText(tokens, layouts)
    compared = [~torch.isin(batch, torch.tensor(bos_ids)) for batch in tokens] if bos_ids else None
    same_width = original.design.width == converted.design.width
    errors = []
    for reference, layer in zip(layer_activations(original, text), layer_activations(converted, text), strict=True):
        mixer = None
        if same_width and reference.mixer_outputs and layer.layer.mixer is not None:
            # on the original's stream and not on its mixer's inputs, because the norm before it may have changed too
            outputs = run_layer(layer.index, layer.layer, reference.streams, layouts).mixer_outputs
            mixer = relative_distance(_select(outputs, compared), _select(reference.mixer_outputs, compared))
        streams = (_select(activations.new_streams, compared) for activations in (layer, reference))
        errors.append(LayerError(layer.index, mixer, relative_distance(*streams)))
    return errors


def relative_distance(values: Any, reference: Any) -> float | None:
    """‖values − reference‖ / ‖reference‖ over tensors in lists or tuples; None for other shapes or no finite number."""
    pairs = list(zip(_tensors(values), _tensors(reference), strict=False))
    if not pairs or any(a.shape != b.shape for a, b in pairs):
        return None
    distance = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    norm = sum(float(b.double().square().sum()) for _, b in pairs)
    error = math.sqrt(distance / norm) if norm else math.nan
    return error if math.isfinite(error) else None


def _select(values: Sequence[Any], compared: Sequence[Tensor] | None) -> Sequence[Any]:
    """The tokens [N, ...] of each batch's tensors [B, T, ...] that are compared; None: all, as they are."""
    if compared is None:
        return values
    return [[x[tokens] for x in _tensors(value)] for value, tokens in zip(values, compared, strict=True)]


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
