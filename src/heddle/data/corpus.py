"""From text sources to token files: read, split, train a tokenizer, encode as much as needed, and cache the results."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle import progress
from heddle.data.cache import DataCache, json_sha256, report_damage
from heddle.data.samples import GOLDEN_GAMMA, PLAIN_ROWS, RowProtocol, splitmix64
from heddle.data.sources import ScannedSource, is_in_validation, parse_source
from heddle.data.token_file import TokenFile, write_token_file
from heddle.errors import DataError, MachineError, pip_install
from heddle.tokenization import DEFAULT_VOCAB_SIZE, fast_encoder, size_problem
from heddle.tokenization.backend import MAX_RUN_LENGTH
from heddle.tokenization.tokenizer import Tokenizer

# The training and validation split of a source, and even samples of either, depend only on the content.


# A split with less than this fraction of the characters counts as empty: it would be too small to be useful.
MIN_SPLIT_FRACTION = 0.01
TAIL_FRACTION = 0.05
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class SplitSize:
    """The size of one split of a source; exact if the method is "hash", else approximate."""

    documents: int
    bytes: int


@dataclass(frozen=True)
class SourceSplit:
    """How one source is split: `method` is "hash", or "tail": the first `train_characters` are for training."""

    source: ScannedSource
    method: str
    train_characters: int

    def documents(self, split: str) -> Iterator[str]:
        """Yield the documents of one split, in the order of the source."""
        return self._by_hash(split) if self.method == "hash" else self._by_position(split)

    def size(self, split: str) -> SplitSize:
        """Return the number of documents and bytes of one split."""
        counts = self.source.counts
        if self.method == "hash":
            validation = SplitSize(counts.validation_documents, counts.validation_bytes)
            train = SplitSize(counts.documents - validation.documents, counts.bytes - validation.bytes)
            return train if split == TRAIN else validation
        fraction = (
            self.train_characters / counts.characters
            if split == TRAIN
            else 1 - self.train_characters / counts.characters
        )
        return SplitSize(max(1, round(counts.documents * fraction)), max(1, round(counts.bytes * fraction)))

    def sample(self, split: str, fraction: float) -> Iterator[str]:
        """Yield about this fraction (0 to 1) of a split's documents, evenly; larger samples include smaller ones."""
        limit = int(min(fraction, 1.0) * 2**64)
        for index, text in enumerate(self.documents(split)):
            # The first document is always included, so that a sample is never empty.
            if index == 0 or splitmix64(index * GOLDEN_GAMMA) < limit:
                yield text

    def _by_hash(self, split: str) -> Iterator[str]:
        for text in self.source.read():
            if is_in_validation(hashlib.sha256(text.encode("utf-8")).digest()) == (split == VALIDATION):
                yield text

    def _by_position(self, split: str) -> Iterator[str]:
        characters_before = 0
        for text in self.source.read():
            cut = min(max(self.train_characters - characters_before, 0), len(text))
            characters_before += len(text)
            part = text[:cut] if split == TRAIN else text[cut:]
            if part:
                yield part
            if split == TRAIN and characters_before >= self.train_characters:
                return


def split_source(source: ScannedSource) -> SourceSplit:
    """Split a source: one document in twenty, chosen by its hash, is for validation.

    If a split would have less than 1 % of the characters, the last 5 % of the text is for validation. Raises DataError
    for fewer than two characters.
    """
    counts = source.counts
    validation_fraction = counts.validation_characters / counts.characters
    if MIN_SPLIT_FRACTION <= validation_fraction <= 1 - MIN_SPLIT_FRACTION:
        return SourceSplit(source, "hash", 0)
    if counts.characters < 2:
        raise DataError(f"data {source.name} has a single character: give more text.")
    train_characters = min(max(1, int(counts.characters * (1 - TAIL_FRACTION))), counts.characters - 1)
    return SourceSplit(source, "tail", train_characters)


# Validation uses at most about this many tokens, spread evenly over the documents of the validation split.
MAX_VALIDATION_TOKENS = 2_000_000
# A training split up to this size is always encoded fully, so that its samples do not depend on max_train_tokens.
FULLY_ENCODED_BYTES = 48 * 1024 * 1024
_BATCH_BYTES = 1024 * 1024
_TIMED_SECONDS = 5.0  # after which the time of an encoding is foreseen
_HINT_BYTES = 8 * 1024 * 1024  # from here on, encoding takes noticeable time
RECIPE_VERSION = 1  # raise this with any change to the tokens of the same text


