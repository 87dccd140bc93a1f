"""Check an engine against a conformance kit. Needs Python alone: python reader.py KIT 'engine --model {model}'

The command is started once for each model. It reads one JSON line per request and answers with one:

    {"tokens": [5, 9, 3], "keep": 0}   ->   {"logits": [[...], [...], [...]]}

`tokens` are read after the first `keep` tokens of the text so far; keep 0 begins a new text. One row of logits for each
token. An engine that cannot do this answers {"error": "why"}; the case then counts as not seen.
"""

import array
import json
import math
import shlex
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

KINDS = {"F64": "d", "F32": "f", "I64": "q"}


def tensors(path: Path) -> dict[str, tuple[list[int], "array.array[Any]"]]:
    """The tensors of a safetensors file: name -> (shape, numbers in row-major order)."""
    data = Path(path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    found: dict[str, tuple[list[int], array.array[Any]]] = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            numbers = array.array(KINDS[entry["dtype"]], data[8 + size + start : 8 + size + stop])
            if sys.byteorder == "big":
                numbers.byteswap()
            found[name] = entry["shape"], numbers
    return found


def models(kit: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folders of the kit's models, each with its cases.json."""
    for entry in json.loads(Path(kit, "kit.json").read_text(encoding="utf-8"))["models"]:
        folder = Path(kit, entry["family"], entry["variant"])
        yield folder, json.loads((folder / "cases.json").read_text(encoding="utf-8"))


def requests(case: Mapping[str, Any], rows: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], int, int]]:
    """The requests of a case for an engine that reads one text at a time: (tokens, keep, row)."""
    if case["way"] == "whole":
        yield rows[case["rows"][0]], 0, case["rows"][0]
    elif case["way"] == "cut":
        row = rows[case["rows"][0]]
        for start, stop in zip([0, *case["cuts"]], [*case["cuts"], len(row)], strict=True):
            yield row[start:stop], start, case["rows"][0]
    elif case["way"] == "rollback":
        first, then = case["rows"]
        yield rows[first][: case["read"]], 0, first
        yield rows[then][case["keep"] :], case["keep"], then


def largest_error(
    answer: list[list[float]], golden: tuple[list[int], "array.array[Any]"], keep: int, clear: int
) -> float:
    """The largest difference of the logits of tokens `keep`, keep + 1, … that are clear, from the golden ones."""
    (_, vocabulary), numbers = golden
    errors = [0.0]
    for position, row in enumerate(answer, keep):
        if position < clear:
            want = numbers[position * vocabulary : (position + 1) * vocabulary]
            errors += [abs(x - y) if x == x else float("inf") for x, y in zip(row, want, strict=True)]
    return max(errors)


def shown(row: list[float], tokens: int) -> list[float]:
    """What a bug tells of a row of logits: those of the first tokens, and the logarithm of all exponentials' sum."""
    largest = max(row)
    return [*row[:tokens], largest + math.log(sum(math.exp(x - largest) for x in row))]


def name_of(
    answer: list[list[float]], golden_of: dict[str, Any], document: dict[str, Any], clear: int, tolerance: float
) -> str | None:
    """The bug with the logits of a wrong answer; None if no bug has them."""
    rows = [shown(row, document["shown"]) for row in answer]
    for index, bug in enumerate(document["bugs"]):
        has_row = bug["property"] == "logits" and bug["row"] == 0
        if has_row and largest_error(rows, golden_of[f"bugs.{index}.logits"], 0, clear) <= tolerance:
            return str(bug["name"])
    return None


def main(kit: str, command: str, dtype: str = "float32") -> int:
    """Print a line for each model and property; the exit code is 1 if one is wrong."""
    failed = False
    for folder, document in models(Path(kit)):
        if dtype not in document["tolerances"]:
            continue
        golden, tolerance = tensors(folder / "goldens.safetensors"), document["tolerances"][dtype]
        seen: dict[str, str] = {}
        arguments = [part.replace("{model}", str(folder)) for part in shlex.split(command)]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdin is not None
            assert engine.stdout is not None
            for case in document["cases"]:
                for tokens, keep, row in requests(case, document["rows"]):
                    with suppress(BrokenPipeError):  # it ended; so does what it says
                        engine.stdin.write(json.dumps({"tokens": tokens, "keep": keep}) + "\n")
                        engine.stdin.flush()
                    answer = json.loads(engine.stdout.readline() or '{"error": "ended"}')
                    if "error" in answer:
                        seen.setdefault(case["property"], f"not seen: {answer['error']}")
                        continue
                    clear = document["clear"][dtype][row]
                    error = largest_error(answer["logits"], golden[f"rows.{row}.logits"], keep, clear)
                    if error > tolerance:
                        failed = True
                        bug = name_of(answer["logits"], golden, document, clear, tolerance) if row + keep == 0 else None
                        if bug or not seen.get(case["property"], "").startswith("WRONG"):
                            seen[case["property"]] = f"WRONG by {error:.3g}" + (f": {bug}" if bug else "")
                    seen.setdefault(case["property"], "right")
            with suppress(BrokenPipeError):
                engine.stdin.close()
        for what, result in seen.items():
            print(f"{document['family']}/{folder.name}  {what}: {result}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
