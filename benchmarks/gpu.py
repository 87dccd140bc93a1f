"""How fast is heddle on a GPU? Operations, training, decoding, beside peers in the same run: at most 8 minutes.

python -m benchmarks.gpu                           every section
python -m benchmarks.gpu --sections ops,decode     some of them
python -m benchmarks.gpu --toy --device cpu        tiny sizes, to see that it runs; its times say nothing

Sections: limits, ops, loss, experts, muon, train, decode, laws. Calls of all sides alternate, and medians are compared.
A peer that is not installed, or runs on no such device, is left out and named. When the time is up, the cases that are
left are named too.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu_models import decode, train
from benchmarks.gpu_operations import experts, loss, muon, ops
from benchmarks.gpu_setup import ROUNDS, Comparison, Setup
from benchmarks.harness import show
from benchmarks.machine import RESULTS
from heddle.cli.doctor import OPTIONAL_PACKAGES, package_state
from heddle.lab.bench.run import measure_limits
from heddle.laws import run as run_laws
from heddle.laws import shrink
from heddle.model.load_config import load_config
from heddle.runtime import hardware, resolve_device, versions

QUESTION = "How fast is heddle on a GPU, beside its peers at their defaults and tuned?"
MINUTES = 8.0
LAWS = ("bfloat16_kernels", "bfloat16_isolation", "chunked_decoding")
LAW_DESIGNS = ("preset:gqa-tiny", "preset:mla-tiny", "preset:gated_delta-tiny", "preset:moe-tiny")
COMPARISONS: dict[str, Callable[[Setup], Iterator[Comparison]]] = {
    "ops": ops,
    "loss": loss,
    "experts": experts,
    "muon": muon,
    "train": train,
    "decode": decode,
}
SECTIONS = ("limits", *COMPARISONS, "laws")


def main(arguments: list[str] | None = None) -> None:
    """Run sections, print a line for each case, and write the results with the hardware, the versions and the date."""
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"comma-separated: {','.join(SECTIONS)}")
    parser.add_argument("--cases", default="", help="only those whose name has a match of this regular expression")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="calls of each side; 1 fills the compiler's cache")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, and nothing compiled")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="start no case after this time")
    parser.add_argument("--out", type=Path, help="the JSON file; default: results/GPU/gpu.json, with --toy none")
    options = parser.parse_args(arguments)
    sections = options.sections.split(",")
    if unknown := [name for name in sections if name not in SECTIONS]:
        parser.error(f"unknown section '{unknown[0]}'; choices: {', '.join(SECTIONS)}")
    setup = Setup(resolve_device(options.device), options.toy, time.monotonic() + 60 * options.minutes, options.rounds)
    out = options.out or (None if options.toy else _result_file())
    rows: list[dict[str, Any]] = []
    for row in (row for name in SECTIONS if name in sections for row in _section(name, setup, options.cases)):
        rows.append(row)
        if out is not None:  # after each case, since a rented machine may go at any time
            out.write_text(json.dumps(_content(setup, rows), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _result_file() -> Path:
    folder = RESULTS / "-".join(re.findall(r"[a-z0-9]+", str(hardware().get("gpu", "no gpu")).lower()))
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "gpu.json"


def _section(name: str, setup: Setup, cases: str) -> Iterator[dict[str, Any]]:
    print(f"\n{name}", flush=True)
    rows = _limits(setup) if name == "limits" else _laws(setup) if name == "laws" else _compared(name, setup, cases)
    for row in rows:
        show([row])
        yield {"section": name, **row}


def _compared(name: str, setup: Setup, cases: str) -> Iterator[dict[str, Any]]:
    for comparison in COMPARISONS[name](setup):
        if not re.search(cases, comparison.case):
            continue
        yield comparison.measure(setup) if setup.has_time() else {"case": comparison.case, "left out": "no time left"}


def _limits(setup: Setup) -> Iterator[dict[str, Any]]:
    yield {"case": f"limits of {setup.device}", **measure_limits(setup.device)}


def _laws(setup: Setup) -> Iterator[dict[str, Any]]:
    for design in LAW_DESIGNS[:1] if setup.toy else LAW_DESIGNS:
        config = shrink(load_config(design, ["vocab_size=64"]))
        for result in run_laws(config, LAWS, setup.device):
            yield {"case": f"{design}: {result.name}", "met": result.passed, "message": result.message}


def _content(setup: Setup, rows: list[dict[str, Any]]) -> dict[str, Any]:
    states = {package: package_state(package) for package in OPTIONAL_PACKAGES}
    return {
        "question": QUESTION,
        "date": date.today().isoformat(),
        "device": setup.device,
        "toy": setup.toy,
        "hardware": hardware(),
        "versions": versions()
        | {"transformers": version("transformers")}
        | {name: state["version"] for name, state in states.items() if "version" in state},
        "unusable": {name: state["unusable"] for name, state in states.items() if "unusable" in state},
        "results": rows,
    }


if __name__ == "__main__":
    main()
