"""Length extrapolation of a design: mean loss at each multiple of the trained length, and its paired change."""

from collections.abc import Sequence
from typing import Any

from heddle.analysis.comparison.statistics import TEXT_SPANS, Run, finished_runs, paired_difference
from heddle.data.corpus import Corpus
from heddle.training.evaluation.length_extrapolation import ExtrapolationPlan, ExtrapolationResult
from heddle.training.evaluation.scores import ratio_of_sums


def result_summary(result: ExtrapolationResult) -> dict[str, Any]:
    """The result at one multiple as plain data, which becomes part of a run."""
    return {
        "multiple": result.multiple,
        "status": "done" if result.refusal is None else "refused",
        "message": result.refusal,
        "bits_per_byte": ratio_of_sums(result.scores) if result.scores else None,
        "windows": result.scores,
    }


def plan_summary(plan: ExtrapolationPlan, corpus: Corpus | None) -> dict[str, Any]:
    """What was read, as plain data for the report.

    corpus: None until it is prepared. `multiples` is empty where nothing was read; `note` says why less was read than
    was asked for.
    """
    size = 0
    if corpus is not None:
        targets = [corpus.validation.read(start + 1, start + plan.span_length + 1) for start in plan.starts]
        size = sum(int(corpus.tokenizer.byte_lengths[tokens].sum()) for tokens in targets)
    return {
        "sequence_length": plan.sequence_length,
        "multiples": list(plan.multiples),
        "spans": len(plan.starts),
        "documents": plan.document_count,
        "tokens": len(plan.starts) * plan.span_length,
        "bytes": size,
        "note": plan.note,
    }


def length_changes(runs: Sequence[Run], multiples: Sequence[int]) -> list[dict[str, Any]]:
    """A design at each multiple: mean bits per byte of its finite seeds, and the change from 1 ×, paired by seed.

    not_finite: seeds without a finite number. refusal: why the design has no number at this multiple.
    """
    finished = finished_runs(runs)
    trained_length = _runs_at(finished, 1)
    rows = []
    for multiple in multiples:
        at_multiple = _runs_at(finished, multiple)
        values = [float(run["bits_per_byte"]) for run in finished_runs(at_multiple)]
        refusals = [run["message"] for run in at_multiple if run["status"] == "refused"]
        rows.append(
            {
                "multiple": multiple,
                "bits_per_byte": sum(values) / len(values) if values else None,
                "change": paired_difference(at_multiple, trained_length, TEXT_SPANS) if multiple > 1 else None,
                "not_finite": len(at_multiple) - len(values) - len(refusals),
                "refusal": refusals[0] if refusals else None,
            }
        )
    return rows


def _runs_at(runs: Sequence[Run], multiple: int) -> list[dict[str, Any]]:
    """The results at one multiple in the form of runs."""
    return [
        {**result, "seed": run["seed"]}
        for run in runs
        for result in run["extrapolation"]
        if result["multiple"] == multiple
    ]