class CorpusEncoder:
    """Encodes splits to token files with one tokenizer, or finds them in the cache."""

    def __init__(self, cache: DataCache, tokenizer: Tokenizer, until: float = math.inf) -> None:
        """until: as in `prepare_corpus`."""
        self._cache, self._tokenizer, self._until = cache, tokenizer, until

    def train_file(self, split: SourceSplit, needed_tokens: int | None) -> TokenFile:
        """Return the training split, or an even sample of it with at least `needed_tokens` tokens."""
        split_bytes = split.size(TRAIN).bytes
        fraction = 1.0
        # A token has at least one byte, so a split with fewer bytes than needed tokens is encoded entirely.
        if needed_tokens is not None and split_bytes > max(FULLY_ENCODED_BYTES, needed_tokens):
            fraction = self._train_fraction(split, needed_tokens)
        while True:
            file = self._token_file([split], [fraction], TRAIN)
            if fraction == 1.0 or needed_tokens is None or len(file) > needed_tokens:
                return file
            fraction = _round_up_fraction(fraction * 1.01)

    def validation_file(self, splits: Sequence[SourceSplit]) -> TokenFile:
        """Return the validation splits, in order, each limited to an equal share of MAX_VALIDATION_TOKENS."""
        fractions = []
        for split in splits:
            max_tokens = MAX_VALIDATION_TOKENS // len(splits)
            expected_tokens = split.size(VALIDATION).bytes
            if expected_tokens > max_tokens:
                expected_tokens = math.ceil(expected_tokens * self._tokens_per_byte(split))
            fractions.append(min(1.0, max_tokens / expected_tokens))
        return self._token_file(splits, fractions, VALIDATION)

    def _train_fraction(self, split: SourceSplit, needed_tokens: int) -> float:
        fraction = needed_tokens / (split.size(TRAIN).bytes * self._tokens_per_byte(split))
        return _round_up_fraction(max(fraction * 1.05, FULLY_ENCODED_BYTES / split.size(TRAIN).bytes))

    def _tokens_per_byte(self, split: SourceSplit) -> float:
        """Tokens per byte, measured on about a megabyte spread over the training split."""
        key = (RECIPE_VERSION, split.source.hash, split.method, split.train_characters, self._tokenizer.hash)
        path = self._cache.path("density", *key)
        cached = self._cache.read_text(path)
        if cached is not None:
            return float(cached)
        tokens = total_bytes = 0
        for texts, text_bytes in _batches(split.sample(TRAIN, _BATCH_BYTES / split.size(TRAIN).bytes)):
            tokens += sum(len(ids) for ids in self._tokenizer.encode_documents(texts))
            total_bytes += text_bytes
        self._cache.write_text(path, repr(tokens / total_bytes))
        return tokens / total_bytes

    def _token_file(self, splits: Sequence[SourceSplit], fractions: Sequence[float], split_name: str) -> TokenFile:
        samples = list(zip(splits, fractions, strict=True))
        content = [[s.source.hash, s.method, s.train_characters, fraction] for s, fraction in samples]
        path = self._cache.path("bin", RECIPE_VERSION, split_name, content, self._tokenizer.hash)
        if os.path.lexists(path):
            try:
                return TokenFile(path)
            except DataError:
                report_damage(path)
        total_bytes = sum(int(split.size(split_name).bytes * fraction) for split, fraction in samples)
        tokenizer = self._tokenizer
        if tokenizer.is_native and total_bytes >= _HINT_BYTES and not fast_encoder.is_installed():
            progress.print_status(f"with gigatoken ({pip_install('data')}), text is encoded many times faster")
        with (
            write_token_file(
                path, vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id, tokenizer_hash=tokenizer.hash
            ) as writer,
            progress.progress_bar(f"encoding {split_name}", total_bytes, "bytes") as bar,
        ):
            began, encoded = time.monotonic(), 0
            for split, fraction in samples:
                for texts, text_bytes in _batches(split.sample(split_name, fraction)):
                    writer.add(tokenizer.encode_documents(texts), text_bytes)
                    bar.advance(text_bytes)
                    encoded += text_bytes
                    self._check_time(began, encoded, total_bytes)
                writer.end_source()
        return TokenFile(path)

    def _check_time(self, began: float, encoded: int, total: int) -> None:
        """Raise MachineError if an encoding that began at this time would end too late."""
        seconds = time.monotonic() - began
        whole = seconds * max(1.0, total / encoded)
        if seconds > _TIMED_SECONDS and began + whole > self._until:
            size, takes = progress.format_amount(total, "bytes"), progress.format_duration(whole)
            raise MachineError(
                f"encoding {size} of text takes about {takes} here, which leaves too little of --budget; give a longer "
                "one, or less text with --data"
            )


