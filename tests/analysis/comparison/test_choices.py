"""A comparison has one set of the ways that its machine takes, whatever the cache says later."""

import json
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.lab.compare import compare
from heddle.runtime import DEFAULT_CHOICES, EARLIER_CHOICES, Choices
from heddle.storage.file_io import read_json_file
from tests.analysis.comparison.runs import Ended, Workers, command

MEASURED = Choices("medium", {"float32 large 1": "plain"}, (256,))


@pytest.fixture
def told(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests of workers."""
    requests: list[Any] = []

    def start(request: Path, target: Path) -> Ended:
        requests.append(json.loads(request.read_text()))
        return workers.start(request, target)

    monkeypatch.setattr("heddle.lab.workers.start_worker", start)
    return requests


def measure(choices: Choices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heddle.machine.measured_choices", lambda *_: choices)


def test_workers_are_told(folder: Path, tmp_path: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    measure(MEASURED, monkeypatch)
    assert run_command(command(folder, tmp_path, "--tokens", "1024", "--seeds", "1")) == 0
    record = read_json_file(tmp_path / "machine.json")
    assert record == {"1": MEASURED.dump()}
    assert {task["task"] for task in told} >= {"train", "speed"}
    measure(DEFAULT_CHOICES, monkeypatch)
    assert run_command(command(folder, tmp_path, "--tokens", "1024", "--seeds", "2")) == 0
    assert [task["choices"] for task in told] == [MEASURED.dump()] * len(told)
    assert json.loads((tmp_path / "report.json").read_text())["hardware"]["worker_choices"] == record


def test_one_that_was_begun_without_a_record_goes_on_as_it_began(
    folder: Path, tmp_path: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(compare, "with_worker_choices", lambda runtime, *_: runtime)
        assert run_command(command(folder, tmp_path, "--tokens", "1024", "--seeds", "1")) == 0
    assert not (tmp_path / "machine.json").exists()
    measure(MEASURED, monkeypatch)
    assert run_command(command(folder, tmp_path, "--tokens", "1024", "--seeds", "1")) == 0
    assert read_json_file(tmp_path / "machine.json") == {"1": EARLIER_CHOICES.dump()}


def test_deterministic_runs_have_the_defaults(
    folder: Path, tmp_path: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(MEASURED, monkeypatch)
    line = command(folder, tmp_path, "--tokens", "1024", "--seeds", "1", "--deterministic")
    assert run_command(line) == 0
    assert [task["choices"] for task in told] == [DEFAULT_CHOICES.dump()] * len(told)
