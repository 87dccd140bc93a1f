"""Save and load the whole state of a training run as one checkpoint folder: a resumed run is bit-equal."""

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from heddle.distributed.ranks import ONE_PROCESS, Ranks, call_on_all, local_part, with_local_part
from heddle.errors import CheckpointError, HeddleError
from heddle.model.decoder import Decoder
from heddle.model.lora import lora_tensors
from heddle.progress import print_status, print_warning
from heddle.storage.checkpoints import PROGRESS_FILE, find_latest, prune_checkpoints, write_checkpoint
from heddle.storage.folder import FolderContents, read_folder, verify_folder
from heddle.storage.manifest import LogPosition, parse_json_object
from heddle.storage.model import WEIGHTS_FILE, HeldRows, model_documents, model_tensors
from heddle.storage.run_log import RunLog, run_hash
from heddle.training.optimizer import Optimizer

# Checkpoints are written while training waits, or by a thread from a copy while training continues.
#
# Copy first, write in the background: Mohan et al. (2021), "CheckFreq: Frequent, Fine-Grained DNN Checkpointing".


CHECKPOINTS_KEPT = 2


class CheckpointSaver:
    """Writes the checkpoints of one run, and deletes all but the newest two. Use it as a context manager.

    is_async: `write` returns once it has copied the tensors to host memory, and a thread writes the copy; the next
    `write`, `wait` and the end of the block wait for it. With several ranks, training waits: their collectives must
    run in the same order on every rank.
    """

    def __init__(self, run: Path, ranks: Ranks = ONE_PROCESS, is_async: bool = False) -> None:
        self.run, self.ranks = run, ranks
        self.is_async = is_async and ranks.count == 1
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="heddle-checkpoints")
        self._pending: Future[None] | None = None

    def write(
        self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, str], log: LogPosition
    ) -> None:
        """Write a step's checkpoint as `write_checkpoint` does. Raises the error of this save or the previous one."""
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
        """Raise the error of the pending save if it has failed; does not wait."""
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


TRAINING_TENSORS_FILE = "training.safetensors"
RANDOM_STATE = "rng.cpu"
ADAPTERS_FILE = "adapters.safetensors"  # LoRA's A and B; in the model's weights they are merged


@dataclass
class TrainingProgress:
    """step: completed steps. skipped_steps: how many of them did not update the weights.

    skipped_batches: how many batches, in the order of the data, were skipped after loss spikes.
    """

    step: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    skipped_batches: int = 0

    def to_json(self, run: str | None = None) -> str:
        """Return the file's text. `skipped_batches` is left out while it is 0, as in earlier versions.

        run: the `run_hash` of the run.
        """
        fields = {name: value for name, value in vars(self).items() if value or name != "skipped_batches"}
        named = {} if run is None else {"run": run}
        return json.dumps(fields | named, sort_keys=True) + "\n"


def save_run(
    saver: CheckpointSaver,
    model: Decoder,
    optimizer: Optimizer,
    progress: TrainingProgress,
    documents: Mapping[str, str],
    log: LogPosition,
) -> None:
    """Write the checkpoint of a step, and delete all but the newest two.

    documents: more text files to write, by name, with the tokenizer's. log: position in the run's log; its lines must
    be synced. Collective: every rank of the saver writes its own part. Only rank 0's documents and log are used.
    """
    # One generator state serves all ranks: draws on ranks are keyed by name, step and sample.
    training_tensors: dict[str, Tensor] = {} if saver.ranks.rank else {RANDOM_STATE: torch.get_rng_state()}
    for name, state in optimizer.state.items():
        for key, value in state.items():
            training_tensors[f"{key}.{name}"] = torch.as_tensor(value)
    texts = {**documents, **model_documents(model, None), PROGRESS_FILE: progress.to_json(run_hash(saver.run))}
    tensors = {WEIGHTS_FILE: model_tensors(model), TRAINING_TENSORS_FILE: training_tensors}
    if adapters := lora_tensors(model):
        tensors[ADAPTERS_FILE] = adapters
    saver.write(progress.step, tensors, texts, log)


