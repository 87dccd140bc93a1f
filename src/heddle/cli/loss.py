"""`heddle loss`: the loss of trained models on a text, side by side."""

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from heddle.errors import ConfigError, DataError
from heddle.progress import print_text, print_warning, progress_bar
from heddle.session import dtype_of, open_session
from heddle.settings import Argument, Json, Option, Precision, SessionSettings, parse_length, parse_tokens
from heddle.training.settings import Data

if TYPE_CHECKING:
    import numpy as np

    from heddle.conversion.convert import ConversionSource
    from heddle.data.corpus import Corpus
    from heddle.data.samples import RowProtocol

SEQUENCE_LENGTH = 1024
BATCH_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class LossSettings(SessionSettings):
    """Settings of `heddle loss`."""

    models: Annotated[tuple[Path, ...], Argument("MODEL", "Runs, model folders or transformers folders.")]
    data: Data = ()
    held_out: Annotated[bool, Option("", "Read only what training on this text leaves out.")] = False
    tokens: Annotated[int, Option("N", "Read at most N tokens, evenly over the text.", parse_tokens)] = 2**16
    sequence_length: Annotated[
        int | None, Option("N", "Tokens per sequence. [1024, or fewer positions]", parse_length)
    ] = None
    precision: Precision = "fp32"
    json: Json = False


@dataclass(frozen=True)
class TextLoss:
    """The loss of one model on a text.

    bits_per_byte, half_width: of its 95 % interval over the text's sequences; None below four. nats_per_token: over
    the scored tokens. added, added_half_width: bits per byte above the first model's, and of the paired interval; None
    for other sequences. rows: how sequences begin. paired: whether the first model read the same sequences.
    """

    model: str
    bits_per_byte: float
    half_width: float | None
    nats_per_token: float
    perplexity: float
    tokens: int
    bytes: int
    sequence_length: int
    rows: str
    added: float | None = None
    added_half_width: float | None = None
    paired: bool = False


