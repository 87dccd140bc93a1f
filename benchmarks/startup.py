"""How soon the command line answers: `heddle --help` as a whole process, torch not imported."""

import statistics
import subprocess
import sys

from benchmarks.harness import bounded, show, timed, write

if __name__ == "__main__":
    command = [sys.executable, "-m", "heddle", "--help"]
    times = [timed(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(12)]
    rows = [bounded("heddle --help", statistics.median(times[1:]), 0.3, "s")]
    show(rows)
    write("benchmarks.startup", "How soon does the command line answer?", rows)
