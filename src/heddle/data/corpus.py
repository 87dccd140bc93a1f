"""From text sources to token files: read, split, train a tokenizer, encode as far as needed, and cache the results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle import progress
from heddle.data.cache import DataCache, json_sha256, report_damage
from heddle.data.corpus_encoder import RECIPE_VERSION, CorpusEncoder
from heddle.data.samples import PLAIN_ROWS, RowProtocol
from heddle.data.sources import ScannedSource, parse_source
from heddle.data.split import TRAIN, SourceSplit, split_source
from heddle.data.token_file import TokenFile
from heddle.errors import DataError
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.tokenization.backend import MAX_RUN_LENGTH
from heddle.tokenization.distinct_words import distinct_word_bytes
from heddle.tokenization.tokenizer import MIN_VOCAB_SIZE, Tokenizer

# BPE trains on at most this much of the training split, evenly over its documents, and by weight over the sources.
TOKENIZER_TRAINING_BYTES = 16 * 1024 * 1024
# BPE trains on at most this many bytes of distinct words, which limits its memory to about 300 MB in any script.
TOKENIZER_DISTINCT_WORD_BYTES = 3 * 1024 * 1024
# A text with so many bytes and tokens for each character is suggested a larger vocabulary.
MANY_BYTES_PER_CHARACTER = 1.5
MANY_TOKENS_PER_CHARACTER = 0.75
SUGGESTED_VOCAB_SIZE = 16_384
_MAX_LISTED_FILES = 1000
_BUDGET_SLACK = 65536


@dataclass(frozen=True)
class Corpus:
    """Tokenized text: one training file for each source, and one validation file for all of them.

    `hash` identifies content, weights, splits and tokenizer, but not how much of the text was encoded. `report` is
    plain JSON: bytes, documents and tokens by split and source, the skipped files, the tokenizer. `rows`: how the model
    of the tokenizer reads it.
    """

    tokenizer: Tokenizer
    train: tuple[TokenFile, ...]
    weights: tuple[float, ...]
    validation: TokenFile
    hash: str
    name: str
    report: dict[str, Any]
    rows: RowProtocol = PLAIN_ROWS

    @property
    def bytes_per_character(self) -> float:
        """Bytes of UTF-8 for each character, over all sources."""
        sources = self.report["sources"]
        return float(sum(source["bytes"] for source in sources) / sum(source["characters"] for source in sources))


def prepare_corpus(
    sources: Sequence[str],
    *,
    vocab_size: int | None,
    max_train_tokens: int | None,
    cache_folder: Path | None = None,
    tokenizer: Path | Tokenizer | None = None,
) -> Corpus:
    """Make a corpus from the sources (see `parse_source`), or read it from the cache.

    `max_train_tokens` is the largest number of training tokens that will be used (None: all). A training split of over
    48 MB is encoded only as far as that needs: an even sample of its documents, the same one whatever the cache holds.
    A given tokenizer may not have more than `vocab_size` tokens; without one, BPE learns that many tokens (None:
    DEFAULT_VOCAB_SIZE) from at most 16 MB of the training split. Raises DataError and MachineError.
    """
    if not sources:
        raise DataError("no data was named: give a file, a folder or stdlib.")
    loaded_tokenizer = Tokenizer.load(tokenizer) if isinstance(tokenizer, Path) else tokenizer
    if loaded_tokenizer is not None:
        check_tokenizer_fits(loaded_tokenizer, vocab_size)
    elif vocab_size is not None and vocab_size < MIN_VOCAB_SIZE:
        Tokenizer.train([], vocab_size)  # raises DataError, before anything is read
    cache = DataCache(cache_folder)
    scanned, weights = _scan_sources(sources, cache)
    splits = [split_source(source) for source in scanned]
    corpus_tokenizer = loaded_tokenizer or _train_tokenizer(cache, splits, weights, vocab_size or DEFAULT_VOCAB_SIZE)
    encoder = CorpusEncoder(cache, corpus_tokenizer)
    total_weight = sum(weights)
    train = []
    for split, weight in zip(splits, weights, strict=True):
        needed_tokens = None
        if max_train_tokens is not None:
            # A little more than the source's share, since sources are mixed by whole samples of an unknown length.
            needed_tokens = math.ceil(max_train_tokens * weight / total_weight * 1.01) + _BUDGET_SLACK
        train.append(encoder.train_file(split, needed_tokens))
    validation = encoder.validation_file(splits)
    content = [[s.source.hash, weight, s.method, s.train_characters] for s, weight in zip(splits, weights, strict=True)]
    corpus = Corpus(
        tokenizer=corpus_tokenizer,
        train=tuple(train),
        weights=tuple(weights),
        validation=validation,
        hash=json_sha256([RECIPE_VERSION, content, corpus_tokenizer.hash]),
        name="+".join(source.name for source in scanned),
        report={},
        rows=RowProtocol.of(corpus_tokenizer),
    )
    corpus.report.update(_report(corpus, splits))
    _announce(corpus, scanned)
    if loaded_tokenizer is None:
        _suggest_vocab_size(corpus)
    return corpus


def check_tokenizer_fits(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    """Raise DataError where a model's `vocab_size` is below the tokenizer's (None: the model takes the tokenizer's).

    Also raises DataError for a tokenizer that does not round-trip, before anything is encoded.
    """
    if len(tokenizer.byte_lengths) > (vocab_size or tokenizer.vocab_size):
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but vocab_size is {vocab_size}: "
            f"set vocab_size to at least {tokenizer.vocab_size}, or take a smaller tokenizer."
        )


def _scan_sources(arguments: Sequence[str], cache: DataCache) -> tuple[list[ScannedSource], list[float]]:
    sources = [parse_source(argument, cache) for argument in arguments]
    with progress.progress_bar("reading", sum(source.size for source, _ in sources), "bytes") as bar:
        return [source.scan(bar.advance) for source, _ in sources], [weight for _, weight in sources]


def _train_tokenizer(
    cache: DataCache, splits: Sequence[SourceSplit], weights: Sequence[float], vocab_size: int
) -> Tokenizer:
    content = [[s.source.hash, s.method, s.train_characters, weight] for s, weight in zip(splits, weights, strict=True)]
    limits = (MAX_RUN_LENGTH, TOKENIZER_TRAINING_BYTES, TOKENIZER_DISTINCT_WORD_BYTES)
    path = cache.path("tokenizer.json", RECIPE_VERSION, *limits, vocab_size, content)
    cached_json = cache.read_text(path)
    if cached_json is not None:
        try:
            return Tokenizer.from_json(cached_json, name=str(path))
        except DataError:  # another version of `tokenizers` wrote it
            report_damage(path)
    fractions = []
    for split, weight in zip(splits, weights, strict=True):
        max_bytes = TOKENIZER_TRAINING_BYTES * weight / sum(weights)
        fractions.append(min(1.0, max_bytes / split.size(TRAIN).bytes))

    def sample(scale: float) -> Iterator[str]:
        for split, fraction in zip(splits, fractions, strict=True):
            yield from split.sample(TRAIN, fraction * scale)

    scale = 1.0
    max_word_bytes = TOKENIZER_DISTINCT_WORD_BYTES
    while scale > 1e-3 and distinct_word_bytes(sample(scale), max_word_bytes) > max_word_bytes:
        scale /= 2
    sizes = [split.size(TRAIN).bytes for split in splits]
    total_bytes = sum(int(size * fraction * scale) for size, fraction in zip(sizes, fractions, strict=True))

    def texts() -> Iterator[str]:
        with progress.progress_bar("training a tokenizer", total_bytes, "bytes") as bar:
            for text in sample(scale):
                yield text
                bar.advance(len(text.encode("utf-8")))

    tokenizer = Tokenizer.train(texts(), vocab_size)
    cache.write_text(path, tokenizer.to_json())
    return tokenizer


def _report(corpus: Corpus, splits: Sequence[SourceSplit]) -> dict[str, Any]:
    sources = []
    for index, split in enumerate(splits):
        source, train_file = split.source, corpus.train[index]
        sources.append(
            {
                "name": source.name,
                "hash": source.hash,
                "weight": corpus.weights[index],
                "files": source.files,
                "bytes": source.counts.bytes,
                "characters": source.counts.characters,
                "documents": source.counts.documents,
                "split": split.method,
                "train": {
                    "documents": train_file.document_count,
                    "bytes": train_file.text_bytes,
                    "tokens": len(train_file),
                },
                "validation": {"tokens": corpus.validation.source_token_counts[index]},
                "empty_files": source.empty_files,
                "ignored_files": source.ignored_files,
                "skipped_files": len(source.skipped_files),
                "skipped": [{"file": s.file, "reason": s.reason} for s in source.skipped_files[:_MAX_LISTED_FILES]],
            }
        )
    validation, tokenizer = corpus.validation, corpus.tokenizer
    return {
        "name": corpus.name,
        "hash": corpus.hash,
        "tokenizer": {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size, "end": tokenizer.eod_id},
        "sources": sources,
        "validation": {
            "documents": validation.document_count,
            "bytes": validation.text_bytes,
            "tokens": len(validation),
        },
    }


def _suggest_vocab_size(corpus: Corpus) -> None:
    """Say where a script with many characters, such as Chinese, is cut into almost as many tokens as characters."""
    text_bytes, size = sum(file.text_bytes for file in corpus.train), corpus.tokenizer.vocab_size
    tokens_per_character = sum(map(len, corpus.train)) * corpus.bytes_per_character / text_bytes
    if (
        corpus.bytes_per_character >= MANY_BYTES_PER_CHARACTER
        and tokens_per_character > MANY_TOKENS_PER_CHARACTER
        and DEFAULT_VOCAB_SIZE <= size < SUGGESTED_VOCAB_SIZE
    ):
        progress.print_status(
            f"corpus {corpus.name}: {tokens_per_character:.2f} tokens a character with a vocabulary of {size:,}; "
            f"this script has more characters than that serves: try vocab_size {SUGGESTED_VOCAB_SIZE:,}"
        )


def _announce(corpus: Corpus, scanned: Sequence[ScannedSource]) -> None:
    total_bytes = sum(source.counts.bytes for source in scanned)
    tokens = sum(len(file) for file in corpus.train)
    progress.print_status(
        f"corpus {corpus.name}, hash {corpus.hash[:16]}: {progress.format_amount(total_bytes, 'bytes')}, "
        f"{tokens:,} tokens to train on, {len(corpus.validation):,} to validate on, "
        f"vocabulary {corpus.tokenizer.vocab_size:,}"
    )
    for source in scanned:
        if source.skipped_files:
            names = ", ".join(skipped.file for skipped in source.skipped_files[:5])
            more = f" and {len(source.skipped_files) - 5} more" if len(source.skipped_files) > 5 else ""
            progress.print_status(
                f"skipped {len(source.skipped_files)} unreadable or non-UTF-8 files of {source.name}: {names}{more}"
            )
