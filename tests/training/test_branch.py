"""Branches that decay from one trunk: the bits of trainings alone, each shared step taken once, resumed, refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle.data.corpus import Corpus
from heddle.distributed.ranks import Ranks
from heddle.errors import CheckpointError, ConfigError
from heddle.lab.compare.worker import train_branch
from heddle.storage.run_log import read_log
from heddle.training import loop
from heddle.training.job import TrainingJob
from heddle.training.loop import TrainingResult, train
from tests import small
from tests.laws.planting import assigned
from tests.training.gradients import same_weights

LENGTHS = (6, 10, 15)


def job(texts: Corpus, out: Path, steps: int, **settings: Any) -> TrainingJob:
    return small.job(texts, out, small.dropping(), steps, **({"warmup": 3} | settings))


def assert_same(branch: TrainingResult, alone: TrainingResult) -> None:
    assert branch.scores == alone.scores
    assert same_weights(branch.model, alone.model)


def branches(texts: Corpus, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[TrainingResult], int]:
    """A branch of each length, and how many steps all of them took."""
    steps, queue_step = 0, loop._queue_step

    def counting(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return queue_step(*arguments)

    results, previous = [], None
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_queue_step", counting)
        for length in LENGTHS:
            trunk = folder / f"trunk-{length}"
            results.append(train_branch(job(texts, folder / f"{length}", length), trunk, previous))
            previous = trunk
    return results, steps


def test_a_branch_has_the_bits_of_a_training_alone(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, steps = branches(texts, tmp_path, monkeypatch)
    assert steps == 12 + 1 + 2 + 3  # the longest trunk and the three decays; alone they take 6 + 10 + 15
    for length, branch in zip(LENGTHS, results, strict=True):
        alone = tmp_path / f"alone-{length}"
        assert_same(branch, train(job(texts, alone, length)))
        rates, expected = ([line["learning_rate"] for line in read_log(run)] for run in (tmp_path / f"{length}", alone))
        assert rates == expected


def test_a_trunk_that_goes_on_too_long_is_noticed(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = assigned(train_branch, "stable", lambda stable, *, settings: replace(stable, steps=settings.steps - 1))
    too_long(monkeypatch)
    branch = train_branch(job(texts, tmp_path / "branch", 15), tmp_path / "trunk")
    with pytest.raises(AssertionError):
        assert_same(branch, train(job(texts, tmp_path / "alone", 15)))


@pytest.mark.parametrize("step", [5, 13])  # in the trunk, in the decay
def test_an_interrupted_branch_ends_with_the_same_bits(
    step: int, texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job(texts, tmp_path / "branch", 15)
    with small.signalled(monkeypatch, step):
        train_branch(asked, tmp_path / "trunk")
    assert_same(train_branch(asked, tmp_path / "trunk"), train(job(texts, tmp_path / "alone", 15)))


def test_what_is_no_branch_is_refused(texts: Corpus, tmp_path: Path) -> None:
    asked = job(texts, tmp_path / "branch", 10)
    for settings, sentence in (
        ({"schedule": "cosine"}, r"^schedule cosine:.*wsd"),
        ({"warmup": None}, r"^warmup None:"),
        ({"warmup": 9}, r"^warmup 9:"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            train_branch(replace(asked, settings=replace(asked.settings, **settings)), tmp_path / "trunk")
    with pytest.raises(ConfigError, match=r"^ranks: .* not 2;"):
        train_branch(replace(asked, ranks=Ranks(0, 2)), tmp_path / "trunk")
    train_branch(job(texts, tmp_path / "longer", 15), tmp_path / "previous")
    with pytest.raises(CheckpointError, match="step 12"):
        train_branch(asked, tmp_path / "trunk", tmp_path / "previous")
    other = job(texts, tmp_path / "other", 20, learning_rate=0.1)
    with pytest.raises(CheckpointError, match=r"settings.learning_rate.*0.003.*0.1"):
        train_branch(other, tmp_path / "trunk-20", tmp_path / "previous")
    assert not (tmp_path / "trunk-20").exists()
