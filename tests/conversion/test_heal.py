"""Healing: towards the original, on samples that neither calibration nor evaluation reads, resumed to the bit."""

import dataclasses
import json
import random
import re
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heddle.cli.main import run_command
from heddle.conversion import heal as heal_module
from heddle.conversion.convert import CONVERSION_FILE, Conversion, ConversionSource, convert, open_source
from heddle.conversion.heal import (
    calibration_from_corpus,
    convert_and_heal,
    healing_job,
    healing_rate,
    healing_settings,
    parse_stages,
    rate_share,
    stage_settings,
)
from heddle.conversion.targets import parse_rewrites
from heddle.data.corpus import Corpus, prepare_corpus
from heddle.errors import CheckpointError, ConfigError
from heddle.storage.folder import read_folder, tensors_sha256
from heddle.storage.model import WEIGHTS_FILE, load
from heddle.storage.run_log import read_log
from heddle.training.built_models import build_models
from heddle.training.distillation import Distillation, LossWeights, Teacher
from heddle.training.init_checkpoint import open_init_checkpoint
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.settings import Settings
from tests import small
from tests.laws.planting import replaced
from tests.storage.shared import MEASURED, Died

LENGTH, ROWS, STEPS = 16, 4, 6
BOTH = LossWeights(logits=1.0, text=0.1, layers=1.0)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return small.corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def folders(texts: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[ConversionSource, Path]:
    """A run, and its conversion to one pair of keys and values."""
    folder = tmp_path_factory.mktemp("models")
    mixer = {"kind": "attention", "heads": 2, "position": {"kind": "rope"}}
    design = small.design(layers=[{"repeat": 2, "mixer": mixer, "feedforward": {"kind": "gated", "hidden": 24}}])
    train(small.job(texts, folder / "original", design, steps=60, learning_rate=0.02, save_every=60))
    source = open_source(folder / "original")
    convert(Conversion(source, tuple(parse_rewrites(["kv_heads=1,groups=contiguous,merge=mean"]))), folder / "fewer")
    return source, folder / "fewer"


def settings(tokens: int = STEPS * ROWS * LENGTH, first_sample: int = 0) -> Settings:
    return healing_settings(tokens, LENGTH, 1e-3, first_sample, ROWS)


def job(
    folders: tuple[ConversionSource, Path], texts: Corpus, out: Path, weights: LossWeights = BOTH, first_sample: int = 0
) -> TrainingJob:
    source, converted = folders
    asked = dataclasses.replace(settings(first_sample=first_sample), save_every=2)
    return healing_job(converted, Distillation(source, weights), texts, asked, out)


def test_healing_brings_a_model_closer_to_the_original(
    folders: tuple[ConversionSource, Path], texts: Corpus, tmp_path: Path
) -> None:
    source, converted = folders
    before = sorted(path.read_bytes() for path in converted.iterdir())
    more = dataclasses.replace(settings(), steps=40)
    distillation = Distillation(source, LossWeights(layers=1.0))
    result = train(healing_job(converted, distillation, texts, more, tmp_path / "heal"))
    log = read_log(tmp_path / "heal")
    for name in ("divergence", "layer_error"):
        first, last = (np.mean([line[name] for line in lines]) for lines in (log[:5], log[-5:]))
        assert last < 0.5 * first, name
    assert result.progress.step == 40
    assert result.model.config.resolved() != source.weights.design
    assert sorted(path.read_bytes() for path in converted.iterdir()) == before


def test_a_healing_stopped_and_resumed_has_the_same_bits(
    folders: tuple[ConversionSource, Path], texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.same_after_a_signal(lambda name: job(folders, texts, tmp_path / name, first_sample=5), monkeypatch)


def test_a_healing_has_one_tokenizer(
    folders: tuple[ConversionSource, Path], texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text's; the converted model's own, which takes 0.2 GB with 262,144 tokens, is not read."""

    def fails(documents: dict[str, str]) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr("heddle.training.init_checkpoint.Tokenizer.from_files", fails)
        assert train(job(folders, texts, tmp_path / "heal")).progress.step == STEPS
        with pytest.raises(Died):
            _ = open_init_checkpoint(folders[1]).tokenizer


@pytest.mark.parametrize("parameters", ["all", "touched"])
def test_less_memory_gives_the_same_bits(
    folders: tuple[ConversionSource, Path],
    texts: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parameters: str,
) -> None:
    """Recomputed activations, which a run keeps, and a teacher that reads the frozen weights of the model."""

    def healed(name: str) -> TrainingJob:
        first = job(folders, texts, tmp_path / name, LossWeights(logits=1.0, text=0.1))
        assert first.distillation is not None
        return dataclasses.replace(first, distillation=dataclasses.replace(first.distillation, parameters=parameters))

    with monkeypatch.context() as patch:
        patch.setattr(Teacher, "share_frozen", lambda self, model: None)
        usual = train(healed("usual")).model
    monkeypatch.setattr(heal_module, "ACTIVATION_BYTES", 1000)
    assert not healed("usual").settings.checkpoint_activations
    saving = healed("saving")
    assert saving.settings.checkpoint_activations
    models = build_models(saving)
    assert models.model.checkpointing
    assert models.teacher is not None
    own = dict(models.teacher.model.named_parameters())
    shared = {name for name, x in models.model.named_parameters() if x.data_ptr() == own[name].data_ptr()}
    assert shared == {name for name, x in models.model.named_parameters() if not x.requires_grad}
    assert bool(shared) is (parameters == "touched")
    for (name, x), y in zip(usual.named_parameters(), train(saving).model.parameters(), strict=True):
        assert torch.equal(x, y), name


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Random letters, so that no two windows are equal."""
    folder, draw = tmp_path_factory.mktemp("letters"), random.Random(0)
    for number in range(20):
        (folder / f"{number:02d}.txt").write_text("".join(draw.choices(string.ascii_letters, k=400)))
    return prepare_corpus([str(folder)], vocab_size=small.VOCABULARY, max_train_tokens=None)


def windows(texts: Corpus, tmp_path: Path, folders: Any, samples: int) -> list[set[bytes]]:
    """The rows of tokens that calibration, healing and evaluation read."""
    text = calibration_from_corpus(texts, samples * LENGTH, LENGTH)
    assert text.samples == samples
    healing = job(folders, texts, tmp_path / "heal", first_sample=text.samples)
    batch_at = healing.training_data.train_batches(healing.settings)
    healed = [batch_at(step).tokens[:, :-1] for step in range(STEPS)]
    evaluated = [batch.tokens[:, :-1] for batch in healing.training_data.validation_batches(healing.settings, 10**6)]
    read = [[x.numpy() for x in text.batches], healed, evaluated]
    return [{row.tobytes() for batch in batches for row in batch} for batches in read]


def are_disjoint(parts: list[set[bytes]]) -> bool:
    return len(set.union(*parts)) == sum(map(len, parts))


def test_calibration_healing_and_evaluation_share_no_window(
    folders: tuple[ConversionSource, Path], letters: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = windows(letters, tmp_path, folders, samples=8)
    assert [len(part) for part in parts[:2]] == [8, STEPS * ROWS]
    assert are_disjoint(parts)
    replaced(Settings.samples_before, lambda settings, step: step * settings.batch_size)(monkeypatch)
    assert not are_disjoint(windows(letters, tmp_path, folders, samples=8))


def test_the_first_sample_is_part_of_a_run(
    folders: tuple[ConversionSource, Path], texts: Corpus, tmp_path: Path
) -> None:
    train(job(folders, texts, tmp_path))
    with pytest.raises(CheckpointError, match=r"settings\.first_sample.*3"):
        train(job(folders, texts, tmp_path, first_sample=3))


def test_a_text_that_is_read_again_is_named(
    folders: tuple[ConversionSource, Path], texts: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = sum((len(file) - 1) // LENGTH for file in texts.train)
    job(folders, texts, tmp_path, first_sample=count - STEPS * ROWS)
    assert "again" not in capsys.readouterr().err
    job(folders, texts, tmp_path, first_sample=count - STEPS * ROWS + 1)
    assert "more than the text has after calibration, so it reads some again; give more text" in capsys.readouterr().err


def healed(folders: Any, texts: Corpus, out: Path, to: str = "kv_heads=1,groups=contiguous,merge=mean") -> None:
    source, asked = folders[0], settings(first_sample=4)
    conversion = Conversion(source, tuple(parse_rewrites([to])))
    convert_and_heal(conversion, Distillation(source, BOTH), texts, asked, out)


def test_a_conversion_that_died_continues_and_its_folder_is_whole_or_absent(
    folders: tuple[ConversionSource, Path], texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    healed(folders, texts, whole)
    for name in ("train", "write_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(heal_module, name, dying)
            with pytest.raises(Died):
                healed(folders, texts, cut)
        assert not cut.exists()
    sentence = r'cut\.work:.*rewrites\[0\]\.merge.*"mean".*"first"'
    with pytest.raises(CheckpointError, match=sentence):
        healed(folders, texts, cut, "kv_heads=1,groups=contiguous,merge=first")
    healed(folders, texts, cut)
    contents = [read_folder(folder) for folder in (whole, cut)]
    assert len({tensors_sha256(folder, WEIGHTS_FILE) for folder in contents}) == 1
    assert contents[0].documents == contents[1].documents
    healing = json.loads(contents[0].documents[CONVERSION_FILE])["healing"]
    assert (healing["steps"], healing["first_sample"]) == (STEPS, 4)
    assert healing["teacher"] == folders[0].weights_sha256
    with pytest.raises(CheckpointError, match="cut: exists"):
        healed(folders, texts, cut)


STAGES = ("50%:layers", "34%:logits=1,text=0.5", "16%:logits@32")


def test_stages_follow_each_other_and_continue_after_a_kill(
    folders: tuple[ConversionSource, Path], texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, converted = folders
    whole, asked = settings(first_sample=4), parse_stages(STAGES, settings())
    parts = stage_settings(whole, asked)
    assert [(part.steps, part.batch_size, part.sequence_length) for part in parts] == [
        (3, 4, 16),
        (2, 4, 16),
        (1, 2, 32),
    ]
    assert [part.first_sample for part in parts] == [4, 16, 12]
    start = converted
    for number, (part, stage) in enumerate(zip(parts, asked, strict=True)):
        out = tmp_path / f"plain-{number}"
        train(healing_job(start, Distillation(source, stage.weights), texts, part, out))
        start = out
    conversion = Conversion(source, tuple(parse_rewrites(["kv_heads=1,groups=contiguous,merge=mean"])))

    def heal(out: Path) -> list[dict[str, Any]]:
        convert_and_heal(
            conversion, Distillation(source), texts, whole, out, adapt_rate=False, stages=asked, evaluation=None
        )
        stages: list[dict[str, Any]] = json.loads(read_folder(out).documents[CONVERSION_FILE])["healing"]["stages"]
        return stages

    runs: list[Path] = []

    def dying_in_a_stage(job: TrainingJob) -> Any:
        runs.append(job.out)
        if len(runs) in (2, 5):  # before the second stage, and in the next call before the third
            raise Died
        return train(job)

    monkeypatch.setattr(heal_module, "train", dying_in_a_stage)
    for _ in range(2):
        with pytest.raises(Died):
            heal(tmp_path / "staged")
    records = heal(tmp_path / "staged")
    assert [record["weights"] for record in records] == [dataclasses.asdict(stage.weights) for stage in asked]
    assert [path.name for path in runs] == ["heal", "heal-1"] + ["heal", "heal-1", "heal-2"] * 2
    model, expected = (load(folder)[0].state_dict() for folder in (tmp_path / "staged", start))
    assert all(torch.equal(model[name], expected[name]) for name in expected)
    # planted: each stage begins with the converted model
    monkeypatch.setattr(heal_module, "train", train)
    job_of = heal_module.healing_job
    first = tmp_path / "planted.work" / heal_module.CONVERTED_FOLDER
    monkeypatch.setattr(heal_module, "healing_job", lambda start, *rest: job_of(first, *rest))
    heal(tmp_path / "planted")
    wrong = load(tmp_path / "planted")[0].state_dict()
    assert not all(torch.equal(wrong[name], expected[name]) for name in expected)


def test_the_rate_of_a_stage_follows_the_loss_that_is_left(
    folders: tuple[ConversionSource, Path], texts: Corpus, tmp_path: Path
) -> None:
    source, asked = folders[0], parse_stages(["50%:layers", "50%:logits"], settings())
    conversion = Conversion(source, tuple(parse_rewrites(["kv_heads=1,groups=contiguous,merge=mean"])))
    longer = dataclasses.replace(settings(), steps=40)
    convert_and_heal(conversion, Distillation(source), texts, longer, tmp_path / "out", stages=asked)
    records = json.loads(read_folder(tmp_path / "out").documents[CONVERSION_FILE])["healing"]["stages"]
    assert records[1]["learning_rate"] < records[0]["learning_rate"] < 1e-3


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        (["half:layers"], "--heal-stage half:layers: is not a stage; write SHARE%:LOSS or SHARE%:LOSS@LENGTH"),
        (["20%"], "--heal-stage 20%: is not a stage"),
        (["20%:layers@"], "--heal-stage 20%:layers@: is not a stage"),
        (["nan%:layers"], "--heal-stage nan%:layers: is not a stage"),
        (["2%:layers", "98%:logits"], "--heal-stage 2%:layers: the share must be from 5% to 100%"),
        (["50%:layers", "40%:logits"], "--heal-stage: the shares add up to 90%; make them 100%"),
        (["100%:logits@48"], "--heal-stage 100%:logits@48: a step of 64 tokens does not hold whole sequences of 48"),
        (["100%:logits@0"], "--heal-stage 100%:logits@0: a step of 64 tokens"),
        (["50%:kl", "50%:logits"], "--heal-stage kl: unknown loss 'kl'"),
        (["8%:layers", "8%:text", "84%:logits"], "--heal-stage: 6 steps of 64 tokens are too few for 3 stages"),
    ],
)
def test_a_mistaken_stage_is_one_sentence(stages: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_stages(stages, settings())


def dying(*arguments: Any, **named: Any) -> None:
    raise Died


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--heal-loss", "text"], "--heal-loss text: has no effect without healing; give --heal or --budget too"),
        (["--heal-batch-size", "2"], "--heal-batch-size 2: has no effect without healing; give --heal or --budget too"),
        (["--heal", "4096", "--heal-batch-size", "0"], "--heal-batch-size 0: must be at least 1"),
        (["--heal-baselines"], "--heal-baselines: has no effect without healing; give --heal or --budget too"),
        (
            ["--heal", "0", "--heal-lr", "1"],
            "--heal-lr 1.0: has no effect without healing; give --heal or --budget too",
        ),
        (
            ["--heal", "4096", "--heal-baselines"],
            "--heal-baselines: has no effect without --search and a report; leave it out",
        ),
        (
            ["--heal", "4096", "--heal-loss", "text", "--heal-stage", "100%:text"],
            "--heal-loss text: stages name their own losses; leave it out",
        ),
        (["--heal", "4096", "--heal-stage", "50%:text"], "--heal-stage: the shares add up to 50%; make them 100%"),
        (
            ["--heal", "9"],
            "--heal 9: is less than one step of 2,048 tokens; give more, 0 for none, or a smaller --heal-batch-size",
        ),
        (["--heal", "4096", "--heal-loss", "logit"], "unknown loss 'logit'; choices: logits, text, layers"),
        (["--heal", "4096", "--heal-parameters", "some"], "unknown parameters; choices: all, touched"),
    ],
)
def test_a_mistaken_command_is_one_sentence(
    folders: tuple[ConversionSource, Path], tmp_path: Path, capsys: Any, options: list[str], sentence: str
) -> None:
    out = tmp_path / "out"
    command = ["convert", str(folders[0].folder), str(out), "--to", "kv_heads=1,merge=mean", "--quiet", *options]
    assert run_command(command) == 2
    assert capsys.readouterr().err.endswith(f"{sentence}\n")
    assert list(tmp_path.iterdir()) == []


def test_the_rate_falls_with_the_width_and_with_small_steps() -> None:
    assert [healing_rate(width) for width in (16, 96, 192)] == [3e-3, 3e-3, 1.5e-3]
    assert [healing_rate(192, tokens) for tokens in (128, 512, 2048, 8192)] == [3.75e-4, 7.5e-4, 1.5e-3, 1.5e-3]


def test_the_rate_falls_with_the_loss_that_the_conversion_added(
    folders: tuple[ConversionSource, Path], texts: Corpus, tmp_path: Path
) -> None:
    assert [rate_share(loss) for loss in (-1.0, 0.0, 0.02, 0.5, 2.0, 9.0)] == [0.1, 0.1, 0.1, 0.5, 1.0, 1.0]
    source, distillation = folders[0], Distillation(folders[0])
    rates = {}
    for target in ("kv_heads=1,groups=contiguous,merge=mean", "head.tied=false"):
        conversion = Conversion(source, tuple(parse_rewrites([target])))
        for name, adapt in (("adapted", True), ("fixed", False)):
            out = tmp_path / f"{target}-{name}"
            convert_and_heal(conversion, distillation, texts, settings(), out, adapt_rate=adapt)
            rates[target, name] = json.loads(read_folder(out).documents[CONVERSION_FILE])["healing"]["learning_rate"]
    assert rates[("head.tied=false", "adapted")] == 1e-4
    assert 1e-4 < rates[("kv_heads=1,groups=contiguous,merge=mean", "adapted")] <= 1e-3
    assert {rate for (_, name), rate in rates.items() if name == "fixed"} == {1e-3}


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"healing tokens 63:.*64 tokens"):
        settings(63)
    with pytest.raises(ConfigError, match="first_sample -1:"):
        settings(first_sample=-1)


def test_the_text_alone_needs_no_teacher(folders: tuple[ConversionSource, Path], texts: Corpus, tmp_path: Path) -> None:
    """It is the same run as without one."""
    by_text = job(folders, texts, tmp_path / "text", LossWeights(logits=0.0, text=1.0))
    logs = []
    for name, run in (("text", by_text), ("plain", dataclasses.replace(by_text, out=tmp_path / "plain"))):
        train(run if name == "text" else dataclasses.replace(run, distillation=None))
        logs.append([line | dict.fromkeys(MEASURED, 0) for line in read_log(tmp_path / name)])
    assert logs[0] == logs[1]
    assert "divergence" not in logs[0][0]
