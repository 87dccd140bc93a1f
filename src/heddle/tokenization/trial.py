"""A trial of another program's tokenizer in a process of its own, before its expressions are compiled in this one.

The process ends after a second of its processor time, or when it takes more than 64 MiB. What the library prints there,
such as the words of a panic, does not reach the terminal.
"""

import functools
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heddle.errors import DataError

_PROCESS_FILE = Path(__file__).with_name("trial_process.py")
_MAX_UNITS = 64  # characters and pairs that are repeated
_CHARACTERS = ("a", "A", "0", " ", "\n", "\t", "!", "_", "'", "é", "中", "\u0301")


def check_steps(steps: dict[str, Any], texts: frozenset[str], name: str) -> None:
    """Raise DataError for a tokenizer whose expressions take too long, take too much memory or break the library.

    steps: normalizer, pre-tokenizer and decoder of a tokenizer.json. Without expressions, those of `texts` aside, and
    without the search for an empty text, all take time and memory in proportion to the text, and are not tried.
    """
    patterns = set(_patterns(steps))
    if patterns <= texts:
        return
    literals = "".join(re.sub(r"\\.|\W", "", pattern) for pattern in sorted(patterns))
    units = dict.fromkeys([*_CHARACTERS, *literals, *map("".join, itertools.pairwise(literals))])
    reason = _failure(json.dumps({"steps": steps, "units": list(units)[:_MAX_UNITS]}))
    if reason is not None:
        raise DataError(
            f"tokenizer {name} cannot encode every text: {reason}; use another one, such as a byte-level one."
        )


def _patterns(step: Any) -> Iterator[str]:
    """Yield every expression, and "" for a replacement of the empty text; nesting is limited by the parser of JSON."""
    if isinstance(step, list):
        for nested in step:
            yield from _patterns(nested)
    if not isinstance(step, dict):
        return
    pattern = step.get("pattern")
    if isinstance(pattern, dict):
        if "Regex" in pattern:
            yield str(pattern["Regex"])
        elif not pattern.get("String"):
            yield ""
    for nested in step.values():
        yield from _patterns(nested)


@functools.lru_cache(maxsize=64)
def _failure(request: str) -> str | None:
    """Why the trial failed, or None."""
    try:
        result = subprocess.run(
            # a trace of a panic may wait forever for memory that is refused
            ["env", "RUST_BACKTRACE=0", sys.executable, "-P", str(_PROCESS_FILE)],
            input=request.encode(),
            capture_output=True,
            timeout=20,  # of a machine that hardly runs it; its processor time is limited
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "its trial did not end"
    if result.returncode == 0 and result.stdout == b"ok":
        return None
    if result.returncode == -signal.SIGPROF:
        return "its expressions take more than a second for runs of 30,000 characters"
    if result.returncode == -signal.SIGABRT:
        return "its expressions take more than 64 MiB"
    return "it breaks the library that reads it"
