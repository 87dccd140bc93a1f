"""Compare two checkouts of heddle through public interfaces: `tools/same.py OLD NEW` says equal, or what differs.

Each section runs in a process of its own (`tools/same_sections.py`), first with OLD's package and then with NEW's, on
one thread, and writes plain data: values, and hashes of tensors and files. Only `heddle.__all__`, the command line and
files on disk are used, so that any layout of the sources answers; `tools/same_commands.py` alone knows more: what reads
a command line. NEW also resumes and loads what OLD wrote.

A difference that is meant stands in `tools/same_options.json` with its reason, is counted as named and does not fail.
Everything else makes the exit code 1.

    logits     draws, logits, gradients and decoding in float64, and costs, of every preset and of the designs
    families   each family of transformers, out and in again; the config.json that transformers itself writes, in
    training   three trainings, whole and resumed; NEW also resumes OLD's
    reports    report.json of three comparisons and a conversion, without what measures time, memory or the machine
    files      names and bytes of a saved model and of a run; NEW also loads OLD's
    options    what 200 random command lines of OLD are read as, and the exit codes of refused ones
    api        heddle.__all__, signatures of its functions, members of its classes, fields of designs

The designs are data, `tools/same_designs.json`, so that both sides build the same: `python -m tools.same
--write-designs` wrote them once from tests/cases.py, tests/covering.py and tests/exchange/cases.py.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DESIGNS, MAP = HERE / "same_designs.json", HERE / "same_options.json"
PROBE, COMMANDS = HERE / "same_sections.py", HERE / "same_commands.py"
SECTIONS = ("logits", "families", "training", "reports", "files", "options", "api")
ABSENT = "is not there"
SHOWN = 12  # differences of a section that are listed


def run_section(section: str, checkout: Path, work: Path, old: Path | None) -> dict[str, Any]:
    """The facts of a section, from a process with a checkout's package; kept beside its work folder and used again.

    They are computed anew if the package, the section or the machine changed. Raises RuntimeError if it fails.
    """
    stamp = fingerprint(section, checkout, old)
    kept = work / f"{section}.json"
    if kept.is_file() and (content := json.loads(kept.read_text(encoding="utf-8"))).get("of") == stamp:
        return dict(content["facts"])
    folder = work / section
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEDDLE", "PYTEST"))}
    environment |= {"PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{HERE.parent}", "PYTHONHASHSEED": "0"}
    environment |= {"HEDDLE_CACHE": str(work / "cache"), "HEDDLE_MACHINE": "default"}  # measured choices are recorded
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {"COLUMNS": "100", "NO_COLOR": "1"}
    words = [sys.executable, "-W", "ignore", str(PROBE), section, str(checkout), str(kept), str(old or "")]
    process = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise RuntimeError(f"{section} of {checkout} failed:\n{process.stderr[-3000:]}")
    facts = dict(json.loads(kept.read_text(encoding="utf-8")))
    kept.write_text(json.dumps({"of": stamp, "facts": facts}), encoding="utf-8")
    return facts


def fingerprint(section: str, checkout: Path, old: Path | None) -> str:
    """Of a package's files, of what the section reads of this tool, and of what both run on."""
    before = "" if old is None else json.loads((old / f"{section}.json").read_text(encoding="utf-8"))["of"]
    sha = hashlib.sha256(json.dumps([before, sys.version, platform.node(), platform.version()]).encode())
    package = [path for path in (checkout / "src").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    for path in sorted(package):
        sha.update(f"{path.relative_to(checkout)} ".encode() + path.read_bytes())
    for path in (PROBE, DESIGNS, *((COMMANDS, MAP) if section == "options" else ())):
        sha.update(path.read_bytes())
    return sha.hexdigest()


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, str, str] | None]:
    """Everything that can differ: (path, old value, new value) where it does, None where it is equal.

    The order of a table's keys is one of them, and so is the length of a list.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        yield from differences([key for key in old if key in new], [key for key in new if key in old], f"{path} order")
        for name in dict.fromkeys([*old, *new]):
            yield from differences(old.get(name, ABSENT), new.get(name, ABSENT), f"{path}.{name}")
    elif isinstance(old, list) and isinstance(new, list) and any(isinstance(item, dict | list) for item in old):
        yield from differences(len(old), len(new), f"{path} length")
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            yield from differences(before, after, f"{path}.{index}")
    else:
        before, after = json.dumps(old), json.dumps(new)
        yield None if before == after else (path, before, after)


def named_by(path: str, expected: list[dict[str, str]]) -> str | None:
    """The pattern of the first declared entry that a difference has."""
    return next((entry["path"] for entry in expected if fnmatchcase(path, entry["path"])), None)


def expected_differences(declared: dict[str, Any]) -> list[dict[str, str]]:
    """The declared entries and those of options that are gone. Raises ValueError for one without reason or remedy."""
    expected = list(declared["expected"])
    for entry in declared["options"]:
        if entry["new"] is None and " " in entry["old"]:
            verb, option = entry["old"].split()
            reason = f"{entry.get('reason')}; {entry['remedy']}" if entry.get("remedy") else ""
            expected.append({"path": f"options.read.{verb} *.values.{option}", "reason": reason})
    for entry in [*expected, *declared["options"]]:
        if not entry.get("reason"):
            raise ValueError(f"{MAP.name}: {entry} has no reason, or no remedy for what is gone; write it")
    return expected


def compare(
    sections: list[str], facts: Callable[[str], tuple[dict[str, Any], dict[str, Any]]], expected: list[dict[str, str]]
) -> tuple[list[str], bool]:
    """The lines of the report, and whether all that differs is named. facts: section -> those of OLD and of NEW."""
    rows, lines, used = [], [], Counter[str]()
    for section in sections:
        try:
            compared = list(differences(*facts(section), section))
        except RuntimeError as error:
            lines.append(str(error))
            rows.append((section, 0, 0, 0, 1))
            continue
        found = [each for each in compared if each is not None]
        other = [each for each in found if named_by(each[0], expected) is None]
        used.update(pattern for path, *_ in found if (pattern := named_by(path, expected)))
        rows.append((section, len(compared), len(compared) - len(found), len(found) - len(other), len(other)))
        lines += [f"{path}\n    OLD {before[:120]}\n    NEW {after[:120]}" for path, before, after in other[:SHOWN]]
        lines += [f"{section}: … and {len(other) - SHOWN} more"] if len(other) > SHOWN else []
    table = [f"{'section':<10}{'compared':>10}{'equal':>10}{'named':>10}{'different':>10}"]
    table += [f"{name:<10}" + "".join(f"{number:>10}" for number in numbers) for name, *numbers in rows]
    for entry in expected:
        if entry["path"].split(".")[0] in sections:
            table.append(f"named {used[entry['path']]:>6}  {entry['path']}: {entry['reason']}")
    is_same = not any(row[-1] for row in rows)
    return [*lines, *table, "equal, but for what is named" if is_same else "DIFFERENT"], is_same


def write_designs() -> None:
    """Write the designs anew, from the tests of this checkout; needs transformers."""
    from heddle.model.presets import names
    from tests.cases import CASES
    from tests.covering import covering
    from tests.exchange import cases
    from tests.exchange.hf_models import config_of, imported

    groups: dict[str, Any] = {"presets": {name: {} for name in names()}, "cases": CASES, "families": {}}
    groups["covering"] = {f"{number:03d}": config.dump() for number, (config, _) in enumerate(covering().designs)}
    for family, case in cases.CASES.items():
        for variant in case.variants:
            config = json.loads(config_of(family, variant).to_json_string())
            groups["families"][f"{family}:{variant}"] = {
                "design": imported(family, variant).model.config.dump(), "config": config,
            }  # fmt: skip
    rows = {group: ",\n".join(f"{json.dumps(name)}: {json.dumps(data)}" for name, data in designs.items())
            for group, designs in groups.items()}  # fmt: skip
    text = ",\n".join(f"{json.dumps(group)}: {{\n{lines}}}" for group, lines in rows.items())  # a design a line
    DESIGNS.write_text(f"{{{text}}}\n", encoding="utf-8")


def main() -> int:
    """Compare two checkouts; the exit code."""
    if sys.argv[1:] == ["--write-designs"]:
        write_designs()
        return 0
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD", help="A checkout: the folder that holds src/heddle.")
    parser.add_argument("new", type=Path, metavar="NEW", help="The checkout that should be the same.")
    parser.add_argument("--only", metavar="A,B", default=",".join(SECTIONS), help="The sections. [all]")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="Keep what was made there, to use it again.")
    words = parser.parse_args()
    sections = words.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"--only {', '.join(sorted(unknown))}: unknown section; choices: {', '.join(SECTIONS)}")
    for checkout in (words.old, words.new):
        if not (checkout / "src/heddle/__init__.py").is_file():
            parser.error(f"{checkout}: holds no src/heddle; name the folder of a checkout")
    expected = expected_differences(json.loads(MAP.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory(prefix="heddle-same-") as temporary:
        work = (words.work or Path(temporary)).resolve()

        def facts(section: str) -> tuple[dict[str, Any], dict[str, Any]]:
            old = run_section(section, words.old.resolve(), work / "old", None)
            return old, run_section(section, words.new.resolve(), work / "new", work / "old")

        lines, is_same = compare(sections, facts, expected)
    print("\n".join(lines))
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
