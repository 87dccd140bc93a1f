"""A loss or gradient that is not finite: the step is skipped and counted, and ten in a row end the run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.data.corpus import Corpus
from heddle.storage.checkpoints import PROGRESS_FILE, checkpoint_folder, checkpoint_steps
from heddle.storage.model import load
from heddle.storage.run_log import read_log
from heddle.training import loop
from heddle.training.loop import Diverged, train
from heddle.training.run import say_if_diverged
from heddle.training.step import accumulate_gradients
from tests import small


def poisoning(monkeypatch: pytest.MonkeyPatch, bad: range) -> None:
    """The losses of some steps, counted from 1, are not a number."""
    right = accumulate_gradients
    calls = 0

    def gradients(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = right(*arguments)
        return dataclasses.replace(result, loss=result.loss * (float("nan") if calls in bad else 1.0))

    monkeypatch.setattr(loop, "accumulate_gradients", gradients)


def test_bad_steps_are_counted_and_survive_a_resume(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        poisoning(patch, range(2, 4))
        outcome = train(small.job(texts, tmp_path, steps=6, save_every=2))
    assert outcome.progress.skipped_steps == 2
    assert outcome.progress.consecutive_skips == 0
    lines = read_log(tmp_path)
    assert [line["skipped"] for line in lines] == [False, True, True, False, False, False]
    assert [line["loss"] is None for line in lines] == [False, True, True, False, False, False]
    assert train(small.job(texts, tmp_path, steps=6)).progress.skipped_steps == 2
    assert json.loads((checkpoint_folder(tmp_path, 4) / PROGRESS_FILE).read_text())["skipped_steps"] == 2


def test_ten_bad_steps_in_a_row_end_the_run_and_leave_its_checkpoints(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        poisoning(patch, range(4, 99))
        with pytest.raises(Diverged, match=r"10 steps.*step 13.*0\.003"):
            train(small.job(texts, tmp_path, steps=20, save_every=3))
    assert checkpoint_steps(tmp_path) == [9, 12]
    reached = [
        torch.equal(a, b) for a, b in zip(*(weights(checkpoint_folder(tmp_path, n)) for n in (9, 12)), strict=True)
    ]
    assert all(reached)
    assert all(bool(tensor.isfinite().all()) for tensor in weights(checkpoint_folder(tmp_path, 12)))
    outcome = train(small.job(texts, tmp_path, steps=20, save_every=3))
    assert outcome.progress.skipped_steps == 9  # steps 4 to 12, as they stand in the checkpoint


def weights(path: Path) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in load(path)[0].parameters()]


def test_nine_bad_steps_do_not_end_it(texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoning(monkeypatch, range(2, 11))
    assert train(small.job(texts, tmp_path, steps=12)).progress.skipped_steps == 9


def test_a_loss_on_held_out_text_that_is_not_finite_is_no_result(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "evaluate", lambda *arguments, **named: [(float("nan"), 3)])
    with pytest.raises(Diverged, match=r"held-out.*finite"):
        train(small.job(texts, tmp_path, steps=2))


def test_a_finite_run_that_diverged_is_said_to_have(
    texts: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the loss of its own steps: held-out text may be harder from the start, as that of a small file is."""
    for name, learning_rate, says in (("good", 1e-3, False), ("short", 1e-3, False), ("bad", 10.0, True)):
        job = small.job(texts, tmp_path / name, steps=2 if name == "short" else 14, learning_rate=learning_rate)
        train(job)
        capsys.readouterr()
        say_if_diverged(job)
        printed = capsys.readouterr().err
        assert ("diverged: the loss rose from 5." in printed) == says, printed
    assert printed.endswith("nats/token; give a lower --lr than 10\n")
