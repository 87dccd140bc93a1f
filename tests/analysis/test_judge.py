"""A judge's ledger: verdicts, refusals, fresh seeds and windows, and the same verdicts after kills."""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from heddle.cli.main import run_command
from heddle.errors import CheckpointError, ConfigError, DataError
from heddle.lab import workers as processes
from heddle.lab.judge import decision as judging
from heddle.lab.judge import evidence, proposal
from heddle.lab.judge.evidence import Noise
from heddle.lab.judge.judge import judge
from heddle.lab.judge.ledger import LEDGER_FILE, Ledger, Windows
from heddle.lab.judge.proposal import LEAKS, code_hash
from heddle.lab.verify import DAMAGED, verify_files
from tests import small
from tests.analysis.comparison.runs import Workers
from tests.analysis.test_judge_leaks import SOUND

BAD = {"lr": 1e-5}  # of the first incumbent, so that almost any other rate is better
OPTIONS: dict[str, Any] = {
    "tokens": 1024, "sequence_length": 16, "batch_size": 4, "pairs": 3, "windows": 12, "alpha": 0.5, "second": 0,
    "device": "cpu", "threads": 1, "quiet": True,
}  # fmt: skip


PLACES = {
    "out",
    "tokenizer",
    "command",
    "label",
    "parent_pid",
}  # of a request: where a copy of a ledger lies, and who asks
known: dict[str, str] = {}


class Remembering(Workers):
    """A run with design, text, seed and spans of an earlier one, for a copy of a ledger, is not trained again."""

    def run(self, request: Path, target: Path) -> int:
        task = json.loads(request.read_text())
        key = json.dumps({name: value for name, value in task.items() if name not in PLACES}, sort_keys=True)
        if key in known:
            self.ran.append(target.stem)
            target.write_text(known[key])
            return 0
        code = super().run(request, target)
        if code == 0 and task["task"] == "loss" and not task["part_files"]:
            known[key] = target.read_text()
        return code


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    workers = Remembering()
    monkeypatch.setattr(processes, "start_worker", workers.start)
    return workers


