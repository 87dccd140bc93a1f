"""Everything a run needs to go on as if it had never stopped, as one checkpoint folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from heddle.errors import CheckpointError
from heddle.model.decoder import Decoder
from heddle.model.lora import lora_tensors
from heddle.progress import say
from heddle.storage.checkpoints import latest, prune, write_step
from heddle.storage.folder import read_folder
from heddle.storage.model import WEIGHTS, model_documents, model_tensors, restore
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training.optimizer import Optimizer

TRAINING = "training.safetensors"
PROGRESS = "training.json"
ADAPTERS = "adapters.safetensors"  # beside the weights in which they are merged
KEEP = 2


@dataclass
class Progress:
    """steps done (of the schedule), and how many of them were not taken."""

    step: int = 0
    skipped: int = 0
    streak: int = 0


def save_run(
    run: Path,
    model: Decoder,
    optimizer: Optimizer,
    progress: Progress,
    tokenizer: Tokenizer | None,
    texts: Mapping[str, str],
) -> Path:
    """Write the checkpoint of a step, with other texts by file name, and drop all but the newest two."""
    moments: dict[str, Tensor] = {"rng.cpu": torch.get_rng_state()}
    for name, state in optimizer.state.items():
        for key, value in state.items():
            moments[f"{key}.{name}"] = torch.as_tensor(value)
    own = model_documents(model, tokenizer) | {PROGRESS: json.dumps(vars(progress), sort_keys=True) + "\n"}
    tensors = {WEIGHTS: model_tensors(model), TRAINING: moments}
    if adapters := lora_tensors(model):
        tensors[ADAPTERS] = adapters
    path = write_step(run, progress.step, tensors=tensors, documents={**texts, **own})
    prune(run, KEEP)
    return path


def resume_run(run: Path, model: Decoder, optimizer: Optimizer) -> Progress:
    """Load the newest whole checkpoint into model and optimizer; an empty Progress where there is none."""
    newest = latest(run, "training")
    for damage in newest.damaged:
        say(f"warning: {damage}")
    if newest.path is None:
        return Progress()
    contents = read_folder(newest.path, "training")
    device = model.embed.weight.device
    learned = lora_tensors(model)
    if learned:
        saved = contents.tensors(ADAPTERS, device)
    else:
        learned, saved = dict(model.named_parameters()), dict(restore(contents, None, device).named_parameters())
    moments = contents.tensors(TRAINING)
    torch.set_rng_state(moments.pop("rng.cpu"))
    state: dict[str, dict[str, Tensor]] = {}
    for key, value in moments.items():
        name, _, parameter = key.partition(".")
        state.setdefault(parameter, {})[name] = value.to(device)  # the fused step keeps even its counter there
    with torch.no_grad():
        for path, weight in learned.items():
            weight.copy_(saved[path])
    optimizer.load(state)
    try:
        progress = Progress(**json.loads(contents.documents[PROGRESS]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{newest.path}/{PROGRESS}: is missing or not a run's; use an earlier checkpoint"
        ) from error
    say(f"continuing {run} from step {progress.step}")
    return progress
