"""Measure one model of a conversion: loss on held-out text, recall, errors of its layers, and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

from heddle.analysis.comparison.report import summarize_design
from heddle.analysis.conversion.layer_errors import layer_errors
from heddle.analysis.conversion.results import ModelResult
from heddle.analysis.conversion.texts import MeasurementText
from heddle.conversion.weights import Weights, build_model
from heddle.errors import ConfigError
from heddle.exchange.family_match import match_report
from heddle.model.decoder import Decoder
from heddle.model.distinct_layers import build_distinct_layers
from heddle.model.size import measure_size
from heddle.progress import ProgressBar
from heddle.training.evaluation.bits_per_byte import token_bits, token_scores
from heddle.training.evaluation.loss_profile import position_edges, position_groups, scores_by_group
from heddle.training.evaluation.scores import FiniteScores, Scores, finite_scores, row_sums
from heddle.training.evaluation.text_recall import NeedleScores, score_text_recall


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


def measured_rows(text: MeasurementText) -> int:
    """The rows that are read for one model, which its progress is counted in."""
    return text.window_count + text.recall.row_count


def measure_model(
    model: ModelToMeasure, original: Weights, text: MeasurementText, device: str, bar: ProgressBar
) -> ModelResult:
    """Measure a model in all that does not depend on the speed of the machine."""
    decoder = build_model(model.weights).to(device)
    windows, positions = _score_windows(decoder, text, bar)
    first, second, needles = score_recall(decoder, text, bar)
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
        architecture=match_report(design).architecture,
        parameters=model_size.parameters,
        flops_per_token=model_size.flops_per_token,
        state_bytes=_state_bytes(shapes, text.settings.state_contexts),
        windows=windows,
        positions=positions,
        first_spans=first,
        repeated_spans=second,
        needles=needles,
        layer_errors=[]
        if model.weights is original
        else layer_errors(original, model.weights, text.layer_rows, bos_ids),
    )


def score_recall(
    decoder: Decoder, text: MeasurementText, bar: ProgressBar
) -> tuple[FiniteScores, FiniteScores, list[NeedleScores]]:
    """The scores of the first and the second occurrence of each span, and those of the needles at each depth."""
    scores = score_text_recall(decoder, text.recall, advance=bar.advance)
    return scores.first_spans, scores.repeated_spans, scores.needles


def _score_windows(
    decoder: Decoder, text: MeasurementText, bar: ProgressBar
) -> tuple[FiniteScores, list[FiniteScores]]:
    """The score of each window, and for each range of positions the score of each window's tokens in it."""
    edges = position_edges(text.settings.sequence_length)
    windows: Scores = []
    positions: list[Scores] = [[] for _ in text.position_ranges]
    for batch, tokens in token_scores(decoder, text.windows, text.corpus.tokenizer.byte_lengths):
        bits, sizes = token_bits(tokens), tokens.sizes.cpu().numpy()
        windows += row_sums(bits, sizes)
        groups = position_groups(batch.doc_lengths, edges)
        for scores, added in zip(positions, scores_by_group(bits, sizes, groups, len(positions)), strict=True):
            scores += added
        bar.advance(len(batch.tokens))
    return finite_scores(windows), [finite_scores(scores) for scores in positions]


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
