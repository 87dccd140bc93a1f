"""A comparison that grows in place: seeds and designs may be added, and it may continue until it is resolved.

Nothing may be changed or removed. Whoever adds seeds after all runs were there may have done so because of what they
showed; from then on the intervals hold at whatever number of seeds one stops.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heddle.analysis.comparison.plan import ComparisonPlan
from heddle.analysis.comparison.power import MAX_SEEDS
from heddle.analysis.comparison.probes import GONE
from heddle.errors import CheckpointError
from heddle.runtime import kind_of_device
from heddle.storage.json_file import read_json_file, write_json_file
from heddle.storage.run_log import first_difference, to_plain_json

REMEDY = "use the same, or another folder"


def result_file(out: Path, name: str, seed: int) -> Path:
    """Where the result of a training run lies."""
    return out / "runs" / f"{name}-seed{seed}.json"


def saved_runs(out: Path, names: Sequence[str]) -> list[tuple[str, int]]:
    """(design, seed) of every training run that has a result."""
    return [(name, seed) for seed in range(MAX_SEEDS) for name in names if result_file(out, name, seed).is_file()]


def check_plan(path: Path, plan: ComparisonPlan, *, may_grow: bool = True) -> bool:
    """Write the plan of a new comparison, or check that of a continued one and add what is new.

    Returns whether the number of seeds follows from results. Raises CheckpointError naming what was changed or removed,
    or for anything new where it may not grow, since other processes work on it.
    """
    identity = to_plain_json(plan.identity())
    saved = dict(identity)
    if path.is_file():
        saved = read_json_file(path)
        saved["device"] = kind_of_device(str(saved.get("device")))  # earlier plans name one GPU
        saved["recall_probes"] = [name for name in saved.get("recall_probes", ()) if name != GONE]
    is_anytime = saved.pop("is_anytime", False)
    until_resolved = saved.pop("until_resolved", None)
    if until_resolved is not None and plan.until_resolved is None:
        raise CheckpointError(
            f"{path.parent}: its seeds were bought until resolved (± {until_resolved:g}), and a fixed number of "
            "seeds would leave some out; continue it in the same way, or choose another folder"
        )
    _check_unchanged(path.parent, saved, identity)
    more_seeds = identity["seeds"] != saved["seeds"]
    if more_seeds and all(result_file(path.parent, name, seed).is_file() for name, seed in _planned(saved)):
        is_anytime = True
    is_anytime = is_anytime or plan.until_resolved is not None
    written = identity | {"is_anytime": is_anytime, "until_resolved": plan.until_resolved}
    if not path.is_file() or read_json_file(path) != written:
        if not may_grow:
            raise CheckpointError(
                f"{path.parent}: other processes work on fewer seeds or designs there; wait until they have ended"
            )
        write_json_file(path, written)
    return is_anytime


def _planned(identity: dict[str, Any]) -> list[tuple[str, int]]:
    return [(name, seed) for name in identity["entries"] for seed in identity["seeds"]]


def _check_unchanged(folder: Path, saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise CheckpointError for anything but added seeds and designs."""
    same, seeds, entries = dict(identity), saved.get("seeds"), saved.get("entries")
    if isinstance(seeds, list) and set(seeds) <= set(identity["seeds"]):
        same["seeds"] = seeds
    if isinstance(entries, dict):
        removed = [name for name in entries if name not in identity["entries"]]
        if removed:
            raise CheckpointError(f"{folder}: holds another comparison: {removed[0]} is in it too; {REMEDY}")
        same["entries"] = {name: identity["entries"][name] for name in entries}
    difference = first_difference(_name_budget(saved), _name_budget(same))
    if difference:
        raise CheckpointError(f"{folder}: holds another comparison: {difference}; {REMEDY}")
    added = [name for name in identity["entries"] if name not in saved["entries"]]
    if added and identity.get("tuning"):
        raise CheckpointError(
            f"{folder}: holds a comparison without {added[0]}; a tuned comparison cannot gain designs, since they are "
            "tuned together; choose another folder"
        )
    if added and identity["budget_kind"] != "tokens":
        # how much of the longer texts is read depends on the steps of every design
        raise CheckpointError(
            f"{folder}: holds a comparison without {added[0]}; designs can be added only where the budget is in tokens"
        )


def _name_budget(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity with the budget under its kind, `tokens` say, instead of kind and value."""
    others = {name: value for name, value in identity.items() if not name.startswith("budget_")}
    return {str(identity.get("budget_kind")): identity.get("budget_value")} | others
