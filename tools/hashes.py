"""Write hashes.txt: the SHA-256 of the files that pip takes for the pins of constraints.txt.

    python tools/hashes.py [REPORT ...]

Without reports, pip is asked for one of each Python version (`pip install --dry-run --report`), on Linux and x86-64,
with the indexes that pip is set to. A report of another index adds other builds of the same version, such as torch for
CPUs: a pin that has not changed loses no hash. `faults` compares the two files.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS, HASHES = ROOT / "constraints.txt", ROOT / "hashes.txt"
PYTHONS = ("3.11", "3.12", "3.13")
HEAD = """\
# The files of the pins of constraints.txt by SHA-256, for CPython 3.11, 3.12 and 3.13 on Linux and x86-64.
# `python tools/hashes.py` writes this file; `make dev HASHES=1` installs from it.
"""
PIN = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.!+]+)(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})*)")

Pins = dict[str, tuple[str, frozenset[str]]]


def read_pins(text: str) -> Pins:
    """By name, as it is written, the version and the hashes of each line. Raises ValueError for any other line."""
    pins: Pins = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = PIN.fullmatch(line)
        if match is None:
            raise ValueError(f"{line!r} is no pin; write NAME==VERSION --hash=sha256:DIGITS")
        if match["name"] in pins:
            raise ValueError(f"{match['name']} is pinned twice; remove one line")
        pins[match["name"]] = match["version"], frozenset(re.findall("[0-9a-f]{64}", match["hashes"]))
    return pins


def faults(constraints: str, hashes: str) -> list[str]:
    """What hashes.txt lacks of constraints.txt, and what it holds besides."""
    pinned, locked = read_pins(constraints), read_pins(hashes)
    lines = [f"{name}: not in constraints.txt" for name in sorted(locked.keys() - pinned.keys())]
    for name, (version, _) in pinned.items():
        locked_version, digests = locked.get(name, ("", frozenset()))
        if not digests:
            lines.append(f"{name}: no hash")
        elif locked_version != version:
            lines.append(f"{name}: {locked_version} is not {version}")
    return lines


def lock(constraints: str, hashes: str, reports: Iterable[Mapping[str, Any]]) -> str:
    """The text of a new hashes.txt: the hashes of the reports, and those of `hashes` whose pin has not changed.

    A local version, such as 2.13.0+cpu, counts as the version before its sign. Raises ValueError if a report holds
    another version.
    """
    pins, earlier = read_pins(constraints), read_pins(hashes)
    names = {_normalized(name): name for name in pins}
    found = {name: set(earlier[name][1]) if earlier.get(name, ("",))[0] == pins[name][0] else set() for name in pins}
    for report in reports:
        for item in report["install"]:
            name = names.get(_normalized(item["metadata"]["name"]))
            version = item["metadata"]["version"]
            if name is None or version.partition("+")[0] != pins[name][0]:
                raise ValueError(f"{item['metadata']['name']} {version} is not in constraints.txt; make a new report")
            found[name].add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    lines = [
        " ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in sorted(found[name]))])
        for name, (version, _) in sorted(pins.items(), key=lambda item: _normalized(item[0]))
    ]
    return HEAD + "\n".join(lines) + "\n"


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def ask_pip(python: str) -> dict[str, Any]:
    """pip's report for a Python version. Exits with pip's last words if it gives none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--no-deps", "--python-version", python, "--target", folder]
        options += ["--report", str(file), "-r", str(CONSTRAINTS)]
        command = [sys.executable, "-m", "pip", "install", "-q", *options]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"heddle: pip gave no report for Python {python}: {result.stderr.strip()[-500:]}")
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return report


def main() -> None:
    """Read or ask for the reports, and write hashes.txt."""
    reports = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    constraints = CONSTRAINTS.read_text(encoding="utf-8")
    before = HASHES.read_text(encoding="utf-8") if HASHES.is_file() else ""
    text = lock(constraints, before, reports or map(ask_pip, PYTHONS))
    if lines := faults(constraints, text):
        sys.exit("heddle: the reports do not hold every pin:\n" + "\n".join(lines))
    HASHES.write_text(text, encoding="utf-8")
    print(f"heddle: hashes.txt: {len(read_pins(text))} pins, {text.count('--hash=')} files")


if __name__ == "__main__":
    main()
