"""What is measured before and after a conversion: the same held-out text, recall without training, errors by layer."""

import contextlib
import copy
import math
import random
import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heddle.conversion import weights as weights_module
from heddle.conversion.rewrites.fold_norms import FoldNorms
from heddle.conversion.weights import ModelWeights, Weights
from heddle.data.corpus import Corpus, prepare_corpus
from heddle.data.samples import Batch
from heddle.errors import CheckpointError
from heddle.lab.compare.results import plain
from heddle.lab.conversion import measure as measure_module
from heddle.lab.conversion import run as run_module
from heddle.lab.conversion.measure import (
    MeasurementSettings,
    MeasurementText,
    ModelToMeasure,
    layer_errors,
    measured_rows,
)
from heddle.lab.conversion.results import (
    CONVERTED,
    HEALED,
    ORIGINAL,
    ConversionResults,
    chance_accuracy,
    needle_accuracy,
    parse_results,
)
from heddle.lab.conversion.run import ConversionReport, measure_conversion
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.parts.layout import Layout
from heddle.storage.file_io import read_json_file
from heddle.training.evaluation import text_recall as recall_module
from heddle.training.evaluation.scores import bits_and_bytes, finite_ratio, token_scores
from heddle.training.evaluation.text_recall import DEPTHS, LEADING_TOKENS, NEEDLE_TOKENS, TextRecall, score_text_recall
from tests import small
from tests.conversion.exactness import design, source_model
from tests.laws.planting import Plant, assigned, calls, reads

SETTINGS = MeasurementSettings(
    sequence_length=128,
    windows=16,
    batch_size=4,
    span_rows=6,
    needle_rows=5,
    layer_rows=3,
    speed_contexts=(8, 16),
    state_contexts=(16, 32),
)

VOCABULARY = 272


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Lines of random letters, in which nothing can be predicted but what stood there before."""
    folder, draw = tmp_path_factory.mktemp("letters"), random.Random(0)
    for number in range(40):
        lines = ["".join(draw.choices(string.ascii_letters + string.digits, k=30)) for _ in range(40)]
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return prepare_corpus([str(folder)], vocab_size=VOCABULARY, max_train_tokens=None)


@pytest.fixture
def text(letters: Corpus) -> MeasurementText:
    return MeasurementText(letters, SETTINGS)


def test_the_text_does_not_depend_on_how_many_rows_are_read_at_a_time(letters: Corpus) -> None:
    """Reports of one model on machines with other batch sizes are of the same windows."""
    first, *others = (MeasurementText(letters, replace(SETTINGS, batch_size=size)) for size in (8, 7, 3, 1))

    def rows(batches: list[Batch]) -> list[list[int]]:
        return [row.tolist() for batch in batches for row in batch.tokens]

    for text in others:
        assert rows(text.windows) == rows(first.windows)
        assert rows(text.layer_rows) == rows(first.layer_rows)
        assert max(len(batch.tokens) for batch in text.windows) == text.settings.batch_size


@pytest.mark.parametrize("asked", [1, 4, 5, 9])
def test_as_many_windows_are_read_as_were_asked_for(letters: Corpus, asked: int) -> None:
    """Whatever the batch size; spread over the text, and all of a text that has fewer."""
    text = MeasurementText(letters, replace(SETTINGS, windows=asked))
    everything = MeasurementText(letters, replace(SETTINGS, windows=10**6))
    numbers = [int(number) for batch in text.windows for number in batch.sample_indices]
    assert len(numbers) == text.window_count == asked < everything.window_count
    assert numbers == sorted(set(numbers))
    assert numbers[-1] >= everything.window_count * (asked - 1) // (2 * asked)
    length = SETTINGS.sequence_length
    assert everything.window_count == -(-(len(letters.validation) - 1) // length)


def make_original() -> Decoder:
    mixer = {"kind": "attention", "heads": 2, "position": {"kind": "rope"}}
    return source_model(design(mixer, vocab_size=VOCABULARY)).float()


@pytest.fixture
def original() -> Decoder:
    return make_original()


def noisy(model: Decoder) -> Decoder:
    """The model with other keys in its second layer."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("layers.1.mixer.k.weight").add_(0.5)
    return other


