"""Run the benchmarks that answer rows of the table of figures, or all; each in a separate process, limits first.

A run that was stopped goes on: what the same code has measured on this kind of machine is not measured again.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figures import FIGURES
from benchmarks.machine import ROOT

NO_BENCHMARKS = {"__init__", "figures", "harness", "machine", "peers", "plain_gqa", "run_all"}
ON_A_GPU = {"gpu", "gpu_models", "gpu_operations", "gpu_setup"}  # run `gpu` by itself


def main() -> None:
    """Run benchmarks, even if some fail. Exit with 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every case of every benchmark, not the figures alone")
    parser.add_argument("--quick", action="store_true", help="two pairs of each case, and write nothing")
    parser.add_argument("--again", action="store_true", help="measure again what the same code has measured")
    options = parser.parse_args()
    if options.all:
        files = {file.stem for file in Path(__file__).parent.glob("*.py")} - NO_BENCHMARKS - ON_A_GPU
        names = ["limits", *sorted(files - {"limits"})]
    else:
        names = ["limits", *dict.fromkeys(figure.module for figure in FIGURES if figure.module)]
    flags = [f"--{name}" for name in ("quick", "again") if getattr(options, name)]
    failed = []
    for name in names:
        print(f"benchmarks.{name}", flush=True)
        began = time.perf_counter()
        command = [sys.executable, "-m", f"benchmarks.{name}", *flags, *([] if options.all else ["--figures"])]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
        print(f"benchmarks.{name}: {time.perf_counter() - began:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
