"""Compare two checkouts of heddle through public interfaces: `tools/same.py OLD NEW` says equal, or what differs.

Each section runs in a process of its own (`tools/same_sections.py`), first with OLD's package and then with NEW's, on
one thread, and writes plain data: values, and hashes of tensors and files. Only `heddle.__all__`, the command line and
files on disk are used, so that any layout of the sources answers; `tools/same_commands.py` alone knows more: what reads
a command line. NEW also resumes and loads what OLD wrote.

Float32 products use oneDNN on both sides where that is as accurate as float32: versions before measured choices do so.
A difference that is meant stands in `tools/same_named.json` with its reason and how far it may go, is counted as named
and does not fail. Everything else makes the exit code 1; a name that matches nothing is listed as stale.

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
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).resolve().parent
DESIGNS, MAP, NAMED = (HERE / f"same_{name}.json" for name in ("designs", "options", "named"))
PROBE, COMMANDS = HERE / "same_sections.py", HERE / "same_commands.py"
SECTIONS = ("logits", "families", "training", "reports", "files", "options", "api")
CHOICES = {"matmul": "medium"}  # kernels of both sides: what was used before they were measured on each machine
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
    choices = work / "choices.json"
    choices.write_text(json.dumps(CHOICES), encoding="utf-8")
    environment |= {"HEDDLE_CACHE": str(work / "cache"), "HEDDLE_MACHINE": str(choices)}
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
    sha = hashlib.sha256(json.dumps([before, CHOICES, sys.version, platform.node(), platform.version()]).encode())
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


# What is meant to differ. A name has a path and exactly one rule, which says how far a difference may go.


def _is_near(old: Any, new: Any, difference: float, share: float) -> bool:
    """Whether floats differ by at most `difference`, or by this share of the larger; anything else is equal."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_is_near(*pair, difference, share) for pair in zip(old, new, strict=True))
    if isinstance(old, float) and isinstance(new, float) and math.isfinite(old) and math.isfinite(new):
        return abs(old - new) <= max(difference, share * max(abs(old), abs(new)))
    return json.dumps(old) == json.dumps(new)


def _in_other_words(old: Any, new: Any, words: dict[str, str]) -> bool:
    """Whether NEW is OLD with its words replaced. words["+"]: the expression of what else a list of NEW may have."""
    kept = new
    if (more := words.get("+")) and isinstance(new, list):
        kept = [item for item in new if not re.fullmatch(more, str(item))]
    text = json.dumps(old, ensure_ascii=False)
    for before, after in words.items():
        text = text if before == "+" else text.replace(before, after)
    return ABSENT not in (old, new) and text == json.dumps(kept, ensure_ascii=False)


def _in_other_order(old: Any, new: Any) -> bool:
    lists: list[Any] = [item.split() if isinstance(item, str) else item for item in (old, new)]
    if not all(isinstance(items, list) for items in lists):
        return False
    before, after = (sorted(map(json.dumps, items)) for items in lists)
    return before == after


RULES: dict[str, Callable[[Any, Any, Any], bool]] = {  # of (bound, old, new)
    "added": lambda bound, old, new: old == ABSENT and json.dumps(new) == json.dumps(bound),
    "added like": lambda bound, old, new: old == ABSENT and re.fullmatch(bound, json.dumps(new)) is not None,
    "changed": lambda bound, old, new: json.dumps([old, new]) == json.dumps(bound),  # from [0] to [1]
    "gone": lambda _, old, new: new == ABSENT != old,
    "relative": lambda bound, old, new: _is_near(old, new, 0.0, bound),
    "absolute": lambda bound, old, new: _is_near(old, new, bound, 0.0),
    "words": lambda bound, old, new: _in_other_words(old, new, bound),
    "reordered": lambda _, old, new: _in_other_order(old, new),
}
WIDEST = {"relative": 1e-5, "absolute": 1e-5}


@dataclass(frozen=True, eq=False)
class Name:
    """Differences at a path that are meant, if a rule permits them.

    path: as `differences` writes it, with * for any text. unless: the same; what it matches keeps no name.
    """

    path: str
    rule: str
    bound: Any
    reason: str
    unless: str = ""

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Self:
        """Read an entry of same_named.json. Raises ValueError without a reason or a rule, or for one that is wide."""
        rules = [key for key in entry if key in RULES]
        if len(rules) != 1 or not {"path"} <= set(entry) <= {"path", "unless", "reason", *rules}:
            raise ValueError(f"{NAMED.name}: {entry}: give path, reason and exactly one of {', '.join(RULES)}")
        if not entry.get("reason"):
            raise ValueError(f"{NAMED.name}: {entry} has no reason; write it")
        rule, bound = rules[0], entry[rules[0]]
        if rule in WIDEST and not 0 < bound <= WIDEST[rule]:
            raise ValueError(f"{NAMED.name}: {entry}: {rule} must be at most {WIDEST[rule]}")
        return cls(entry["path"], rule, bound, entry["reason"], entry.get("unless", ""))

    def is_of(self, path: str) -> bool:
        """Whether it names differences at this path."""
        return fnmatchcase(path, self.path) and not fnmatchcase(path, self.unless)

    def permits(self, old: Any, new: Any) -> bool:
        """Whether a difference is the one that is meant."""
        return RULES[self.rule](self.bound, old, new)

    def __str__(self) -> str:
        bound = json.dumps(self.bound, ensure_ascii=False)
        return f"{self.path}, {self.rule} {bound if len(bound) < 60 else bound[:57] + '...'}"


