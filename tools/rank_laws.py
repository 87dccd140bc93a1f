"""Every law of ranks on every case and layout: `python -m tools.rank_laws`; the same command continues.

A line of tests/distributed/laws.jsonl is one case on one layout and one way of computing a batch. docs/rank-laws.md is
their table. The first round takes every case on every layout, in a way that depends on the case; `--all-ways` takes
the other ways, too.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from heddle.distributed.ranks import (  # noqa: E402
    ONE_PROCESS,
    RESERVED,
    Ranks,
    whole,
)
from heddle.model.config import ModelConfig  # noqa: E402
from heddle.model.decoder import Decoder, build  # noqa: E402
from heddle.progress import progress_bar  # noqa: E402
from heddle.storage.model import load, save  # noqa: E402
from heddle.training.built_models import REFUSED_ON_RANKS  # noqa: E402
from heddle.training.evaluation.scores import bits_and_bytes, scores_on_ranks  # noqa: E402
from tests.cases import CASES, case  # noqa: E402
from tests.distributed.ranks import on_ranks  # noqa: E402
from tests.distributed.steps import MESHES, WAYS, WITHOUT_ENCODER, Way, batch_of, exact_muon, run_steps, sharded  # noqa: E402
from tools.markdown import joined, table  # noqa: E402

RESULTS = ROOT / "tests/distributed/laws.jsonl"
NO_STEP = "A caller gives the vectors of its cross-attention: there is no training step"
EQUAL_LAWS = ("first weights", "evaluation", "checkpoint")  # bit for bit
CLOSE_LAWS = ("losses", "norms", "penalties", "gradients", "weights")  # after three steps, to TOLERANCE
TOLERANCE = 1e-10
INTRO = """Every case of `tests/cases.py` on every layout of ranks, against one process, in float64. The first weights,
the evaluation of a batch and a checkpoint that ranks write and one process reads are equal bit for bit. A number is the
largest difference of the losses, gradient norms, penalties, gradients and weights of three training steps; the law
allows 10⁻¹⁰. Muon orthogonalizes in float64 here; in bfloat16, as in training, a difference in the last bit of a
gradient may tip a rounding. Ranks are threads with torch's own test group.

A row is a way of computing a batch: accumulated in two parts, recomputed layers, fewer targets in half of the rows,
muon, or everything at once. Each case was run in at least one way on each layout. `python tools/rank_laws.py` runs what
is missing, `--all-ways` all of them; [laws.jsonl](../tests/distributed/laws.jsonl) has every case."""
REFUSED = f"""## Refused

{NO_STEP}: {", ".join(f"`{name}`" for name in sorted(WITHOUT_ENCODER))}.

What a training on several ranks refuses, each in a sentence that names it (`tests/distributed/test_train.py`):"""


def main() -> None:
    """Run what is missing; exits with 1 if any law is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all-ways", action="store_true", help="every way on every layout: hours")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = 3 if options.all_ways else 2  # a case has been on a layout, whichever the way, though the ways chosen move
    known = {identity(line)[:parts] for line in read_results()}
    missing = [task for task in tasks(options.all_ways) if task[:parts] not in known]
    with RESULTS.open("a", encoding="utf-8") as file, progress_bar("laws of ranks", len(missing), "checks") as bar:
        for name, mesh, way in missing:
            line = {"case": name, "layout": mesh, "way": way} | compare(case(name), WAYS[way], MESHES[mesh])
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            bar.advance(1)
    broken = [line for line in read_results() if not holds(line)]
    for line in broken:
        print(f"BROKEN {json.dumps(line, ensure_ascii=False)}")
    sys.exit(bool(broken))


def tasks(all_ways: bool) -> Iterator[tuple[str, str, str]]:
    """(case, layout, way): one way for each layout of a case, or all of them."""
    for place, name in enumerate(sorted(CASES.keys() - WITHOUT_ENCODER)):
        for turn, mesh in enumerate(MESHES):
            ways = list(WAYS)
            yield from ((name, mesh, way) for way in (ways if all_ways else [ways[(place + turn) % len(ways)]]))


