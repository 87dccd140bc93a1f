"""The end of a rank: gloo's threads own no tensor when Python's interpreter ends, else they abort the process."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from heddle.distributed.process_group import wait_for_sleep

RANK = """
import os
from pathlib import Path
import torch
from torch import distributed
from heddle.distributed.process_group import join_ranks

with join_ranks("cpu"):
    kept = distributed.group.WORLD  # as DTensor's caches keep it
    distributed.all_reduce(torch.ones(4))
    for task in Path("/proc/self/task").iterdir():
        if "pt_gloo" in (task / "comm").read_text():  # it runs when nobody else wants the core
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    for _ in range(5):
        distributed.all_reduce(torch.ones(1000))
"""


def write_states(tasks: Path, *states: str) -> None:
    for number, state in enumerate(states):
        (tasks / str(number)).mkdir(parents=True, exist_ok=True)
        (tasks / str(number) / "stat").write_text(f"{number} (pt_gloo_(run) {state} 1 1 1 0")


def seconds_until_asleep(tasks: Path) -> float:
    start = time.monotonic()
    wait_for_sleep(tasks)
    return time.monotonic() - start


def test_a_thread_that_runs_is_waited_for(tmp_path: Path) -> None:
    write_states(tmp_path, "S", "R")
    (tmp_path / "9").mkdir()
    (tmp_path / "9/stat").write_text("9 (python) R 1 1 1 0")  # not gloo's
    timer = threading.Timer(0.3, write_states, (tmp_path, "S", "S"))
    timer.start()
    assert seconds_until_asleep(tmp_path) >= 0.3
    timer.join()


def test_without_threads_nothing_is_waited_for(tmp_path: Path) -> None:
    wait_for_sleep(tmp_path / "missing")


@pytest.mark.nightly
def test_ranks_end_well_on_busy_cores(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    try:
        ends = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(12)]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert [(end.returncode, end.stderr) for end in ends if end.returncode] == []
