"""How long do `heddle --help`, `import heddle` and the way to the first step of a first training take?"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import alternate, limit_row, run_rows

QUESTION = "How long does `heddle --help` take, and the first step of a first training?"
TRAIN_ROUNDS = 5
COMMANDS = {
    "heddle --help": ["-m", "heddle", "--help"],
    "import heddle": ["-c", "import heddle"],
    "python alone": ["-c", "pass"],
}


def run_python(arguments: list[str]) -> None:
    """Run a new Python process."""
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def first_step() -> float:
    """Seconds from the start of `heddle train` to its first logged step, with an empty cache."""
    command = [sys.executable, "-m", "heddle", "train", "preset:gqa-tiny", "--data", "stdlib", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "run", "log.jsonl")
        environment = os.environ | {"HEDDLE_CACHE": str(Path(folder, "cache"))}
        began = time.perf_counter()
        process = subprocess.Popen([*command, "--out", str(log.parent)], env=environment, stdout=subprocess.DEVNULL)
        try:
            while process.poll() is None and not (log.exists() and log.stat().st_size):
                time.sleep(0.01)
            if process.poll() is not None:
                raise RuntimeError(f"heddle train ended with exit status {process.returncode}")
            return time.perf_counter() - began
        finally:
            process.kill()
            process.wait()


def rows(quick: bool) -> list[dict[str, Any]]:
    """Medians of processes in turn, and of first steps (quick: one of each)."""
    calls = {name: (lambda arguments=arguments: run_python(arguments)) for name, arguments in COMMANDS.items()}
    rounds = 1 if quick else 15
    medians = {name: statistics.median(seconds) for name, seconds in alternate(calls, rounds=rounds).items()}
    first_steps = [first_step() for _ in range(1 if quick else TRAIN_ROUNDS)]
    return [
        limit_row("heddle --help", medians["heddle --help"], 0.3, "seconds"),
        *(
            {"case": name, "value": round(value, 3), "unit": "seconds"}
            for name, value in medians.items()
            if "help" not in name
        ),
        limit_row("first step of gqa-tiny, empty cache", statistics.median(first_steps), 6, "seconds")
        | {"figure": "cold start"},
    ]


if __name__ == "__main__":
    run_rows("benchmarks.startup", QUESTION, rows)
