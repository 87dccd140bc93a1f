"""A task on several ranks: the worker starts them, and each is `python -m heddle.lab.compare.rank_worker`.

Its arguments are TASK.json, RESULT.json, its rank and the process that started it. Rank 0 writes the result, or the
first rank that fails writes the reason.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from heddle import progress

ON_RANKS = ("calibrate", "train", "loss")  # the others measure one process, or are too small to share


def run_on_ranks(task: dict[str, Any], request_file: str, result_file: str) -> int:
    """Run a task on ranks, each on one of its devices; return the exit code of the worker."""
    from heddle.distributed.launcher import launch
    from heddle.errors import RankLost
    from heddle.storage.file_io import write_json_file

    try:
        with progress.quiet() if task["quiet"] else nullcontext():
            arguments = (request_file, result_file, "${local_rank}", str(os.getpid()))  # torchrun's agent fills it in
            return launch(arguments, len(task["devices"]), max_restarts=0, module=__name__)
    except RankLost as lost:
        failed = {"status": "failed", "message": str(lost), "stops_all": False}
        if not Path(result_file).exists():  # the other ranks name one that hangs
            write_json_file(Path(result_file), failed)
        return lost.exit_code


def main() -> None:
    """Be one rank of a task. After a signal exit with 130 or 143, without a result."""
    from heddle.distributed.process_group import join_ranks
    from heddle.errors import OtherRankFailed
    from heddle.lab.compare.worker import TASKS, perform
    from heddle.signals import Interrupted
    from heddle.storage.file_io import write_json_file

    started = time.monotonic()
    request_file, result_file, rank, launcher = sys.argv[1:]
    task = json.loads(Path(request_file).read_text(encoding="utf-8"))
    device = task["devices"][int(rank)]

    def be_rank() -> dict[str, Any]:
        try:
            with join_ranks(device, launcher=int(launcher)) as ranks:
                return TASKS[task["task"]]({**task, "device": device, "ranks": ranks})
        except OtherRankFailed as error:
            sys.exit(error.exit_code)

    try:
        with progress.quiet() if task["quiet"] or not task["alone"] else nullcontext():
            result, exit_code = perform(be_rank)
    except Interrupted as interrupted:
        if not task["quiet"]:
            progress.print_status(f"{task['label']}: {interrupted}")
        sys.exit(interrupted.exit_code)
    except Exception as error:  # a bug: its traceback follows
        message = f"rank {rank} failed ({type(error).__name__}: {error})"
        write_json_file(Path(result_file), {"status": "failed", "message": message, "stops_all": False})
        raise
    if rank == "0" or result["status"] != "done":
        write_json_file(Path(result_file), result | {"wall_seconds": time.monotonic() - started})
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