@exact_muon()
def compare(config: ModelConfig, way: Way, mesh: tuple[int, int]) -> dict[str, Any]:
    """Whether the bits are equal, and the largest difference of each number, over all ranks."""
    expected = everything(build(config, torch.float64), config, way, ONE_PROCESS)
    count = mesh[0] * mesh[1]
    with tempfile.TemporaryDirectory() as folder:

        def run(rank: int) -> dict[str, Any]:
            model, ranks = sharded(config, mesh), Ranks(rank, count)
            numbers = everything(model, config, way, ranks)
            save(model, Path(folder) / "model", ranks=ranks)
            return numbers

        actual = on_ranks(count, run)
        saved = dict(load(Path(folder) / "model")[0].named_parameters())
    result: dict[str, Any] = {
        "first weights": all(are_equal(expected["first weights"], row["first weights"]) for row in actual),
        "evaluation": all(expected["evaluation"] == row["evaluation"] for row in actual),
        "checkpoint": all(are_equal(row["weights"], saved) for row in actual),
    }
    return result | {law: max(difference(expected[law], row[law]) for row in actual) for law in CLOSE_LAWS}


def everything(model: Decoder, config: ModelConfig, way: Way, ranks: Ranks) -> dict[str, Any]:
    """The first weights, an evaluation, and the numbers of three steps."""
    first = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    scores = None  # an evaluation reads text, which has no encoder's input
    if model.encoder is None:
        byte_lengths = np.ones(config.vocab_size or 2, dtype=np.int64)
        batches = [batch_of(config, 0, way, None)]
        scores = scores_on_ranks(model, batches, lambda group, _: bits_and_bytes(model, group, byte_lengths), ranks)
    return {"first weights": first, "evaluation": scores} | run_steps(model, config, way, ranks)


def are_equal(expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same names and bits."""
    return expected.keys() == actual.keys() and all(
        torch.equal(value, actual[name]) for name, value in expected.items()
    )


def difference(expected: Any, actual: Any) -> float:
    """The largest difference of two lists of numbers or of two sets of tensors."""
    if isinstance(expected, list):
        return max(abs(a - b) for a, b in zip(expected, actual, strict=True))
    if expected.keys() != actual.keys():
        return float("inf")
    return max(float((value - actual[name]).abs().max()) for name, value in expected.items() if value.numel())


def holds(line: dict[str, Any]) -> bool:
    """Whether a case keeps every law on a layout."""
    return all(line[law] for law in EQUAL_LAWS) and are_close(line)


def are_close(line: dict[str, Any]) -> bool:
    """Whether the numbers of three steps are those of one process."""
    return all(line[law] <= TOLERANCE for law in CLOSE_LAWS)


def identity(line: dict[str, Any]) -> tuple[str, str, str]:
    """The task that a line answers."""
    return line["case"], line["layout"], line["way"]


def read_results() -> list[dict[str, Any]]:
    """The lines of the committed file, for cases that still exist."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.is_file() else []
    return [line for line in map(json.loads, lines) if line["case"] in CASES]


def page(written: str) -> str:
    """docs/rank-laws.md."""
    lines = read_results()
    rows = [(way, *(cell(lines, way, mesh) for mesh in MESHES)) for way in WAYS]
    laws = table(("way of computing a batch", *MESHES), rows)
    return joined(
        "# Laws of ranks",
        written,
        INTRO,
        laws,
        exceptions(lines),
        REFUSED,
        table(("what", "why", "instead"), refusals()),
    )


def refusals() -> list[tuple[str, str, str]]:
    """What is refused, why, and what to do instead."""
    refused = [(f"`{each.name}`", each.reason, each.remedy) for each in REFUSED_ON_RANKS]
    degrees = ", ".join(f"`{kind}_parallel_degree`" for kind in RESERVED)
    return [*refused, (degrees, "such parallelism is not implemented yet", "leave it at 1")]


def cell(lines: list[dict[str, Any]], way: str, mesh: str) -> str:
    """How many cases were run in one way on a layout, and their largest difference."""
    own = [line for line in lines if (line["way"], line["layout"]) == (way, mesh)]
    largest = max((line[law] for line in own for law in CLOSE_LAWS), default=0.0)
    return f"{len(own)} cases: {largest:.0e}" if own else "not run yet"


def exceptions(lines: list[dict[str, Any]]) -> str:
    """What breaks a law, and what was not run on every layout."""
    run = {(line["case"], line["layout"]) for line in lines}
    missing = [
        name for name in sorted(CASES.keys() - WITHOUT_ENCODER) if any((name, mesh) not in run for mesh in MESHES)
    ]
    broken = [f"`{line['case']}` on {line['layout']}, {line['way']}" for line in lines if not holds(line)]
    sentences = [
        f"**Broken**: {'; '.join(broken)}." if broken else "No case breaks a law.",
        f"Not run on every layout yet: {', '.join(f'`{name}`' for name in missing)}." if missing else "",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


if __name__ == "__main__":
    main()
