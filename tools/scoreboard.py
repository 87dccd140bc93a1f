"""Run engines on conformance kits, a model at a time, and write the scoreboard of docs/conformance.md.

    python -m tools.scoreboard run [--all] [FAMILY …]     one model of each family, or all; goes on where it stopped
    python -m tools.scoreboard write                      the table, of what was run

Results are lines of evidence/results/conformance.jsonl: an engine on a model, with versions and the date.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from heddle.errors import ConfigError
from heddle.exchange.family import families
from heddle.exchange.gguf.match import match_architecture
from heddle.lab.conformance.build import KIT_FILE, build_model, design, variants
from heddle.lab.conformance.run import NOT_SEEN, RIGHT, WRONG, Finding, engine_of, run_kit
from heddle.progress import quiet
from tools.llama_cpp.runner import HERE, install
from tools.llama_cpp.runner import version as llama_cpp_version

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "evidence/results/conformance.jsonl", ROOT / "docs/conformance.md"
ENGINES = (*(f"transformers:{mode}" for mode in ("eager", "sdpa", "static", "assisted")), "llama.cpp")
MARKS = ("<!-- scoreboard -->\n", "<!-- end -->\n")


def results() -> list[dict[str, Any]]:
    """What was run so far; of two runs of the same, the later."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    read = [json.loads(line) for line in lines]
    return list({(line["engine"], line["family"], line["variant"]): line for line in read}.values())


def run(names: list[str], every: bool) -> None:
    """Run what has no result yet."""
    done = {(line["engine"], line["family"], line["variant"]) for line in results()}
    install()
    tried = {family for _, family, _ in done}
    for family in names or sorted(variants(), key=lambda name: (name in tried, name)):
        for variant in variants()[family] if every else [_one(family)]:
            left = [engine for engine in ENGINES if (engine, family, variant) not in done]
            if left:
                _run_model(family, variant, left)


def _one(family: str) -> str:
    """The first model of a family that llama.cpp runs, or the first."""
    own = variants()[family]
    for variant, fields in own.items():
        with suppress(ConfigError):
            match_architecture(design(families()[family], fields), family)
            return variant
    return next(iter(own))


def _run_model(family: str, variant: str, engines: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="heddle-") as folder, quiet():
        kit = Path(folder)
        began = time.process_time()
        entry = build_model(kit / family / variant, families()[family], variants()[family][variant], gguf=True)
        built = {"seconds": round(time.process_time() - began, 1), "cases": entry["cases"], "bugs": entry["bugs"]}
        built["bytes"] = sum(
            file.stat().st_size for file in (kit / family / variant).iterdir() if file.suffix != ".gguf"
        )
        print(family, variant, built, flush=True)
        (kit / KIT_FILE).write_text(json.dumps({"models": [{"family": family, "variant": variant} | entry]}))
        for engine in engines:
            line = {"engine": engine, "family": family, "variant": variant}
            if engine == "llama.cpp" and "gguf" not in entry:
                line |= {"cases": {RIGHT: 0, WRONG: 0, NOT_SEEN: entry["cases"]}, "wrong": [], "reason": "no GGUF"}
            else:
                opened = engine_of(f"llama.cpp:{HERE}" if engine == "llama.cpp" else engine, "float32")
                line |= _line(list(run_kit(kit, opened)))
            line |= {"version": _version(engine), "date": f"{datetime.now(UTC):%Y-%m-%d}", "built": built}
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(family, variant, engine, line["cases"], *line["wrong"], sep="  ", flush=True)


def _line(findings: list[Finding]) -> dict[str, Any]:
    counts = {status: sum(each.status == status for each in findings) for status in (RIGHT, WRONG, NOT_SEEN)}
    wrong = [
        f"{each.property}, {each.way}: off by {each.distance:.3g}, {each.bug or each.reason or 'no known mistake'}"
        for each in findings
        if each.status == WRONG
    ]
    return {"cases": counts, "wrong": wrong, "reason": next((each.reason for each in findings if each.reason), "")}


def _version(engine: str) -> str:
    return (
        f"node-llama-cpp {llama_cpp_version()}" if engine == "llama.cpp" else f"transformers {version('transformers')}"
    )


def table() -> str:
    """A row an engine: the families whose models it runs, cases, and the families with something wrong."""
    rows = [
        "| engine | version | date | families | right | not seen | wrong |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    lines = defaultdict(list)
    for line in results():
        lines[line["engine"]].append(line)
    for engine in ENGINES:
        ran = [line for line in lines[engine] if line["cases"][RIGHT] or line["cases"][WRONG]]
        if ran:
            counts = {status: sum(line["cases"][status] for line in ran) for status in (RIGHT, WRONG, NOT_SEEN)}
            wrong = sorted({line["family"] for line in ran if line["wrong"]})
            cells = [
                engine,
                ran[-1]["version"],
                max(line["date"] for line in ran),
                len({line["family"] for line in ran}),
            ]
            cells += [counts[RIGHT], counts[NOT_SEEN], f"{counts[WRONG]}" + (f": {', '.join(wrong)}" if wrong else "")]
            rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows) + "\n"


def write() -> None:
    """Put the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    PAGE.write_text(before + MARKS[0] + table() + MARKS[1] + rest.partition(MARKS[1])[2], encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "write"))
    parser.add_argument("names", metavar="NAME", nargs="*")
    parser.add_argument("--all", action="store_true")
    asked = parser.parse_args()
    run(asked.names, asked.all) if asked.action == "run" else write()