@pytest.fixture(scope="module", autouse=True)
def _few_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "MIN_CHANCE", 0.2)
        patch.setattr(judging, "REFERENCE_RUNS", 1)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A text, a design, and a ledger whose incumbent hardly learns."""
    root = tmp_path_factory.mktemp("judge")
    small.folder(root / "text", documents=60, size=1500)
    small.design_file(root / "good.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_worker", Remembering().start)
        judge("init", root / "good.yaml", data=[str(root / "text")], out=root / "ledger", **OPTIONS, **BAD)
    yield root
    shutil.rmtree(root)


@pytest.fixture
def ledger(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "ledger", tmp_path / "ledger")
    return tmp_path / "ledger"


def submit(ledger: Path, change: dict[str, Any], **options: Any) -> dict[str, Any]:
    file = ledger.parent / "proposal.yaml"
    file.write_text(yaml.safe_dump(change))
    verdict: dict[str, Any] = judge("submit", file, out=ledger, quiet=True, device="cpu", threads=1, **options)
    return verdict


BETTER = {"name": "faster", "training": {"lr": 0.01}}


@pytest.mark.usefixtures("workers")
def test_a_proposal_that_learns_becomes_the_incumbent(ledger: Path) -> None:
    verdict = submit(ledger, BETTER)
    assert (verdict["verdict"], verdict["incumbent"]) == ("better", True), verdict["sentence"]
    assert verdict["evidence"] >= verdict["needed"]
    assert verdict["improvement"]["mean"] > 0.1
    assert verdict["improvement"]["low"] > 0  # as the verdict says
    found = Ledger.open(ledger)
    assert (found.incumbent.name, found.incumbent_number) == ("faster", 1)
    assert found.incumbent.training == {"learning_rate": 0.01}
    page = (ledger / "judge.html").read_text()
    assert "The incumbent is faster" in page
    assert f"{verdict['improvement']['mean']:+.4f}" in page  # positive, so without a minus
    # an incumbent of earlier, and the same again, are no change; a rate that is too low is no improvement
    back = submit(ledger, {"training": {"lr": 1e-5}})
    assert (back["verdict"], back["rule"]) == ("refused", "copy")
    assert submit(ledger, {"training": {"lr": 2e-5}})["verdict"] in ("worse", "no clear difference")
    again = submit(ledger, {"overrides": ["width=16"]})
    assert (again["verdict"], again["rule"]) == ("refused", "copy")
    assert [result for result in verify_files(ledger) if result.status == DAMAGED] == []


def test_every_pair_has_its_own_seed_and_windows(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, tuple[tuple[int, ...], ...]]] = []
    workers = Workers()

    def start(request: Path, target: Path) -> Any:
        task = json.loads(request.read_text())
        seen.append((target.stem, task["settings"]["seed"], spans_of(task)))
        return workers.start(request, target)

    monkeypatch.setattr(processes, "start_worker", start)
    monkeypatch.setattr(evidence, "first_look", lambda *_: None)
    for hidden in (28, 32):
        submit(ledger, {"overrides": [f"layers.*.feedforward.hidden={hidden}"]})
    first_looks = [spans for name, _, spans in seen if name == "proposal-look0"]
    seen = [run for run in seen if "pair" in run[0]]
    pairs = {(seed, span) for _, seed, span in seen}
    assert len(pairs) * 2 == len(seen)
    assert {name.split("-")[0] for name, *_ in seen} == {"incumbent", "proposal"}
    assert len({seed for seed, _ in pairs}) == len(pairs)
    windows = Ledger.open(ledger).windows
    assert first_looks == [spans_of({"held_out": windows.tuning})] * 2
    others = [windows.tuning, *(windows.of_final_pair(pair) for pair in range(4))]
    assert do_not_meet([*(span for _, spans in pairs for span in spans), *(span for spans in others for span in spans)])


def spans_of(request: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(span) for span in request["held_out"])


def do_not_meet(spans: Sequence[Sequence[int]]) -> bool:
    return all(first[1] - 1 <= second[0] for first, second in itertools.pairwise(sorted(map(tuple, spans))))


@pytest.mark.parametrize("spread", [False, True])
def test_blocks_do_not_meet(spread: bool) -> None:
    """Every token of tuning, blocks and final pairs is read by one of them only."""
    windows = Windows(count=200, length=8, each=3, pairs=4, spread=spread)
    parts = [windows.tuning]
    parts += [windows.of_pair(block, pair) for block in range(windows.decisions) for pair in range(4)]
    parts += [windows.of_final_pair(pair) for pair in range(4)]
    spans = [span for part in parts for span in part]
    assert windows.decisions == 10
    assert do_not_meet(spans)
    assert sum(stop - start - 1 for start, stop in spans) == 8 * (25 + 40 * 3 + 48)
    assert max(stop for _, stop in spans) <= 200 * 8 + 1


@pytest.mark.parametrize("spread", [False, True])
def test_a_proposal_that_helps_in_one_half_of_the_text_alone_is_not_better(spread: bool) -> None:
    """It harms in the other half as much. Windows in a row lie in one half, where all pairs agree."""
    windows = Windows(count=4000, length=8, each=8, pairs=8, spread=spread)
    noise, better = Noise(0.1, math.inf), 0
    for block in range(windows.decisions):
        pairs = [np.array(windows.of_pair(block, pair)).mean(1) for pair in range(8)]
        differences = [float(np.where(middles < 4000 * 8 / 2, 0.1, -0.1).mean()) for middles in pairs]
        better += evidence.verdict(differences, noise, 0.05, 8) == "better"
    assert (better / windows.decisions <= 0.05) == spread


def test_a_first_run_decides_what_is_bought_and_more_buys_past_it(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--more` starts the pairs; a new incumbent has runs of its own to look at."""
    reference = float(np.mean(Ledger.open(ledger).reference or []))
    gains = {"look": 0.0, "pair": 0.5, "reference": 0.7}
    requests = fake_losses(
        monkeypatch, lambda name: reference - (name[0] == "p") * gains[name.split("-")[1].rstrip("0123456789")]
    )
    change = {"overrides": ["layers.*.feedforward.hidden=28"]}
    first = submit(ledger, change)
    assert (first["verdict"], first["pairs"], first["differences"]) == ("no clear difference", 0, [])
    assert "from a first run; more pairs would hardly" in first["sentence"]
    assert [request["name"] for request in requests] == ["proposal-look0"]
    more = submit(ledger, change, more=True)
    assert (more["verdict"], more["pairs"]) == ("better", 3), more["sentence"]
    assert [request["name"] for request in requests].count("proposal-look0") == 1
    gains["look"] = -0.5
    worse = submit(ledger, {"overrides": ["layers.*.feedforward.hidden=32"]})
    assert (worse["verdict"], worse["pairs"]) == ("worse", 0)
    assert worse["improvement"]["mean"] == pytest.approx(-1.2, abs=0.02)  # of the new incumbent's own runs
    assert len(Ledger.open(ledger).reference or []) == judging.REFERENCE_RUNS


