"""Save and load the whole state of a training run as one checkpoint folder: a resumed run is bit-equal."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from heddle.errors import CheckpointError
from heddle.model.decoder import Decoder
from heddle.model.lora import lora_tensors
from heddle.progress import print_status, print_warning
from heddle.storage.checkpoints import latest_checkpoint, prune_checkpoints, write_checkpoint
from heddle.storage.folder import FolderContents, read_folder
from heddle.storage.manifest import LogPosition, parse_json_object
from heddle.storage.model import WEIGHTS_FILE, model_documents, model_tensors, restore_model
from heddle.storage.run_log import RunLog
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training.optimizer import Optimizer

TRAINING_TENSORS_FILE = "training.safetensors"
PROGRESS_FILE = "training.json"
ADAPTERS_FILE = "adapters.safetensors"  # LoRA's A and B; in the model's weights they are merged
CHECKPOINTS_KEPT = 2


@dataclass
class TrainingProgress:
    """step: steps done. skipped_steps: how many of them did not update the weights."""

    step: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0


def save_run(
    run: Path,
    model: Decoder,
    optimizer: Optimizer,
    progress: TrainingProgress,
    tokenizer: Tokenizer | None,
    documents: Mapping[str, str],
    log: LogPosition,
) -> Path:
    """Write the checkpoint of a step, and delete all but the newest two.

    documents: more text files to write, by name. log: where the run's log is; its lines must be synced.
    """
    training_tensors: dict[str, Tensor] = {"rng.cpu": torch.get_rng_state()}
    for name, state in optimizer.state.items():
        for key, value in state.items():
            training_tensors[f"{key}.{name}"] = torch.as_tensor(value)
    progress_json = json.dumps(vars(progress), sort_keys=True) + "\n"
    own_documents = model_documents(model, tokenizer) | {PROGRESS_FILE: progress_json}
    tensors = {WEIGHTS_FILE: model_tensors(model), TRAINING_TENSORS_FILE: training_tensors}
    if adapters := lora_tensors(model):
        tensors[ADAPTERS_FILE] = adapters
    path = write_checkpoint(run, progress.step, tensors=tensors, documents={**documents, **own_documents}, log=log)
    prune_checkpoints(run, CHECKPOINTS_KEPT)
    return path


def resume_run(run: Path, model: Decoder, optimizer: Optimizer, log: RunLog) -> TrainingProgress:
    """Load the newest intact checkpoint into model and optimizer; step 0 if there is no checkpoint.

    log: is opened where the checkpoint was saved. Raises CheckpointError if one of its lines up to there was altered.
    """
    checkpoint = latest_checkpoint(run, "training")
    for damage in checkpoint.damaged:
        print_warning(damage)
    if checkpoint.path is None:
        log.resume(LogPosition())
        return TrainingProgress()
    contents = read_folder(checkpoint.path, "training")
    if contents.log is None:
        raise CheckpointError(f"{contents.folder}: does not say where the log was; use an earlier checkpoint")
    progress = _read_progress(contents, checkpoint.step)
    log.resume(contents.log)
    device = model.embed.weight.device
    trainable = lora_tensors(model)
    if trainable:
        saved = contents.tensors(ADAPTERS_FILE, device)
    else:
        trainable = dict(model.named_parameters())
        saved = dict(restore_model(contents, None, device).named_parameters())
    training_tensors = contents.tensors(TRAINING_TENSORS_FILE)
    torch.set_rng_state(training_tensors.pop("rng.cpu"))
    optimizer_state: dict[str, dict[str, Tensor]] = {}
    for key, value in training_tensors.items():
        state_name, _, parameter_name = key.partition(".")
        # on the device even the step count, which the fused optimizer needs there
        optimizer_state.setdefault(parameter_name, {})[state_name] = value.to(device)
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(saved[name])
    optimizer.load_state(optimizer_state)
    print_status(f"continuing {run} from step {progress.step}")
    return progress


def _read_progress(contents: FolderContents, step: int | None) -> TrainingProgress:
    """Return the counts in a checkpoint of this step. Raises CheckpointError if they cannot be right."""
    path = contents.folder / PROGRESS_FILE
    try:
        fields = parse_json_object(contents.documents.get(PROGRESS_FILE, "").encode())
        if not all(type(value) is int and value >= 0 for value in fields.values()):
            raise ValueError("a count is not a whole number from 0")
        if fields.get("step") != step:
            raise ValueError(f"its step is {fields.get('step')!s:.20}")
        return TrainingProgress(**fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: does not hold the progress of step {step} ({error}); restore it") from error
