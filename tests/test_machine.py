"""What is fastest on a machine: measured once, installed, recorded, and taken again by what continues."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle import machine
from heddle import runtime as runtime_module
from heddle.cli.main import run_command
from heddle.errors import ConfigError
from heddle.extensions import sources_hash
from heddle.machine import fastest, measured_choices, measured_facts, recorded_choices
from heddle.model.decoder import build
from heddle.numerics import native
from heddle.numerics.attention import softmax
from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.dispatch import record_choices
from heddle.numerics.linear import DEFAULT_WAYS, linear, packed_weights, way_name
from heddle.runtime import DEFAULT_CHOICES, EARLIER_CHOICES, Choices, set_up_runtime
from heddle.session import ALL_NEEDS, TRAINING_NEEDS
from heddle.storage.file_io import write_json_file
from heddle.storage.lock import lock_output
from heddle.storage.model import save
from heddle.tokenization.tokenizer import Tokenizer
from tests import small

PLAIN = {way_name(key): "plain" for key in DEFAULT_WAYS}
FACTS: dict[str, Any] = {
    "products": {"matmul": "medium", "speedups": {}, "fp32_flops_per_second": 3e9, "bf16_flops_per_second": 1e9},
    "packing": {name: {"way": way, "speedups": {}} for name, way in PLAIN.items()},
    "attention": {"triangle_lengths": [256], "speedups": {}},
    "native": {"faster": [], "speedups": {}, "sources": sources_hash()},
}
MEASURED = Choices("medium", PLAIN, (256,))


@pytest.fixture
def measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sections that are measured, of a machine on which FACTS hold."""
    monkeypatch.delenv(machine.VARIABLE)
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path / "cache"))
    sections: list[str] = []

    def measure(section: str) -> Callable[[], Any]:
        def call() -> Any:
            sections.append(section)
            return FACTS[section]

        return call

    monkeypatch.setattr(machine, "MEASURES", {section: measure(section) for section in ALL_NEEDS})
    return sections


def test_a_tie_keeps_the_default() -> None:
    assert fastest({"highest": 1.09, "medium": 1.0}, "highest") == "highest"
    assert fastest({"highest": 1.11, "medium": 1.0}, "highest") == "medium"
    assert fastest({"a": 3.0, "b": 1.0, "c": 2.0}, "a") == "b"


def test_a_race_times_all_ways_in_turn() -> None:
    calls: list[str] = []
    seconds = machine.race({name: partial(calls.append, name) for name in "ab"}, rounds=4, seconds=100)
    assert calls == list("ab" * 5)
    assert seconds.keys() == {"a", "b"}


def test_only_what_is_needed_is_measured_and_only_once(measures: list[str]) -> None:
    assert measured_choices(1, ("products",)) == Choices("medium")
    assert measures == ["products"]
    assert measured_choices(1) == MEASURED
    assert measures == ["products", "packing", "attention", "native"]
    assert measured_choices(1) == MEASURED
    assert len(measures) == 4
    measured_choices(2, ("products",))  # another number of threads is another machine
    assert len(measures) == 5
    measured_facts(1, ("attention",), anew=True)
    assert len(measures) == 6
    assert torch.get_num_threads() == 1


