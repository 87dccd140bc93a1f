"""Check that a training that is killed repeatedly ends bit-equal to one that is not.

    python tools/kill_test.py [--kills 10] [--steps 60] [--seed 0] [--out FOLDER] [DESIGN [TRAIN OPTION...]]

trains once undisturbed and once with that many SIGKILLs at random moments (while it starts, computes and saves). Each
training is a process `heddle train DESIGN`, by default `preset:gqa-tiny --data stdlib`. Prints the SHA-256 over all
tensors of both last checkpoints (weights, optimizer, random state) and "equal", and exits with 0; or prints what
differs, and exits with 1. Logs are compared line by line, without the seconds.
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

from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.folder import tensors_sha256
from heddle.storage.run_log import LOG_FILE, read_log


class Ending(NamedTuple):
    """What equal runs have in common: the SHA-256 of the tensors, and the log without times."""

    fingerprint: str
    log: list[dict[str, Any]]


def start(options: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    """Start `heddle train` in a new process, silent unless it fails."""
    command = [sys.executable, "-m", "heddle", "train", *options, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process. Raises RuntimeError if the training failed."""
    if process.wait() != 0:
        raise RuntimeError(f"heddle train ended with code {process.returncode}")


def undisturbed(options: Sequence[str], out: Path) -> float:
    """Train to the end and return the seconds until the first step was done."""
    began = time.monotonic()
    process = start(options, out)
    while process.poll() is None and not done(out):
        time.sleep(0.01)
    seconds = time.monotonic() - began
    finish(process)
    return seconds


def killed(options: Sequence[str], out: Path, moments: Sequence[tuple[int, float]]) -> list[int]:
    """Train to the end through SIGKILLs. Each (step, delay) kills `delay` seconds after that step is in the log.

    Step 0 counts from the start of the process. Returns how many steps were done at each kill.
    """
    steps_at_kill = []
    for step, delay in moments:
        process = start(options, out)
        while step and process.poll() is None and done(out) < step:
            time.sleep(0.005)
        time.sleep(delay)
        if process.poll() is None:
            os.kill(process.pid, 9)
            steps_at_kill.append(done(out))
        process.wait()
    finish(start(options, out))
    return steps_at_kill


def moments(kills: int, steps: int, starting: float, seed: int) -> list[tuple[int, float]]:
    """Draw random (step, delay) pairs, in order; about one in four falls while the process starts."""
    rng = random.Random(seed)
    kill_steps = sorted(rng.randint(1, max(1, steps - 2)) for _ in range(kills))
    return [
        (0, rng.uniform(0, 1.5 * starting)) if rng.random() < 0.25 else (kill_step, rng.uniform(0, 0.3))
        for kill_step in kill_steps
    ]


def done(out: Path) -> int:
    """Return the number of lines in a run's log; 0 if there is no log yet."""
    try:
        return (out / LOG_FILE).read_bytes().count(b"\n")
    except OSError:
        return 0


def ending(out: Path, steps: int) -> Ending:
    """Return the ending of a run."""
    log = [{name: value for name, value in line.items() if name != "seconds"} for line in read_log(out)]
    return Ending(tensors_sha256(checkpoint_folder(out, steps)), log)


def main() -> int:
    """Run both trainings and compare their endings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments, train_options = parser.parse_known_args()
    options = train_options or ["preset:gqa-tiny", "--data", "stdlib"]
    options += ["--steps", str(arguments.steps), "--save-every", "3", "--quiet"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        starting = undisturbed(options, folder / "undisturbed")
        fallen = killed(options, folder / "killed", moments(arguments.kills, arguments.steps, starting, arguments.seed))
        first, second = (ending(folder / name, arguments.steps) for name in ("undisturbed", "killed"))
    print(f"undisturbed        {first.fingerprint}")
    print(f"killed {len(fallen):3} times   {second.fingerprint}")
    print(f"steps done when killed: {', '.join(map(str, fallen)) or 'none'}")
    if first == second:
        print("equal")
        return 0
    different_lines = sum(a != b for a, b in zip(first.log, second.log, strict=False))
    print(
        f"DIFFERENT: {'tensors; ' if first.fingerprint != second.fingerprint else ''}{different_lines} lines of the log"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
