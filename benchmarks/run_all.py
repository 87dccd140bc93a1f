"""Every benchmark, one after the other, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT

SHARED = {"__init__", "harness", "peers", "run_all"}


def main() -> None:
    """Run them all, also when one fails; exit 1 if any did."""
    names = sorted(file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in SHARED)
    failed = []
    for name in names:
        print(f"benchmarks.{name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT, check=False).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
