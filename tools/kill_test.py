"""Does a training that is killed again and again end like one that never was?

    python tools/kill_test.py [--kills 10] [--steps 60] [--seed 0] [--out FOLDER] [DESIGN [TRAIN OPTION...]]

trains once without disturbance and once with that many SIGKILLs at random moments (while it starts, computes
and saves), each time by `heddle train DESIGN` in a process of its own, by default `preset:gqa-tiny --data stdlib`.
It prints the SHA-256 over all tensors of both last checkpoints (weights, optimizer, random state) and "equal",
and exits with 0; or says what differs, and exits with 1. Logs are compared line by line, but for the seconds.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from heddle.storage.checkpoints import step_folder
from heddle.storage.folder import fingerprint
from heddle.storage.run_log import LOG, read_log


class Ending(NamedTuple):
    """What two runs that are the same share: the tensors' hash and the log without its times."""

    fingerprint: str
    log: list[dict[str, Any]]


def start(options: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    """`heddle train` in a process of its own, silent unless it fails."""
    command = [sys.executable, "-m", "heddle", "train", *options, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end. Raises RuntimeError where the training failed."""
    if process.wait() != 0:
        raise RuntimeError(f"heddle train ended with code {process.returncode}")


def undisturbed(options: Sequence[str], out: Path) -> float:
    """Train to the end; returns the seconds before the first step was done."""
    began = time.monotonic()
    process = start(options, out)
    while process.poll() is None and not done(out):
        time.sleep(0.01)
    seconds = time.monotonic() - began
    finish(process)
    return seconds


def killed(options: Sequence[str], out: Path, moments: Sequence[tuple[int, float]]) -> list[int]:
    """Train to the end through one SIGKILL for each (step, delay): so many seconds after that step is in the log.

    A step of 0 counts from the start of the process. Returns the steps that were done when each kill fell.
    """
    fallen = []
    for step, delay in moments:
        process = start(options, out)
        while step and process.poll() is None and done(out) < step:
            time.sleep(0.005)
        time.sleep(delay)
        if process.poll() is None:
            os.kill(process.pid, 9)
            fallen.append(done(out))
        process.wait()
    finish(start(options, out))
    return fallen


def moments(kills: int, steps: int, starting: float, seed: int) -> list[tuple[int, float]]:
    """Random moments in order; about one in four falls while the process starts."""
    draw = random.Random(seed)
    places = sorted(draw.randint(1, max(1, steps - 2)) for _ in range(kills))
    return [
        (0, draw.uniform(0, 1.5 * starting)) if draw.random() < 0.25 else (place, draw.uniform(0, 0.3))
        for place in places
    ]


def done(out: Path) -> int:
    """Lines in the log of a run, none where there is no log yet."""
    try:
        return (out / LOG).read_bytes().count(b"\n")
    except OSError:
        return 0


def ending(out: Path, steps: int) -> Ending:
    """How a run ended."""
    log = [{name: value for name, value in line.items() if name != "seconds"} for line in read_log(out)]
    return Ending(fingerprint(step_folder(out, steps)), log)


def main() -> int:
    """Compare the two endings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    known, given = parser.parse_known_args()
    options = given or ["preset:gqa-tiny", "--data", "stdlib"]
    options += ["--steps", str(known.steps), "--save-every", "3", "--quiet"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = known.out or Path(temporary)
        starting = undisturbed(options, folder / "undisturbed")
        fallen = killed(options, folder / "killed", moments(known.kills, known.steps, starting, known.seed))
        first, second = (ending(folder / name, known.steps) for name in ("undisturbed", "killed"))
    print(f"undisturbed        {first.fingerprint}")
    print(f"killed {len(fallen):3} times   {second.fingerprint}")
    print(f"steps done when killed: {', '.join(map(str, fallen)) or 'none'}")
    if first == second:
        print("equal")
        return 0
    differing = sum(a != b for a, b in zip(first.log, second.log, strict=False))
    print(f"DIFFERENT: {'tensors; ' if first.fingerprint != second.fingerprint else ''}{differing} lines of the log")
    return 1


if __name__ == "__main__":
    sys.exit(main())
