"""A judge's ledger: verdicts, refusals, fresh seeds and windows, and the same verdicts after kills."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from heddle.errors import CheckpointError, ConfigError, DataError
from heddle.lab import workers as processes
from heddle.lab.judge import decision as judging
from heddle.lab.judge.judge import judge
from heddle.lab.judge.ledger import LEDGER_FILE, Ledger, Windows
from heddle.lab.judge.proposal import code_hash
from heddle.lab.verify import DAMAGED, verify_files
from heddle.signals import Interrupted
from tests import small
from tests.analysis.comparison.runs import Workers

BAD = {"lr": 1e-5}  # of the first incumbent, so that almost any other rate is better
OPTIONS: dict[str, Any] = {
    "tokens": 1024, "sequence_length": 16, "batch_size": 4, "pairs": 4, "windows": 12, "alpha": 0.5, "second": 0,
    "device": "cpu", "threads": 1, "quiet": True,
}  # fmt: skip


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    workers = Workers()
    monkeypatch.setattr(processes, "start_worker", workers.start)
    return workers


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A text, a design, and a ledger whose incumbent hardly learns."""
    root = tmp_path_factory.mktemp("judge")
    small.folder(root / "text", documents=60, size=1500)
    small.design_file(root / "good.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_worker", Workers().start)
        judge("init", root / "good.yaml", data=[str(root / "text")], out=root / "ledger", **OPTIONS, **BAD)
    yield root
    shutil.rmtree(root)


@pytest.fixture
def ledger(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "ledger", tmp_path / "ledger")
    return tmp_path / "ledger"


def submit(ledger: Path, proposal: dict[str, Any], **options: Any) -> dict[str, Any]:
    file = ledger.parent / "proposal.yaml"
    file.write_text(yaml.safe_dump(proposal))
    verdict: dict[str, Any] = judge("submit", file, out=ledger, quiet=True, device="cpu", threads=1, **options)
    return verdict


BETTER = {"name": "faster", "training": {"lr": 0.01}}


@pytest.mark.usefixtures("workers")
def test_a_proposal_that_learns_becomes_the_incumbent(ledger: Path) -> None:
    verdict = submit(ledger, BETTER)
    assert (verdict["verdict"], verdict["incumbent"]) == ("better", True), verdict["sentence"]
    assert verdict["evidence"] >= verdict["needed"]
    assert verdict["improvement"]["mean"] > 0.1
    found = Ledger.open(ledger)
    assert (found.incumbent.name, found.incumbent_number) == ("faster", 1)
    assert found.incumbent.training == {"learning_rate": 0.01}
    # the old incumbent's rate is worse than the new incumbent, and the same again is no change
    assert submit(ledger, {"training": {"lr": 1e-5}})["verdict"] in ("worse", "no clear difference")
    again = submit(ledger, {"overrides": ["width=16"]})
    assert (again["verdict"], again["rule"]) == ("refused", "copy")
    assert [result for result in verify_files(ledger) if result.status == DAMAGED] == []


def test_every_pair_has_its_own_seed_and_windows(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, tuple[int, ...]]] = []
    workers = Workers()

    def start(request: Path, target: Path) -> Any:
        task = json.loads(request.read_text())
        seen.append((target.stem, task["settings"]["seed"], tuple(task["held_out"])))
        return workers.start(request, target)

    monkeypatch.setattr(processes, "start_worker", start)
    for hidden in (28, 32):
        submit(ledger, {"overrides": [f"layers.*.feedforward.hidden={hidden}"]})
    pairs = {(seed, span) for _, seed, span in seen}
    assert len(pairs) * 2 == len(seen)
    assert {name.split("-")[0] for name, *_ in seen} == {"incumbent", "proposal"}
    assert len({seed for seed, _ in pairs}) == len(pairs)
    spans = sorted(span for _, span in pairs)
    assert all(first[1] - 1 <= second[0] for first, second in itertools.pairwise(spans))
    windows = Ledger.open(ledger).windows
    assert all(windows.tuning[1] - 1 <= span[0] and span[1] <= windows.final.start * 16 + 1 for span in spans)