def _batches(documents: Iterator[str]) -> Iterator[tuple[list[str], int]]:
    """Group documents into lists of about a megabyte, with their bytes: enough for all cores, in little memory."""
    texts: list[str] = []
    size = 0
    for text in documents:
        texts.append(text)
        size += len(text.encode("utf-8"))
        if size >= _BATCH_BYTES:
            yield texts, size
            texts, size = [], 0
    if texts:
        yield texts, size


def _round_up_fraction(fraction: float) -> float:
    """Round a fraction up to one of 1, 2^-1/4, 2^-2/4 ..., so that similar budgets share a token file."""
    return min(1.0, 2.0 ** (math.ceil(4 * math.log2(fraction)) / 4)) if fraction < 1 else 1.0


# The distinct words of texts determine the memory for training a tokenizer.


_WORD = re.compile(rf"\w{{1,{MAX_RUN_LENGTH}}}|[^\w\s]{{1,{MAX_RUN_LENGTH}}}")
_MAX_RUNS_SIZE = 4 * 1024 * 1024  # characters that are remembered


def distinct_word_bytes(texts: Iterable[str], limit: int) -> int:
    """Count the UTF-8 bytes of the distinct words of the texts; stop once the count passes `limit`.

    BPE training keeps every distinct word, in about 100 bytes of memory for each of these bytes. Scripts without spaces
    have many distinct words, source code has few.
    """
    words: set[str] = set()
    runs: set[str] = set()  # text between white space: most of it repeats, and is searched once
    total = runs_size = 0
    for text in texts:
        new_runs = set(text.split()) - runs
        new_words = set(_WORD.findall(" ".join(new_runs))) - words
        words |= new_words
        total += sum(len(word.encode("utf-8")) for word in new_words)
        runs_size += sum(map(len, new_runs))
        runs |= new_runs
        if runs_size > _MAX_RUNS_SIZE:
            runs, runs_size = set(), 0
        if total > limit:
            break
    return total


# BPE trains on at most this many bytes of the training split, evenly over documents, and by weight over sources.
TOKENIZER_TRAINING_BYTES = 16 * 1024 * 1024
# BPE trains on at most this many bytes of distinct words, which limits its memory to about 300 MB in any script.
TOKENIZER_DISTINCT_WORD_BYTES = 3 * 1024 * 1024
# With this many bytes and tokens per character, a larger vocabulary is suggested.
MANY_BYTES_PER_CHARACTER = 1.5
MANY_TOKENS_PER_CHARACTER = 0.75
SUGGESTED_VOCAB_SIZE = 16_384
_MAX_LISTED_FILES = 1000
_BUDGET_SLACK = 65536