def test_operators_with_other_sources_are_measured_again(measures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured_choices(1)
    monkeypatch.setattr(machine, "sources_hash", lambda: "other")
    measured_choices(1)
    assert measures == ["products", "packing", "attention", "native", "native"]


def test_a_stand_in_of_another_machine_is_another_machine(measures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured_choices(1, ("products",))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    measured_choices(1, ("products",))
    assert len(measures) == 2


def test_a_file_that_is_not_as_it_was_written_is_measured_again(measures: list[str], tmp_path: Path) -> None:
    measured_choices(1, ("products",))
    (path,) = (tmp_path / "cache").glob("*.json")
    path.write_text(path.read_text().replace("medium", "highest"))
    assert measured_choices(1, ("products",)).matmul == "medium"
    assert len(measures) == 2


def slow_section(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[list[float], dict[str, Any]]:
    """The clock, which each call of this section's race puts forward by 7 seconds, and all sections."""
    now = [0.0]

    def slow_call() -> None:
        now[0] += 7.0

    monkeypatch.setattr("heddle.machine.time.perf_counter", lambda: now[0])
    sections: dict[str, Any] = dict(machine.MEASURES)
    sections[name] = lambda: machine.race({"plain": slow_call, "packed": slow_call})
    monkeypatch.setattr(machine, "MEASURES", sections)
    return now, sections


def test_a_busy_machine_ends_a_measurement_in_time_and_keeps_the_others(
    measures: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, sections = slow_section(monkeypatch, "packing")
    assert measured_choices(1) == Choices("medium", triangle_lengths=(256,))
    assert now[0] <= machine.LIMIT_SECONDS + 7.0
    printed = capsys.readouterr().err
    assert "about 16 seconds, at most 120 where other programs run" in printed
    assert "packing: not measured within 30 seconds, because the machine is busy" in printed
    sections["packing"] = lambda: FACTS["packing"]
    assert measured_choices(1) == Choices(
        "medium", triangle_lengths=(256,)
    )  # a busy machine is not asked at once again
    assert capsys.readouterr().err == ""
    later = time.time() + machine.BUSY_SECONDS
    monkeypatch.setattr("heddle.machine.time.time", lambda: later)
    assert measured_choices(1) == MEASURED
    assert measures == ["products", "attention", "native"]


def test_a_budget_bounds_all_that_is_measured(
    measures: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    now, sections = slow_section(monkeypatch, "attention")
    runtime = set_up_runtime("cpu", 1)
    needs = {1: TRAINING_NEEDS, 2: TRAINING_NEEDS}
    chosen = machine.with_worker_choices(runtime, tmp_path / "out", "plan.json", needs, seconds=20.0)
    assert now[0] <= 20.0 + 7.0
    assert chosen.worker_choices == {1: Choices("medium"), 2: DEFAULT_CHOICES}
    assert measures == ["products"]  # no section begins after the end
    printed = " ".join(capsys.readouterr().err.split())
    assert "at most 20 where other programs run" in printed
    for section in ("attention", "native"):
        assert f"{section}: not measured within the 20 seconds that the budget leaves for it" in printed
    sections["attention"] = lambda: FACTS["attention"]
    assert measured_choices(1) == MEASURED  # without a budget they are measured the next time


def test_a_measurement_of_another_process_is_not_waited_for_beyond_the_budget(
    measures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heddle.storage.lock.POLL_SECONDS", 0.01)
    with lock_output(machine._facts_file(1)):
        assert measured_choices(1, seconds=0.05) == DEFAULT_CHOICES
    assert not measures
    assert measured_choices(1) == MEASURED


def test_without_a_home_the_defaults_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(machine.VARIABLE)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path / "file"))
    assert measured_choices(1) == DEFAULT_CHOICES


def test_a_file_of_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    monkeypatch.setenv(machine.VARIABLE, str(path))
    path.write_text(json.dumps(MEASURED.dump()))
    assert measured_choices(1) == MEASURED
    wrong: list[tuple[Any, str]] = [
        ([], "expected a table of matmul, packing, triangle_lengths, native"),
        ({"threads": 2}, "expected a table"),
        ({"matmul": "fast"}, "matmul fast: must be one of highest, medium"),
        ({"packing": {"float32 huge 1": "plain"}}, "packing float32 huge 1: unknown class"),
        ({"packing": {"float32 large 8": "four"}}, "packing float32 large 8: four is not a way"),
        ({"packing": []}, "packing: expected a table"),
        ({"triangle_lengths": [3]}, r"triangle_lengths \[3\]: must be a list"),
        ({"triangle_lengths": 256}, "triangle_lengths 256: must be a list"),
        ({"native": ["norm"]}, r"native \['norm'\]: must be a list of some of adamw,"),
    ]
    for values, reason in wrong:
        path.write_text(json.dumps(values))
        with pytest.raises(ConfigError, match=reason):
            measured_choices(1)
    path.unlink()
    with pytest.raises(ConfigError, match=r"^HEDDLE_MACHINE .*choices.json: is not a file of choices"):
        measured_choices(1)


def test_the_measurements_choose_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes, and one round: what is measured is in order, whatever is fastest."""
    monkeypatch.setattr(machine, "PRODUCTS", ((8, 16, 24),) * 4)
    monkeypatch.setattr(machine, "READ_BYTES", 1)
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    monkeypatch.setattr(softmax, "LENGTHS", (128, 256))
    monkeypatch.setattr(native, "OPERATORS", {})  # nothing is built
    facts = {section: measure() for section, measure in machine.MEASURES.items()}
    choices = Choices.read(machine.choices_from(facts).dump())
    assert choices.packing.keys() == PLAIN.keys()
    assert all(ratio > 0 for row in facts["packing"].values() for ratio in row["speedups"].values())
    assert facts["attention"]["speedups"].keys() == {"128", "256"}
    assert facts["products"]["bf16_flops_per_second"] > 0
    assert torch.get_float32_matmul_precision() == "highest"
    assert softmax.triangle_lengths == softmax.TRIANGLE_LENGTHS


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("way", ["plain", "packed", "four"])
def test_every_way_is_the_same_product(rows: int, way: str) -> None:
    ways = {name: way if way != "four" or name.endswith(" 1") else "packed" for name in PLAIN}
    set_up_runtime("cpu", 1, choices=Choices(packing=ways))
    x, weight = torch.randn(rows, 512), torch.randn(512, 512)
    with torch.no_grad(), packed_weights(), record_choices("cpu") as choices:
        y = linear(x, weight)
    assert [choice.kernel for choice in choices] == ["matrix" if way == "plain" else "packed"]
    exact = x.double() @ weight.double().T
    assert float((y - exact).abs().max() / exact.abs().max()) < 1e-6


def test_lengths_choose_the_kernel_of_attention() -> None:
    for lengths, kernel in (((), "causal"), ((128,), "triangle"), ((256,), "causal")):
        set_up_runtime("cpu", 1, choices=Choices(triangle_lengths=lengths))
        q = torch.randn(1, 2, 100, 8, requires_grad=True)
        positions = torch.arange(100)[None]
        mask = AttentionMask(positions, positions, contiguous=True)
        with record_choices("cpu") as choices:
            softmax.attention(q, q, q, mask, 1.0)
        assert [choice.kernel for choice in choices] == [kernel]


def test_a_run_continues_with_the_choices_that_it_began_with(
    measures: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "medium_is_exact", lambda: True)  # AMX has it in bfloat16
    texts, design = small.folder(tmp_path / "text"), small.design_file(tmp_path / "design.yaml")
    options = ["--sequence-length", "16", "--batch-size", "4", "--device", "cpu", "--threads", "1", "--quiet"]
    line = ["train", str(design), "--data", str(texts), "--out", str(tmp_path / "run"), *options]
    assert run_command([*line, "--steps", "2"]) == 0
    assert recorded_choices(tmp_path / "run") == MEASURED.read({"matmul": "medium", "triangle_lengths": [256]})
    monkeypatch.setitem(FACTS, "products", FACTS["products"] | {"matmul": "highest"})
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path / "another"))
    began = list(measures)
    assert run_command([*line, "--steps", "2"]) == 0
    assert measures == began  # nothing is asked of the cache
    assert torch.get_float32_matmul_precision() == "medium"
    assert run_command([*line, "--steps", "2", "--deterministic"]) == 0
    assert torch.get_float32_matmul_precision() == "highest"


def test_runs_from_before_there_were_choices(tmp_path: Path) -> None:
    assert recorded_choices(tmp_path) is None
    for runtime, expected in (
        ({"matmul": "medium"}, Choices("medium")),
        ({"matmul": "highest"}, Choices("highest")),
        ({}, EARLIER_CHOICES),
        ({"choices": {"matmul": "fast"}}, None),
    ):
        write_json_file(tmp_path / "run.json", {"runtime": runtime})
        assert recorded_choices(tmp_path) == expected


def test_emulated_bfloat16_is_said(measures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.slow_precision(1) is None  # unknown
    measured_choices(1, ("products",))
    assert "3.0 times as long as in fp32" in str(machine.slow_precision(1))
    monkeypatch.setitem(FACTS, "products", FACTS["products"] | {"bf16_flops_per_second": 6e9})
    measured_facts(1, ("products",), anew=True)
    assert machine.slow_precision(1) is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("train preset:nope", "preset:nope"),
        ("train preset:gqa-tiny --data nothere --out new", "nothere"),
        ("train preset:gqa-tiny --from nothere --out new", "nothere"),
        ("compare preset:gqa-tiny preset:mha-tiny --data nothere --out new", "nothere"),
        ("ladder preset:gqa-tiny --data nothere --out new", "nothere"),
        ("bench preset:nope", "preset:nope"),
        ("generate nothere --prompt x", "nothere"),
        ("chat nothere", "nothere"),
        ("serve nothere", "nothere"),
        ("compare loss run nothere", "nothere"),
        ("compare loss run --data nothere", "nothere"),
        ("convert nothere new --to kv_heads=1", "nothere"),
        ("convert run new --to nope=1", "nope"),
        ("convert run new --to kv_heads=1 --data nothere", "nothere"),
        ("convert run taken --to kv_heads=1", "taken"),
    ],
)
def test_what_cannot_run_is_refused_before_the_machine_is_measured(
    words: str, named: str, measures: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Building operators and measuring kernels take up to minutes, once per machine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    save(build(small.config()), tmp_path / "run", tokenizer=Tokenizer.train([small.text(2000)], small.VOCABULARY))
    assert run_command([*words.split(), "--device", "cpu"]) != 0
    assert named in capsys.readouterr().err
    assert measures == []
