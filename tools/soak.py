"""Run the campaigns against files for as long as there is time, and add the counts to docs/soak.json.

    python tools/soak.py [--seconds 600] [--name damage] [--record docs/soak.json]

Campaigns: damage (random damages to the files of a run, a cache and a comparison, each of which `heddle verify` must
name), kills (SIGKILLs of trainings, with and without asynchronous saving, whose ends must be bit-equal), files
(designs, configs, tokenizers, tensor files and templates changed at random: read or refused in a sentence), designs (a
wrong value in a design: its field is named), numbers (a number that is not finite: nothing moves, its place is named),
server (requests of 50 clients, a twentieth abusive, to a process of its own, for an hour: right texts, no 5xx, flat
memory), commands (SIGKILLs and signals at random moments of one command after the other: given again, each leaves what
it leaves undisturbed, and a signal is answered in a sentence), ledger (SIGKILLs of a loop that submits proposals to one
ledger, whose verdicts must be those of an undisturbed one), flaky (the default test suite in random order, a share
of its files a round, 40 rounds a repeat: runs with a failure). Each round has a seed; a round that is finished is
counted, and the next call goes on with the next seed. The first failure is printed, counted, and ends the call with 1.
"""

import argparse
import datetime
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from heddle.lab.judge.judge import judge  # noqa: E402
from heddle.lab.judge.ledger import Ledger  # noqa: E402
from heddle.storage.run_log import first_difference  # noqa: E402
from tests import killed_commands, small  # noqa: E402
from tests.cli.test_verify import unnoticed, write_files  # noqa: E402
from tests.model.test_hostile_designs import check_random  # noqa: E402
from tests.mutated_files import refusals  # noqa: E402
from tests.random_order import repeat_share  # noqa: E402
from tests.serving.server_process import server  # noqa: E402
from tests.training.test_first_non_finite import check_sites  # noqa: E402
from tools.kill_test import ending, is_alive, killed, moments, undisturbed  # noqa: E402

DAMAGES, KILLS, STEPS = 5_000, 10, 30  # of a round
FILES, DESIGNS, SITES = 5_000, 10_000, 500
COMMAND_KILLS = 10  # and as many other signals at least


def damage(folder: Path, seed: int) -> tuple[int, list[str]]:
    """One round of damages: (how many, those that were not named)."""
    if not (folder / "files").is_dir():
        write_files(folder / "files")
    return DAMAGES, list(unnoticed(folder / "files", DAMAGES, seed))


def kills(folder: Path, seed: int) -> tuple[int, list[str]]:
    """One round of kills of one training: (how many, how it ended otherwise than without them)."""
    design = small.design_file(folder / "design.yaml", small.dropping())
    size = ["--sequence-length", "32", "--batch-size", "4", "--threads", "1", "--device", "cpu"]
    data = ["--data", str(small.folder(folder / "text"))]
    options = [str(design), *data, *size, "--steps", str(STEPS), "--save-every", "3", "--quiet"]
    options += ["--async-save"] if seed % 2 else []
    whole, cut = folder / f"whole-{seed % 2}", folder / "cut"
    shutil.rmtree(cut, ignore_errors=True)
    shutil.rmtree(whole, ignore_errors=True)
    starting = undisturbed(options, whole)
    count = len(killed(options, cut, moments(KILLS, STEPS, starting, seed)))
    return count, [] if ending(whole, STEPS) == ending(cut, STEPS) else [f"seed {seed}: another ending"]


def commands(folder: Path, seed: int) -> tuple[int, list[str]]:
    """One round of kills and signals of one command: (how many, what was wrong)."""
    workspace, names = folder / "workspace", list(killed_commands.COMMANDS)
    if not workspace.is_dir():
        workspace.mkdir()
        cache = str(workspace / "cache")
        killed_commands.write_workspace(workspace, partial(killed_commands.give, HEDDLE_CACHE=cache))
    command = killed_commands.KilledCommand(names[seed % len(names)], workspace, folder / "trials")
    trials = command.tried(COMMAND_KILLS, seed)
    return trials.kills + trials.signals, trials.failures


SUBMIT = (
    "from sys import argv\nfrom heddle.lab.judge.judge import judge\nfor file in argv[1:]: judge('submit', file, **{})"
)
LEDGER_OPTIONS: dict[str, Any] = {
    "tokens": 1024, "sequence_length": 16, "batch_size": 4, "pairs": 4, "windows": 8, "alpha": 0.5, "second": 0,
    "lr": 1e-5, "device": "cpu", "threads": 1, "quiet": True,
}  # fmt: skip


