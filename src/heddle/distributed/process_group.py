"""The process group of a training run: joining it, and failing together.

The first rank that fails leaves its error message in the group's store, and the others end within seconds. A rank that
does not answer is named: ranks report if their collective failed or timed out, and ranks that do not report are lost.
"""

import json
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from heddle import progress
from heddle.distributed.ranks import ONE_PROCESS, WAIT_SECONDS, Ranks
from heddle.errors import HeddleError, OtherRankFailed, RankLost
from heddle.torch_private import default_store, flight_record

# torch's flight recorder names the newest collective of this process, in which ranks wait for one that hangs.


MAX_SIZES = 3  # of tensors in a message


def newest_collective() -> str | None:
    """Name the newest collective, such as `all_reduce of [4, 8], number 17`. None if torch records nothing."""
    record = flight_record()
    entries = None if record is None else json.loads(record).get("entries")
    if not entries:
        return None
    newest = entries[-1]
    sizes = [str(size) for size in newest["input_sizes"]]
    shown = ", ".join(sizes[:MAX_SIZES]) + (", …" if len(sizes) > MAX_SIZES else "")
    return f"{newest['profiling_name'].rpartition(':')[2]} of {shown}, number {newest['collective_seq_id']}"


CONNECT_SECONDS = 120.0  # for the store of the launcher, or of rank 0, to answer
START_SECONDS = 600.0  # how long ranks wait for each other until the first step is done
REPORT_SECONDS = 10.0  # for the live ranks to report after a collective failed
WATCH_SECONDS = 1.0
END_SECONDS = 5.0  # for a rank to end by itself once another has failed

Result = TypeVar("Result")
_prefix = ""  # of these ranks' keys: a store may still have the keys of dead ranks


@contextmanager
def join_ranks(device: str = "cpu", wait_seconds: float = WAIT_SECONDS, launcher: int | None = None) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, or an existing process group, as under Ray Train.

    device: such as "cuda:1"; each rank has its own GPU. wait_seconds: as in `Ranks`. launcher: id of the process that
    started this one, which ends with it; None: the parent under torchrun. Within the block only rank 0 prints. If
    ranks raise errors in it, the first error is raised unchanged, and the other ranks raise OtherRankFailed. Raises
    RankLost if ranks do not find each other. A process alone in its group gets ONE_PROCESS.
    """
    global _prefix  # noqa: PLW0603 - a process has one default group
    is_owner = not distributed.is_initialized()
    if launcher is None and distributed.is_torchelastic_launched():
        launcher = os.getppid()
    with _ending_with(launcher):
        if is_owner:
            _initialize(device)
        ranks = Ranks(distributed.get_rank(), distributed.get_world_size(), wait_seconds)
        try:
            if ranks.count == 1:
                yield ONE_PROCESS
                return
            _prefix = str(ranks.largest(secrets.randbits(62)))
            with _FailureWatch(ranks) as watch, progress.silent(ranks.rank > 0):
                try:
                    yield ranks
                    ranks.wait()
                except BaseException as error:
                    raise watch.shared(error) from error
        finally:
            if is_owner:
                distributed.destroy_process_group()
                wait_for_sleep(TASKS)


TASKS = Path("/proc/self/task")  # the threads of this process, on Linux
SLEEP_SECONDS = 5.0  # for gloo's threads to fall asleep
LOOKS = 3  # in a row that must find them asleep: in a single one they may be waiting for a lock


def wait_for_sleep(tasks: Path) -> None:
    """Wait until gloo's threads sleep: before that, a thread may own the tensors of a finished collective.

    It takes the interpreter lock to free them, and aborts the process if the interpreter has ended. Destroying the
    group does not end the threads: DTensor's caches keep its mesh, and the mesh keeps the group.
    """
    asleep, deadline = 0, time.monotonic() + SLEEP_SECONDS
    while asleep < LOOKS and time.monotonic() < deadline:
        time.sleep(0.002)  # without the interpreter's lock
        asleep = asleep + 1 if all(state == "S" for state in _gloo_states(tasks)) else 0


def _gloo_states(tasks: Path) -> Iterator[str]:
    """Yield the state of each gloo thread, R, S, …, as in proc(5)."""
    for stat in tasks.glob("*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except FileNotFoundError:  # the thread has ended
            continue
        if "gloo" in name:
            yield rest.split()[0]


@contextmanager
def _ending_with(launcher: int | None) -> Iterator[None]:
    """Within the block, end this process soon after its launcher ends, as if it had been killed too."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_SECONDS):
            if os.getppid() != launcher:
                os._exit(RankLost.exit_code)

    if launcher is not None:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _initialize(device: str) -> None:
    backend, timeout = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timedelta(seconds=START_SECONDS)
    try:
        store, rank, count = next(rendezvous("env://", timeout=timedelta(seconds=CONNECT_SECONDS)))
        store.set_timeout(timeout)
        fresh = PrefixStore(_new_prefix(store, rank, count), store)
        distributed.init_process_group(backend, store=fresh, rank=rank, world_size=count, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"the ranks cannot find each other ({error}); start them with torchrun") from error