def test_a_copy_of_a_proposal_that_another_incumbent_was_judged_against_is_refused(
    ledger: Path, workers: Workers
) -> None:
    narrow = {"overrides": ["layers.*.feedforward.hidden=28"]}
    assert submit(ledger, narrow)["verdict"] != "refused"
    assert submit(ledger, BETTER)["incumbent"]
    ran = len(workers.ran)
    copy = submit(ledger, {"name": "other", **narrow, "training": BAD})
    assert (copy["verdict"], copy["rule"]) == ("refused", "copy"), copy["sentence"]
    assert "proposal 1" in copy["sentence"]
    assert len(workers.ran) == ran
    assert submit(ledger, narrow)["verdict"] != "refused"  # of the new incumbent, so another design


def gains_of(name: str, gains: dict[str, float]) -> float:
    return gains[name.split("-")[1].rstrip("0123456789")] if name[0] == "p" else 0.0


def test_what_leads_becomes_the_incumbent_without_a_claim(made: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Its first runs decide, with fresh seeds on the calibration text; `--more` continues against its own incumbent."""
    gains = {"look": 0.02, "pair": 0.0, "reference": 0.02}
    requests = fake_losses(monkeypatch, lambda name: 2.0 - gains_of(name, gains))
    ledger = tmp_path / "ledger"
    options = OPTIONS | {"adopt": "leading", "out": ledger}
    judge("init", made / "good.yaml", data=[str(made / "text")], **options)
    monkeypatch.setattr(evidence, "LOOK_LEADING", math.inf)
    first = submit(ledger, {"name": "wide", "overrides": ["layers.*.feedforward.hidden=28"]})
    assert (first["verdict"], first["incumbent"], first["pairs"]) == ("no clear difference", True, 0), first["sentence"]
    assert "becomes the incumbent, without a claim" in first["sentence"]
    looks = [request for request in requests if "look" in request["name"]]
    assert len({request["settings"]["seed"] for request in looks}) == len(looks) == 1 + len(evidence.LOOKS)
    assert {spans_of(request) for request in looks} == {spans_of({"held_out": Ledger.open(ledger).windows.tuning})}
    assert (Ledger.open(ledger).incumbent.name, Ledger.open(ledger).incumbent_number) == ("wide", 1)
    assert "leads" in (ledger / "judge.html").read_text()
    # what is behind stops after one run, and is not adopted
    gains["look"], count = -0.02, len(requests)
    behind = submit(ledger, {"overrides": ["layers.*.feedforward.hidden=32"]})
    assert (behind["against"], behind["incumbent"], "lead" in behind) == (1, False, False)
    assert len(requests) == count + 1
    # the claim: pairs against the incumbent of its time, with all earlier evidence, and no second adoption
    gains["pair"], count = 0.002, len(requests)
    weak = submit(ledger, {"name": "wide", "overrides": ["layers.*.feedforward.hidden=28"]}, more=True)
    assert (weak["continues"], weak["against"], weak["incumbent"]) == (1, 0, False)
    assert {request["design"]["layers"][0]["feedforward"]["hidden"] for request in requests[count:]} == {24, 28}
    gains["pair"] = 0.5
    better = submit(ledger, {"name": "wide", "overrides": ["layers.*.feedforward.hidden=28"]}, more=True)
    assert (better["verdict"], better["against"], better["incumbent"]) == ("better", 0, False), better["sentence"]
    assert better["differences"][: weak["pairs"]] == weak["differences"]
    assert "is the incumbent already" in better["sentence"]
    found = Ledger.open(ledger)
    assert [entry["number"] for entry in found.accepted] == [1]
    assert found.incumbent_number == 1
    assert len(found.reference or []) == judging.REFERENCE_RUNS


def test_the_incumbent_that_a_lead_replaced_may_return_once(made: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A lead is no claim, so it can be undone, on fresh pairs; what a claim replaced stays a copy."""
    gains = {"look": 0.0, "pair": 0.0, "reference": 0.0}
    fake_losses(monkeypatch, lambda name: 2.0 - gains_of(name, gains))
    options = OPTIONS | {"adopt": "leading", "out": tmp_path / "ledger"}
    judge("init", made / "good.yaml", data=[str(made / "text")], **options)
    monkeypatch.setattr(evidence, "LOOK_LEADING", math.inf)

    def propose(width: int, *others: str) -> tuple[str, bool]:
        gains["look"] += 0.02  # above the incumbent's
        gains["reference"] = gains["look"]
        verdict = submit(tmp_path / "ledger", {"overrides": [f"layers.*.feedforward.hidden={width}", *others]})
        return verdict["verdict"], verdict["incumbent"]

    assert propose(28) == ("no clear difference", True)
    assert propose(24) == ("no clear difference", True)
    assert propose(24, "width=16")[0] == "refused"  # the incumbent itself
    gains["pair"] = 0.5
    monkeypatch.setattr(evidence, "LOOK_LEADING", 0.0)
    assert propose(32) == ("better", True)
    assert propose(24, "width=16")[0] == "refused"  # a claim stands between


def test_what_fails_at_the_second_size_does_not_lead(made: Path, tmp_path: Path, monkeypatch: Any) -> None:
    gains = {"look": 0.5, "pair": 0.5, "second": -0.5, "reference": 0.5}
    fake_losses(monkeypatch, lambda name: 2.0 - gains_of(name, gains))
    options = OPTIONS | {"adopt": "leading", "second": 3.0, "out": tmp_path / "ledger"}
    judge("init", made / "good.yaml", data=[str(made / "text")], **options)
    verdict = submit(tmp_path / "ledger", {"overrides": ["layers.*.feedforward.hidden=40"]})
    assert (verdict["verdict"], verdict["incumbent"]) == ("no clear difference", False), verdict["sentence"]


@pytest.fixture(scope="module")
def leading(made: Path) -> tuple[Path, dict[str, Any]]:
    """A ledger that adopts what leads, and the verdict of an undisturbed submission."""
    root = made / "leading"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_worker", Remembering().start)
        patch.setattr(evidence, "LOOK_LEADING", math.inf)
        options = OPTIONS | BAD | {"adopt": "leading", "out": root / "ledger"}
        judge("init", made / "good.yaml", data=[str(made / "text")], **options)
        shutil.copytree(root / "ledger", root / "whole" / "ledger")
        expected = submit(root / "whole" / "ledger", BETTER)
    assert (expected["verdict"], expected["incumbent"]) == ("no clear difference", True)
    return root / "ledger", expected


@pytest.mark.parametrize("point", ["proposal-look0", "proposal-look2", "proposal-reference0", "fixing", "recording"])
def test_a_killed_lead_ends_with_the_same_verdict(
    point: str,
    leading: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another run is trained only where no kill came after it."""
    monkeypatch.setattr(evidence, "LOOK_LEADING", math.inf)
    ledger, expected = leading
    shutil.copytree(ledger, tmp_path / "ledger")
    record, start = Ledger.record, workers.start

    def starting(request: Path, target: Path) -> Any:
        if point in request.name:
            raise Killed
        return start(request, target)

    def recording(ledger: Ledger, line: dict[str, Any]) -> None:
        if line["event"] == {"fixing": "proposal", "recording": "verdict"}.get(point):
            raise Killed
        record(ledger, line)

    with monkeypatch.context() as patch:
        patch.setattr(processes, "start_worker", starting)
        patch.setattr(Ledger, "record", recording)
        with pytest.raises(Killed):
            submit(tmp_path / "ledger", BETTER)
    assert submit(tmp_path / "ledger", BETTER) == expected
    assert len(workers.ran) == len(set(workers.ran)) == 1 + len(evidence.LOOKS) + judging.REFERENCE_RUNS


def test_an_older_ledger_is_judged_as_it_began(ledger: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise is pooled, and it has no first look."""
    inner = Ledger.open

    def older(folder: Path) -> Ledger:
        found = inner(folder)
        found.facts = {name: value for name, value in found.facts.items() if name != "reference"}
        found.facts["noise"] = found.facts["noise"][:2]
        return found

    monkeypatch.setattr(Ledger, "open", older)
    verdict = submit(ledger, BETTER)
    entry = inner(ledger).entries[0]
    assert verdict["verdict"] == "better"
    assert all("pair" in name for name in workers.ran)
    differences, level = verdict["differences"], entry["level"]
    assert verdict["evidence"] == pytest.approx(evidence.e_value(differences, Noise(*entry["noise"][:2]), level, 3))


@pytest.mark.usefixtures("workers")
def test_losses_of_windows_are_not_stored(ledger: Path) -> None:
    submit(ledger, {"overrides": ["layers.*.feedforward.hidden=32"]})
    files = list((ledger / "proposals" / "1" / "runs").iterdir())
    assert files
    assert all(file.suffix == ".json" for file in files)
    assert all(json.loads(file.read_text())["windows"] is None for file in files)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a copy": ({"overrides": ["layers.0.mixer.kv_heads=1"]}, "copy", "first incumbent"),
    "another seed": ({"training": {"seed": 7}, "overrides": ["width=16"]}, "copy", "change more than names or seeds"),
    "a default of training": ({"training": {"weight_decay": 0.1, "schedule": "wsd"}}, "copy", "first incumbent"),
    "layers written out": ({"design": {**small.design(), "norm": {"kind": "rms", "eps": 1e-5}}}, "copy", "first"),
    "weights": ({"from": "runs/best"}, "initial_weights", "held-out"),
    "no such width": ({"overrides": ["layers.0.mixer.heads=3"]}, "design", "heads"),
    "a bidirectional mixer": ({"overrides": ["layers.0.mixer.causal=false"]}, "causality", "later"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, ledger: Path, workers: Workers) -> None:
    change, rule, words = REFUSED[case]
    left = Ledger.open(ledger).decisions_left
    verdict = submit(ledger, change)
    assert (verdict["verdict"], verdict["rule"]) == ("refused", rule), verdict["sentence"]
    assert words in verdict["sentence"]
    assert verdict["decisions_left"] == left
    assert workers.ran == []
    assert submit(ledger, change) == verdict
    assert len(Ledger.open(ledger).entries) == 1


def test_a_resubmission_repeats_or_continues(ledger: Path, workers: Workers) -> None:
    change = {"overrides": ["layers.*.feedforward.hidden=32"]}
    first = submit(ledger, change)
    assert first["verdict"] == "no clear difference"
    ran = len(workers.ran)
    assert submit(ledger, {**change, "name": "other"}) == first
    assert len(workers.ran) == ran
    more = submit(ledger, change, more=True)
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


@pytest.fixture(scope="module")
def expected(made: Path) -> dict[str, Any]:
    """The verdict of an undisturbed submission."""
    shutil.copytree(made / "ledger", made / "whole" / "ledger")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_worker", Remembering().start)
        return submit(made / "whole" / "ledger", BETTER)


@pytest.mark.parametrize("point", ["staging", "fixing", "first run", "second run", "verdict file", "recording"])
def test_a_killed_submission_ends_with_the_same_verdict(
    point: str, expected: dict[str, Any], ledger: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:

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
    assert len(workers.ran) == len(set(workers.ran)) == 1 + 2 * expected["pairs"] + judging.REFERENCE_RUNS
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


def test_the_sealed_text_is_opened_once(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two accepted changes, of which one does nothing more once the other is there; a kill in between."""
    losses = {"first": 2.0, "last": 1.0, "without1": 1.9, "without2": 1.0, "incumbent": 2.0, "proposal": 1.0}
    requests = fake_losses(monkeypatch, lambda name: losses[name.split("-")[0]])
    judgments = iter(["better", "better"])
    monkeypatch.setattr(evidence, "verdict", lambda *_, **__: next(judgments))
    monkeypatch.setattr(evidence, "first_look", lambda *_: None)
    submit(ledger, BETTER)
    submit(ledger, {"name": "wider", "overrides": ["layers.*.feedforward.hidden=28"]})
    options: dict[str, Any] = {"out": ledger, "quiet": True, "device": "cpu", "threads": 1}
    with monkeypatch.context() as patch:
        patch.setattr(judging.Judge, "losses", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            judge("final", **options)
    with pytest.raises(CheckpointError, match="final has opened its sealed text"):
        submit(ledger, {"overrides": ["layers.*.feedforward.hidden=32"]})
    requests.clear()
    found = judge("final", **options)
    designs = {request["name"]: request for request in requests}
    # without the first change the rate is the old one, without the second the width is
    assert designs["without1-pair0"]["settings"]["learning_rate"] == BAD["lr"]
    hidden = [
        designs[f"{name}-pair0"]["design"]["layers"][0]["feedforward"]["hidden"] for name in ("without1", "without2")
    ]
    assert hidden == [28, 24]
    windows = Ledger.open(ledger).windows
    assert {spans_of(request) for request in requests} == {
        spans_of({"held_out": windows.of_final_pair(pair)}) for pair in range(3)
    }
    assert 0.9 < found["improvement"]["low"] < found["improvement"]["high"] < 1.1
    assert found["removed"]["1"]["low"] > 0.8
    assert found["removed"]["2"]["low"] < 0 < found["removed"]["2"]["high"]
    assert "Without faster it loses" in found["sentence"]
    assert "Without wider it loses" in found["sentence"]
    requests.clear()
    assert judge("final", **options)["sentence"] == found["sentence"]
    assert requests == []


def test_an_altered_ledger_is_refused(ledger: Path, tmp_path: Path) -> None:
    file = ledger / LEDGER_FILE
    file.write_text(file.read_text().replace("alpha: 0.5", "alpha: 0.9"))
    with pytest.raises(CheckpointError, match="fixed it"):
        Ledger.open(ledger)
    with pytest.raises(CheckpointError, match="no ledger"):
        Ledger.open(tmp_path)
    with pytest.raises(CheckpointError, match="holds a ledger already"):
        judge("init", "preset:gqa-tiny", out=ledger)


def test_what_init_fixed_is_refused_later(ledger: Path) -> None:
    for action, words, option in (("submit", ("p.yaml",), {"lr": 0.5}), ("final", (), {"alpha": 0.7})):
        with pytest.raises(ConfigError, match="was fixed by `init`"):
            judge(action, *words, out=ledger, quiet=True, **option)
    with pytest.raises(ConfigError, match=r"show: takes no p\.yaml"):
        judge("show", "p.yaml", out=ledger)
    submit(ledger, BETTER, alpha=0.5)  # as it was fixed


def test_what_cannot_be_read(ledger: Path, made: Path, tmp_path: Path) -> None:
    for change, words in (
        ({"widths": 3}, "unknown field"),
        ({"training": {"steps": 3}}, "cannot be proposed"),
        ({"training": {"lr": "fast"}}, "--lr fast: must be a number"),
        ({"training": {"weight_decay": "0.1"}}, "wrong type"),
    ):
        with pytest.raises(ConfigError, match=words):
            submit(ledger, change)
    options = OPTIONS | {"windows": 1200, "out": tmp_path / "new"}
    with pytest.raises(DataError, match="too few for one decision"):
        judge("init", made / "good.yaml", data=[str(made / "text")], **options)


def test_renamed_code_is_the_same_code() -> None:
    text = 'class My:\n    """Words."""\n    def go(self, x):\n        self.y = x * 2  # twice\n        return self.y\n'
    renamed = text.replace("My", "Mine").replace("y", "z").replace('"""Words."""', "'other words'").replace("x", "u")
    assert code_hash(text) == code_hash(renamed) != code_hash(text.replace("* 2", "* 3"))
    imports = "import model as m\nfrom model import build\nimport model\nmodel.build(m)\nscore = 1\n"
    moved = imports.replace("model", "net")
    assert code_hash(imports, {"model.py": "file0"}) == code_hash(moved, {"net.py": "file0"})
    assert code_hash(imports, {"model.py": "file0"}) != code_hash(moved, {"net.py": "file1"})
    assert code_hash(imports, {"score.py": "file0"}) == code_hash(imports)  # a variable, not the file


def fake_losses(monkeypatch: pytest.MonkeyPatch, loss: Callable[[str], float]) -> list[dict[str, Any]]:
    """Every run takes no time and has the loss that its name gives; returns the requests."""
    requests: list[dict[str, Any]] = []

    def run(court: judging.Judge, tasks: Any) -> list[dict[str, Any]]:
        requests.extend({**task.request, "name": task.result_file.stem} for task in tasks)
        speeds = {"status": "done", "seconds_per_step": 0.5, "windows": [(1.0, 1), (1.1, 1)]}
        names = [task.result_file.stem for task in tasks]
        return [speeds | {"bits_per_byte": loss(name) + 0.001 * (sum(map(ord, name)) % 7)} for name in names]

    monkeypatch.setattr(judging.Judge, "run", run)
    return requests


@pytest.mark.parametrize("holds", [True, False])
def test_a_winner_must_win_at_the_second_size(holds: bool, made: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def loss(name: str) -> float:
        bonus = 0.5 if name.startswith("proposal") and (holds or "second" not in name) else 0.0
        return 2.0 - bonus

    requests = fake_losses(monkeypatch, loss)
    options = OPTIONS | {"second": 3.0, "tokens": 2048, "match": "flops", "out": tmp_path / "new"}
    judge("init", made / "good.yaml", data=[str(made / "text")], **options)
    verdict = submit(tmp_path / "new", {"overrides": ["layers.*.feedforward.hidden=40"]})
    assert (verdict["verdict"], verdict["incumbent"]) == (
        ("better", True) if holds else ("no clear difference", False)
    ), verdict["sentence"]
    first, second = verdict["sizes"]
    assert 2 < second["parameters"] / first["parameters"] < 4
    assert (second["improvement"] > 0.2) == holds
    assert (verdict["evidence"] == 0) == (not holds)
    # the same FLOPs: the wider proposal reads less text
    steps = {request["name"]: request["settings"]["steps"] for request in requests}
    assert steps["proposal-pair0"] < steps["incumbent-pair0"] == 2048 // 64
    if not holds:  # evidence of 0 stays 0
        again = submit(tmp_path / "new", {"overrides": ["layers.*.feedforward.hidden=40"]}, more=True)
        assert (again["verdict"], again["rule"]) == ("refused", "evidence")


def test_each_side_is_tuned_on_its_own_part_of_the_text(made: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The incumbent takes the second rate of the grid, the proposal the first."""
    lower = ("incumbent-trial1", "proposal-trial0", "proposal-look0")
    requests = fake_losses(monkeypatch, lambda name: 2.0 - (name in lower))
    options = OPTIONS | {"tune": ["lr=0.001,0.004"], "match": "parameters", "out": tmp_path / "new", "tokens": 2048}
    judge("init", made / "good.yaml", data=[str(made / "text")], **options)
    submit(tmp_path / "new", {"overrides": ["layers.0.mixer.kv_heads=2"]})
    ledger = Ledger.open(tmp_path / "new")
    rates = {request["name"]: request["settings"]["learning_rate"] for request in requests}
    assert (rates["seed0"], rates["incumbent-pair0"], rates["proposal-pair0"]) == (0.004, 0.004, 0.001)
    trials = [request for request in requests if "trial" in request["name"]]
    assert {spans_of(request) for request in trials} == {spans_of({"held_out": ledger.windows.tuning})}
    assert {request["settings"]["steps"] for request in trials} == {2048 // 64 // 4}
    # equal parameters, although it has twice the keys and values
    sizes = [ledger.entries[0][name][0]["parameters"] for name in ("sizes", "incumbent_sizes")]
    assert abs(sizes[0] / sizes[1] - 1) < 0.02


def test_the_budget_in_seconds_is_timed(made: Path, tmp_path: Path, monkeypatch: Any) -> None:
    requests = fake_losses(monkeypatch, lambda name: 2.0 - (name == "proposal-look0"))
    options = OPTIONS | {"match": "seconds", "out": tmp_path / "new", "tokens": 2048}
    facts = judge("init", made / "good.yaml", data=[str(made / "text")], **options)
    assert facts["budget"] == ["seconds", 16.0, 2048]
    submit(tmp_path / "new", {"overrides": ["layers.*.feedforward.hidden=40"]})
    steps = {request["name"]: request["settings"]["steps"] for request in requests}
    assert steps["proposal-pair0"] == steps["incumbent-pair0"] == 32


def test_a_part_in_one_file(ledger: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is trained with limits, and a later proposal is made of it; a renamed copy is refused."""
    limits: list[tuple[Any, ...]] = []

    def screened(request: dict[str, Any], _: Path) -> dict[str, Any]:
        small.forget_parts()
        try:
            return proposal.screen(request)
        finally:
            small.forget_parts()

    def confined(*given: Any) -> None:
        limits.append(given)
        small.forget_parts()  # a worker is a new process

    monkeypatch.setattr("heddle.lab.compare.worker.confine", confined)
    monkeypatch.setattr(proposal, "LAWS", LEAKS)
    monkeypatch.setattr(judging, "screen_apart", screened)
    source, kind = SOUND["a norm"]
    for name in (kind, "other_norm"):
        (ledger.parent / f"{name}.py").write_text(source.replace("LeakyNorm", name.title().replace("_", "")))
    change = {"overrides": [f"norm.kind={kind}"], "part": f"{kind}.py", **BETTER}
    try:
        verdict = submit(ledger, change)
        assert verdict["verdict"] == "better", verdict["sentence"]
        assert set(limits) == {(str(ledger.resolve() / "proposals" / "1" / "own"), 3600.0, 16.0)}
        assert not (ledger / "proposals" / "1" / "own").exists()
        copy = submit(ledger, change | {"part": "other_norm.py", "overrides": ["norm.kind=other_norm"]})
        assert (copy["verdict"], copy["rule"]) == ("refused", "copy"), copy["sentence"]
        seen = len(limits)
        later = submit(ledger, {"overrides": ["layers.*.feedforward.hidden=28"]})
        assert later["verdict"] != "refused", later["sentence"]
        assert len(limits) == seen + 1 + 2 * later["pairs"]  # the incumbent has the part as well
        (ledger / "proposals" / "1" / "parts" / f"{kind}.py").write_text("1 / 0")
        with pytest.raises(CheckpointError, match="was changed or removed"):
            submit(ledger, {"overrides": ["layers.*.feedforward.hidden=32"]})
    finally:
        small.forget_parts()
    assert workers.ran


def test_the_command(ledger: Path, workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, or one line of JSON, and the exit code."""
    assert workers.ran == []
    file = ledger.parent / "copy.yaml"
    file.write_text("name: copy\noverrides: [width=16]\n")
    words = ["judge", "submit", str(file), "--out", str(ledger), "--quiet", "--device", "cpu"]
    assert run_command(words) == 5
    assert capsys.readouterr().out.startswith("copy is refused by copy: resolves to the same as the first incumbent")
    assert run_command([*words, "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["rule"] == "copy"
    assert run_command(["judge", "show", "--out", str(ledger)]) == 0
    assert "The incumbent is good (0). 1 refused;" in " ".join(capsys.readouterr().out.split())
    assert run_command(["judge", "try", "--out", str(ledger)]) == 2
    assert "choices: init, submit, show, final" in capsys.readouterr().err
    assert "heddle judge submit" in (ledger / "AGENTS.md").read_text()


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "alpha": ({"alpha": 1.5}, "--alpha 1.5"),
    "rule": ({"rule": "bonferroni"}, "--rule bonferroni"),
    "adopt": ({"adopt": "all"}, "--adopt all"),
    "match": ({"match": "luck"}, "--match luck"),
    "pairs": ({"pairs": 1}, "--pairs 1"),
    "second": ({"second": 0.5}, "--second 0.5"),
    "tokens": ({"tokens": 10}, "--tokens 10"),
}


@pytest.mark.parametrize("case", INVALID)
def test_settings_out_of_range(case: str, made: Path, tmp_path: Path) -> None:
    options, words = INVALID[case]
    with pytest.raises(ConfigError, match=words):
        judge("init", made / "good.yaml", out=tmp_path / "new", **options)