@dataclass(frozen=True)
class Corpus:
    """Tokenized text: one training file for each source, and one validation file for all of them.

    `hash` identifies content, weights, splits and tokenizer, but not how much of the text was encoded. `report` is
    plain JSON: bytes, documents and tokens by split and source, the skipped files, the tokenizer. `rows`: how every
    sequence begins, in training and evaluation.
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
        """UTF-8 bytes per character, over all sources."""
        sources = self.report["sources"]
        return float(sum(source["bytes"] for source in sources) / sum(source["characters"] for source in sources))


def prepare_corpus(
    sources: Sequence[str],
    *,
    vocab_size: int | None,
    max_train_tokens: int | None,
    cache_folder: Path | None = None,
    tokenizer: Path | Tokenizer | None = None,
    rows: RowProtocol = PLAIN_ROWS,
    until: float = math.inf,
    is_whole: bool = False,
) -> Corpus:
    """Make a corpus from the sources (see `parse_source`), or read it from the cache.

    `max_train_tokens` is the largest number of training tokens that will be used (None: all). Of a training split over
    48 MB only an even sample of documents is encoded, as large as that needs, and independent of the cache. A tokenizer
    may not have more than `vocab_size` tokens; without a tokenizer, BPE learns that many tokens (None:
    DEFAULT_VOCAB_SIZE) from at most 16 MB of the training split. rows: how sequences begin for a trained model
    (`heddle.training.init_checkpoint.model_rows`). until: in time.monotonic() seconds; an encoding that would end later
    is refused. is_whole: the status counts all tokens, not each split apart. Raises DataError and MachineError.
    """
    if not sources:
        raise DataError("no data was named: give a file, a folder or stdlib.")
    loaded_tokenizer = Tokenizer.load(tokenizer) if isinstance(tokenizer, Path) else tokenizer
    if loaded_tokenizer is not None:
        check_tokenizer_fits(loaded_tokenizer, vocab_size)
    elif vocab_size is not None and size_problem(vocab_size):
        Tokenizer.train([], vocab_size)  # raises DataError, before anything is read
    cache = DataCache(cache_folder)
    scanned, weights = _scan_sources(sources, cache)
    splits = [split_source(source) for source in scanned]
    corpus_tokenizer = loaded_tokenizer or _train_tokenizer(cache, splits, weights, vocab_size or DEFAULT_VOCAB_SIZE)
    encoder = CorpusEncoder(cache, corpus_tokenizer, until)
    total_weight = sum(weights)
    train = []
    for split, weight in zip(splits, weights, strict=True):
        needed_tokens = None
        if max_train_tokens is not None:
            # A little more than the source's share, as sources are mixed by whole samples of unknown length.
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
        rows=rows,
    )
    corpus.report.update(_report(corpus, splits))
    _announce(corpus, scanned, is_whole)
    if loaded_tokenizer is None:
        _suggest_vocab_size(corpus)
    return corpus


def check_tokenizer_fits(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    """Raise DataError if a model's `vocab_size` is below the tokenizer's (None: the model takes the tokenizer's).

    Also raises DataError for a tokenizer that does not round-trip, before anything is encoded.
    """
    if len(tokenizer.byte_lengths) > (vocab_size or tokenizer.vocab_size):
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but vocab_size is {vocab_size}: "
            f"set vocab_size to at least {tokenizer.vocab_size}, or use a smaller tokenizer."
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

    sample_bytes = 0

    def sample(scale: float) -> Iterator[str]:
        nonlocal sample_bytes
        sample_bytes = 0
        for split, fraction in zip(splits, fractions, strict=True):
            for text in split.sample(TRAIN, fraction * scale):
                sample_bytes += len(text.encode("utf-8"))
                yield text

    scale = 1.0
    max_word_bytes = TOKENIZER_DISTINCT_WORD_BYTES
    while scale > 1e-3 and distinct_word_bytes(sample(scale), max_word_bytes) > max_word_bytes:
        scale /= 2

    def texts() -> Iterator[str]:
        with progress.progress_bar("training a tokenizer", sample_bytes, "bytes") as bar:
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
    """Suggest a larger vocabulary for a script, such as Chinese, with almost as many tokens as characters."""
    text_bytes, size = sum(file.text_bytes for file in corpus.train), corpus.tokenizer.vocab_size
    tokens_per_character = sum(map(len, corpus.train)) * corpus.bytes_per_character / text_bytes
    if (
        corpus.bytes_per_character >= MANY_BYTES_PER_CHARACTER
        and tokens_per_character > MANY_TOKENS_PER_CHARACTER
        and DEFAULT_VOCAB_SIZE <= size < SUGGESTED_VOCAB_SIZE
    ):
        progress.print_status(
            f"corpus {corpus.name}: {tokens_per_character:.2f} tokens per character with a vocabulary of {size:,}, "
            f"which is small for this script: try vocab_size {SUGGESTED_VOCAB_SIZE:,}"
        )


def _announce(corpus: Corpus, scanned: Sequence[ScannedSource], is_whole: bool) -> None:
    total_bytes = sum(source.counts.bytes for source in scanned)
    tokens, held_out = sum(len(file) for file in corpus.train), len(corpus.validation)
    parts = (
        f"{tokens + held_out:,} tokens" if is_whole else f"{tokens:,} tokens to train on, {held_out:,} to validate on"
    )
    progress.print_status(
        f"corpus {corpus.name}, hash {corpus.hash[:16]}: {progress.format_amount(total_bytes, 'bytes')}, "
        f"{parts}, vocabulary {corpus.tokenizer.vocab_size:,}"
    )
    for source in scanned:
        _announce_skipped(source)


def _announce_skipped(source: ScannedSource) -> None:
    """Print which files and records of a source are not in the corpus, and why."""
    if source.skipped_files:
        first = source.skipped_files[0]
        names = [skipped.file for skipped in source.skipped_files]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        others = f"; and {', '.join(names[1:4])}{more}" if len(names) > 1 else ""
        count = f"{len(names):,} file{'s' if len(names) > 1 else ''}"
        progress.print_status(f"skipped {count} of {source.name}: {first.file} {first.reason}{others}")
    for name, records in source.skipped_records[:_MAX_LISTED_FILES]:
        count = f"{records.count:,} record{'s' if records.count > 1 else ''}"
        progress.print_status(f"skipped {count} of {name}, the first because it {records.reason}")
    if source.left_out:
        counts = ", ".join(f"{count} {suffix}" for suffix, count in source.left_out.items())
        progress.print_status(f"left out of {source.name}: {counts} files; write their text to .txt or .jsonl files")
