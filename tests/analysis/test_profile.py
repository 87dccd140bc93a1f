"""A profile divides a step by part and operation."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.lab.bench.run import PHASE
from heddle.lab.profile import BACKWARD, OUTSIDE, PART, summarize_events
from tests import small


@dataclass
class Event:
    """What `summarize_events` reads of an event of torch's profiler; times in microseconds."""

    name: str
    cpu_time_total: float
    cpu_children: list["Event"] = field(default_factory=list)
    sequence_nr: int = -1
    cpu_parent: Any = None

    def __post_init__(self) -> None:
        for child in self.cpu_children:
            child.cpu_parent = self

    @property
    def self_cpu_time_total(self) -> float:
        return self.cpu_time_total - sum(child.cpu_time_total for child in self.cpu_children)


def test_backward_operations_belong_to_the_part_of_their_forward_operation() -> None:
    product = Event("aten::linear", 30, [Event("aten::mm", 20)], sequence_nr=7)
    forward = Event(PHASE + "forward", 200, [
        Event(PART + "attention", 50, [product]),
        Event("loss", 10, sequence_nr=8),
        Event(BACKWARD + "MmBackward0", 60, [Event("aten::mm", 40)], sequence_nr=7),
        Event(BACKWARD + "LossBackward0", 20, sequence_nr=8),
    ])  # fmt: skip
    seconds, operations = summarize_events([forward, Event("warm-up", 1000)], steps=2)
    microseconds = {(op.phase, op.part, op.operation): round(op.seconds * 1e6, 6) for op in operations}
    assert microseconds == {
        ("forward", "loss", OUTSIDE): 30,
        ("forward", "attention", OUTSIDE): 10,
        ("forward", "attention", "aten::linear"): 5,
        ("forward", "attention", "aten::mm"): 10,
        ("forward", "loss", "loss"): 5,
        ("backward", "attention", "MmBackward0"): 10,
        ("backward", "attention", "aten::mm"): 20,
        ("backward", "loss", "LossBackward0"): 10,
    }
    assert seconds == pytest.approx(100e-6)  # without what ran outside of the step
    assert sum(operation.share for operation in operations) == pytest.approx(1)


def test_show_profiles_a_training_step_and_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.design_file(tmp_path / "design.yaml")
    command = ["show", str(tmp_path / "design.yaml"), "--profile", "--context-length", "16"]
    assert run_command([*command, "--json"]) == 0
    training, decoding = json.loads(capsys.readouterr().out)["profile"]
    parts = {(operation["part"], operation["phase"]) for operation in training["operations"]}
    assert parts >= {
        (part, phase) for part in ("attention", "gated", "rms norm", "embedding") for phase in ("forward", "backward")
    } | {("loss", "forward"), ("optimizer", "update")}
    assert {operation["phase"] for operation in decoding["operations"]} == {"token"}
    for step in (training, decoding):
        assert sum(operation["share"] for operation in step["operations"]) == pytest.approx(1)
        assert step["seconds"] > 0
    assert run_command(command) == 0
    out = capsys.readouterr().out
    assert "one token after 16: " in out
    assert "attention, backward" in out
