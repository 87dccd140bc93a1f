"""Check that a training that is killed repeatedly ends bit-equal to one that is not.

    python tools/kill_test.py [--kills 10] [--steps 60] [--seed 0] [--nproc N] [--out FOLDER] [DESIGN [TRAIN OPTION...]]

trains once undisturbed and once with that many SIGKILLs at random moments (while it starts, computes and saves). Each
training is a process `heddle train DESIGN`, by default `preset:gqa-tiny --data stdlib`. Prints the SHA-256 over all
tensors of both last checkpoints (weights, optimizer, random state) and "equal", and exits with 0; or prints what
differs, and exits with 1. Logs are compared line by line, without the seconds. With --nproc the trainings have that
many ranks, and each kill hits a rank, which the launcher answers, or the launcher itself, whose command is given again.
With --out, a test that was itself interrupted goes on after the kills in FOLDER/kills.jsonl.
"""

import argparse
import json
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

MEASURED = ("seconds", "peak_memory_bytes")  # of a line of the log: they differ from run to run


class Moment(NamedTuple):
    """When to kill, in steps of the log and seconds after them; step 0: seconds after the start.

    victim: 0 is the process that was started, which for several ranks is their launcher; n is the n-th rank.
    """

    step: int
    delay: float
    victim: int = 0


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


def killed(
    options: Sequence[str], out: Path, moments: Sequence[tuple[int, float] | Moment], record: Path | None = None
) -> list[int]:
    """Train to the end through SIGKILLs. Returns how many steps were done at each kill.

    record: a file of the kills so far, which are not repeated.
    """
    steps_at_kill = [] if record is None else [kill["steps_done"] for kill in read_kills(record)]
    process = None
    for moment in [Moment(*moment) for moment in moments][len(steps_at_kill) :]:
        process = start(options, out) if process is None else process
        while moment.step and process.poll() is None and done(out) < moment.step:
            time.sleep(0.005)
        time.sleep(moment.delay)
        ranks = children(process.pid)
        victim = ranks[moment.victim - 1] if 0 < moment.victim <= len(ranks) else process.pid
        if process.poll() is None:
            os.kill(victim, 9)
            steps_at_kill.append(done(out))
            if record is not None:
                record_kill(record, moment, steps_at_kill[-1])
        if victim == process.pid or process.poll() is not None:
            process.wait()
            process = None
            while any(is_alive(rank) for rank in ranks):  # they see that their launcher is gone
                time.sleep(0.05)
        else:
            wait_for_restart(process, ranks)
    finish(start(options, out) if process is None else process)
    return steps_at_kill


def record_kill(record: Path, moment: Moment, steps_done: int) -> None:
    """Add a line to the file of kills."""
    with record.open("a") as file:
        file.write(json.dumps({**moment._asdict(), "steps_done": steps_done}) + "\n")


def read_kills(record: Path) -> list[dict[str, Any]]:
    """Return the kills in a file, none if there is no file."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []


def wait_for_restart(process: subprocess.Popen[bytes], ranks: Sequence[int]) -> None:
    """Wait until the launcher has started other ranks, or has ended."""
    while process.poll() is None and (not (others := children(process.pid)) or set(others) & set(ranks)):
        time.sleep(0.05)


def children(process: int) -> list[int]:
    """Return the processes that a process has started and that have not ended, in the order of their numbers."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True, check=False)
    return sorted(int(pid) for pid in listed.stdout.split() if is_alive(int(pid)))


def is_alive(process: int) -> bool:
    """Whether a process runs: one that has ended and that nobody waited for does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


def moments(kills: int, steps: int, starting: float, seed: int, ranks: int = 1) -> list[Moment]:
    """Draw random moments, in order; about one in four falls while the process starts, one in five at the launcher."""
    rng = random.Random(seed)
    kill_steps = sorted(rng.randint(1, max(1, steps - 2)) for _ in range(kills))
    drawn = [
        (0, rng.uniform(0, 1.5 * starting)) if rng.random() < 0.25 else (kill_step, rng.uniform(0, 0.3))
        for kill_step in kill_steps
    ]
    victims = [0 if ranks == 1 or rng.random() < 0.2 else rng.randint(1, ranks) for _ in drawn]
    return [Moment(*pair, victim) for pair, victim in zip(drawn, victims, strict=True)]


def done(out: Path) -> int:
    """Return the number of lines in a run's log; 0 if there is no log yet."""
    try:
        return (out / LOG_FILE).read_bytes().count(b"\n")
    except OSError:
        return 0


def ending(out: Path, steps: int) -> Ending:
    """Return the ending of a run."""
    log = [{name: value for name, value in line.items() if name not in MEASURED} for line in read_log(out)]
    return Ending(tensors_sha256(checkpoint_folder(out, steps)), log)


def main() -> int:
    """Run both trainings and compare their endings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments, train_options = parser.parse_known_args()
    options = train_options or ["preset:gqa-tiny", "--data", "stdlib"]
    options += ["--steps", str(arguments.steps), "--save-every", "3", "--quiet"]
    if arguments.nproc > 1:
        options += ["--nproc", str(arguments.nproc), "--max-restarts", str(arguments.kills)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        whole, cut, record = folder / "undisturbed", folder / "killed", folder / "kills.jsonl"
        starting = undisturbed(options, whole)
        drawn = moments(arguments.kills, arguments.steps, starting, arguments.seed, arguments.nproc)
        fallen = killed(options, cut, drawn, record)
        first, second = ending(whole, arguments.steps), ending(cut, arguments.steps)
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
