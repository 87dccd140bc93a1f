"""Measure one model of a conversion: loss on held-out text, recall, errors of its layers, and sizes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from heddle.analysis.comparison.run import summarize_design
from heddle.analysis.conversion.layer_errors import layer_errors
from heddle.analysis.conversion.results import FiniteScores, ModelResult, NeedleScores
from heddle.analysis.conversion.texts import MeasurementText
from heddle.conversion.weights import Weights, build_model
from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.exchange.family_match import match_report
from heddle.model.decoder import Decoder
from heddle.model.size import build_distinct_layers, measure_size
from heddle.progress import ProgressBar
from heddle.training.evaluation.bits_per_byte import token_nats_and_bytes
from heddle.training.evaluation.scores import Scores
from heddle.training.evaluation.task_accuracy import correct_predictions


@dataclass(frozen=True)
class ModelToMeasure:
    """A model that a conversion read or made.

    stage: original, converted or healed. method: how it was converted, without the size; one line of the figures.
    source: the folder or the command it is from. key: identifies its weights, so that nothing is measured twice.
    """

    name: str
    stage: str
    weights: Weights
    key: str
    method: str = ""
    source: str = ""


class _TokenLosses(NamedTuple):
    """Of one batch: bits float64 [B, T], bytes int64 [B, T], and the batch."""

    bits: np.ndarray
    sizes: np.ndarray
    batch: Batch


def measured_rows(text: MeasurementText) -> int:
    """The rows that are read for one model, which its progress is counted in."""
    rows = text.window_count
    if text.row_length:
        rows += len(text.span_rows.first) + sum(len(b.tokens) for _, batches in text.needle_rows for b in batches)
    return rows


def measure_model(
    model: ModelToMeasure, original: Weights, text: MeasurementText, device: str, bar: ProgressBar
) -> ModelResult:
    """Measure a model in all that does not depend on the speed of the machine."""
    decoder = build_model(model.weights).to(device)
    windows = list(_token_losses(decoder, text.windows, text, bar))
    first, second, needles = score_recall(decoder, text, bar)
    del decoder
    design, dtype = model.weights.design, model.weights.dtype
    shapes = build_distinct_layers(design, dtype)
    model_size = measure_size(shapes, text.settings.sequence_length)
    return ModelResult(
        name=model.name,
        stage=model.stage,
        method=model.method,
        source=model.source,
        key=model.key,
        design_key=f"{design.fingerprint()} {dtype}",
        summary=summarize_design(design, model_size),
        architecture=match_report(design).architecture,
        parameters=model_size.parameters,
        flops_per_token=model_size.flops_per_token,
        state_bytes=_state_bytes(shapes, text.settings.state_contexts),
        windows=_finite([pair for losses in windows for pair in _row_sums(losses.bits, losses.sizes)]),
        positions=[_position_scores(windows, *bounds) for bounds in text.position_ranges],
        first_spans=first,
        repeated_spans=second,
        needles=needles,
        layer_errors=[] if model.weights is original else layer_errors(original, model.weights, text.layer_rows),
    )


def score_recall(
    decoder: Decoder, text: MeasurementText, bar: ProgressBar
) -> tuple[FiniteScores, FiniteScores, list[NeedleScores]]:
    """The scores of the first and the second occurrence of each span, and those of the needles at each depth."""
    first: Scores = []
    second: Scores = []
    if not text.row_length:
        return [], [], []
    spans = text.span_rows
    for losses in _token_losses(decoder, spans.batches, text, bar):
        rows = losses.batch.sample_indices
        for starts, scores in ((spans.first[rows], first), (spans.second[rows], second)):
            columns = starts[:, None] + np.arange(spans.length)
            bits, sizes = (np.take_along_axis(values, columns, 1) for values in (losses.bits, losses.sizes))
            scores += _row_sums(bits, sizes)
    needles = []
    for depth, batches in text.needle_rows:
        sums = [_row_sums(losses.bits, losses.sizes) for losses in _token_losses(decoder, batches, text, bar)]
        scores = [pair for batch_sums in sums for pair in batch_sums]
        needles.append(NeedleScores(depth, _finite(scores), _finite(correct_predictions(decoder, batches))))
    return _finite(first), _finite(second), needles


def _token_losses(
    decoder: Decoder, batches: Sequence[Batch], text: MeasurementText, bar: ProgressBar
) -> Iterable[_TokenLosses]:
    losses = token_nats_and_bytes(decoder, batches, text.corpus.tokenizer.byte_lengths)
    for batch, (nats, sizes) in zip(batches, losses, strict=True):
        yield _TokenLosses(nats.cpu().numpy() / math.log(2), sizes.cpu().numpy(), batch)
        bar.advance(len(batch.tokens))


def _row_sums(bits: np.ndarray, sizes: np.ndarray) -> Scores:
    return list(zip(bits.sum(1).tolist(), sizes.sum(1).tolist(), strict=True))


def _finite(scores: Scores) -> FiniteScores:
    """The scores with None for what JSON cannot express."""
    return [(score if math.isfinite(score) else None, count) for score, count in scores]


def _position_scores(windows: Sequence[_TokenLosses], first: int, end: int) -> FiniteScores:
    """The scores of the tokens of each window whose input has a position in [first, end) of its document."""
    scores: Scores = []
    for losses in windows:
        positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in losses.batch.doc_lengths])
        inside = (positions >= first) & (positions < end)
        scores += _row_sums(np.where(inside, losses.bits, 0.0), losses.sizes * inside)
    return _finite(scores)


def _state_bytes(shapes: Decoder, contexts: Sequence[int]) -> list[tuple[int, int]]:
    """(context, bytes of the layers' states) at each context that the design of a meta model can process."""
    sizes = []
    for context in contexts:
        try:
            measured = measure_size(shapes, context)
        except ConfigError:  # the context is longer than the learned positions
            break
        sizes.append((context, measured.state_bytes - measured.position_table_bytes))
    return sizes
