"""Measure one model of a conversion: loss on held-out text, recall, errors of its layers, and sizes."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heddle.conversion.weights import CalibrationText, Weights, build_model, layer_activations, run_layer
from heddle.data.corpus import Corpus
from heddle.data.samples import Batch, evaluation_windows, joined
from heddle.errors import ConfigError
from heddle.exchange.family_match import match_report
from heddle.exchange.gguf.match import architecture_of
from heddle.lab.conversion.results import LayerError, ModelResult
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.size import build_distinct_layers, measure_size, summarize_design
from heddle.parts.layout import Layout
from heddle.progress import ProgressBar, print_text
from heddle.training.evaluation.loss_profile import (
    frequency_groups,
    position_edges,
    position_groups,
    scores_by_group,
    token_frequencies,
)
from heddle.training.evaluation.scores import FiniteScores, finite_scores, row_sums, token_bits, token_scores
from heddle.training.evaluation.text_recall import TextRecall, TextRecallScores, score_text_recall, unread

# How far each layer of a converted model is from the original's, on held-out text, with two layers in memory.


@torch.no_grad()
def layer_errors(
    original: Weights, converted: Weights, rows: Sequence[Batch], bos_ids: Sequence[int] = ()
) -> list[LayerError]:
    """Compare two models layer by layer; empty if they differ in depth, so that layers do not correspond.

    bos_ids: tokens to leave out. The hidden state of BOS can be a hundred times as large as for any other token, and
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
    """The compared tokens [N, ...] of each batch's tensors [B, T, ...]; None: all, unchanged."""
    if compared is None:
        return values
    return [[x[tokens] for x in _tensors(value)] for value, tokens in zip(values, compared, strict=True)]


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


# The held-out text that is read before and after a conversion: windows, repeated spans and needles.
#
# Spans and needles come from `heddle.training.evaluation.text_recall`. Nothing is trained.


@dataclass(frozen=True)
class MeasurementSettings:
    """How much is read. windows, span_rows, needle_rows: upper limits. speed_contexts: empty: no speed test."""

    sequence_length: int = 256
    windows: int = 256
    batch_size: int = 8
    span_rows: int = 64
    needle_rows: int = 32
    layer_rows: int = 8
    speed_contexts: tuple[int, ...] = (512, 2048, 8192)
    state_contexts: tuple[int, ...] = (2048, 8192, 32768)


