"""A loss or gradient that is not finite: the step is not taken, counted, and ten in a row end the run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.data.corpus import Corpus
from heddle.storage.checkpoints import step_folder, steps
from heddle.storage.model import load
from heddle.storage.run_log import read_log
from heddle.training import checkpoint as snapshot
from heddle.training import loop
from heddle.training.loop import Diverged, train
from tests import small


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return small.corpus(tmp_path_factory.mktemp("text"))


def poisoning(monkeypatch: pytest.MonkeyPatch, bad: range) -> None:
    """The losses of some steps, counted from 1, are not a number."""
    right = loop.gradients
    calls = 0

    def gradients(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        found = right(*given)
        return dataclasses.replace(found, loss=found.loss * (float("nan") if calls in bad else 1.0))

    monkeypatch.setattr(loop, "gradients", gradients)


def test_bad_steps_are_counted_and_survive_a_resume(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        poisoning(patch, range(2, 4))
        outcome = train(small.job(texts, tmp_path, steps=6, save_every=2))
    assert outcome.progress.skipped == 2
    assert outcome.progress.streak == 0
    lines = read_log(tmp_path)
    assert [line["taken"] for line in lines] == [True, False, False, True, True, True]
    assert [line["loss"] is None for line in lines] == [False, True, True, False, False, False]
    assert train(small.job(texts, tmp_path, steps=6)).progress.skipped == 2
    assert json.loads((step_folder(tmp_path, 4) / snapshot.PROGRESS).read_text())["skipped"] == 2


def test_ten_bad_steps_in_a_row_end_the_run_and_leave_its_checkpoints(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        poisoning(patch, range(4, 99))
        with pytest.raises(Diverged, match=r"10 steps in a row, up to step 13, .* try a lower --lr than 0\.003"):
            train(small.job(texts, tmp_path, steps=20, save_every=3))
    assert steps(tmp_path) == [9, 12]
    reached = [torch.equal(a, b) for a, b in zip(*(weights(step_folder(tmp_path, n)) for n in (9, 12)), strict=True)]
    assert all(reached)
    assert all(bool(tensor.isfinite().all()) for tensor in weights(step_folder(tmp_path, 12)))
    outcome = train(small.job(texts, tmp_path, steps=20, save_every=3))
    assert outcome.progress.skipped == 9  # steps 4 to 12, as they stand in the checkpoint


def weights(path: Path) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in load(path)[0].parameters()]


def test_nine_bad_steps_do_not_end_it(texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoning(monkeypatch, range(2, 11))
    assert train(small.job(texts, tmp_path, steps=12)).progress.skipped == 9


def test_a_loss_on_held_out_text_that_is_not_finite_is_no_result(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "evaluate", lambda *given, **named: [(float("nan"), 3)])
    with pytest.raises(Diverged, match="held-out text is not finite; try a lower --lr"):
        train(small.job(texts, tmp_path, steps=2))
