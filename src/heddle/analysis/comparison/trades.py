"""What each design buys and costs, in sentences that follow from what was measured: state, speed, recall and more."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from heddle.analysis.comparison import wording

SOLVED = 0.9  # of the way from chance to all right


def recalled(design: wording.Design, probe: str) -> float | None:
    """The share of right answers, or None where it was not measured."""
    found = design["recall"].get(probe)
    return None if found is None else found["accuracy"]


def state_growth(design: wording.Design) -> str:
    """How the state grows with the context: with each token, up to a window, or not at all."""
    points = [(place, value) for place, value in design["state_bytes"] or () if value is not None]
    if len(points) < 3:
        return "Its state was not measured."
    steps = [(b - a) / (y - x) for (x, a), (y, b) in pairwise(points)]
    first, last = points[0][1] - steps[0] * points[0][0], steps[-1]
    at_end = wording.size(points[-1][1])
    if max(steps) == 0:
        return f"It keeps {at_end}, however long the context: constant."
    if last == 0:
        return f"Its state grows up to {at_end} and is constant from there."
    fixed = f"{wording.size(first)} and " if first > 0.02 * points[0][1] else ""
    kept = f"It keeps {fixed}{wording.size(last)} for each token."
    return kept if steps[0] == last else f"Once its windows are full, {kept[0].lower()}{kept[1:]}"


def against(report: wording.Report, design: wording.Design) -> list[str]:
    """The design beside the baseline, a phrase each: state, decode, training, loss and recall. Empty for itself."""
    base = next(row for row in report["designs"] if row["name"] == report["baseline"])
    if design is base:
        return []
    parts = []
    for key, title in (("state_bytes", "state"), ("decode", "decoding speed")):
        context = wording.shared_context(report["designs"], key)
        mine, other = wording.at(design[key], context), wording.at(base[key], context)
        if context is not None and mine is not None and other:
            parts.append(f"{_share(mine, other)} its {title} at {wording.context_name(context)}")
    mine, other = design["train_tokens_per_second"], base["train_tokens_per_second"]
    if mine and other:
        parts.append(f"{_share(mine, other)} its training speed")
    difference = wording.difference_of(report, design["name"])
    if difference is not None and difference["mean"] is not None:
        parts.append(f"{wording.signed(difference)} bits per byte: {wording.judgement(difference)}")
    for name, probe in list(report["recall"].items())[:1]:
        mine, other = recalled(design, name), recalled(base, name)
        if mine is not None and other is not None:
            parts.append(f"{wording.percent(mine)} right answers on {probe['title']}, it {wording.percent(other)}")
    return parts


def _share(part: float, whole: float) -> str:
    words = wording.share(part, whole)
    return words if words.endswith("times") else f"{words} of"


def recall_verdict(report: wording.Report) -> list[str]:
    """Which designs answer the first probe, and which are near chance; nothing where none was measured."""
    for name, probe in list(report["recall"].items())[:1]:
        found = {row["name"]: recalled(row, name) for row in report["designs"]}
        known = {design: share for design, share in found.items() if share is not None}
        if not known:
            return []
        bar = probe["chance"] + SOLVED * (1 - probe["chance"])
        solved = [design for design, share in known.items() if share >= bar]
        others = sorted((design for design in known if design not in solved), key=lambda design: -known[design])
        blind = f"picking blindly gives {wording.percent(probe['chance'])}"
        if not others:
            lowest = wording.percent(min(known.values()))
            few = "" if lowest == wording.percent(1.0) else "at least "
            every = f"each design answers {few}{lowest}" if len(known) > 1 else f"{solved[0]} answers {lowest}"
            return [f"Recall ({probe['title']}): {every} right; {blind}."]
        rest = wording.listing([f"{design} {wording.percent(known[design])}" for design in others], 6)
        start = f"{wording.listing(solved, 6)} learned it" if solved else "no design learned it"
        return [f"Recall ({probe['title']}): {start} within the budget; {rest} ({blind})."]
    return []


def longer_verdict(report: wording.Report) -> list[str]:
    """What the longest text does to each design; nothing where no longer text was read."""
    largest = max(report["extrapolation"]["multiples"], default=1)
    if largest == 1:
        return []
    rows = [(design["name"], design["extrapolation"][-1]) for design in report["designs"]]
    known = sorted((row["change"]["mean"], name, row["change"]) for name, row in rows if _moved(row) is not None)
    words = [(name, mean, wording.judgement(change).partition(",")[0]) for mean, name, change in known]
    parts = [f"{name} {wording.signed_alone(mean)} ({word})" for name, mean, word in words]
    parts += [f"{name} {wording.lacking(row)}" for name, row in rows if _moved(row) is None]
    single = ", on one seed" if max((change["pairs"] for _, _, change in known), default=0) == 1 else ""
    start = f"At {largest} × the trained context bits per byte change, on the same text"
    return [f"{start}{single}: {wording.listing(parts, 8)}."]


def _moved(row: Mapping[str, Any]) -> float | None:
    change: float | None = row["change"]["mean"]
    return change
