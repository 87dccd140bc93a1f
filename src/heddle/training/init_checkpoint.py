"""What a training may start from instead of fresh weights: the model in a folder, with its tokenizer and texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from heddle.errors import CheckpointError, ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.model.lora import TARGETS
from heddle.progress import say
from heddle.storage.folder import Contents, fingerprint, read_folder
from heddle.storage.model import CONFIG, WEIGHTS, find, read_design, restore
from heddle.storage.run_log import first_difference, plain
from heddle.tokenization.tokenizer import FILE, MARKS, Tokenizer
from heddle.training.checkpoint import PROGRESS

OWN = (CONFIG, FILE, MARKS, PROGRESS)


@dataclass(frozen=True)
class Lora:
    """Only adapters learn: their rank, and the paths of the projections that have one."""

    rank: int
    targets: tuple[str, ...] = TARGETS


@dataclass(frozen=True)
class Base:
    """documents: other texts of the folder, by file name; they go along. hash: of every weight."""

    contents: Contents
    config: ModelConfig
    tokenizer: Tokenizer | None
    documents: dict[str, str]
    hash: str

    def design(self, given: str | None, overrides: Sequence[str]) -> ModelConfig:
        """The base's design with overrides; `given` may name it again. Raises ConfigError for another one."""
        if given is not None:
            if self._differs(load_config(given, overrides)) is None:
                return self.config
            other = self._differs(load_config(given))
            if other is not None:
                raise ConfigError(
                    f"{given}: is another design than that in {self.contents.folder} ({other}); leave DESIGN out, and "
                    "give what changes as FIELD=VALUE"
                )
        config = load_config(self.config.dump(), overrides)
        changed = self._differs(config)
        if changed is not None:
            say(f"the design is not quite that of {self.contents.folder}: {changed}")
        return config

    def _differs(self, other: ModelConfig) -> str | None:
        """The first field in which a design differs, in words; one that names no vocabulary has the base's."""
        if other.vocab_size is None:
            other = other.replace(vocab_size=self.config.vocab_size)
        return first_difference(plain(self.config.resolved().dump()), plain(other.resolved().dump()))

    def start(self, config: ModelConfig, device: str) -> Decoder:
        """A design with the base's weights, in float32. Raises CheckpointError where their names or shapes differ."""
        try:
            return restore(self.contents, torch.float32, device, config)
        except CheckpointError as error:
            if config == self.config:
                raise
            reason = f"{error}, since an override changed it"
            raise ConfigError(f"{reason}; with --from, override only what has no weights") from None


def open_base(folder: Path) -> Base:
    """Open a model's folder, or the newest checkpoint of a run. Raises CheckpointError."""
    contents = read_folder(find(folder))
    config = load_config(read_design(contents))
    tokenizer = Tokenizer.from_documents(contents.documents)
    documents = {name: text for name, text in contents.documents.items() if name not in OWN}
    return Base(contents, config, tokenizer, documents, fingerprint(contents, WEIGHTS))
