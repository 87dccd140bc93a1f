"""The design and the data that the arguments of `heddle train` name."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from heddle.cli.options import with_vocab_size
from heddle.errors import ConfigError
from heddle.tokenization import DEFAULT_VOCAB_SIZE

if TYPE_CHECKING:
    from heddle.data.chat import ChatDataset
    from heddle.data.corpus import Corpus
    from heddle.data.recall import TaskStream
    from heddle.model.config import ModelConfig
    from heddle.tokenization.tokenizer import Tokenizer
    from heddle.training.distillation import Distillation
    from heddle.training.init_checkpoint import InitCheckpoint
    from heddle.training.settings import Settings


def open_recall_task(
    data: list[str] | None, tokenizer: Path | None, vocab_size: int | None, sequence_length: int | None
) -> "TaskStream | None":
    """The recall task that --data names; None for other data. Raises ConfigError for options that only text takes."""
    from heddle.data.recall import is_recall_argument, parse_recall

    if data is None or len(data) != 1 or not is_recall_argument(data[0]):
        return None
    task = parse_recall(data[0])
    for option, value in (("tokenizer", tokenizer), ("vocab-size", vocab_size)):
        if value is not None:
            raise ConfigError(f"--{option} {value}: {data[0]} has a vocabulary of its own; leave --{option} out")
    if sequence_length not in (None, task.task.length):
        raise ConfigError(
            f"--sequence-length {sequence_length}: {data[0]} has sequences of {task.task.length} tokens; "
            f"give length={sequence_length} in --data"
        )
    return task


def design_of(
    design: str | dict[str, Any] | None,
    overrides: list[str] | None,
    checkpoint: "InitCheckpoint | None",
    distillation: "Distillation | None",
) -> "ModelConfig":
    """The config to train, with a teacher's vocabulary. Raises ConfigError if neither DESIGN nor --from is given."""
    from heddle.model.load_config import load_config

    overrides = list(overrides or [])
    if checkpoint is None:
        if design is None:
            raise ConfigError("DESIGN: is missing; give a file, preset:NAME or a folder, or --from FOLDER")
        config = load_config(design, overrides)
        vocab_size = None if distillation is None else distillation.teacher.config.vocab_size
        return config if vocab_size is None else with_vocab_size(config, vocab_size)
    if (
        isinstance(design, str) and "=" in design and not Path(design).exists()
    ):  # without DESIGN, an override comes first
        return checkpoint.resolve_config(None, [design, *overrides])
    return checkpoint.resolve_config(design, overrides)


def open_data(
    data: list[str],
    settings: "Settings",
    sizes: tuple[int | None, int | None],
    tokenizer: "Tokenizer | Path | None",
    documents: dict[str, str],
) -> "Corpus | ChatDataset":
    """Text or conversations, ready to train on. sizes: the design's vocab_size, and --vocab-size."""
    from heddle.data.chat import is_chat_argument, prepare_chat
    from heddle.data.corpus import check_tokenizer_fits, prepare_corpus
    from heddle.tokenization.tokenizer import Tokenizer

    if not any(map(is_chat_argument, data)):
        vocab_size = sizes[0] or sizes[1] or (None if tokenizer else DEFAULT_VOCAB_SIZE)
        max_tokens = settings.steps * settings.tokens_per_step
        corpus = prepare_corpus(data, vocab_size=vocab_size, max_train_tokens=max_tokens, tokenizer=tokenizer)
        check_tokenizer_fits(corpus.tokenizer, sizes[0])
        return corpus
    for argument in data:
        if not is_chat_argument(argument):
            raise ConfigError(
                f"--data {argument}: is not chat data, which cannot be mixed with text; leave it out, or write chat:"
            )
    if tokenizer is None:
        raise ConfigError(f"--data {data[0]}: needs a trained tokenizer; give --from or --tokenizer")
    loaded = Tokenizer.load(tokenizer) if isinstance(tokenizer, Path) else tokenizer
    check_tokenizer_fits(loaded, sizes[0])
    return prepare_chat(data, loaded, settings.sequence_length, documents)