class Copier(Decoder):
    """Predicts what followed the longest earlier occurrence of the newest tokens; knows nothing else."""

    def __init__(self) -> None:
        data = small.design(width=VOCABULARY, head={"tied": False}, vocab_size=VOCABULARY)
        super().__init__(load_config(data))
        with torch.no_grad():
            self.head.weight.copy_(60 * torch.eye(VOCABULARY))

    def forward(self, tokens: Tensor, layout: Layout | None = None, state: Any = None) -> tuple[Tensor, Any]:
        hidden = torch.zeros(*tokens.shape, VOCABULARY)
        for row, history in enumerate(tokens.tolist()):
            for end in range(LEADING_TOKENS, len(history) + 1):
                recent = history[end - LEADING_TOKENS : end]
                for start in range(end - LEADING_TOKENS - 1, -1, -1):
                    if history[start : start + LEADING_TOKENS] == recent:
                        hidden[row, end - 1, history[start + LEADING_TOKENS]] = 1.0
                        break
        return hidden, None


def test_the_needles_are_where_they_are_said_to_be(text: MeasurementText) -> None:
    half = NEEDLE_TOKENS // 2
    by_depth = {depth: np.concatenate([batch.tokens for batch in rows]) for depth, rows in text.recall.needle_rows}
    assert set(by_depth) == {*DEPTHS, None}
    for depth, rows in by_depth.items():
        assert rows.shape == (SETTINGS.needle_rows, text.recall.row_length + 1)
        for row in rows:
            needle = row[-NEEDLE_TOKENS:]
            hidden = row[:-NEEDLE_TOKENS]
            starts = [
                start for start in range(len(hidden) - half) if (hidden[start : start + half] == needle[:half]).all()
            ]
            if depth is None:
                assert starts == []
            else:
                assert starts == [round(depth * (text.recall.row_length + 1 - 2 * NEEDLE_TOKENS))]
    targets = np.concatenate([batch.targets for batch in text.recall.needle_rows[0][1]])
    assert (targets[:, :-half] == -1).all()
    assert (targets[:, -half:] == by_depth[DEPTHS[0]][:, -half:]).all()


def test_spans_are_repeated_in_held_out_text(text: MeasurementText, letters: Corpus) -> None:
    spans = text.recall.span_rows
    rows = np.concatenate([batch.tokens for batch in spans.batches])
    held_out = letters.validation.read(0, len(letters.validation)).tobytes()
    for row, first, second in zip(rows, spans.first + 1, spans.second + 1, strict=True):
        assert first + spans.length < len(row) // 2 < second + spans.length <= len(row)
        assert (row[first : first + spans.length] == row[second : second + spans.length]).all()
        assert row[: second - LEADING_TOKENS].tobytes() in held_out
    again = MeasurementText(letters, SETTINGS).recall.span_rows
    assert all((a.tokens == b.tokens).all() for a, b in zip(spans.batches, again.batches, strict=True))


def test_a_model_that_copies_recalls_everything(text: MeasurementText) -> None:
    scores = score_text_recall(Copier(), text.recall)
    first, second, needles = scores.first_spans, scores.repeated_spans, scores.needles
    blind = math.log2(VOCABULARY)
    first_loss, second_loss = finite_ratio(first), finite_ratio(second)
    assert first_loss is not None
    assert second_loss is not None
    assert first_loss > 0.7 * blind  # a token of letters has one byte or two
    assert second_loss < 1e-3
    recalled = {needle.depth: finite_ratio(needle.correct) for needle in needles}
    assert [recalled[depth] for depth in DEPTHS] == [1.0] * len(DEPTHS)
    guessed = recalled[None]
    assert guessed is not None
    assert guessed < 0.1


