"""Start a training from a saved model, with its tokenizer, instead of from fresh weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from heddle.data.samples import PLAIN_ROWS, RowProtocol
from heddle.distributed.ranks import ONE_PROCESS, Ranks
from heddle.errors import CheckpointError, ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.model.lora import TARGETS
from heddle.progress import print_status
from heddle.storage.checkpoints import PROGRESS_FILE
from heddle.storage.file_io import read_json_file
from heddle.storage.folder import FolderContents, read_folder, tensors_sha256
from heddle.storage.model import CONFIG_FILE, WEIGHTS_FILE, find_model_folder, load_shards, read_config, restore_model
from heddle.storage.run_log import RUN_FILE, first_difference, to_plain_json
from heddle.tokenization.tokenizer import BOUNDARY_TOKENS_FILE, TOKENIZER_FILE, Tokenizer

OWN_FILES = (CONFIG_FILE, TOKENIZER_FILE, BOUNDARY_TOKENS_FILE, PROGRESS_FILE)


@dataclass(frozen=True)
class LoraSettings:
    """Train only adapters: their rank, and the paths of the projections that get one."""

    rank: int
    targets: tuple[str, ...] = TARGETS


@dataclass(frozen=True)
class InitCheckpoint:
    """A saved model from which training starts.

    documents: the folder's other text files, by name; they are saved again with the trained model. weights_sha256: the
    SHA-256 of all weights.
    """

    contents: FolderContents
    config: ModelConfig
    documents: dict[str, str]
    weights_sha256: str

    @property
    def folder(self) -> Path:
        """Return the folder it was read from."""
        return self.contents.folder

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Return its tokenizer, None if it has none. Read when first needed: a large one takes 0.2 GB."""
        return Tokenizer.from_files(self.contents.documents)

    def resolve_config(self, design: str | dict[str, Any] | None, overrides: Sequence[str]) -> ModelConfig:
        """Return the checkpoint's design with overrides applied.

        design: None, or the checkpoint's design. Raises ConfigError if it differs.
        """
        if design is not None:
            if self._difference(load_config(design, overrides)) is None:
                return self.config
            difference = self._difference(load_config(design))
            if difference is not None:
                raise ConfigError(
                    f"{design}: differs from the design in {self.contents.folder} ({difference}); leave DESIGN out,"
                    " and give changes as FIELD=VALUE"
                )
        config = load_config(self.config.dump(), overrides)
        difference = self._difference(config)
        if difference is not None:
            print_status(f"the design differs from {self.contents.folder}: {difference}")
        return config

    def _difference(self, config: ModelConfig) -> str | None:
        """Describe the first field in which a design differs. A missing vocab_size counts as the checkpoint's."""
        if config.vocab_size is None:
            config = config.replace(vocab_size=self.config.vocab_size)
        return first_difference(to_plain_json(self.config.resolved().dump()), to_plain_json(config.resolved().dump()))

    def build_model(self, config: ModelConfig, device: str) -> Decoder:
        """Build a design with the checkpoint's weights, in float32.

        Raises CheckpointError if names or shapes differ, or ConfigError if an override is the reason.
        """
        try:
            return restore_model(self.contents, torch.float32, device, config)
        except CheckpointError as error:
            if config == self.config:
                raise
            raise ConfigError(
                f"{error}, because an override changed it; override only fields without weights"
            ) from None

    def load_shards(self, model: Decoder, device: str, ranks: Ranks = ONE_PROCESS) -> None:
        """Fill a model that was sharded on the meta device; each rank reads its own shards.

        Collective. Raises CheckpointError on all ranks.
        """
        load_shards(model, self.contents, device, ranks)


def open_init_checkpoint(folder: Path, ranks: Ranks = ONE_PROCESS) -> InitCheckpoint:
    """Open a model's folder, or the newest checkpoint of a run. Raises CheckpointError.

    ranks: collective; each rank verifies a share of a run's checkpoint.
    """
    contents = read_folder(find_model_folder(folder, ranks))
    config = load_config(read_config(contents))
    documents = {name: text for name, text in contents.documents.items() if name not in OWN_FILES}
    return InitCheckpoint(contents, config, documents, tensors_sha256(contents, WEIGHTS_FILE))


def model_rows(folder: Path, tokenizer: Tokenizer | None) -> RowProtocol:
    """Return how sequences begin for the model in `folder`, which may be a run: as in its training.

    An imported model reads BOS tokens before each text. A model that heddle trained from random weights follows its
    run.json, whatever its tokenizer was made for.
    """
    run = read_json_file(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else {}
    data = run.get("data", {})
    if "bos_ids" in data or (run and run.get("init_checkpoint") is None):
        return RowProtocol.parse(data)
    return PLAIN_ROWS if tokenizer is None else RowProtocol.of(tokenizer)
