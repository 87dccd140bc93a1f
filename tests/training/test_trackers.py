"""`--track`: stand-ins receive what each tracker's own library is given; one that fails or hangs stops no training."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.data.corpus import Corpus
from heddle.distributed.ranks import Ranks
from heddle.errors import ConfigError
from heddle.storage.run_log import read_log
from heddle.training import trackers
from heddle.training.loop import train
from heddle.training.trackers import TRACKERS, check_trackers, metrics_of, open_trackers
from tests import small

STEPS = 3
Received = list[tuple[int, dict[str, float]]]


class StandIn:
    """All four libraries at once: what a run, a writer or a client of theirs receives."""

    def __init__(self, log: Callable[[], object] = lambda: None) -> None:
        self.received: Received = []
        self.opened: list[dict[str, Any]] = []
        self.closed = 0
        self._before_log = log

    def record(self, metrics: dict[str, float], step: int) -> None:
        self._before_log()
        self.received.append((step, metrics))

    def open(self, *arguments: Any, **named: Any) -> Any:
        self.opened.append({"arguments": arguments, **named})
        return SimpleNamespace(log=self.record, finish=self.close)

    def close(self, *_: Any) -> None:
        self.closed += 1

    def modules(self) -> dict[str, Any]:
        """The modules of the libraries, with what heddle calls of them."""

        def writer(*arguments: Any, **named: Any) -> Any:
            self.opened.append({"arguments": arguments, **named})
            scalars: dict[str, float] = {}

            def add_scalar(name: str, value: float, step: int) -> None:
                scalars[name], scalars["step"] = value, step

            def flush() -> None:
                step = int(scalars.pop("step"))
                self.record(dict(scalars), step)
                scalars.clear()

            return SimpleNamespace(add_scalar=add_scalar, flush=flush, add_text=lambda *_: None, close=self.close)

        def client() -> Any:
            def create_run(experiment: str, **named: Any) -> Any:
                self.opened.append({"experiment": experiment, **named})
                return SimpleNamespace(info=SimpleNamespace(run_id="r"))

            def log_batch(_: str, metrics: list[Any]) -> None:
                self.record({metric.key: metric.value for metric in metrics}, metrics[0].step)

            return SimpleNamespace(
                get_experiment_by_name=lambda _: None, create_experiment=lambda name: name, create_run=create_run,
                search_runs=lambda *_, **__: [], log_param=lambda *_: None, log_batch=log_batch,
                set_terminated=self.close,
            )  # fmt: skip

        def metric(key: str, value: float, _: int, step: int) -> Any:
            return SimpleNamespace(key=key, value=value, step=step)

        variable = SimpleNamespace(get=lambda: None)
        return {
            "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=writer),
            "wandb": SimpleNamespace(
                setup=lambda: SimpleNamespace(settings=SimpleNamespace(project=None)), Settings=dict, init=self.open
            ),
            "trackio": SimpleNamespace(init=self.open),
            "mlflow": SimpleNamespace(MlflowClient=client),
            "mlflow.entities": SimpleNamespace(Metric=metric),
            "mlflow.environment_variables": SimpleNamespace(MLFLOW_EXPERIMENT_NAME=variable),
        }


def stand_in(monkeypatch: pytest.MonkeyPatch, log: Callable[[], object] = lambda: None) -> StandIn:
    library = StandIn(log)
    for name, module in library.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return library


@pytest.mark.parametrize("name", TRACKERS)
def test_each_library_receives_every_line(
    name: str, texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = stand_in(monkeypatch)
    job = replace(small.job(texts, tmp_path / "run", steps=STEPS), trackers=(name,))
    trained = train(job)
    expected = [(line["step"], metrics_of(line)) for line in read_log(job.out)]
    assert library.received == [*expected, (STEPS, {"final_bits_per_byte": trained.bits_per_byte})]
    assert [step for step, _ in library.received[:STEPS]] == list(range(1, STEPS + 1))
    assert {"loss", "learning_rate", "gradient_norm", "tokens"} <= library.received[0][1].keys()
    assert (len(library.opened), library.closed) == (1, 1)


def test_a_tracker_that_fails_stops_nothing(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise SystemExit("no such\nserver")

    stand_in(monkeypatch, fail)
    train(replace(small.job(texts, tmp_path / "run", steps=STEPS), trackers=("wandb",)))
    assert len(read_log(tmp_path / "run")) == STEPS
    warning = "warning: track wandb:"
    assert warning in capsys.readouterr().err


def test_a_tracker_that_hangs_stops_nothing(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()
    stand_in(monkeypatch, release.wait)
    monkeypatch.setattr(trackers, "CLOSING_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "MAX_QUEUED_LINES", 1)
    train(replace(small.job(texts, tmp_path / "run", steps=6), trackers=("trackio",)))
    release.set()
    assert len(read_log(tmp_path / "run")) == 6
    printed = capsys.readouterr().err
    assert printed.count("warning: track trackio: 1 lines wait to be sent; further ones are dropped") == 1
    assert "warning: track trackio:" in printed


def test_only_the_first_rank_tracks(texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = stand_in(monkeypatch)
    job = replace(small.job(texts, tmp_path), trackers=tuple(TRACKERS), ranks=Ranks(rank=1, count=2))
    with open_trackers(job, 1) as track:
        track({"step": 1, "loss": 2.0})
    assert library.opened == []


def test_a_continued_run_is_the_same_one(texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = stand_in(monkeypatch)
    job = replace(small.job(texts, tmp_path), trackers=("wandb",))
    for first_step in (1, 4):
        with open_trackers(job, first_step):
            pass
    with open_trackers(replace(job, out=tmp_path / "other"), 1):
        pass
    first, continued, other = (opened["id"] for opened in library.opened)
    assert first == continued != other
    assert library.opened[0]["config"]["settings.batch_size"] == 4


def test_numbers_of_a_line() -> None:
    line = {"step": 2, "loss": 1.5, "skipped": False, "bad": None, "note": "a", "experts": {"layers.0": {"load": [1]}}}
    assert metrics_of(line) == {"loss": 1.5, "experts/layers/0/load/0": 1.0}


def test_names_are_checked_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", "preset:gqa-tiny", "--track", "wandbb", "--out", str(tmp_path / "run")]) == 2
    assert "--track wandbb:" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"track mlflow:.*\[mlf"):
        check_trackers(["mlflow"])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    with pytest.raises(ConfigError, match="given twice"):
        check_trackers(["mlflow", "mlflow"])
    assert check_trackers(list(TRACKERS)) == tuple(TRACKERS)
    assert not (tmp_path / "run").exists()


def test_a_slow_tracker_gets_all_lines(texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = stand_in(monkeypatch, lambda: time.sleep(0.01))
    job = replace(small.job(texts, tmp_path), trackers=("wandb",))
    with open_trackers(job, 1) as track:
        for step in range(1, 9):
            track({"step": step, "loss": 1.0})
    assert [step for step, _ in library.received] == list(range(1, 9))
