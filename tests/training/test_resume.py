"""A run that died anywhere ends, continued, with the very bits of one that never did."""

import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import heddle
from heddle.data.corpus import Corpus
from heddle.errors import CheckpointError
from heddle.signals import Interrupted
from heddle.storage import folder
from heddle.storage.checkpoints import PROGRESS_FILE, checkpoint_folder, checkpoint_steps
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.folder import read_folder, tensors_sha256
from heddle.storage.model import find_model_folder
from heddle.storage.run_log import LOG_FILE, RUN_FILE, read_log
from heddle.training import checkpoint as snapshot
from heddle.training import loop
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.step import accumulate_gradients, apply_gradients
from tests import small
from tests.storage.shared import Died, System, standing_in, untimed_log

STEPS = 7


def job(texts: Corpus, out: Path, **settings: Any) -> TrainingJob:
    return small.job(texts, out, small.dropping(), STEPS, **({"evaluate_every": 3, "save_every": 2} | settings))


def ending(out: Path) -> tuple[str, str, list[dict[str, Any]]]:
    """All that must be equal: every tensor, the progress, and each line of the log but its time."""
    last = checkpoint_folder(out, STEPS)
    return tensors_sha256(last), (last / PROGRESS_FILE).read_text(), untimed_log(out)


@pytest.fixture(scope="module")
def undisturbed(texts: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed; tests damage a copy, `finished`."""
    out = tmp_path_factory.mktemp("whole")
    train(job(texts, out))
    return out


@pytest.fixture(scope="module")
def whole(undisturbed: Path) -> tuple[str, str, list[dict[str, Any]]]:
    """Its ending."""
    return ending(undisturbed)


@pytest.fixture
def finished(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(undisturbed, tmp_path / "finished"))


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, name: str, at: int, before: bool) -> Iterator[None]:
    """The process ends at the call number `at` of one of the loop's functions."""
    calls = 0
    right = getattr(loop, name)

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and before:
            raise Died
        result = right(*arguments, **named)
        if calls == at:
            raise Died
        return result

    with monkeypatch.context() as patch:
        patch.setattr(loop, name, call)
        with pytest.raises(Died):
            yield


@pytest.mark.parametrize(
    ("name", "before"),
    [("accumulate_gradients", True), ("apply_gradients", False), ("save_run", True), ("save_run", False)],
)
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_death_at_any_step(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any, name: str, before: bool, every: int
) -> None:
    """By day at even steps before a call and at odd ones after it, in the night at each step."""
    for at in range(every if before else 1, STEPS + 1, every):
        out = tmp_path / str(at)
        with dying(monkeypatch, name, at, before):
            train(job(texts, out, save_every=1))
        torch.manual_seed(99)  # another process starts elsewhere
        train(job(texts, out, save_every=1))
        assert ending(out) == whole, at


def test_death_at_every_second_step_of_one_run(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    for _ in range(STEPS // 2):
        with dying(monkeypatch, "_stop_if_diverged", 3, before=True):
            train(job(texts, tmp_path, save_every=1))
    train(job(texts, tmp_path, save_every=1))
    assert ending(tmp_path) == whole


def check_deaths(root: Path, make: Callable[[Path], TrainingJob], ends: Callable[[Path], Any], number: int) -> None:
    """A run that dies after about so many of the system calls ends, continued, as one that does not."""
    with standing_in(System()) as counting:
        train(make(root / "count"))
    calls = len(counting.trace)
    for at in range(1, calls, max(1, calls // number)):
        out = root / str(at)
        with standing_in(System(at, "after")), pytest.raises(Died):
            train(make(out))
        train(make(out))
        assert ends(out) == ends(root / "count"), at


def test_death_at_system_calls_of_a_save(texts: Corpus, tmp_path: Path, whole: Any) -> None:
    check_deaths(tmp_path, lambda out: job(texts, out), ending, 10)
    assert ending(tmp_path / "count") == whole


def test_muon_with_rates_of_its_own(texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = (("layers.*.mixer", 0.5), ("embed", 0.0))
    asked: dict[str, Any] = {"save_every": 1, "optimizer": "muon", "schedule": "cosine", "warmup": 2, "lr_scale": scale}
    train(job(texts, tmp_path / "whole", **asked))
    for planted in (False, True):
        out = tmp_path / f"cut-{planted}"
        for _ in range(STEPS // 2):
            with dying(monkeypatch, "_stop_if_diverged", 3, before=True):
                train(job(texts, out, **asked))
        with monkeypatch.context() as patch:
            if planted:
                patch.setattr(loop, "resume_run", forgetting_momentum)
            train(job(texts, out, **asked))
        assert (ending(out) == ending(tmp_path / "whole")) is not planted
    run = json.loads((tmp_path / "whole" / RUN_FILE).read_text())["settings"]
    assert (run["optimizer"], run["warmup"], run["schedule"]) == ("muon", 2, "cosine")
    assert run["lr_scale"] == [["layers.*.mixer", 0.5], ["embed", 0.0]]
    rates = [line["learning_rate"] for line in read_log(tmp_path / "whole")]
    assert rates[:2] == pytest.approx([0.0015, 0.003])


def forgetting_momentum(*arguments: Any) -> Any:
    progress = snapshot.resume_run(*arguments)
    state = arguments[2].state["layers.0.mixer.q.weight"]
    state["momentum_buffer"].zero_()
    return progress


def test_a_run_at_its_end_is_only_measured_again(texts: Corpus, tmp_path: Path, whole: Any) -> None:
    first = train(job(texts, tmp_path))
    again = train(job(texts, tmp_path))
    assert again.scores == first.scores
    assert ending(tmp_path) == whole


def test_how_a_batch_is_split_is_part_of_a_run(texts: Corpus, finished: Path) -> None:
    with pytest.raises(CheckpointError, match=r"settings\.gradient_accumulation_steps.*1.*2"):
        train(job(texts, finished, gradient_accumulation_steps=2))


def forgetting_moments(*arguments: Any) -> Any:
    optimizer = arguments[2]
    progress = snapshot.resume_run(*arguments)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    return progress


def forgetting_the_step(*arguments: Any) -> Any:
    progress = snapshot.resume_run(*arguments)
    progress.step = max(0, progress.step - 1)
    return progress


@pytest.mark.parametrize("planted", [forgetting_moments, forgetting_the_step])
def test_a_resume_that_forgets_something_is_caught(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any, planted: Any
) -> None:
    with dying(monkeypatch, "_stop_if_diverged", 5, before=True):
        train(job(texts, tmp_path))
    monkeypatch.setattr(loop, "resume_run", planted)
    train(job(texts, tmp_path))
    assert ending(tmp_path) != whole


def test_a_checkpoint_holds_the_state_of_the_random_numbers(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawing(*arguments: Any, **named: Any) -> Any:
        torch.rand(1)  # as a part of the user's own may
        return accumulate_gradients(*arguments, **named)

    monkeypatch.setattr(loop, "accumulate_gradients", drawing)
    train(job(texts, tmp_path / "whole"))
    after = torch.get_rng_state()
    with dying(monkeypatch, "_stop_if_diverged", 5, before=True):
        train(job(texts, tmp_path / "cut"))
    torch.manual_seed(1234)
    train(job(texts, tmp_path / "cut"))
    assert torch.equal(torch.get_rng_state(), after)


def test_a_damaged_checkpoint_is_passed_over_aloud(
    texts: Corpus, finished: Path, whole: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoint_folder(finished, STEPS) / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-3] ^= 4
    newest.write_bytes(data)
    train(job(texts, finished))
    warnings = capsys.readouterr().err
    assert "warning: " in warnings
    assert str(newest) in warnings
    assert "continuing" in warnings
    assert "from step 6" in warnings
    assert ending(finished) == whole


def test_a_checkpoint_of_an_impossible_step_is_refused(texts: Corpus, finished: Path, tmp_path: Path) -> None:
    train(small.job(texts, tmp_path / "longer", small.dropping(), STEPS + 2, evaluate_every=3, save_every=2))
    later = checkpoint_folder(finished, STEPS + 2)
    shutil.copytree(checkpoint_folder(tmp_path / "longer", STEPS + 2), later)
    with pytest.raises(CheckpointError, match=f"step {STEPS + 2}.*{STEPS}"):
        train(job(texts, finished))
    contents = read_folder(later)
    for step in (-1, STEPS, 10**17, "9", True):
        documents = contents.documents | {PROGRESS_FILE: json.dumps({"step": step})}
        with pytest.raises(CheckpointError, match=f"step {STEPS + 2}"):
            snapshot._read_progress(dataclasses.replace(contents, documents=documents), STEPS + 2, None)


def test_a_checkpoint_of_another_run_with_its_log_is_refused(
    texts: Corpus, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(job(texts, tmp_path / "other", seed=1))
    shutil.rmtree(finished / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", finished / "checkpoints")
    shutil.copy(tmp_path / "other" / LOG_FILE, finished / LOG_FILE)
    with pytest.raises(CheckpointError, match="it is a checkpoint of another run"):
        train(job(texts, finished))
    newest = checkpoint_folder(finished, checkpoint_steps(finished)[-1])
    for named in (finished, newest):  # by each reader of models, too
        with pytest.raises(CheckpointError, match="is a checkpoint of another run"):
            heddle.load(named)
    heddle.load(newest.rename(tmp_path / newest.name))  # elsewhere it stands for itself
    # one of an earlier version does not say of which run it is, and so does one that nobody asks
    monkeypatch.setattr(snapshot, "run_hash", lambda run: None)
    train(job(texts, tmp_path / "older"))
    monkeypatch.undo()
    train(job(texts, tmp_path / "older"))
    heddle.load(tmp_path / "older")


def test_a_checkpoint_under_the_name_of_another_step_is_not_read(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = (checkpoint_folder(finished, step) for step in checkpoint_steps(finished))
    renamed = last.rename(checkpoint_folder(finished, STEPS + 5))
    assert find_model_folder(finished) == first
    assert f"is the checkpoint of step {STEPS}, not of step {STEPS + 5}" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=f"step {STEPS}, not of step {STEPS + 5}"):
        heddle.load(renamed)
    shutil.rmtree(first)
    with pytest.raises(CheckpointError, match=f"step {STEPS}, not of step {STEPS + 5}"):
        heddle.load(finished)


def test_a_cut_last_line_of_the_log_is_written_again(finished: Path) -> None:
    path = finished / LOG_FILE
    path.write_text(path.read_text()[:-30])
    assert len(read_log(finished)) == STEPS - 1
    path.write_text(path.read_text() + "\n[1]\n")
    with pytest.raises(CheckpointError, match=f"line {STEPS}"):
        read_log(finished)


def test_the_manifest_of_a_checkpoint_says_where_the_log_was(finished: Path) -> None:
    lines = (finished / LOG_FILE).read_text().splitlines()
    for step in checkpoint_steps(finished):
        manifest = json.loads((checkpoint_folder(finished, step) / "manifest.json").read_text())
        assert manifest["log"] == {"lines": step, "head": json.loads(lines[step - 1])["chain"]}


@pytest.mark.parametrize("number", [1, 4, 5])
def test_an_altered_line_of_the_log_is_named_and_the_run_is_left_as_it_is(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with dying(monkeypatch, "apply_gradients", 7, before=True):
        train(job(texts, tmp_path))  # the last checkpoint is of step 6
    path = tmp_path / LOG_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(b'"loss": 5.', b'"loss": 4.', 1)
    path.write_bytes(b"".join(lines))
    before = ending_bytes(tmp_path)
    with pytest.raises(CheckpointError, match=rf"log\.jsonl: line {number}"):
        train(job(texts, tmp_path))
    assert ending_bytes(tmp_path) == before


def test_shards_resume_with_the_same_bits(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    monkeypatch.setattr(folder, "MAX_SHARD_BYTES", 10_000)
    with dying(monkeypatch, "save_run", 2, before=False):
        train(job(texts, tmp_path))
    train(job(texts, tmp_path))
    names = {path.name for path in checkpoint_folder(tmp_path, STEPS).iterdir()}
    assert {"model.safetensors.index.json", "training.safetensors.index.json"} <= names
    assert "model.safetensors" not in names
    assert ending(tmp_path) == whole


@pytest.mark.parametrize("name", [RUN_FILE, "manifest.json"])
def test_files_of_format_1_are_refused(texts: Corpus, tmp_path: Path, name: str) -> None:
    train(small.job(texts, tmp_path, steps=2))
    path = tmp_path / name if name == RUN_FILE else checkpoint_folder(tmp_path, 2) / name
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_text(json.dumps(content | {"version": 1} if name == "manifest.json" else content))
    load = (lambda: train(small.job(texts, tmp_path, steps=2))) if name == RUN_FILE else lambda: heddle.load(tmp_path)
    with pytest.raises(CheckpointError, match="format 1"):
        load()


def test_an_altered_run_json_is_named(texts: Corpus, tmp_path: Path) -> None:
    train(small.job(texts, tmp_path, steps=2))
    path = tmp_path / RUN_FILE
    path.write_text(path.read_text().replace('"steps": 2', '"steps": 3'))
    with pytest.raises(CheckpointError, match=r"run\.json:.*SHA-256"):
        train(small.job(texts, tmp_path, steps=3))


CHANGES: dict[str, dict[str, Any]] = {
    "design.width was 16": {"data": small.design(width=32)},
    "design.layers[0].mixer.heads was 2": {
        "data": small.design(
            layers=[{"mixer": {"kind": "attention", "heads": 4, "kv_heads": 1, "position": {"kind": "rope"}},
                     "feedforward": {"kind": "gated", "hidden": 24}}]
        )
    },
    "settings.seed was 0": {"seed": 1},
    "settings.steps was 4": {"steps": 5},
    "settings.learning_rate was 0.003": {"learning_rate": 0.01},
    "settings.sequence_length was 16": {"sequence_length": 8},
    'settings.optimizer was "adamw"': {"optimizer": "muon"},
    'settings.schedule was "wsd"': {"schedule": "linear"},
    "settings.warmup was null": {"warmup": 3},
    "settings.lr_scale was []": {"lr_scale": (("embed", 2.0),)},
    'settings.precision was "fp32"': {"precision": "bf16"},
}  # fmt: skip


@pytest.mark.parametrize("difference", CHANGES)
def test_a_changed_run_is_refused_by_name(texts: Corpus, tmp_path: Path, difference: str) -> None:
    train(small.job(texts, tmp_path, steps=4))
    before = ending_bytes(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        train(small.job(texts, tmp_path, **({"steps": 4} | CHANGES[difference])))
    assert difference in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert ending_bytes(tmp_path) == before


def test_changed_data_is_refused(texts: Corpus, tmp_path: Path) -> None:
    train(small.job(texts, tmp_path / "run", steps=2))
    other = small.folder(tmp_path / "other", documents=31)
    assert other.is_dir()
    with pytest.raises(CheckpointError, match=r"data\.hash"):
        train(small.job(small.corpus(tmp_path / "other"), tmp_path / "run", steps=2))


def test_as_much_text_encoded_otherwise_is_refused(texts: Corpus, tmp_path: Path) -> None:
    """The hash does not say how far a text was encoded, but the order of samples depends on it."""
    first = small.job(texts, tmp_path, steps=2)
    train(first)
    path = tmp_path / RUN_FILE
    run = read_json_file(path)
    assert run["data"]["tokens"] == [len(file) for file in texts.train]
    run["data"]["tokens"][0] += 1
    write_json_file(path, run)
    with pytest.raises(CheckpointError, match=r"data\.tokens\[0\]"):
        train(first)


def ending_bytes(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_folder_that_holds_something_else_is_left_alone(texts: Corpus, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"\(thesis.tex\)"):
        train(small.job(texts, tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert checkpoint_steps(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_ends(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    right = apply_gradients
    calls = 0

    def apply(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(number)
        return right(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "apply_gradients", apply)
        with pytest.raises(Interrupted) as caught:
            train(job(texts, tmp_path, save_every=100))
    assert caught.value.exit_code == 128 + number
    assert checkpoint_steps(tmp_path) == [3]
    assert signal.getsignal(number) is before
    train(job(texts, tmp_path, save_every=100))
    assert ending(tmp_path) == whole


def test_a_signal_during_the_last_evaluation_ends_it(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    right = loop._train_steps

    def run(*arguments: Any) -> float:
        result = right(*arguments)
        signal.raise_signal(signal.SIGTERM)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_train_steps", run)
        with pytest.raises(Interrupted):
            train(job(texts, tmp_path))
    train(job(texts, tmp_path))
    assert ending(tmp_path) == whole


def test_a_second_signal_ends_at_once(texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(*arguments: Any) -> Any:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        now.append(100.6)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[-1])
    monkeypatch.setattr(loop, "apply_gradients", apply)
    with pytest.raises(Interrupted):
        train(job(texts, tmp_path))
    assert now == [100.0, 100.6]
    assert checkpoint_steps(tmp_path) == []


def test_one_wish_that_arrives_twice_is_one(texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = apply_gradients

    def apply(*arguments: Any) -> Any:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        return right(*arguments)

    monkeypatch.setattr(loop, "apply_gradients", apply)
    with pytest.raises(Interrupted):
        train(job(texts, tmp_path))
    assert checkpoint_steps(tmp_path) == [1]


def test_equal_runs_are_equal_and_other_seeds_are_not(texts: Corpus, tmp_path: Path) -> None:
    prints = set()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(small.job(texts, tmp_path / name, steps=3, seed=seed))
        prints.add(tensors_sha256(checkpoint_folder(tmp_path / name, 3)))
    assert len(prints) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_last_batch_of_the_last_evaluation_ends_the_training(
    number: signal.Signals, texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing reads the request after that batch; without an exception the caller would go on to its next work."""
    evaluate = loop.evaluate

    def signalled(*arguments: Any) -> Any:
        scores = evaluate(*arguments)
        is_last = len(arguments) > 3
        if is_last:
            os.kill(os.getpid(), number)
        return scores

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", signalled)
        with pytest.raises(Interrupted) as interrupted:
            train(job(texts, tmp_path / "run"))
    assert interrupted.value.exit_code == 128 + number
    assert interrupted.value.sentence == f"ended by {number.name}; the same command continues"
    again, undisturbed = train(job(texts, tmp_path / "run")), train(job(texts, tmp_path / "undisturbed"))
    assert again.scores == undisturbed.scores
