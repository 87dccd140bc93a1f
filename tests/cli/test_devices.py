"""Devices by their numbers: of one command, and of the runs of a comparison."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heddle.cli.main import run_command
from heddle.errors import ConfigError
from heddle.lab.compare.compare import check_workers, choose_devices, parse_devices, parse_process_share
from heddle.lab.compare.tasks import choose_workers
from heddle.lab.workers import Workers
from heddle.runtime import MEASUREMENTS, fastest_seconds


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that torch finds four GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0-3", ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("cuda:0,cuda:2", ("cuda:0", "cuda:2")),
        ("3, 0", ("cuda:3", "cuda:0")),
        ("cuda:1-2", ("cuda:1", "cuda:2")),
        ("cuda", ("cuda",)),
        ("cpu:4", ("cpu",) * 4),
        ("cpu,cpu", ("cpu",) * 2),
        (None, ()),
    ],
)
def test_names_of_devices(text: str | None, names: tuple[str, ...], four_gpus: None) -> None:
    assert parse_devices(text, "auto") == names


@pytest.mark.parametrize(
    ("text", "device", "says"),
    [
        ("0-7", "auto", "device cuda:4:"),
        ("0,0", "auto", "--devices 0,0:"),
        ("0,cpu", "auto", "--devices 0,cpu:"),
        ("cpu:0", "auto", "--devices cpu:0:"),
        ("3-0", "auto", "--devices 3-0:"),
        ("cpu:9999", "auto", "--devices cpu:9999:"),
        ("gpu0", "auto", "--devices gpu0:"),
        ("0", "cpu", "--devices 0:"),
    ],
)
def test_wrong_names_of_devices(text: str, device: str, says: str, four_gpus: None) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        parse_devices(text, device)


def test_devices_or_workers() -> None:
    check_workers(2, None)
    with pytest.raises(ConfigError, match=r"^--workers 2: --devices 0-1"):
        check_workers(2, "0-1")
    with pytest.raises(ConfigError, match=r"^--workers 65:.*64"):
        check_workers(65, None)


def test_the_devices_of_runs_of_several_processes(four_gpus: None) -> None:
    assert choose_devices("0-3", "auto", None, 2) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert choose_devices(None, "auto", None, 2) == ("cuda:0", "cuda:1")
    assert choose_devices(None, "cpu", 2, 2) == ()
    assert choose_devices(None, "cuda:1", None, 1) == ()
    for arguments, says in (
        ((None, "auto", None, 0), "--nproc 0:"),
        (("0-2", "auto", None, 2), "--nproc 2:"),
        ((None, "cuda:1", None, 2), "--device cuda:1: each of the 2 processes"),
        ((None, "auto", 2, 2), "--workers 2:"),
        ((None, "auto", None, 5), "device cuda:4:"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
            choose_devices(*arguments)


def test_the_share_of_a_process() -> None:
    array = {"SLURM_ARRAY_TASK_ID": "12", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_MIN": "10"}
    assert parse_process_share(None, {}) is None
    assert parse_process_share(None, {"SLURM_JOB_ID": "7"}) is None
    assert parse_process_share(None, array) == (2, 8)
    assert parse_process_share("0/3", array) == (0, 3)
    for text, says in (("3/3", r"0/3.*2/3"), ("1", "expected INDEX"), ("0/0", "expected INDEX")):
        with pytest.raises(ConfigError, match=f"^--share {text}: .*{says}"):
            parse_process_share(text, {})
    with pytest.raises(ConfigError, match=r"^SLURM_ARRAY_TASK_ID x/8:"):
        parse_process_share(None, array | {"SLURM_ARRAY_TASK_ID": "x"})


def test_the_threads_of_each_run() -> None:
    def chosen(threads: int | None, budget_kind: str = "tokens", **choices: Any) -> Workers:
        plan: Any = SimpleNamespace(threads=threads, budget_kind=budget_kind, batch_size=4)
        runtime: Any = SimpleNamespace(device="cpu", threads=threads or 8)
        return choose_workers(plan, runtime, **choices)

    assert chosen(None) == Workers(("cpu",) * 4, 2)
    assert chosen(None, count=8) == Workers(("cpu",) * 8, 1)
    assert chosen(2) == Workers(("cpu",), 2)
    assert chosen(2, count=3) == Workers(("cpu",) * 3, 1)
    assert chosen(None, "seconds") == Workers(("cpu",))
    for count in (1, 2, 4):  # the bits of a run do not depend on how many there are
        assert chosen(2, devices=("cpu",) * count) == Workers(("cpu",) * count, 2)
    assert chosen(None, devices=("cuda:0", "cuda:1")) == Workers(("cuda:0", "cuda:1"), 4)
    assert chosen(2, share=(1, 4)) == Workers(("cpu",), 2, (1, 4))
    assert chosen(None, ranks=2) == Workers(("cpu",) * 2, 4, ranks=2)
    assert chosen(2, ranks=2) == Workers(("cpu",) * 2, 2, ranks=2)
    assert chosen(None, count=2, ranks=2) == Workers(("cpu",) * 4, 2, ranks=2)
    shared = chosen(1, devices=("cuda:0", "cuda:1", "cuda:2", "cuda:3"), ranks=2)
    assert (shared.count, shared.groups) == (2, [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")])
    assert shared.first().groups == [("cuda:0", "cuda:1")]
    with pytest.raises(ConfigError, match="batch_size 4:"):
        chosen(1, ranks=3)


@pytest.mark.parametrize(
    "command",
    [
        *(f"{name} preset:gqa-tiny" for name in ("train", "compare", "ladder", "check")),
        *("generate run --prompt a", "inspect run --text a", "convert run new --to state"),
    ],
)
def test_a_gpu_that_is_absent(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, four_gpus: None,
                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run_command([*command.split(), "--device", "cuda:4"]) == 2
    assert capsys.readouterr().err == "heddle: device cuda:4: torch finds none on this machine; use device cuda\n"
    assert not any(tmp_path.iterdir())


def test_the_doctor_waits_for_the_device_that_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    fastest_seconds(lambda: None, "cuda:1")
    assert waits == ["cuda:1"] * 2 * (MEASUREMENTS + 1)