def read_names(entries: list[dict[str, Any]], options: list[dict[str, Any]]) -> list[Name]:
    """The names of same_named.json and those of options that are gone. Raises ValueError if a reason is missing.

    {"path": "a.*", "adds": {"b": 1}} stands for {"path": "a.b", "added": 1}, and for the like of each field.
    """
    names = []
    for entry in entries:
        whole, fields = dict(entry), entry.get("adds", {})
        if whole.pop("adds", None) is not None:
            prefix = whole.pop("path").removesuffix("*")
            names += [Name.read({"path": prefix + field, "added": value} | whole) for field, value in fields.items()]
        else:
            names.append(Name.read(whole))
    for entry in options:
        if not entry.get("reason") or (entry["new"] is None and not entry.get("remedy")):
            raise ValueError(f"{MAP.name}: {entry} has no reason, or no remedy for what is gone; write it")
        if entry["new"] is None and " " in entry["old"]:
            verb, option = entry["old"].split()
            reason = f"{entry['reason']}; {entry['remedy']}"
            names.append(Name(f"options.read.{verb} *.values.{option}", "gone", True, reason))
    return names


def compare(
    sections: list[str], facts: Callable[[str], tuple[dict[str, Any], dict[str, Any]]], names: list[Name]
) -> tuple[list[str], bool]:
    """The lines of the report, and whether all that differs is named. facts: section -> those of OLD and of NEW."""
    rows, lines, used = [], [], Counter[Name]()
    for section in sections:
        try:
            compared = list(differences(*facts(section), section))
        except RuntimeError as error:
            lines.append(str(error))
            rows.append((section, 0, 0, 0, 1))
            continue
        found = [each for each in compared if each is not None]
        other = []
        for path, before, after in found:
            of_path = [name for name in names if name.is_of(path)]
            meant = next((each for each in of_path if each.permits(json.loads(before), json.loads(after))), None)
            used.update([] if meant is None else [meant])
            beyond = f"  (more than {', '.join(map(str, of_path))})" if of_path else ""
            other += [] if meant else [f"{path}{beyond}\n    OLD {before[:120]}\n    NEW {after[:120]}"]
        rows.append((section, len(compared), len(compared) - len(found), len(found) - len(other), len(other)))
        lines += other[:SHOWN] + ([f"{section}: … and {len(other) - SHOWN} more"] if len(other) > SHOWN else [])
        reasons = Counter[str]()
        for name, count in used.items():
            reasons[name.reason] += count if name.path.startswith(section) else 0
        lines += [f"{section}: {count} named: {reason}" for reason, count in reasons.most_common() if count]
    table = [f"{'section':<10}{'compared':>10}{'equal':>10}{'named':>10}{'unnamed':>10}"]
    table += [f"{name:<10}" + "".join(f"{number:>10}" for number in numbers) for name, *numbers in rows]
    stale = [name for name in names if not used[name] and name.path.split(".")[0].split(" ")[0] in sections]
    table += [f"stale: {name} matches nothing here: {name.reason}" for name in stale]
    is_same = not any(row[-1] for row in rows)
    equal = "EQUAL BUT FOR WHAT IS NAMED" if used else "EQUAL"
    return [*lines, *table, equal if is_same else "DIFFERENT"], is_same


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
    declared = json.loads(MAP.read_text(encoding="utf-8"))["options"]
    names = read_names(json.loads(NAMED.read_text(encoding="utf-8")), declared)
    with tempfile.TemporaryDirectory(prefix="heddle-same-") as temporary:
        work = (words.work or Path(temporary)).resolve()

        def facts(section: str) -> tuple[dict[str, Any], dict[str, Any]]:
            old = run_section(section, words.old.resolve(), work / "old", None)
            return old, run_section(section, words.new.resolve(), work / "new", work / "old")

        lines, is_same = compare(sections, facts, names)
    print("\n".join(lines))
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