def resume_run(
    run: Path,
    model: Decoder,
    optimizer: Optimizer,
    log: RunLog,
    ranks: Ranks = ONE_PROCESS,
    last_step: int | None = None,
) -> TrainingProgress:
    """Load the newest intact checkpoint into model and optimizer; return step 0 if there is no checkpoint.

    It may come from any number of ranks. log: reopened on rank 0 at the checkpoint's position. ranks: collective; each
    rank reads its own part. last_step: the run's last step; None: unknown. Raises CheckpointError if the log was
    altered before that position, or if the checkpoint is later than `last_step`.
    """
    trainable = HeldRows(lora_tensors(model) or dict(model.named_parameters()))
    updated = HeldRows({**optimizer.masters.copies, **optimizer.updated_tensors})
    saved: list[_SavedState] = []

    def read(path: Path) -> None:
        contents = verify_folder(path, "training") if ranks.count == 1 else read_folder(path, "training")
        saved[:] = [_SavedState.read(contents, trainable, updated)]

    checkpoint = find_latest(run, read, ranks)
    for damage in checkpoint.damaged:
        print_warning(damage)
    if checkpoint.path is None:
        call_on_all(ranks, lambda: _open_log(log, LogPosition(), ranks))
        return TrainingProgress()
    (state,) = saved
    position = state.contents.log
    if position is None:
        raise CheckpointError(f"{state.contents.folder}: has no position in the log; use an earlier checkpoint")
    progress = _read_progress(state.contents, checkpoint.step, run_hash(run))
    if last_step is not None and progress.step > last_step:
        raise CheckpointError(
            f"{state.contents.folder}: is at step {progress.step}, and the run ends at step {last_step}; remove it"
        )
    call_on_all(ranks, lambda: _open_log(log, position, ranks))
    torch.set_rng_state(state.training.pop(RANDOM_STATE))
    with torch.no_grad():
        for name, parameter in trainable.tensors.items():
            local_part(parameter).copy_(state.weights[name])
    optimizer.load_state(state.optimizer_state(updated.tensors))
    print_status(f"continuing {run} from step {progress.step}")
    return progress


@dataclass(frozen=True)
class _SavedState:
    """This rank's part of a checkpoint, in its own memory. slices: names of the sharded training tensors."""

    contents: FolderContents
    weights: dict[str, Tensor]
    training: dict[str, Tensor]
    slices: set[str]

    @classmethod
    def read(cls, contents: FolderContents, trainable: HeldRows, updated: HeldRows) -> "_SavedState":
        """Read this rank's part. Raises CheckpointError if it is damaged or does not fit."""
        weights = trainable.read(contents, ADAPTERS_FILE if ADAPTERS_FILE in contents.tensor_sets else WEIGHTS_FILE)
        rows: dict[str, range | None] = {RANDOM_STATE: None}
        for key, record in contents.tensor_records(TRAINING_TENSORS_FILE).items():
            name = key.partition(".")[2]
            if name in updated.tensors:  # each rank updates its own matrices of a stack
                is_like_it = record.whole_shape == updated.tensors[name].shape
                rows[key] = updated.rows[name] if is_like_it else None
        training = contents.read_slices(TRAINING_TENSORS_FILE, rows)
        return cls(contents, weights, training, {key for key in rows if rows[key] is not None})

    def optimizer_state(self, updated: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state, by tensor and key, on the devices and ranks of the tensors that it updates."""
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in self.training.items():
            state_name, _, name = key.partition(".")
            # on the device even the step count, which the fused optimizer needs there
            on_device = value.to(updated[name].device)
            state.setdefault(name, {})[state_name] = (
                with_local_part(updated[name], on_device) if key in self.slices else on_device
            )
        return state


def _open_log(log: RunLog, position: LogPosition, ranks: Ranks) -> str:
    if ranks.rank == 0:
        log.resume(position)
    return ""


def _read_progress(contents: FolderContents, step: int | None, run: str | None) -> TrainingProgress:
    """Return the counts in a checkpoint of this step. Raises CheckpointError if they cannot be right.

    run: the `run_hash` of the run that continues; checkpoints of earlier versions do not name their run.
    """
    path = contents.folder / PROGRESS_FILE
    try:
        fields = parse_json_object(contents.documents.get(PROGRESS_FILE, "").encode())
        if fields.pop("run", run) != run:
            raise ValueError("it is a checkpoint of another run")
        if not all(type(value) is int and value >= 0 for value in fields.values()):
            raise ValueError("a count is not a whole number of at least 0")
        if fields.get("step") != step:
            raise ValueError(f"its step is {fields.get('step')!s:.20}")
        return TrainingProgress(**fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: does not hold the progress of step {step} ({error}); restore it") from error
