"""`heddle bench`: rounds are fair, sides do the same workload, and what cannot be compared is refused."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.errors import ConfigError, HeddleError, MachineError
from heddle.lab.bench import run as machine_limits
from heddle.lab.bench.run import (
    DEFAULTS,
    HEDDLE,
    PREFILL,
    TOKEN,
    TRAINING,
    Bench,
    Calibration,
    Quartiles,
    Workload,
    check_peer,
    check_values,
    least_cost,
    measure_in_rounds,
    quartiles_of,
    ratio_of,
    run_bench,
)
from heddle.lab.bench.worker import Side
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.model.size import size

LIMITS = {"fp32_flops_per_second": 1e10, "bf16_flops_per_second": 1e10, "read_bytes_per_second": 1e9}
SMALL = ["width=16", "layers.0.repeat=1", "vocab_size=40"]


def design(name: str = "preset:gqa-tiny") -> ModelConfig:
    return load_config(name, [*SMALL, "layers.0.mixer.heads=2", "layers.0.mixer.kv_heads=1"])


class ScriptedCalibration(Calibration):
    """Says in round whether the machine was slow."""

    def __init__(self, answers: Iterator[bool]) -> None:
        self.answers = answers

    def is_slow(self) -> bool:
        return next(self.answers)


def test_a_turn_during_which_the_machine_was_slow_is_taken_again() -> None:
    calls: list[str] = []

    def step(name: str, times: Iterator[int]) -> Any:
        def run() -> float:
            calls.append(name)
            return float(next(times))

        return run

    steps = {"a": step("a", iter(range(10))), "b": step("b", iter(range(10, 20)))}
    slow_before_and_after_turns = iter([False, False, True, False, False, True, False, False, False, False])
    rounds = measure_in_rounds(steps, 3, ScriptedCalibration(slow_before_and_after_turns))
    assert rounds.seconds == {"a": [0.0, 3.0, 4.0], "b": [10.0, 13.0, 14.0]}
    assert rounds.repeated == 2
    assert not rounds.is_noisy
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b"], "none is always the first"


def test_a_machine_that_stays_slow_is_said() -> None:
    rounds = measure_in_rounds({"a": lambda: 1.0}, 2, ScriptedCalibration(iter([True] * 8)))
    assert (rounds.seconds, rounds.repeated, rounds.is_noisy) == ({"a": [1.0, 1.0]}, 2, True)


def test_ratios_are_taken_turn_by_turn() -> None:
    assert ratio_of([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == Quartiles(2.0, 2.0, 2.0), "a slow round slows both"
    assert quartiles_of([1.0, 2.0, 3.0, 4.0, 5.0]) == Quartiles(3.0, 1.5, 4.5)
    assert quartiles_of([7.0]) == Quartiles(7.0, 7.0, 7.0)


def test_the_least_work_is_that_of_the_design() -> None:
    config = design()
    flops = size(config, 8).flops_per_token
    assert least_cost(config, Workload(TRAINING, 2, 8), "fp32") == ("fp32_flops_per_second", 3 * 16 * flops)
    assert least_cost(config, Workload(PREFILL, 1, 8), "bf16") == ("bf16_flops_per_second", 8 * flops)
    limit, read = least_cost(config, Workload(TOKEN, 1, 8), "fp32")
    assert limit == "read_bytes_per_second"
    assert read == 4 * size(config, 8).active_parameters + size(config, 8).state_bytes


def side(name: str) -> Side:
    facts = {"design": design().dump(), "side": name, "precision": "fp32", "device": "cpu", "threads": 1, "choices": {}}
    return Side(facts | {"part_files": []})


def test_both_sides_compute_the_same() -> None:
    ours, peer = side(HEDDLE), side(DEFAULTS)
    for kind in (PREFILL, TOKEN, TRAINING):
        values, other = ours.prepare(kind, 1, 24), peer.prepare(kind, 1, 24)
        tolerance = 0.02 if kind == TRAINING else 1e-5  # transformers' loss leaves out the last token
        assert other == pytest.approx(values, rel=tolerance, abs=1e-6), kind
        assert ours.seconds() > 0
        assert peer.seconds() > 0


def test_a_side_that_computes_something_else_is_refused() -> None:
    check_values("a, transformers", [1.0, -4.0], [1.0, -4.01], "fp32")
    with pytest.raises(MachineError, match=r"transformers.*25 %"):
        check_values("a, transformers", [1.0, -4.0], [2.0, -4.0], "fp32")
    with pytest.raises(MachineError, match="by nan %"):
        check_values("a, transformers", [1.0], [float("nan")], "fp32")


def test_a_design_that_no_family_fits_has_no_peer() -> None:
    check_peer("transformers", {"a": design()})
    with pytest.raises(ConfigError, match="gated_delta-tiny"):
        check_peer("transformers", {"gated_delta-tiny": load_config("preset:gated_delta-tiny")})
    with pytest.raises(ConfigError, match=r"--peer llama:.*transformers"):
        check_peer("llama", {"a": design()})


def test_designs_are_measured_in_processes_and_a_refusal_names_the_design() -> None:
    workload = [Workload(TOKEN, 1, 8)]
    (result,) = run_bench(Bench({"a": design(), "b": design("preset:mha-tiny")}, workload, rounds=2), LIMITS)
    assert [(row.design, row.side) for row in result.measurements] == [("a", HEDDLE), ("b", HEDDLE)]
    first, second = result.measurements
    assert first.ratio == Quartiles(1.0, 1.0, 1.0)
    assert second.ratio.median > 0
    assert first.tokens_per_second == pytest.approx(1 / first.seconds.median)
    limited = load_config(
        "preset:gqa-tiny", [*SMALL, "embedding.position.kind=learned", "embedding.position.length=16"]
    )
    with pytest.raises(HeddleError, match=r"^b: "):
        run_bench(Bench({"b": limited}, [Workload(PREFILL, 1, 64)], rounds=1), LIMITS)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--rounds=0", "--rounds 0:"),
        ("--context-length=0", "--context-length 0:"),
        ("--peer=llama", "--peer llama:"),
        ("layers.0.repeat=1000", "bench: 1 models"),
    ],
)
def test_wrong_options_are_refused(option: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "preset:gqa-medium", option]) in (1, 2)
    assert sentence in capsys.readouterr().err


def test_bench_prints_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "measure_limits", lambda device: LIMITS)
    small = [*SMALL, "layers.0.mixer.heads=2", "layers.0.mixer.kv_heads=1"]
    arguments = ["--rounds", "1", "--sequence-length", "8", "--context-length", "8", "--device", "cpu", "--json"]
    assert run_command(["bench", "preset:gqa-tiny", *small, *arguments]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["limits"] == LIMITS
    assert [result["workload"]["kind"] for result in facts["results"]] == [TRAINING, PREFILL, TOKEN]
    for result in facts["results"]:
        (row,) = result["measurements"]
        assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
