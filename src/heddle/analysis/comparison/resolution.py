"""What a comparison did not resolve, in words: ties, what it could resolve, and what a narrower interval needs."""

from collections.abc import Mapping
from typing import Any

from heddle.analysis.comparison.formatting import (
    format_bound,
    format_difference,
    half_width,
    join_names,
)
from heddle.analysis.comparison.lookup import Report, differences_to_leader
from heddle.analysis.comparison.power import MAX_SEEDS
from heddle.analysis.comparison.tables import TextTable
from heddle.progress import format_duration

Row = Mapping[str, Any]


def resolution_sentences(report: Report) -> list[str]:
    """Ties with the leader and what would resolve them; empty where nothing is open."""
    rows = [row for row in differences_to_leader(report) if _is_unresolved(row) and row["pairs"] > 1]
    sentences = []
    if rows:
        widest = max(rows, key=lambda row: half_width(row) or 0.0)
        ties = f"A tie within ± {format_bound(rows[0]['tie_within'])}"
        if len(report["designs"]) > 2:
            names = join_names([f"{row['reference']} within ± {format_bound(row['tie_within'])}" for row in rows], 8)
            ties = f"A tie with {report['leader']}: {names}"
        power = f"a true difference of {format_bound(widest['resolvable'])} would be resolved four times in five"
        sentences.append(f"{ties}; {power}.")
        sentences += [f"{need_words(need)}." for need in widest["needs"][:1]]
    return sentences


def need_words(need: Mapping[str, Any]) -> str:
    """ "± 0.01 needs 2.1 times the held-out text, which is the larger part, and 9 seeds of each, 4 min more"."""
    start = f"± {need['half_width']:g} needs"
    if need["seeds"] is None:
        seeds = f"more than {MAX_SEEDS} seeds of each"
    else:
        more = f", {format_duration(need['seconds'])} more" if need["seconds"] else ""
        seeds = f"{need['seeds']} seeds of each{more}"
    if need["text_factor"] == 1:
        return f"{start} {seeds}"
    return f"{start} {need['text_factor']:.1f} times the held-out text, which is the larger part, and {seeds}"


def _short_need(need: Mapping[str, Any]) -> str:
    """ "± 0.01: 9 seeds, 4 min, 2.1 × text"."""
    seeds = f"over {MAX_SEEDS} seeds" if need["seeds"] is None else f"{need['seeds']} seeds"
    time = f", {format_duration(need['seconds'])}" if need["seconds"] else ""
    text = "" if need["text_factor"] == 1 else f", {need['text_factor']:.1f} × text"
    return f"± {need['half_width']:g}: {seeds}{time}{text}"


def resolution_table(report: Report) -> TextTable | None:
    """A row for each unresolved pair with the leader or the baseline; None where there is none."""
    rows = [
        [
            f"{row['design']} − {row['reference']}",
            format_difference(row),
            f"± {format_bound(row['tie_within'])}",
            format_bound(row["resolvable"]),
            "; ".join(map(_short_need, row["needs"])) or "a second seed",
        ]
        for row in report["pairs"]
        if _is_unresolved(row) and {report["leader"], report["baseline"]} & {row["design"], row["reference"]}
    ]
    header = ["not resolved", "difference", "a tie within", "resolved from", "narrower"]
    return TextTable(header, rows, "What is not resolved, and what would resolve it") if rows else None


def _is_unresolved(row: Row) -> bool:
    """Whether a pair was judged and is open; runs that gave the same numbers are not."""
    return bool(row["final"] and not row["resolved"] and row.get("tie_within"))
