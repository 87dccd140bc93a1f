"""Run every benchmark, one after the other, each in a separate process."""

import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT

SHARED = {"__init__", "harness", "peers", "run_all", "gpu_models", "gpu_operations", "gpu_setup"}
ON_A_GPU = {"gpu"}  # run it by itself


def main() -> None:
    """Run all benchmarks, even if some fail. Exit with 1 if any failed."""
    names = sorted(file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in SHARED | ON_A_GPU)
    failed = []
    for name in names:
        print(f"benchmarks.{name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT, check=False).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