def _new_prefix(store: Store, rank: int, count: int) -> str:
    """Agree on a new prefix: after a restart by torchrun, the store still has the keys of dead ranks.

    Each rank asks with a random word of its own, rank 0 answers to that word, and the rank confirms the answer.
    """
    deadline, own = time.monotonic() + START_SECONDS, uuid.uuid4().hex
    if rank:
        store.set(f"heddle/asks/{rank}", own)
        while not store.check([f"heddle/answer/{own}"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        answer: str = store.get(f"heddle/answer/{own}").decode()
        store.set(f"heddle/{answer}/{rank}", "")
        return answer
    missing = set(range(1, count))
    while missing and time.monotonic() < deadline:
        missing -= {other for other in missing if store.check([f"heddle/{own}/{other}"])}
        for other in missing:
            if store.check([f"heddle/asks/{other}"]):
                store.set(f"heddle/answer/{store.get(f'heddle/asks/{other}').decode()}", own)
        time.sleep(0.02)
    if missing:
        raise RuntimeError(f"rank {', '.join(map(str, sorted(missing)[:8]))} is missing")
    return own


def in_order(ranks: Ranks, function: Callable[[], Result]) -> Result:
    """`Ranks.in_order` on several ranks."""
    store, number = _store(), ranks.largest(secrets.randbits(62))
    host = torch.tensor(int.from_bytes(socket.gethostname().encode()[-7:], "big"))
    hosts = ranks.gather(host).tolist()
    leader = hosts.index(hosts[ranks.rank])
    if not ranks.is_first:
        _wait_for(store, f"order/{number}/{0 if leader == ranks.rank else leader}")
    result = function()
    store.set(f"order/{number}/{ranks.rank}", "")
    return result


def _wait_for(store: Store, key: str) -> None:
    seconds = 0.05
    while not store.check([key]):
        failure = _Failure.read(store)
        if failure is not None:
            raise OtherRankFailed(*failure)
        time.sleep(seconds)
        seconds = min(1.0, 2 * seconds)


def _store() -> Store:
    return PrefixStore(f"heddle/{_prefix}", default_store().clone())


class _Failure:
    """The first failure of any rank: its message and exit code, in the group's store."""

    KEY, COUNT = "failure", "failures"

    @classmethod
    def is_first(cls, store: Store) -> bool:
        """Whether this is the first call of all ranks: only the rank that gets True may write."""
        return bool(store.add(cls.COUNT, 1) == 1)

    @classmethod
    def write(cls, store: Store, sentence: str, exit_code: int) -> None:
        store.set(cls.KEY, json.dumps([sentence, exit_code]))

    @classmethod
    def read(cls, store: Store) -> tuple[str, int] | None:
        if not store.check([cls.KEY]):
            return None
        sentence, exit_code = json.loads(store.get(cls.KEY))
        return sentence, exit_code


class _FailureWatch:
    """A thread that ends this process if another rank has failed and this one does not end by itself.

    Without it, a rank that waits for a GPU would hang.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.store = ranks, _store()
        self.store.set(f"process/{ranks.rank}", f"{os.getpid()} on {socket.gethostname()}")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(_store(),), daemon=True)

    def __enter__(self) -> "_FailureWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self, store: Store) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            try:
                failure = _Failure.read(store)
            except RuntimeError:  # the process that serves the store has ended
                failure = ("", RankLost.exit_code)
            if failure is not None and not self._ended.wait(END_SECONDS):
                os._exit(failure[1])

    def shared(self, error: BaseException) -> BaseException:
        """Return the error that this rank raises: its own if it is the first of all ranks, else OtherRankFailed.

        An error of another library gets a note with the rank.
        """
        try:
            is_lost = _is_of_connection(error)
            if is_lost:
                self.store.set(f"reported/{self.ranks.rank}", "")
            if _Failure.is_first(self.store):
                error = RankLost(self._lost_sentence(error)) if is_lost else error
                if not isinstance(error, HeddleError):
                    error.add_note(f"on rank {self.ranks.rank} of {self.ranks.count}")
                _Failure.write(self.store, str(error), getattr(error, "exit_code", 1))
                return error
            deadline = time.monotonic() + 2 * REPORT_SECONDS
            while (failure := _Failure.read(self.store)) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            return OtherRankFailed(*(failure or ("another rank failed", RankLost.exit_code)))
        except RuntimeError:  # the store ended with its process: there is no rank to tell
            return OtherRankFailed("the launcher has ended", RankLost.exit_code)

    def _lost_sentence(self, error: BaseException) -> str:
        """Name the ranks that did not report in time."""
        silent, deadline = set(range(self.ranks.count)) - {self.ranks.rank}, time.monotonic() + REPORT_SECONDS
        while len(silent) > 1 and time.monotonic() < deadline:
            try:
                silent -= {rank for rank in silent if self.store.check([f"reported/{rank}"])}
                time.sleep(0.02)
            except BaseException:  # a launcher's signal shortens the wait
                deadline = min(deadline, time.monotonic() + 1.0)
        if not silent:
            return f"the connection between ranks failed ({error}); the same command continues"
        names = ", ".join(self._name(rank) for rank in sorted(silent)[:8]) + (", …" if len(silent) > 8 else "")
        several = len(silent) > 1
        who = f"{'ranks' if several else 'rank'} {names} of {self.ranks.count}"
        if "imed out" in str(error):
            collective = newest_collective()
            wait = "waited too long" if collective is None else f"waited too long in {collective}"
            return f"{who} {'hang' if several else 'hangs'}: the others {wait}; the same command continues"
        return f"{who} {'have' if several else 'has'} ended without an error; the same command continues"

    def _name(self, rank: int) -> str:
        return f"{rank} (process {self.store.get(f'process/{rank}').decode()})"


def _is_of_connection(error: BaseException) -> bool:
    """Whether a collective failed because of another rank."""
    if isinstance(error, distributed.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "NCCL", "imed out", "onnection "))