def test_blocks_do_not_meet() -> None:
    """Every token of tuning, blocks and final pairs is read by one of them only."""
    windows = Windows(count=200, length=8, each=3, pairs=4)
    spans = [windows.tuning]
    spans += [windows.of_pair(block, pair) for block in range(windows.decisions) for pair in range(4)]
    spans += [windows.of_final_pair(pair) for pair in range(4)]
    assert windows.decisions == 10
    assert all(first[1] - 1 <= second[0] for first, second in itertools.pairwise(spans))
    assert spans[-1][1] <= 200 * 8 + 1


@pytest.mark.usefixtures("workers")
def test_losses_of_windows_are_not_stored(ledger: Path) -> None:
    submit(ledger, {"overrides": ["layers.*.feedforward.hidden=32"]})
    files = list((ledger / "proposals" / "1" / "runs").iterdir())
    assert files
    assert all(file.suffix == ".json" for file in files)
    assert all(json.loads(file.read_text())["windows"] is None for file in files)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a copy": ({"overrides": ["layers.0.mixer.kv_heads=1"]}, "copy", "first incumbent"),
    "another seed": ({"training": {"seed": 7}, "overrides": ["width=16"]}, "copy", "a seed is no change"),
    "layers written out": ({"design": {**small.design(), "norm": {"kind": "rms", "eps": 1e-5}}}, "copy", "first"),
    "weights": ({"from": "runs/best"}, "initial_weights", "held-out"),
    "no such width": ({"overrides": ["layers.0.mixer.heads=3"]}, "design", "heads"),
    "a bidirectional mixer": ({"overrides": ["layers.0.mixer.causal=false"]}, "causality", "later"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, ledger: Path, workers: Workers) -> None:
    proposal, rule, words = REFUSED[case]
    left = Ledger.open(ledger).decisions_left
    verdict = submit(ledger, proposal)
    assert (verdict["verdict"], verdict["rule"]) == ("refused", rule), verdict["sentence"]
    assert words in verdict["sentence"]
    assert verdict["decisions_left"] == left
    assert workers.ran == []
    assert submit(ledger, proposal) == verdict
    assert len(Ledger.open(ledger).entries) == 1


def test_a_resubmission_repeats_or_continues(ledger: Path, workers: Workers) -> None:
    proposal = {"overrides": ["layers.*.feedforward.hidden=32"]}
    first = submit(ledger, proposal)
    assert first["verdict"] == "no clear difference"
    ran = len(workers.ran)
    assert submit(ledger, {**proposal, "name": "other"}) == first
    assert len(workers.ran) == ran
    more = submit(ledger, proposal, more=True)
    assert more["continues"] == 1
    assert more["differences"][: first["pairs"]] == first["differences"]
    assert more["pairs"] > first["pairs"]
    assert more["needed"] == first["needed"]
    assert more["decisions_left"] == first["decisions_left"] - 1


@pytest.mark.usefixtures("workers")
def test_without_windows_nothing_is_called_better(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Windows, "decisions", 0)
    verdict = submit(ledger, BETTER)
    assert (verdict["verdict"], verdict["rule"]) == ("refused", "windows")


class Killed(BaseException):
    """In the place of SIGKILL."""


