"""`benchmarks.gpu` runs to its end on a CPU at toy sizes, and says what it left out."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_models
from benchmarks.gpu_setup import Comparison, Setup
from benchmarks.harness import EQUAL, largest_difference


def test_every_section_runs_at_toy_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--toy", "--device", "cpu", "--out", str(out)])
    content = json.loads(out.read_text(encoding="utf-8"))
    assert {row["section"] for row in content["results"]} == set(gpu.SECTIONS)
    assert [row for row in content["results"] if "left out" in row or row.get("met") is False] == []
    assert content["device"] == "cpu"
    assert content["toy"]
    assert set(content["unusable"]) >= {"flash-linear-attention", "causal-conv1d"}
    cases = {row["case"] for row in content["results"]}
    assert {"attention, soft cap", "training, mla, toy", "decoding, gqa, batch 32, after 32", "Muon step"} <= cases
    printed = capsys.readouterr().out
    assert all(case in printed for case in cases)


def test_peers_that_compute_something_else_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain loop and transformers' model equal heddle's; with another eps neither section times anything."""
    setup = Setup("cpu", True, float("inf"))
    difference = largest_difference("plain loop", gpu_models.plain_logits(setup), EQUAL)
    assert difference is not None
    assert difference < 1e-12
    assert largest_difference("transformers", gpu_models.transformers_losses(setup), 1e-6) is not None
    plain, transformers_model = gpu_models.PlainModel, gpu_models.transformers_model

    def other_norms(make: Callable[..., Any], *arguments: Any) -> Any:
        model = make(*arguments)
        for module in model.modules():
            for name in {"eps", "variance_epsilon"} & set(vars(module)):
                setattr(module, name, 0.1)
        return model

    monkeypatch.setattr(gpu_models, "PlainModel", partial(other_norms, plain))
    monkeypatch.setattr(gpu_models, "transformers_model", partial(other_norms, transformers_model))
    for section in (gpu_models.decode, gpu_models.train):
        with pytest.raises(ValueError, match="computes something else"):
            next(section(setup))


def test_a_section_runs_alone_and_no_case_starts_without_time(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--toy", "--device", "cpu", "--sections", "loss", "--minutes", "0", "--out", str(out)])
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert [(row["section"], row["left out"]) for row in rows] == [("loss", "no time left")]


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--sections", "trian"])
    assert "'trian'" in capsys.readouterr().err


def test_a_slower_peer_has_a_ratio_above_one() -> None:
    setup = Setup("cpu", False, float("inf"))
    calls = {"heddle": lambda: sum(range(1000)), "slow": lambda: sum(range(100_000))}
    row = Comparison("sums", lambda: calls, goal=2.0, work=("sums per second", 1.0)).measure(setup)
    assert row["ratio to slow"] > 2.0
    assert row["met"]
    assert row["sums per second"] == 1.0 / row["heddle seconds"]
