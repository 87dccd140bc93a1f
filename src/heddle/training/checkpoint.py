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
from heddle.storage.checkpoints import find_latest, prune_checkpoints, write_checkpoint
from heddle.storage.folder import FolderContents, read_folder, verify_folder
from heddle.storage.manifest import LogPosition, parse_json_object
from heddle.storage.model import WEIGHTS_FILE, HeldRows, model_documents, model_tensors
from heddle.storage.run_log import RunLog, run_hash
from heddle.training.optimizer import Optimizer

# Write a run's checkpoints: while training waits, or on a thread, from a copy, while training goes on.
#
# Copy first, write behind: Mohan et al. (2021), "CheckFreq: Frequent, Fine-Grained DNN Checkpointing".


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


TRAINING_TENSORS_FILE = "training.safetensors"
PROGRESS_FILE = "training.json"
RANDOM_STATE = "rng.cpu"
ADAPTERS_FILE = "adapters.safetensors"  # LoRA's A and B; in the model's weights they are merged


@dataclass
class TrainingProgress:
    """step: steps done. skipped_steps: how many of them did not update the weights.

    skipped_batches: of the data's order, left out after spikes of the loss.
    """

    step: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    skipped_batches: int = 0

    def to_json(self, run: str | None = None) -> str:
        """Return the file's text. Runs without a spike have no field of skipped batches, as earlier versions.

        run: the `run_hash` of the run that it is of.
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

    documents: more text files to write, by name, with those of the tokenizer. log: where the run's log is; its lines
    must be synced. All ranks of the saver call this at once; each writes what it holds. documents and log are rank 0's.
    """
    # The generator is one for all ranks: what is drawn on ranks is drawn by name, step and sample.
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
    """Load the newest intact checkpoint into model and optimizer; step 0 if there is no checkpoint.

    It may be of any number of ranks. log: is opened, on rank 0, where the checkpoint was saved. ranks: all of them call
    this at once; each reads what it holds. last_step: of the run; None: unknown. Raises CheckpointError if a line of
    the log up to there was altered, or if the checkpoint is of a later step than the last.
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
        raise CheckpointError(f"{state.contents.folder}: does not say where the log was; use an earlier checkpoint")
    progress = _read_progress(state.contents, checkpoint.step, run_hash(run))
    if last_step is not None and progress.step > last_step:
        raise CheckpointError(
            f"{state.contents.folder}: is of step {progress.step}, and the run has {last_step}; remove it"
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
    """What this rank holds of a checkpoint, in memory of its own. slices: the training tensors that are sharded."""

    contents: FolderContents
    weights: dict[str, Tensor]
    training: dict[str, Tensor]
    slices: set[str]

    @classmethod
    def read(cls, contents: FolderContents, trainable: HeldRows, updated: HeldRows) -> "_SavedState":
        """Read it. Raises CheckpointError for what is damaged or does not fit."""
        weights = trainable.read(contents, ADAPTERS_FILE if ADAPTERS_FILE in contents.tensor_sets else WEIGHTS_FILE)
        rows: dict[str, range | None] = {RANDOM_STATE: None}
        for key, record in contents.tensor_records(TRAINING_TENSORS_FILE).items():
            name = key.partition(".")[2]
            if name in updated.tensors:  # of a stack of matrices, each rank updates its own
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

    run: the `run_hash` of the run that continues; a checkpoint of an earlier version does not say of which run it is.
    """
    path = contents.folder / PROGRESS_FILE
    try:
        fields = parse_json_object(contents.documents.get(PROGRESS_FILE, "").encode())
        if fields.pop("run", run) != run:
            raise ValueError("it is a checkpoint of another run")
        if not all(type(value) is int and value >= 0 for value in fields.values()):
            raise ValueError("a count is not a whole number from 0")
        if fields.get("step") != step:
            raise ValueError(f"its step is {fields.get('step')!s:.20}")
        return TrainingProgress(**fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: does not hold the progress of step {step} ({error}); restore it") from error
