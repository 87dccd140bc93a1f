"""Every law on every case of the tests, on a device that CI does not have: `python tools/laws_on.py --device cuda`.

Prints one line for each law that is broken, and a summary; exits with 1 if any is.
"""

import argparse
import json
import multiprocessing
import re
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]


def hold(task: tuple[str, str]) -> list[tuple[str, str, str]]:
    """(case, law, message) of every law that a case violates on a device."""
    name, device = task
    import torch

    from heddle.laws import run
    from heddle.model.config import ModelConfig
    from heddle.model.load_config import load_config
    from tests.cases import CASES

    torch.set_num_threads(1)
    config: ModelConfig = load_config(CASES[name])
    return [(name, result.name, result.message) for result in run(config, device=device) if not result.passed]


def main() -> None:
    """Run all cases in several processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--cases", default="", help="only those whose name has a match of this regular expression")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these, and say how far it came")
    parser.add_argument("--json", type=Path, help="write the summary here too")
    options = parser.parse_args()
    import torch

    from heddle.laws import LAWS
    from heddle.runtime import hardware, versions
    from tests.cases import CASES

    names = [name for name in CASES if re.search(options.cases, name)]
    began = time.perf_counter()
    broken: list[tuple[str, str, str]] = []
    done = 0
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for rows in pool.imap_unordered(hold, [(name, options.device) for name in names]):
            done += 1
            broken += rows
            for case, law, message in rows:
                print(f"BROKEN {case} {law}: {message}", flush=True)
            if time.perf_counter() - began > options.seconds:
                pool.terminate()
                break
    total = done * len(LAWS)
    summary = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "cases": done,
        "of": len(names),
        "laws": len(LAWS),
        "held": total - len(broken),
        "broken": [list(row) for row in sorted(broken)],
        "seconds": round(time.perf_counter() - began, 1),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "hardware": hardware(),
    }
    cases = f"{done} of {len(names)} cases"
    print(f"{summary['held']} of {total} hold on {summary['device']}, {cases} ({summary['seconds']} s)")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