@pytest.mark.parametrize(
    "plant",
    [
        reads(score_text_recall, "second", lambda second, *, spans: spans.first, nth=0),
        assigned(score_text_recall, "columns", lambda columns: columns + 1),
        calls(
            TextRecall._draw_needles,
            "append",
            lambda needles, needle, *, rng, row: needles.append(rng.permutation(row)[: len(needle)]),
        ),
    ],
    ids=["first occurrence twice", "one token late", "needles of no text"],
)
def test_planted_errors_of_recall_are_caught(
    text: MeasurementText, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    plant(monkeypatch)
    try:
        test_a_model_that_copies_recalls_everything(text)
        test_needles_are_lines_of_the_text(text)
    except (AssertionError, ValueError, IndexError):
        return
    raise AssertionError("the planted error was not caught")


def test_needles_are_lines_of_the_text(text: MeasurementText) -> None:
    validation = text.corpus.validation
    whole = validation.read(0, len(validation)).tobytes()
    for batch in text.recall.needle_rows[-1][1]:
        for row in batch.tokens:
            assert row[-NEEDLE_TOKENS:].tobytes() in whole


def results_of(
    models: list[tuple[str, str, Decoder, str]], letters: Corpus, path: Path, **settings: Any
) -> ConversionResults:
    measured = [ModelToMeasure(name, stage, ModelWeights(m), key, "noise") for name, stage, m, key in models]
    machine, chosen = {"cpu": "x", "threads": 1, "device": "cpu"}, MeasurementSettings(**(vars(SETTINGS) | settings))
    return measure_conversion(
        measured, ConversionReport(letters, chosen, "cpu", "heddle convert a b", "a", machine), path
    )


@pytest.fixture(scope="module")
def three(letters: Corpus, tmp_path_factory: pytest.TempPathFactory) -> ConversionResults:
    original = make_original()
    models = [
        ("original", ORIGINAL, original, "a"),
        ("converted", CONVERTED, noisy(original), "b"),
        ("healed", HEALED, original, "c"),
    ]
    return results_of(models, letters, tmp_path_factory.mktemp("three") / "convert.json")


def test_every_model_is_measured_on_the_same_windows(
    three: ConversionResults, text: MeasurementText, original: Decoder, letters: Corpus
) -> None:
    first, second, healed = three.models
    for scores, expected in zip(
        first.windows, bits_and_bytes(original, text.windows, letters.tokenizer.byte_lengths), strict=True
    ):
        assert scores == pytest.approx(expected, rel=1e-12)
    for model in three.models:
        assert [size for _, size in model.windows] == [size for _, size in first.windows]
        for window, (bits, size) in enumerate(model.windows):
            for groups in (model.positions, model.frequencies):
                parts = [scores[window] for scores in groups]
                assert sum(part for _, part in parts) == size
                assert math.isclose(sum(part or 0 for part, _ in parts), bits or 0, rel_tol=1e-12)
    assert healed.windows == first.windows != second.windows
    assert three.text.windows == len(first.windows)
    assert three.text.bytes == sum(size for _, size in first.windows)
    assert first.architecture == "LlamaForCausalLM"
    # 2 layers, keys and values of 16 float32 numbers
    assert first.state_bytes == [(context, 2 * 2 * 16 * 4 * context) for context in SETTINGS.state_contexts]
    assert set(three.speeds) == {first.design_key}
    assert [len(rounds) for rounds in three.speeds.values()] == [run_module.SPEED_ROUNDS]
    assert needle_accuracy(first) is not None
    assert chance_accuracy(first) is not None


def test_layer_errors_are_of_the_layer_that_changed(three: ConversionResults) -> None:
    first, second, healed = three.models
    assert first.layer_errors == []
    assert [(error.mixer, error.stream) for error in healed.layer_errors] == [(0.0, 0.0)] * 2
    errors = [(error.mixer, error.stream) for error in second.layer_errors]
    assert errors[0] == (0.0, 0.0)
    assert None not in errors[1]
    assert min(value for value in errors[1] if value is not None) > 1e-3


def test_folded_norms_are_no_error(text: MeasurementText, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = {"kind": "attention", "heads": 2, "position": {"kind": "rope"}}
    source = ModelWeights(source_model(design(mixer, vocab_size=VOCABULARY, head={"tied": False})))
    folded = FoldNorms().apply(source, None)

    def largest() -> float:
        errors = layer_errors(source, folded, text.layer_rows)
        assert len(errors) == 2
        return max(error.mixer or 0.0 for error in errors)

    assert largest() < 1e-10
    on_mixer_inputs = assigned(
        layer_errors,
        "outputs",
        lambda _, *, layer, reference, layouts: [
            layer.layer.mixer(x, layout)[0] for x, layout in zip(reference.mixer_inputs, layouts, strict=True)
        ],
    )
    on_mixer_inputs(monkeypatch)
    assert largest() > 1e-3


def test_models_of_other_depth_have_no_layer_errors(original: Decoder, text: MeasurementText) -> None:
    deeper = source_model(original.config.replace(layers=original.config.layers * 2)).float()
    assert layer_errors(ModelWeights(original), ModelWeights(deeper), text.layer_rows) == []


def test_a_killed_run_continues_where_it_was(
    original: Decoder, letters: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [("original", ORIGINAL, original, "a"), ("converted", CONVERTED, noisy(original), "b")]
    measured: list[str] = []
    build = weights_module.build_model

    def watch(weights: Weights) -> Decoder:
        measured.append("model")
        if len(measured) == 2:
            raise KeyboardInterrupt
        return build(weights)

    monkeypatch.setattr(measure_module, "build_model", watch)
    with pytest.raises(KeyboardInterrupt):
        results_of(models, letters, tmp_path / "cut.json")
    assert [model.name for model in parse_results(read_json_file(tmp_path / "cut.json")).models] == ["original"]
    results = results_of(models, letters, tmp_path / "cut.json")
    assert len(measured) == 3
    whole = results_of(models, letters, tmp_path / "whole.json")
    assert results.models == whole.models
    saved = parse_results(read_json_file(tmp_path / "cut.json"))
    assert saved.models == results.models
    assert saved.speeds == results.speeds
    count = len(measured)
    results_of(models, letters, tmp_path / "cut.json")
    assert len(measured) == count
    other = results_of([models[0], ("converted", CONVERTED, original, "other weights")], letters, tmp_path / "cut.json")
    assert other.models[1].windows == other.models[0].windows
    results_of(models, letters, tmp_path / "cut.json", windows=8)
    assert len(measured) == count + 3


def test_a_model_that_was_killed_half_measured_goes_on_after_its_windows(
    original: Decoder, letters: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "PART_SECONDS", 0.0)
    models, path = [("original", ORIGINAL, original, "a")], tmp_path / "cut.json"
    scored = token_scores
    seen: list[int] = []

    def cut_after(batches: int) -> Any:
        def watched(decoder: Decoder, rows: Any, lengths: Any) -> Iterator[Any]:
            for number, item in enumerate(scored(decoder, rows, lengths)):
                if number == batches:
                    raise KeyboardInterrupt
                seen.append(len(item[0].tokens))
                yield item

        return watched

    for batches, total in ((1, 1), (1, 2)):  # killed twice
        monkeypatch.setattr(measure_module, "token_scores", cut_after(batches))
        with pytest.raises(KeyboardInterrupt):
            results_of(models, letters, path)
        assert len(seen) == total
    part = path.with_name("cut.part.json")
    kept = part.read_bytes()
    monkeypatch.setattr(measure_module, "token_scores", cut_after(10**6))
    results = results_of(models, letters, path)
    assert sum(seen) == results.text.windows  # no window was read twice
    assert not part.exists()
    whole = results_of(models, letters, tmp_path / "whole.json")
    assert results.models == whole.models
    # of other weights, or damaged, it is not used
    for key, content in (("y", kept), ("z", kept[: len(kept) // 2])):
        part.write_bytes(content)
        seen.clear()
        other = results_of([("original", ORIGINAL, original, key)], letters, path)
        assert sum(seen) == other.text.windows


def test_a_model_that_is_killed_after_each_batch_reads_no_row_twice(
    original: Decoder, letters: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "PART_SECONDS", 0.0)
    models, path, seen = [("original", ORIGINAL, original, "a")], tmp_path / "cut.json", [0]
    scored = token_scores
    left = [1]

    def watched(decoder: Decoder, rows: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        for item in scored(decoder, rows, *arguments, **options):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            seen[0] += len(item[0].tokens)
            yield item

    monkeypatch.setattr(measure_module, "token_scores", watched)
    monkeypatch.setattr(recall_module, "token_scores", watched)
    calls = 0
    while not path.is_file():
        left[0], calls = 1, calls + 1
        with contextlib.suppress(KeyboardInterrupt):
            results_of(models, letters, path)
    assert calls > 10
    assert {len(batch.tokens) for batch in MeasurementText(letters, SETTINGS).windows[:-1]} != {SETTINGS.batch_size}
    assert seen[0] == measured_rows(MeasurementText(letters, SETTINGS))
    left[0] = 10**6
    [resumed], [whole] = (results_of(models, letters, tmp_path / f"{name}.json").models for name in ("cut", "whole"))
    assert plain(resumed) == plain(whole)


def test_numbers_that_are_not_finite_are_saved_as_none(original: Decoder, letters: Corpus, tmp_path: Path) -> None:
    broken = copy.deepcopy(original)
    with torch.no_grad():
        broken.get_parameter("layers.1.mixer.k.weight").fill_(math.nan)
    results = results_of(
        [("original", ORIGINAL, original, "a"), ("converted", CONVERTED, broken, "b")],
        letters,
        tmp_path / "convert.json",
        speed_contexts=(),
    )
    assert {bits for bits, _ in results.models[1].windows} == {None}
    assert parse_results(read_json_file(tmp_path / "convert.json")).models == results.models


def test_short_documents_leave_recall_out_and_say_so(tmp_path: Path, original: Decoder) -> None:
    folder = tmp_path / "short"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"a short text {number}")
    corpus = prepare_corpus([str(folder)], vocab_size=VOCABULARY, max_train_tokens=None)
    settings = {"sequence_length": 16, "speed_contexts": ()}
    results = results_of([("original", ORIGINAL, original, "a")], corpus, tmp_path / "convert.json", **settings)
    assert results.models[0].needles == []
    assert results.text.note.startswith("Recall was not measured: it needs a held-out document of 66 tokens")


def test_a_folder_that_is_a_file_is_refused(original: Decoder, letters: Corpus, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(CheckpointError, match=r"taken:.*folder"):
        results_of([("original", ORIGINAL, original, "a")], letters, tmp_path / "taken" / "convert.json")
