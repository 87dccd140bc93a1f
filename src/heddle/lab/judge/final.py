"""The end of a ledger: the sealed text is opened once, and each accepted change is removed alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from heddle import progress
from heddle.errors import MachineError
from heddle.lab.compare.statistics import seed_half_width
from heddle.lab.judge import evidence
from heddle.lab.judge.decision import Judge, RunFailed, first_size
from heddle.lab.judge.ledger import FINAL_SEED, Candidate
from heddle.lab.judge.proposal import Submission
from heddle.storage.file_io import read_json_file
from heddle.storage.run_log import to_plain_json

FIRST, LAST = "first", "last"


def final(judge: Judge) -> dict[str, Any]:
    """Score the first incumbent, the last one, and the last one without each change, on the sealed text; once.

    From the first call on nothing more can be submitted; a later call returns what the first one found.
    """
    ledger = judge.ledger
    if ledger.final is not None:
        return ledger.final
    if ledger.unfinished is not None:
        judge.decide(ledger.unfinished)
    if not ledger.is_open:
        ledger.record({"event": "open"})
    systems, kept = _systems(judge)
    losses = _losses(judge, systems)
    last, removed = losses[LAST], {}
    for entry in ledger.accepted:
        name = str(entry["number"])
        if name in losses:
            removed[name] = {"name": entry["name"], **_difference(losses[name], last)}
        else:
            removed[name] = {"name": entry["name"], "reason": kept.get(name, "it is the only change")}
    result = {
        "event": "final",
        "improvement": _difference(losses[FIRST], last) if LAST in systems else None,
        "removed": removed,
        "pairs": ledger.windows.pairs,
        "by_e_bh": _summary(judge),
    }
    result["sentence"] = _sentence(judge, result)
    ledger.record(result)
    return dict(to_plain_json(result))


def _systems(judge: Judge) -> tuple[dict[str, tuple[Candidate, Any]], dict[str, str]]:
    """(candidate, size) by name: the first and last incumbents, and the last without a change; why others are not."""
    ledger, accepted = judge.ledger, judge.ledger.accepted
    first = Candidate.read(ledger.facts["candidate"])
    systems, reasons = {FIRST: (first, first_size(ledger.facts["sizes"]))}, dict[str, str]()
    systems[LAST] = (ledger.incumbent, first_size(accepted[-1]["sizes"] if accepted else ledger.facts["sizes"]))
    for entry in accepted if len(accepted) > 1 else []:
        number = str(entry["number"])
        rebuilt = _without(judge, first, entry["number"])
        if isinstance(rebuilt, str):
            reasons[number] = rebuilt
        else:
            systems[number] = rebuilt
    return systems, reasons


def _without(judge: Judge, first: Candidate, number: int) -> tuple[Candidate, Any] | str:
    """The last incumbent without one of its changes, and its size; or why it cannot be made."""
    base, sizes = first, judge.ledger.facts["sizes"]
    for entry in judge.ledger.accepted:
        if entry["number"] == number:
            continue
        staged = read_json_file(judge.ledger.proposal_folder(entry["number"]) / "change.json")
        if "trainer" in staged["change"]:
            return "a trainer of someone else's is one whole"
        submission = Submission(entry["name"], b"", staged["change"], {})
        screened = judge.screened(base, submission, staged["files"], entry["number"], {})
        if "refused" in screened:
            return f"without it {entry['name']} is refused: {screened['refused'][1]}"
        base, sizes = Candidate.read(screened["candidate"]), screened["sizes"]
    where, size = judge.ledger.folder / "final", first_size(sizes)
    name = f"without{number}"
    return judge.tuned(base, size, name, where, judge.tokens_of(base, size, name, where)), size


def _losses(judge: Judge, systems: dict[str, tuple[Candidate, Any]]) -> dict[str, list[float]]:
    """The losses of each system; every pair has its own seed and its own part of the sealed text."""
    windows, where, tasks = judge.ledger.windows, judge.ledger.folder / "final", []
    for pair in range(windows.pairs):
        for name, (candidate, size) in systems.items():
            label = f"without{name}" if name.isdecimal() else name
            tokens = judge.tokens_of(candidate, size, label, where)
            span, seed = windows.of_final_pair(pair), FINAL_SEED + pair
            task = judge.task(candidate, size, f"{label}-pair{pair}", where, seed=seed, span=span, tokens=tokens)
            tasks.append(task)
    progress.print_status(f"{len(tasks)} runs on the sealed text")
    try:
        losses = judge.losses(tasks)
    except RunFailed as failed:
        raise MachineError(f"{failed}; the same command goes on") from None
    return {name: losses[index :: len(systems)] for index, name in enumerate(systems)}


def _difference(worse: Sequence[float], better: Sequence[float]) -> dict[str, float | None]:
    """The mean of worse − better over the pairs, and its 95 % interval by Student's t; None for a diverged run."""
    differences = np.array(worse) - np.array(better)
    if not np.isfinite(differences).all():
        return {"mean": None, "low": None, "high": None}
    half = seed_half_width(differences.tolist())
    mean = float(differences.mean())
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _summary(judge: Judge) -> list[int]:
    """The numbers of the proposals that online e-BH calls better, of all evidence; for this summary only."""
    roots = [entry for entry in judge.ledger.decided if entry["continues"] is None]
    values = []
    for root in roots:
        chain = [entry["verdict"] for entry in judge.ledger.decided if entry["root"] == root["number"]]
        values.append(chain[-1].get("evidence", 0.0))
    found = evidence.summarize_by_e_bh(values, judge.settings.alpha, judge.ledger.windows.decisions)
    return [root["number"] for root, is_better in zip(roots, found, strict=True) if is_better]


def _sentence(judge: Judge, result: dict[str, Any]) -> str:
    """What was found on the sealed text."""
    total, removed = result["improvement"], result["removed"]
    if not removed:
        return "No proposal was accepted, so the first incumbent is the last one."
    words = f"On the sealed text the last incumbent is better than the first by {_interval(total)}."
    carries = {each["name"]: each for each in removed.values() if each.get("mean") is not None}
    for name, each in carries.items():
        verb = "still carries" if each["low"] > 0 else "no longer clearly carries"
        words += f" Without {name} it loses {_interval(each)}: it {verb} its weight."
    if len(carries) == len(removed) and total["mean"] is not None:
        apart = sum(each["mean"] for each in carries.values())
        relation = "more than they gain together, so they replace each other in part"
        if apart < total["mean"]:
            relation = "less than they gain together, so none is missed alone as much as it gave"
        spread = sum((each["high"] - each["low"]) / 2 for each in carries.values())
        if abs(apart - total["mean"]) < spread:
            relation = "as much as they gain together, within the intervals"
        words += f" Removed alone, the changes lose {apart:+.4f} in all: {relation}."
    return words


def _interval(each: dict[str, Any]) -> str:
    if each["mean"] is None:
        return "an unknown amount, since a run diverged"
    return f"{each['mean']:+.4f} bits per byte ({each['low']:+.4f} to {each['high']:+.4f})"