@pytest.mark.parametrize("point", ["staging", "fixing", "first run", "second run", "verdict file", "recording"])
def test_a_killed_submission_ends_with_the_same_verdict(
    point: str, made: Path, ledger: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ledger.parent / "whole"
    shutil.copytree(made / "ledger", whole)
    expected = submit(whole, BETTER)

    def kill(target: Any, name: str, is_now: Callable[..., bool]) -> Callable[[pytest.MonkeyPatch], None]:
        inner = getattr(target, name)

        def killing(*arguments: Any, **options: Any) -> Any:
            if is_now(*arguments):
                raise Killed
            return inner(*arguments, **options)

        return lambda patch: patch.setattr(target, name, killing)

    plant = {
        "staging": kill(judging, "write_json_file", lambda path, *_: path.name == "change.json"),
        "fixing": kill(Ledger, "record", lambda _, line: line["event"] == "proposal"),
        "first run": kill(processes, "start_worker", lambda request, _: "incumbent-pair0" in request.name),
        "second run": kill(processes, "start_worker", lambda request, _: "proposal-pair0" in request.name),
        "verdict file": kill(judging, "write_json_file", lambda path, *_: path.name == "verdict.json"),
        "recording": kill(Ledger, "record", lambda _, line: line["event"] == "verdict"),
    }[point]
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises(Killed):
            submit(ledger, BETTER)
    log = ledger / "log.jsonl"
    log.write_bytes(log.read_bytes() + b'{"event": "verd')  # a line that was not finished
    assert submit(ledger, BETTER) == expected
    assert [entry["verdict"] for entry in Ledger.open(ledger).entries] == [expected]


@pytest.mark.usefixtures("workers")
def test_an_unfinished_proposal_is_judged_before_another(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(judging.Judge, "decide", stop)
        with pytest.raises(Killed):
            submit(ledger, BETTER)
    submit(ledger, {"from": "elsewhere"})
    assert [entry["verdict"]["verdict"] for entry in Ledger.open(ledger).entries] == ["better", "refused"]


def test_the_sealed_text_is_opened_once(ledger: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two accepted changes, of which one does nothing more once the other is there; a kill in between."""
    judgments = iter(["better", "better"])
    monkeypatch.setattr(judging.evidence, "verdict", lambda *_: next(judgments))
    submit(ledger, BETTER)
    submit(ledger, {"name": "wider", "overrides": ["layers.*.feedforward.hidden=28"]})
    workers.interrupts.add("without1-pair1")
    options: dict[str, Any] = {"out": ledger, "quiet": True, "device": "cpu", "threads": 1}
    with pytest.raises(Interrupted):
        judge("final", **options)
    with pytest.raises(CheckpointError, match="final text is open"):
        submit(ledger, {"overrides": ["layers.*.feedforward.hidden=32"]})
    workers.interrupts.clear()
    found = judge("final", **options)
    ran = len(workers.ran)
    assert judge("final", **options)["sentence"] == found["sentence"]
    assert len(workers.ran) == ran
    assert workers.ran.count("last-pair0") == 1
    assert found["improvement"]["low"] > 0
    assert found["removed"]["1"]["low"] > 0  # without the rate nothing is learned
    assert found["removed"]["2"]["low"] < 0.05
    assert "Without faster it loses" in found["sentence"]


def test_an_altered_ledger_is_refused(ledger: Path, tmp_path: Path) -> None:
    file = ledger / LEDGER_FILE
    file.write_text(file.read_text().replace("alpha: 0.5", "alpha: 0.9"))
    with pytest.raises(CheckpointError, match="fixed it"):
        Ledger.open(ledger)
    with pytest.raises(CheckpointError, match="no ledger"):
        Ledger.open(tmp_path)
    with pytest.raises(CheckpointError, match="holds a ledger already"):
        judge("init", "preset:gqa-tiny", out=ledger)


def test_what_cannot_be_read(ledger: Path, made: Path, tmp_path: Path) -> None:
    for proposal, words in (({"widths": 3}, "unknown field"), ({"training": {"steps": 3}}, "cannot be proposed")):
        with pytest.raises(ConfigError, match=words):
            submit(ledger, proposal)
    options = OPTIONS | {"windows": 1200, "out": tmp_path / "new"}
    with pytest.raises(DataError, match="too few for one decision"):
        judge("init", made / "good.yaml", data=[str(made / "text")], **options)


def test_renamed_code_is_the_same_code() -> None:
    text = 'class My:\n    """Words."""\n    def go(self, x):\n        self.y = x * 2  # twice\n        return self.y\n'
    renamed = text.replace("My", "Mine").replace("y", "z").replace('"""Words."""', "'other words'").replace("x", "u")
    assert code_hash(text) == code_hash(renamed) != code_hash(text.replace("* 2", "* 3"))
