"""Write a run's checkpoints: while training waits, or on a thread, from a copy, while training goes on.

Copy first, write behind: Mohan et al. (2021), "CheckFreq: Frequent, Fine-Grained DNN Checkpointing".
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from torch import Tensor

from heddle.distributed.ranks import ONE_PROCESS, Ranks
from heddle.errors import HeddleError
from heddle.progress import print_warning
from heddle.storage.checkpoints import prune_checkpoints, write_checkpoint
from heddle.storage.manifest import LogPosition

CHECKPOINTS_KEPT = 2


class CheckpointSaver:
    """Writes the checkpoints of one run, and deletes all but the newest two. Use it as a context manager.

    is_async: `write` returns once it has copied the tensors to host memory, and a thread writes the copy; the next
    `write`, `wait` and the end of the block wait for it. Several ranks write together, while training waits: they must
    exchange what they hold, in the order of all their exchanges.
    """

    def __init__(self, run: Path, ranks: Ranks = ONE_PROCESS, is_async: bool = False) -> None:
        self.run, self.ranks = run, ranks
        self.is_async = is_async and ranks.count == 1
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="heddle-checkpoints")
        self._pending: Future[None] | None = None

    def write(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        documents: Mapping[str, str],
        log: LogPosition,
    ) -> None:
        """Write a step's checkpoint as `write_checkpoint` does. Raises the error of this save, or of the one before."""
        self.wait()
        if not self.is_async:
            self._write(step, tensors, documents, log)
            return
        copies = {
            set_name: {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
            for set_name, named in tensors.items()
        }
        self._pending = self._executor.submit(self._write, step, copies, dict(documents), log)

    def _write(
        self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, str], log: LogPosition
    ) -> None:
        write_checkpoint(self.run, step, tensors=tensors, documents=documents, log=log, ranks=self.ranks)
        prune_checkpoints(self.run, CHECKPOINTS_KEPT, self.ranks)

    def check(self) -> None:
        """Raise the error of a save that has failed since; does not wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises its error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except HeddleError as failure:
            if error is None:
                raise
            print_warning(str(failure))  # beside the error that ends the training
        finally:
            self._executor.shutdown()
