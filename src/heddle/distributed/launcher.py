"""Start the ranks of a command on this machine, with torchrun's agent, and restart them after one died."""

import logging
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from heddle.errors import RankLost
from heddle.progress import print_status

SAVE_SECONDS = 600  # time for ranks to save after a signal, before they are killed


def launch(arguments: Sequence[str], ranks: int, max_restarts: int, module: str = "heddle") -> int:
    """Run `python -m MODULE ARGUMENTS` on several ranks; return the exit code of the first that failed, or 0.

    If a rank dies, all ranks are restarted, at most `max_restarts` times: a run continues from its last checkpoint.
    After an error of a rank itself, such as ConfigError, there is no restart. A signal goes to all ranks. Raises
    RankLost after the last restart.
    """
    for name in logging.root.manager.loggerDict:  # each has its own level
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the same is reported here
    try:
        return _launch(("-m", module, *arguments), ranks, max_restarts)
    except SignalException as stopped:
        return 128 + stopped.sigval


def _launch(arguments: Sequence[str], ranks: int, max_restarts: int) -> int:
    for restart in range(max_restarts + 1):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle="SIGTERM,SIGINT,SIGHUP",
        )
        config.shutdown_timeout = SAVE_SECONDS
        try:
            elastic_launch(config, sys.executable)(*arguments)
            return 0
        except ChildFailedError as error:
            failures = error.failures
        codes = [failure.exitcode for failure in failures.values() if not _may_go_on(failure)]
        if any(failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM for failure in failures.values()):
            codes = [code for code in codes if code != 128 + signal.SIGTERM]  # the agent's reaction to a death
        code = next(iter(codes), None)
        if code is not None:
            return code
        deaths = _deaths(failures, ranks)
        if restart == max_restarts:
            starts = f"; the ranks were started {restart + 1} times" if restart else ""
            raise RankLost(f"{deaths}{starts}; the same command continues")
        print_status(f"{deaths}; restarting all ranks ({restart + 1} of {max_restarts})")
    raise AssertionError("unreachable")


def _may_go_on(failure: ProcessFailure) -> bool:
    """Whether a rank was killed, or lost another, so that the same command may succeed."""
    return failure.exitcode < 0 or failure.exitcode == RankLost.exit_code


def _deaths(failures: dict[int, ProcessFailure], ranks: int) -> str:
    by_signal = {rank: failure for rank, failure in failures.items() if failure.exitcode < 0}
    killed = {rank: each for rank, each in by_signal.items() if each.exitcode != -signal.SIGTERM} or by_signal
    if not killed:
        ended = [str(rank) for rank in range(ranks) if rank not in failures]
        if not ended:
            return f"ranks {', '.join(map(str, sorted(failures)))} lost each other"
        return f"{'rank' if len(ended) == 1 else 'ranks'} {', '.join(ended)} ended without an error"
    names = [f"{rank} (process {each.pid}, {signal.Signals(-each.exitcode).name})" for rank, each in killed.items()]
    return f"rank {names[0]} was killed" if len(names) == 1 else f"ranks {', '.join(names)} were killed"