@dataclass(frozen=True)
class MeasurementText:
    """The held-out text of a corpus, cut into windows, spans and needles."""

    corpus: Corpus
    settings: MeasurementSettings

    @cached_property
    def windows(self) -> list[Batch]:
        """At most `settings.windows` windows in order, spread evenly over the text: the same for every batch size."""
        file, length, wanted = self.corpus.validation, self.settings.sequence_length, self.settings.windows
        every = max(1, -(-(len(file) - 1) // length) // wanted)
        read = list(evaluation_windows(file, length, 1, self.corpus.rows, every))
        kept = [read[index * len(read) // wanted] for index in range(wanted)] if len(read) > wanted else read
        return list(joined(kept, self.settings.batch_size))

    @property
    def window_count(self) -> int:
        """The number of windows."""
        return sum(len(batch.tokens) for batch in self.windows)

    @property
    def text_bytes(self) -> int:
        """The bytes of all scored tokens."""
        lengths = self.corpus.tokenizer.byte_lengths
        return sum(int(lengths[batch.targets].sum()) for batch in self.windows)

    @property
    def position_ranges(self) -> list[tuple[int, int]]:
        """Ranges [first, end) of positions, each twice as long as the one before it."""
        return list(pairwise(position_edges(self.settings.sequence_length)))

    @cached_property
    def token_groups(self) -> np.ndarray:
        """The group of each token by its frequency in the training text, int64 [vocab]; 0: the most frequent ones."""
        return frequency_groups(token_frequencies(self.corpus))

    @cached_property
    def recall(self) -> TextRecall:
        """The rows of the recall tests."""
        settings = self.settings
        rows = (settings.span_rows, settings.needle_rows)
        return TextRecall(self.corpus, settings.sequence_length, *rows, settings.batch_size)

    @property
    def layer_rows(self) -> list[Batch]:
        """The first windows, on which layers are compared."""
        starts = np.cumsum([0, *(len(batch.tokens) for batch in self.windows)]).tolist()
        left = [self.settings.layer_rows - start for start in starts]
        return [_first_rows(batch, rows) for batch, rows in zip(self.windows, left, strict=False) if rows > 0]


def _first_rows(batch: Batch, count: int) -> Batch:
    """At most `count` rows of a batch of text."""
    return Batch(batch.tokens[:count], batch.doc_lengths[:count], batch.sample_indices[:count])


@dataclass(frozen=True)
class ModelToMeasure:
    """A model that a conversion read or made.

    stage: original, converted or healed. method: how it was converted, without the size; one line in the figures.
    source: the folder or command that it comes from. key: identifies its weights, so that nothing is measured twice.
    family: that it was imported from.
    """

    name: str
    stage: str
    weights: Weights
    key: str
    method: str = ""
    source: str = ""
    family: str | None = None


@dataclass(frozen=True)
class ReadScores:
    """The scores of the rows that a model has read so far.

    windows: of each window. positions: for each range of positions, of the tokens in it, by window. frequencies: for
    each group of tokens by frequency.
    """

    windows: FiniteScores
    positions: list[FiniteScores]
    frequencies: list[FiniteScores]
    recall: TextRecallScores


def measured_rows(text: MeasurementText) -> int:
    """The rows that are read for one model: the unit of its progress bar."""
    return text.window_count + text.recall.row_count


def measure_model(
    model: ModelToMeasure,
    original: Weights,
    text: MeasurementText,
    device: str,
    bar: ProgressBar,
    begun: ReadScores | None = None,
    save: Callable[[ReadScores, bool], None] = lambda scores, is_all: None,
) -> ModelResult:
    """Measure everything about a model that does not depend on the speed of the machine.

    begun: scores of the first rows from an earlier call. save: called after each batch with the scores so far, and
    whether they are complete.
    """
    positions: list[FiniteScores] = [[] for _ in text.position_ranges]
    frequencies: list[FiniteScores] = [[] for _ in range(int(text.token_groups.max()) + 1)]
    scores = begun or ReadScores([], positions, frequencies, TextRecallScores([], [], []))
    decoder = build_model(model.weights).to(device)

    def advance(rows: int) -> None:
        bar.advance(rows)
        save(scores, False)

    _score_windows(decoder, text, scores, advance)
    recall = score_text_recall(decoder, text.recall, advance=advance, begun=scores.recall)
    save(scores, True)
    del decoder
    design, dtype, bos_ids = model.weights.design, model.weights.dtype, text.corpus.rows.bos_ids
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
        architecture=_architecture(design, model.family),
        parameters=model_size.parameters,
        flops_per_token=model_size.flops_per_token,
        state_bytes=_state_bytes(shapes, text.settings.state_contexts),
        windows=scores.windows,
        positions=scores.positions,
        frequencies=scores.frequencies,
        first_spans=recall.first_spans,
        repeated_spans=recall.repeated_spans,
        needles=recall.needles,
        layer_errors=[]
        if model.weights is original
        else layer_errors(original, model.weights, text.layer_rows, bos_ids),
    )


def _score_windows(decoder: Decoder, text: MeasurementText, scores: ReadScores, advance: Callable[[int], None]) -> None:
    """Score the windows that have no score yet."""
    edges = position_edges(text.settings.sequence_length)
    advance(len(scores.windows))
    rest = unread(text.windows, scores.windows)
    for batch, tokens in token_scores(decoder, rest, text.corpus.tokenizer.byte_lengths):
        bits, sizes = token_bits(tokens), tokens.sizes.cpu().numpy()
        scores.windows.extend(finite_scores(row_sums(bits, sizes)))
        by_frequency = text.token_groups[np.clip(batch.targets, 0, None)]
        for collected, groups in (
            (scores.positions, position_groups(batch.doc_lengths, edges)),
            (scores.frequencies, by_frequency),
        ):
            for own, added in zip(collected, scores_by_group(bits, sizes, groups, len(collected)), strict=True):
                own.extend(finite_scores(added))
        advance(len(batch.tokens))


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


# What a dry run prints.


DRY_RUN_CONTEXT = 2048  # tokens; the shortest for which a dry run prints costs
ROWS = {  # of a dry run's table, by the name in JSON
    "parameters": "parameters",
    "dtype": "weights and state",
    "state_bytes_per_token": "state bytes per token",
    "states": "state bytes at {:,}",
    "flops_per_token": "FLOPs per token at {:,}",
    "architecture": "exports as",
    "gguf": "GGUF, for llama.cpp",
}


@cache
def _architecture(design: ModelConfig, family: str | None) -> str:
    """The class that a design exports as. Cached, since the models of a sweep share designs."""
    return match_report(design, family).architecture


def conversion_costs(
    weights: Weights, design: ModelConfig, contexts: Sequence[int] = (), family: str | None = None
) -> dict[str, dict[str, Any]]:
    """Sizes and costs of both designs.

    contexts: lengths at which state bytes are listed, besides `DRY_RUN_CONTEXT`. family: that the model came from.
    """
    columns = {}
    context = weights.design.usual_length(DRY_RUN_CONTEXT)
    lengths = sorted({context, *map(weights.design.usual_length, contexts)})
    for label, config in (("before", weights.design), ("after", design)):
        shapes = build_distinct_layers(config, weights.dtype)
        costs = measure_size(shapes, context)
        columns[label] = {
            "parameters": costs.parameters,
            "dtype": str(weights.dtype).removeprefix("torch."),
            "context_length": context,
            "state_bytes_per_token": costs.state_bytes_per_token,
            "state_bytes": costs.state_bytes,
            "states": {length: measure_size(shapes, length).state_bytes for length in lengths},
            "flops_per_token": round(costs.flops_per_token),
            "architecture": _architecture(config, family),
            "gguf": "no" if (graph := architecture_of(config, family)) is None else graph[1].name,
        }
    return columns


def print_costs(costs: dict[str, dict[str, dict[str, Any]]], as_json: bool) -> None:
    """Print the costs of each conversion, without its name if there is only one."""
    if as_json:
        print_text(json.dumps(next(iter(costs.values())) if len(costs) == 1 else costs, indent=2))
        return
    for name, columns in costs.items():
        if len(costs) > 1:
            print_text(name)
        print_text(f"{'':30}{'before':>24}{'after':>24}")
        context = columns["before"]["context_length"]
        for name, row in ROWS.items():
            pair = [columns[label][name] for label in ("before", "after")]
            cells = [each if isinstance(each, dict) else {context: each} for each in pair]
            for length in cells[0]:
                shown = [f"{cell[length]:,}" if isinstance(cell[length], int) else cell[length] for cell in cells]
                print_text(f"{row.format(length):30}{shown[0]:>24}{shown[1]:>24}")