def loss(settings: LossSettings) -> None:
    """Measure the bits per byte and the perplexity of trained models on a text; nothing is trained.

    The text is cut into sequences that do not overlap. Later models are compared with the first, paired by sequence if
    their tokens are the same.
    """
    for option, value in (("--tokens", settings.tokens), ("--sequence-length", settings.sequence_length)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: must be at least 1")
    with ExitStack() as stack:
        runtime = open_session(stack, settings)
        from heddle.machine import with_measured_choices

        sources = _open(settings)
        with_measured_choices(runtime, settings.threads, ("products", "native"))
        usual = min(
            source.weights.design.usual_length(SEQUENCE_LENGTH) for source in sources
        )  # one length, to pair them
        length = settings.sequence_length or usual
        losses = _text_losses([_read(source, settings, length, runtime.device) for source in sources])
    if settings.json:
        print_text(json.dumps([asdict(each) for each in losses], indent=2))
        return
    for each in losses:
        print_text(_sentence(each, losses[0].model))


def _open(settings: LossSettings) -> list["ConversionSource"]:
    """Open the models. Raises CheckpointError, ConfigError and DataError; only headers are read."""
    from heddle.conversion.convert import open_source
    from heddle.data.sources import check_sources
    from heddle.model.decoder import build
    from heddle.storage.model import require_tokenizer

    check_sources(settings.data)
    sources = [open_source(folder) for folder in settings.models]
    for source in sources:
        require_tokenizer(source.tokenizer, source.folder)
        model = build(source.weights.design, device="meta")
        if not model.causal or model.encoder_width is not None:
            raise ConfigError(f"{source.folder}: is not a causal language model, so it has no loss on a text")
    return sources


def _text_losses(read: Sequence["_ReadText"]) -> list[TextLoss]:
    from heddle.lab.compare.statistics import text_half_width

    losses = []
    for own in read:
        paired = None
        if own.text == read[0].text:
            paired = text_half_width(own.bits - read[0].bits, own.sizes)
        first = own is read[0]
        losses.append(
            TextLoss(
                model=own.model,
                bits_per_byte=own.bits_per_byte,
                half_width=text_half_width(own.bits, own.sizes),
                nats_per_token=(nats := float(own.bits.sum()) * math.log(2) / own.tokens),
                perplexity=math.exp(nats),
                tokens=own.tokens,
                bytes=int(own.sizes.sum()),
                sequence_length=own.text.sequence_length,
                rows=str(own.text.rows),
                added=None if first else own.bits_per_byte - read[0].bits_per_byte,
                added_half_width=None if first else paired,
                paired=own.text == read[0].text and not first,
            )
        )
    return losses


class _Text(NamedTuple):
    """What decides the sequences that a model reads."""

    tokenizer: str
    corpus: str
    sequence_length: int
    rows: "RowProtocol"


class _ReadText(NamedTuple):
    """bits, sizes: float64 [sequences]; sizes are bytes. tokens: how many are scored."""

    model: str
    text: _Text
    bits: "np.ndarray"
    sizes: "np.ndarray"
    tokens: int

    @property
    def bits_per_byte(self) -> float:
        return float(self.bits.sum() / self.sizes.sum())


def _read(source: "ConversionSource", settings: LossSettings, length: int, device: str) -> _ReadText:
    """Read the text with one model."""
    import numpy as np

    from heddle.conversion.weights import build_model
    from heddle.data.corpus import prepare_corpus
    from heddle.data.samples import evaluation_windows, joined
    from heddle.training.evaluation.scores import token_scores
    from heddle.training.init_checkpoint import model_rows

    tokenizer, data = source.tokenizer, settings.data or ("stdlib",)
    assert tokenizer is not None
    rows = model_rows(source.folder, tokenizer)
    corpus = prepare_corpus(
        data,
        vocab_size=None,
        max_train_tokens=settings.tokens,
        tokenizer=tokenizer,
        rows=rows,
        is_whole=not settings.held_out,
    )
    if not settings.held_out:
        _warn_of_training_text(source.folder, corpus)
    files = [corpus.validation] if settings.held_out else [*corpus.train, corpus.validation]
    every = -(-sum(-(-(len(file) - 1) // length) for file in files) // max(1, settings.tokens // length))
    windows = chain.from_iterable(evaluation_windows(file, length, 1, rows) for file in files)
    batches = list(joined(islice(windows, 0, None, max(1, every)), max(1, BATCH_TOKENS // length)))
    model = build_model(source.weights).to(device, dtype_of(settings.precision))
    bits, sizes, tokens = [], [], 0
    with progress_bar(source.folder.name, sum(len(batch.tokens) for batch in batches), "sequences") as bar:
        for batch, scores in token_scores(model, batches, tokenizer.byte_lengths):
            bits += (scores.nats.sum(1) / math.log(2)).tolist()
            sizes += scores.sizes.sum(1).tolist()
            tokens += int((scores.sizes > 0).sum())
            bar.advance(len(batch.tokens))
    if not tokens:
        raise DataError(f"--data {' '.join(data)}: holds fewer than two tokens to score; give more text")
    text = _Text(tokenizer.hash, corpus.hash, length, rows)
    return _ReadText(str(source.folder), text, np.array(bits), np.array(sizes, dtype=np.float64), tokens)


def _warn_of_training_text(folder: Path, corpus: "Corpus") -> None:
    """Warn where a run was trained on this text."""
    from heddle.storage.file_io import read_json_file
    from heddle.storage.run_log import RUN_FILE

    run = folder if (folder / RUN_FILE).is_file() else folder.parent.parent
    if (run / RUN_FILE).is_file() and read_json_file(run / RUN_FILE).get("data", {}).get("hash") == corpus.hash:
        print_warning(f"{folder}: was trained on this text; --held-out reads only what training left out")


def _sentence(loss: TextLoss, first: str) -> str:
    interval = "" if loss.half_width is None else f" ± {loss.half_width:.4f}"
    sentence = f"{loss.model}: {loss.bits_per_byte:.4f}{interval} bits per byte, perplexity {loss.perplexity:,.2f}"
    if loss.added is not None:
        paired = "" if loss.added_half_width is None else f" ± {loss.added_half_width:.4f}"
        paired = paired if loss.paired else " (not paired)"
        sentence += f", {loss.added:+.4f}{paired} against {first}"
    text = f"{loss.tokens:,} tokens, {loss.bytes:,} bytes"
    few = "; too few sequences for an interval" if loss.half_width is None else ""
    return f"{sentence} ({text}; sequences of {loss.sequence_length:,}, {loss.rows}{few})"
