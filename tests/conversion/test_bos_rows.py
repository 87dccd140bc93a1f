"""Rows that a model of others reads begin with BOS, as it was trained; compared with a plain loop of transformers."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from heddle.cli import loss as loss_verb
from heddle.cli.main import run_command
from heddle.conversion import heal as heal_module
from heddle.conversion.convert import (
    Conversion,
    ConversionSource,
    convert,
    is_transformers_folder,
    open_source,
    saved_conversion,
)
from heddle.conversion.heal import calibration_from_corpus, healing_job, healing_settings
from heddle.conversion.targets import parse_rewrites
from heddle.conversion.weights import ModelWeights, layer_activations
from heddle.data import samples
from heddle.data.corpus import Corpus, prepare_corpus
from heddle.data.samples import PLAIN_ROWS, CorpusLoader, RowProtocol, evaluation_windows
from heddle.errors import ConfigError
from heddle.exchange.export import export
from heddle.exchange.load import load
from heddle.lab.compare.plan import load_entries
from heddle.lab.conversion import measure as measure_module
from heddle.lab.conversion.measure import MeasurementSettings, MeasurementText, ModelToMeasure, layer_errors
from heddle.lab.conversion.results import ORIGINAL, ConversionResults, parse_results
from heddle.lab.conversion.run import ConversionReport, measure_conversion
from heddle.laws.harness import model_under_test
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.storage.file_io import read_json_file
from heddle.storage.model import load as load_checkpoint
from heddle.storage.model import save
from heddle.training.distillation import Distillation, LossWeights
from heddle.training.evaluation.scores import finite_ratio
from heddle.training.init_checkpoint import model_rows
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from tests import small
from tests.conversion.exactness import calibration_text
from tests.exchange.tokenizer_cases import tokenizer_json

LENGTH = 16
DESIGN: dict[str, Any] = {
    "vocab_size": 600, "width": 16, "norm": {"kind": "rms", "eps": 1e-6}, "head": {"tied": False},
    "layers": [{"repeat": 2, "mixer": {"kind": "attention", "heads": 2, "position": {"kind": "rope"}},
                "feedforward": {"kind": "gated", "hidden": 24}}],
}  # fmt: skip
QUICK = ["--sequence-length", str(LENGTH), "--report-tokens", "100000", "--calibration-tokens", "256", "--quiet"]
QUICK += ["--speed-context-length", "4", "--device", "cpu"]
TARGET = ["--to", "kv_heads=1,groups=contiguous"]


@pytest.fixture(autouse=True)
def _few_decoded_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heddle.lab.compare.probes.DECODED_TOKENS", 4)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.folder(tmp_path_factory.mktemp("text") / "text", size=300)


def write_llama(folder: Path, tokenizer: str) -> Path:
    """A float64 Llama of transformers, whose loss depends on BOS."""
    export(model_under_test(load_config(DESIGN)), folder)
    (folder / "manifest.json").unlink()
    (folder / "tokenizer.json").write_text(tokenizer_json(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="module", params=["gemma", "llama2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "gemma", "gemma")


def corpus_of(source: ConversionSource, texts: Path) -> Corpus:
    rows = model_rows(source.folder, source.tokenizer)
    return prepare_corpus([str(texts)], vocab_size=None, max_train_tokens=None, tokenizer=source.tokenizer, rows=rows)


Logits = Callable[[Tensor], Tensor]


@torch.no_grad()
def plain_loss(logits: Logits, corpus: Corpus, with_bos: bool = True) -> float:
    """Bits per byte of a plain loop: documents are read alone, each token from BOS and what stood before it.

    logits: of tokens [1, T].
    """
    tokens = corpus.validation.read(0, len(corpus.validation)).tolist()
    (bos,) = corpus.tokenizer.bos_ids
    bits, size = 0.0, 0
    for first in range(0, len(tokens) - 1, LENGTH):
        row = [bos if with_bos else tokens[first], *tokens[first + 1 : first + 1 + LENGTH]]
        starts = [0, *(i for i in range(1, len(row)) if row[i] == bos), len(row)]
        for start, end in pairwise(starts):
            piece = torch.tensor(row[start:end])
            losses = functional.cross_entropy(logits(piece[None])[0, :-1], piece[1:], reduction="sum")
            bits += float(losses) / math.log(2)
        size += int(corpus.tokenizer.byte_lengths[row[1:]].sum())
    return bits / size


def our_logits(folder: Path) -> Logits:
    model = load(folder).model if is_transformers_folder(folder) else load_checkpoint(folder)[0]
    return lambda tokens: model.head(model(tokens)[0])


def their_logits(folder: Path) -> Logits:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return lambda tokens: model(tokens).logits


def command(model: Path, texts: Path, out: Path, *options: str) -> list[str]:
    return ["convert", str(model), str(out), "--data", str(texts), *QUICK, *options]


def results_of(out: Path) -> ConversionResults:
    return parse_results(read_json_file(out / "convert.json"))


def test_compare_loss_is_a_plain_loop_that_begins_with_bos(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder of transformers and of its import, in float64; the second is compared with the first by sequence."""
    assert run_command(["import", str(model), str(tmp_path / "imported"), "--quiet"]) == 0
    monkeypatch.setattr(loss_verb, "dtype_of", lambda precision: torch.float64)
    words = ["compare", "loss", str(model), str(tmp_path / "imported"), "--data", str(texts), "--held-out", "--json"]
    capsys.readouterr()
    assert run_command([*words, "--sequence-length", str(LENGTH), "--device", "cpu", "--quiet"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    corpus = corpus_of(open_source(model), texts)
    expected = plain_loss(our_logits(model), corpus)
    assert first["bits_per_byte"] == pytest.approx(expected, rel=1e-10)
    assert plain_loss(their_logits(model), corpus) == pytest.approx(expected, rel=1e-7)  # float32 angles inside
    assert abs(plain_loss(their_logits(model), corpus, with_bos=False) - expected) > 1e-4
    bits = first["nats_per_token"] / math.log(2) * first["tokens"]
    assert bits / first["bytes"] == pytest.approx(expected, rel=1e-10)
    assert first["perplexity"] == pytest.approx(math.exp(first["nats_per_token"]))
    assert (second["added"], second["added_half_width"]) == pytest.approx((0, 0), abs=1e-10)
    assert "BOS" in first["rows"]


def test_the_report_is_a_plain_loop_that_begins_with_bos(model: Path, texts: Path, tmp_path: Path) -> None:
    out, exported = tmp_path / "fewer", tmp_path / "exported"
    assert run_command(command(model, texts, out, *TARGET)) == 0
    corpus = corpus_of(open_source(model), texts)
    export(load_checkpoint(out)[0], exported)
    for result, ours, theirs in zip(results_of(out).models, (model, out), (model, exported), strict=True):
        expected = plain_loss(our_logits(ours), corpus)
        assert finite_ratio(result.windows) == pytest.approx(expected, rel=0, abs=1e-10)
        assert plain_loss(their_logits(theirs), corpus) == pytest.approx(
            expected, rel=0, abs=1e-6
        )  # their float32 norm
        assert abs(expected - plain_loss(our_logits(ours), corpus, with_bos=False)) > 0.02
    assert results_of(out).text.bos_ids == tuple(corpus.tokenizer.bos_ids)
    page = (out / "convert.html").read_text(encoding="utf-8")
    assert f"Each sequence begins with BOS ({corpus.tokenizer.bos_ids[0]})" in page
    assert saved_conversion(out)["text"]["bos_ids"] == corpus.tokenizer.bos_ids


@pytest.fixture(scope="module")
def fewer(gemma: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ConversionSource, Path, Corpus]:
    source, out = open_source(gemma), tmp_path_factory.mktemp("converted") / "fewer"
    convert(Conversion(source, tuple(parse_rewrites([TARGET[1] + ",merge=mean"]))), out)
    return source, out, corpus_of(source, texts)


def test_rows_to_calibrate_heal_and_validate_begin_with_bos(
    fewer: tuple[ConversionSource, Path, Corpus], tmp_path: Path
) -> None:
    """Everything but a row's first token, and BOS as a target, is as before."""
    source, out, corpus = fewer
    (bos,) = corpus.tokenizer.bos_ids
    text = calibration_from_corpus(corpus, 512, LENGTH)
    settings = healing_settings(1024, LENGTH, 1e-3, text.samples, 4)
    job = healing_job(out, Distillation(source, LossWeights(text=1.0)), corpus, settings, tmp_path / "heal")
    batch_at, data = job.training_data.train_batches(settings), job.training_data
    loader = CorpusLoader(corpus.train, corpus.weights, LENGTH, 4, settings.seed, corpus.tokenizer.eod_id)
    cut = [loader.batch_from(settings.samples_before(step)) for step in range(settings.steps)]
    healed = [batch_at(step) for step in range(settings.steps)]
    validated = list(data.validation_batches(settings, 10**6))
    for now, before in zip(
        [*healed, *validated], [*cut, *evaluation_windows(corpus.validation, LENGTH, 4)], strict=True
    ):
        assert (now.tokens[:, 0] == bos).all()
        assert np.array_equal(now.tokens[:, 1:], before.tokens[:, 1:])
        assert now.doc_lengths == before.doc_lengths
    for now, before in zip(healed, cut, strict=True):
        assert np.array_equal(now.targets, np.where(before.targets == bos, -1, before.targets))
    assert any((batch.targets == bos).any() for batch in cut)
    assert not all((batch.tokens[:, 0] == bos).all() for batch in cut)
    assert [tuple(batch.shape) for batch in text.batches] == [(16, LENGTH)] * 2
    assert all(bool((batch[:, 0] == bos).all()) for batch in text.batches)
    assert data.identity()["bos_ids"] == [bos]


def test_rows_of_recall_begin_with_bos(gemma: Path, texts: Path) -> None:
    corpus = corpus_of(open_source(gemma), texts)
    (bos,) = corpus.tokenizer.bos_ids
    recall = MeasurementText(corpus, MeasurementSettings(sequence_length=64, span_rows=6, needle_rows=5)).recall
    spans = recall.span_rows
    batches = [*spans.batches, *(batch for _, rows in recall.needle_rows for batch in rows)]
    assert batches
    for batch in batches:
        assert (batch.tokens[:, 0] == bos).all()
        assert (batch.tokens[:, 1:] != bos).all()
        assert batch.doc_lengths == ((recall.row_length,),) * len(batch.tokens)
    for batch in spans.batches:
        for row, first, second in zip(batch.tokens, spans.first, spans.second, strict=False):
            assert np.array_equal(
                row[first + 1 : first + 1 + spans.length], row[second + 1 : second + 1 + spans.length]
            )


def test_an_inspected_text_begins_with_bos(gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported, read = tmp_path / "imported", list[list[int]]()

    def watch(model: Decoder, tokens: list[int]) -> None:
        read.append(tokens)
        raise ConfigError("seen")

    assert run_command(["import", str(gemma), str(imported), "--quiet"]) == 0
    monkeypatch.setattr("heddle.lab.inspect.inspect_layers", watch)
    assert run_command(["inspect", str(imported), "--text", "a word", "--out", f"{tmp_path}/page.html"]) == 2
    _, tokenizer = load_checkpoint(imported)
    assert tokenizer is not None
    assert read == [[*tokenizer.bos_ids, *tokenizer.encode("a word")]]
    assert len(tokenizer.bos_ids) == 1


def test_rows_keep_within_the_positions_of_a_model(gemma: Path, texts: Path, tmp_path: Path) -> None:
    """BOS takes one of the row's positions."""
    corpus = corpus_of(open_source(gemma), texts)
    layers = [{"mixer": {"kind": "attention", "heads": 2}, "feedforward": {"kind": "gated", "hidden": 24}}]
    learned = {"position": {"kind": "learned", "length": LENGTH}}
    weights = ModelWeights(model_under_test(load_config(DESIGN | {"layers": layers, "embedding": learned})))

    def measured(length: int) -> ConversionResults:
        settings = MeasurementSettings(sequence_length=length, speed_contexts=(), state_contexts=(), layer_rows=2)
        report, path = ConversionReport(corpus, settings), tmp_path / f"{length}.json"
        return measure_conversion([ModelToMeasure("original", ORIGINAL, weights, "a")], report, path)

    assert finite_ratio(measured(LENGTH).models[0].windows) is not None
    with pytest.raises(ConfigError, match=str(LENGTH)):
        measured(LENGTH + 1)


def test_layer_errors_are_of_other_tokens_than_bos() -> None:
    """The stream of BOS is large and does not change here, so with it the errors would be close to 0."""
    original = model_under_test(load_config(DESIGN))
    converted = copy.deepcopy(original)
    with torch.no_grad():
        converted.embed.weight.add_(0.1)
        for model in (original, converted):
            model.embed.weight[1] = 1e4
    tokens = torch.cat((torch.ones(3, 1, dtype=torch.int64), torch.arange(2, 50).reshape(3, 16)), dim=1)
    rows = [samples.Batch(tokens.numpy(), ((LENGTH,),) * 3, np.arange(3))]
    weights = ModelWeights(original), ModelWeights(converted)
    errors, with_bos = layer_errors(*weights, rows, bos_ids=(1,)), layer_errors(*weights, rows)
    text = calibration_text([tokens[:, :-1]])
    before, after = ([step.new_streams[0] for step in layer_activations(each, text)] for each in weights)
    for error, diluted, old, new in zip(errors, with_bos, before, after, strict=True):
        expected = (new - old)[:, 1:].norm() / old[:, 1:].norm()
        assert error.stream == pytest.approx(float(expected), rel=1e-9)
        assert (diluted.stream or 0.0) < 0.01 * float(expected)


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Within it rows begin as before there was a record of them."""
    with monkeypatch.context() as patch:
        patch.setattr(samples.RowProtocol, "of", classmethod(lambda cls, tokenizer: PLAIN_ROWS))
        yield patch


class Killed(BaseException):
    pass


def kill_in(patch: pytest.MonkeyPatch, place: str, number: int = 1) -> None:
    """The call of that number ends the process."""
    module, name = {"heal": (heal_module, "train"), "measure": (measure_module, "build_model")}[place]
    original, calls = getattr(module, name), []

    def watch(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) == number:
            raise Killed
        return original(*arguments, **named)

    patch.setattr(module, name, watch)


WINDOW = "window=8"  # a conversion that reads no text
CASES = {
    "calibrated, not healed": ([*TARGET, "--heal", "1024"], "heal", 1),
    "calibrated and half measured": (TARGET, "measure", 2),
    "the rate is measured": (["--to", WINDOW, "--heal", "1024"], "heal", 1),
    "healed at a given rate": (["--to", WINDOW, "--heal", "1024", "--heal-lr", "0.001"], "measure", 1),
    "half measured": (["--to", WINDOW], "measure", 2),
    "a sweep": (["--sweep", f"{WINDOW},4"], "measure", 2),
    "a healed sweep": (["--sweep", f"{WINDOW},4", "--heal", "1024"], "heal", 2),
}


@pytest.mark.parametrize("case", CASES)
def test_what_began_without_bos_goes_on_without_it(
    gemma: Path, texts: Path, tmp_path: Path, case: str, earlier: pytest.MonkeyPatch, capsys: Any
) -> None:
    options, place, number = CASES[case]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_command(command(gemma, texts, whole, *options)) == 0
    kill_in(earlier, place, number)
    with pytest.raises(Killed):
        run_command(command(gemma, texts, cut, *options))
    earlier.undo()
    capsys.readouterr()
    assert run_command([word for word in command(gemma, texts, cut, *options) if word != "--quiet"]) == 0
    assert "rows begin without the model's BOS token, as in the conversion that is resumed" in capsys.readouterr().err
    first, second = map(results_of, (whole, cut))
    assert [model.windows for model in first.models] == [model.windows for model in second.models]
    assert "bos_ids" not in read_json_file(cut / "convert.json")["text"]


def rows_of(job: TrainingJob) -> RowProtocol:
    assert isinstance(job.source, Corpus)
    return job.source.rows


def test_a_healing_goes_on_as_it_began(
    fewer: tuple[ConversionSource, Path, Corpus], texts: Path, tmp_path: Path, earlier: pytest.MonkeyPatch
) -> None:
    source, out, corpus = fewer
    distillation, settings = Distillation(source, LossWeights(text=1.0)), healing_settings(512, LENGTH, 1e-3)
    train(healing_job(out, distillation, corpus_of(source, texts), settings, tmp_path / "heal"))
    earlier.undo()
    assert rows_of(healing_job(out, distillation, corpus, settings, tmp_path / "heal")) == PLAIN_ROWS
    train(healing_job(out, distillation, corpus, settings, tmp_path / "heal"))
    assert rows_of(healing_job(out, distillation, corpus, settings, tmp_path / "other")) == corpus.rows != PLAIN_ROWS


def test_rows_of_native_tokenizers_stay_as_they_were(tmp_path: Path) -> None:
    corpus = small.corpus(tmp_path)
    assert RowProtocol.of(corpus.tokenizer) == corpus.rows == PLAIN_ROWS
    assert PLAIN_ROWS.record() == {}
    text = calibration_from_corpus(corpus, 256, LENGTH)
    loader = CorpusLoader(corpus.train, corpus.weights, LENGTH, 16, 0, corpus.tokenizer.eod_id)
    assert all(
        np.array_equal(batch.numpy(), loader.batch(step).tokens[:, :-1]) for step, batch in enumerate(text.batches)
    )
    assert loader.batch(0).labels is None
    job = small.job(corpus, tmp_path / "run")
    assert set(job.identity()["data"]) == {"hash", "tokens"}


def test_several_bos_tokens_begin_a_row() -> None:
    rows, tokens = RowProtocol((7, 8)), np.arange(10).reshape(2, 5)
    assert rows.begin(tokens).tolist() == [[7, 8, 2, 3, 4], [7, 8, 7, 8, 9]]
    assert tokens[0, 0] == 0
    batch = rows.without_bos_targets(samples.Batch(rows.begin(tokens), ((4,), (4,)), np.arange(2)))
    assert batch.targets.tolist() == [[-1, 2, 3, 4], [-1, -1, -1, 9]]
    assert RowProtocol.parse(json.loads(json.dumps(rows.record()))) == rows


QUIET_ROWS = ["--batch-size", "2", "--sequence-length", str(LENGTH), "--device", "cpu", "--quiet"]
QUIET_RUN = [*QUIET_ROWS, "--steps", "1"]


@pytest.fixture(scope="module")
def imported(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported") / "gemma"
    assert run_command(["import", str(gemma), str(folder)]) == 0
    return folder


def recorded_rows(run: Path) -> RowProtocol:
    return RowProtocol.parse(read_json_file(run / "run.json")["data"])


@pytest.mark.parametrize("options", [[], ["--held-out"]])
def test_compare_loss_reads_at_most_the_tokens_asked_for(
    gemma: Path, texts: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Spread over the text: as many sequences as fit, and more than half of them, in files of any number."""
    words = ["compare", "loss", str(gemma), "--data", str(texts), "--sequence-length", str(LENGTH), *options, "--json"]
    assert run_command([*words, "--tokens", "1m"]) == 0
    whole = json.loads(capsys.readouterr().out)[0]
    for tokens in (LENGTH, 3 * LENGTH, whole["tokens"] // 3):
        assert run_command([*words, "--tokens", str(tokens)]) == 0
        assert (tokens - 1) // 2 - LENGTH < json.loads(capsys.readouterr().out)[0]["tokens"] <= tokens


def test_compare_loss_says_what_it_read_and_where_an_interval_is_missing(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models of one tokenizer read sequences of one length, though one has fewer positions, and are paired."""
    corpus = prepare_corpus([str(texts)], vocab_size=small.VOCABULARY, max_train_tokens=None)
    for name, positions in (("long", 64), ("short", 32)):
        design = small.design(embedding={"position": {"kind": "learned", "length": positions}})
        save(build(load_config(design)), tmp_path / name, corpus.tokenizer)
    words = [
        "compare",
        "loss",
        str(tmp_path / "long"),
        str(tmp_path / "short"),
        "--data",
        str(texts),
        "--device",
        "cpu",
    ]
    capsys.readouterr()
    assert run_command([*words, "--tokens", "60"]) == 0
    printed = capsys.readouterr()
    assert "to train on" not in printed.err
    assert " tokens, vocabulary" in printed.err
    assert "; sequences of 32, " in printed.out
    assert printed.out.count("; too few sequences for an interval)") == 2
    assert "not paired" not in printed.out
    assert run_command([*words, "--held-out"]) == 0
    printed = capsys.readouterr()
    assert "to train on" in printed.err
    assert "too few" not in printed.out
    assert printed.out.count(" ± ") == 3  # of each model, and of the pair


def test_an_imported_model_is_never_beside_a_native_one_without_a_word(
    imported: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`compare loss` says how each was read, and pairs none; a comparison reads the design of an import only."""
    corpus = prepare_corpus([str(texts)], vocab_size=small.VOCABULARY, max_train_tokens=None)
    save(build(load_config(small.design())), native := tmp_path / "native", corpus.tokenizer)
    words = ["compare", "loss", str(imported), str(native), "--data", str(texts), "--device", "cpu"]
    assert run_command([*words, "--held-out", "--tokens", "512"]) == 0
    first, second = capsys.readouterr().out.strip().splitlines()
    assert "beginning with BOS, which is not scored" in first
    assert "(not paired)" in second
    assert "beginning mid-text, without BOS" in second
    entries = load_entries([str(imported), "preset:mha-tiny"], [])
    assert len(entries) == 2
    assert f"{imported}: only the design is read, and trained from random weights" in capsys.readouterr().err
    load_entries(["preset:mha-tiny"], [])
    assert not capsys.readouterr().err


def test_fine_tuning_begins_rows_with_bos(
    gemma: Path, imported: Path, texts: Path, tmp_path: Path, capsys: Any
) -> None:
    """Nothing is learned, so the loss is that of the imported model: of a plain loop with BOS."""
    corpus, run = corpus_of(open_source(gemma), texts), tmp_path / "run"
    fine_tune = ["train", "--from", str(imported), "--data", str(texts), "--out", str(run), *QUIET_ROWS, "--json"]
    capsys.readouterr()
    all_of_it = str(len(corpus.validation))  # a shorter training is evaluated on less
    assert run_command([*fine_tune, "--tokens", all_of_it, "--lr", "1e-30"]) == 0
    expected = plain_loss(our_logits(gemma), corpus)
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    assert recorded_rows(run) == model_rows(run, corpus.tokenizer) == corpus.rows != PLAIN_ROWS


def test_a_training_goes_on_as_it_began(
    imported: Path, texts: Path, tmp_path: Path, earlier: pytest.MonkeyPatch
) -> None:
    fine_tune = ["train", "--from", str(imported), "--data", str(texts), "--out", str(tmp_path / "run"), *QUIET_RUN]
    assert run_command(fine_tune) == 0
    earlier.undo()
    assert run_command(fine_tune) == 0
    assert recorded_rows(tmp_path / "run") == PLAIN_ROWS


@pytest.mark.parametrize("with_bos", [True, False])
def test_a_student_is_read_as_it_was_trained(
    imported: Path, texts: Path, tmp_path: Path, earlier: pytest.MonkeyPatch, with_bos: bool
) -> None:
    """It reads what its teacher reads. One from before rows began with BOS is converted without."""
    if with_bos:
        earlier.undo()
    run, fewer, design = tmp_path / "run", tmp_path / "fewer", tmp_path / "design.json"
    design.write_text(json.dumps({key: value for key, value in DESIGN.items() if key != "vocab_size"}))
    data = ["--data", str(texts), "--out", str(run)]
    assert run_command(["train", str(design), "--distill", str(imported), *data, *QUIET_RUN]) == 0
    earlier.undo()
    assert bool(recorded_rows(run).bos_ids) == with_bos
    assert run_command(command(run, texts, fewer, *TARGET)) == 0
    assert results_of(fewer).text.bos_ids == recorded_rows(run).bos_ids
