"""What longer texts do to a design: for each multiple of the trained context its mean and its change, paired."""

from collections.abc import Sequence
from typing import Any

from heddle.analysis.comparison.statistics import STRETCHES, Run, finished, paired_difference
from heddle.data.corpus import Corpus
from heddle.training.evaluation.bits_per_byte import bits_per_byte
from heddle.training.evaluation.length_extrapolation import Reading, Stretches


def told(reading: Reading) -> dict[str, Any]:
    """A reading as a run's result keeps it."""
    status = "done" if reading.refusal is None else "refused"
    return {
        "multiple": reading.multiple,
        "status": status,
        "message": reading.refusal,
        "bits_per_byte": bits_per_byte(reading.windows) if reading.windows else None,
        "windows": reading.windows,
    }


def describe(stretches: Stretches, corpus: Corpus) -> dict[str, Any]:
    """Plain data for the report; no multiples where nothing was read, and in `note` why, if it was asked for."""
    sizes = corpus.tokenizer.byte_lengths
    targets = [corpus.validation.read(start + 1, start + stretches.length + 1) for start in stretches.starts]
    return {
        "context": stretches.context,
        "multiples": list(stretches.multiples),
        "stretches": len(stretches.starts),
        "documents": stretches.documents,
        "tokens": len(stretches.starts) * stretches.length,
        "bytes": int(sum(sizes[one].sum() for one in targets)),
        "note": stretches.note,
    }


def changes(runs: Sequence[Run], multiples: Sequence[int]) -> list[dict[str, Any]]:
    """A design at each multiple: mean bits per byte of its finite seeds, and the change from 1 × seed by seed.

    not_finite counts the seeds without a finite number; refusal is why a length has none at all.
    """
    done = finished(runs)
    first = _side(done, 1)
    made = []
    for multiple in multiples:
        side = _side(done, multiple)
        good = [float(one["bits_per_byte"]) for one in finished(side)]
        refused = [one["message"] for one in side if one["status"] == "refused"]
        made.append(
            {
                "multiple": multiple,
                "bits_per_byte": sum(good) / len(good) if good else None,
                "change": paired_difference(side, first, STRETCHES) if multiple > 1 else None,
                "not_finite": len(side) - len(good) - len(refused),
                "refusal": refused[0] if refused else None,
            }
        )
    return made


def _side(runs: Sequence[Run], multiple: int) -> list[dict[str, Any]]:
    """The readings of one multiple, as if each were a run."""
    found = []
    for run in runs:
        found += [{**one, "seed": run["seed"]} for one in run["extrapolation"] if one["multiple"] == multiple]
    return found