def ledger(folder: Path, seed: int) -> tuple[int, list[str]]:
    """One round of kills of a loop over a better, an unclear and a refused proposal: (kills, other verdicts)."""
    start, whole, cut = (folder / name for name in ("start", "whole", "cut"))
    proposals = {"1": "training: {lr: 0.01}", "2": "overrides: [layers.*.feedforward.hidden=32]", "3": "from: other"}
    words = {"quiet": True, "device": "cpu", "threads": 1}

    def begin(out: Path) -> subprocess.Popen[bytes]:
        files = [str(folder / f"{name}.yaml") for name in proposals]
        return subprocess.Popen([sys.executable, "-c", SUBMIT.format({"out": str(out), **words}), *files])

    def verdicts(out: Path) -> list[Any]:
        return [entry["verdict"] for entry in Ledger.open(out).entries]

    if not start.is_dir():
        for name, change in proposals.items():
            (folder / f"{name}.yaml").write_text(change + "\n")
        text, design = small.folder(folder / "text", documents=60, size=1500), small.design_file(folder / "design.yaml")
        judge("init", design, data=[str(text)], out=start, **LEDGER_OPTIONS)
        shutil.copytree(start, whole)
        assert begin(whole).wait() == 0
    shutil.rmtree(cut, ignore_errors=True)
    shutil.copytree(start, cut)
    draw, kills = random.Random(seed), 0
    while True:
        process = begin(cut)
        try:
            code = process.wait(draw.uniform(1, 12) if kills < KILLS else None)
        except subprocess.TimeoutExpired:
            below = killed_commands.descendants(process.pid)
            victim = draw.choice([process.pid, process.pid, *below])
            if is_alive(victim):
                os.kill(victim, signal.SIGKILL)
                kills += 1
            code = process.wait()
            while any(map(is_alive, below)):
                time.sleep(0.01)
        if code == 0:
            break
    expected, found = verdicts(whole), verdicts(cut)
    return kills, [] if expected == found else [f"seed {seed}: {first_difference(expected, found)}"]


def files(folder: Path, seed: int) -> tuple[int, list[str]]:
    """One round of changed files: (how many, those that were neither read nor refused in a sentence)."""
    return FILES, list(refusals(folder, FILES, seed))


def designs(folder: Path, seed: int) -> tuple[int, list[str]]:
    """One round of designs with a wrong value: (how many, the first whose field was not named)."""
    return DESIGNS, _failure(partial(check_random, DESIGNS, seed))


def numbers(folder: Path, seed: int) -> tuple[int, list[str]]:
    """One round of numbers that are not finite: (how many, the first that moved something or was not named)."""
    checks = [partial(check_sites, kind, SITES, seed) for kind in ("adamw", "muon")]
    return 2 * SITES, [failure for check in checks for failure in _failure(check)]


def flaky(folder: Path, seed: int) -> tuple[int, list[str]]:
    """One share of a repeat of the test suite: (1, what failed in it)."""
    return repeat_share(seed)


def _failure(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except AssertionError as error:
        return [str(error)]
    return []


CAMPAIGNS: dict[str, Callable[[Path, int], tuple[int, list[str]]]] = {
    "damage": damage, "kills": kills, "files": files, "designs": designs, "numbers": numbers, "server": server,
    "commands": commands, "ledger": ledger, "flaky": flaky,
}  # fmt: skip


def add_round(record: Path, name: str, seed: int, count: int, failures: int) -> None:
    """Add the counts of a round to the record."""
    rounds: dict[str, dict[str, Any]] = json.loads(record.read_text()) if record.is_file() else {}
    before = rounds.get(name, {"count": 0, "failures": 0})
    rounds[name] = {
        "next_seed": seed + 1,
        "count": before["count"] + count,
        "failures": before["failures"] + failures,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
    record.write_text(json.dumps(rounds, indent=1, sort_keys=True) + "\n")


def main() -> int:
    """Run rounds of the campaigns in turn until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--name", choices=sorted(CAMPAIGNS), action="append")
    parser.add_argument("--record", type=Path, default=ROOT / "docs" / "soak.json")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as temporary:
        while time.monotonic() < end:
            for name in arguments.name or CAMPAIGNS:
                saved = json.loads(arguments.record.read_text()) if arguments.record.is_file() else {}
                seed = saved.get(name, {}).get("next_seed", 0)
                folder = Path(temporary, name)
                folder.mkdir(exist_ok=True)
                count, failures = CAMPAIGNS[name](folder, seed)
                add_round(arguments.record, name, seed, count, len(failures))
                print(f"{name}, seed {seed}: {count} trials, {len(failures)} failures", flush=True)
                if failures:
                    print(*failures, sep="\n")
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
