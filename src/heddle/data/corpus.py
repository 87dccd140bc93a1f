"""From `--data` to token files: read, split, learn a tokenizer, encode as far as needed, keep it cached."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle import progress
from heddle.data.cache import Cache, digest, write_text
from heddle.data.sources import Survey, open_source
from heddle.data.split import TRAIN, VALIDATION, Split, split
from heddle.data.token_file import TokenFile, TokenWriter, write_token_file
from heddle.errors import DataError
from heddle.tokenization.distinct_words import distinct_bytes
from heddle.tokenization.tokenizer import LONGEST_RUN, SMALLEST_VOCABULARY, Tokenizer

DEFAULT_VOCABULARY = 8192
# Validation is measured on at most about this many tokens, evenly over the documents held out.
VALIDATION_TOKENS = 2_000_000
# BPE learns from at most this much of the training split, evenly over its documents, by weight over sources.
LEARNING_BYTES = 16 * 1024 * 1024
# And from no more distinct words than this, which bounds its memory to about 300 MB in any script.
LEARNING_DISTINCT_BYTES = 3 * 1024 * 1024
# A training split up to this size is always encoded whole, so that its samples do not depend on the budget.
WHOLE_BYTES = 48 * 1024 * 1024
_BATCH_BYTES = 1024 * 1024
_RECIPE = 1  # to be raised with any change that gives other tokens for the same text
_LISTED = 1000
_SLACK = 65536


@dataclass(frozen=True)
class Corpus:
    """Text made ready to train on: one training file for each source, and one validation file over all.

    `hash` names content, weights, split and tokenizer, not how far it was encoded. `report` is plain JSON:
    bytes, documents and tokens by split and source, the skipped files, the tokenizer.
    """

    tokenizer: Tokenizer
    train: tuple[TokenFile, ...]
    weights: tuple[float, ...]
    validation: TokenFile
    hash: str
    name: str
    report: dict[str, Any]


def prepare(
    sources: Sequence[str],
    *,
    vocab_size: int | None,
    budget: int | None,
    cache: Path | None = None,
    tokenizer: Path | Tokenizer | None = None,
) -> Corpus:
    """Make a corpus of the sources (see `open_source`), from the cache where it is there already.

    `budget` is the number of training tokens that will be used at most (None: all). A split of over 48 MB
    is encoded only as far as the budget needs: an even sample of its documents, the same one whatever the
    cache holds. `vocab_size` bounds the tokenizer: one that is given may not be larger; without one, BPE
    learns that many tokens (None: 8192) from at most 16 MB of the training split. Raises DataError and
    MachineError.
    """
    if not sources:
        raise DataError("no data was named: give a file, a folder or stdlib.")
    given = Tokenizer.load(tokenizer) if isinstance(tokenizer, Path) else tokenizer
    if given is not None:
        check_vocabulary(given, vocab_size)
    elif vocab_size is not None and vocab_size < SMALLEST_VOCABULARY:
        Tokenizer.train([], vocab_size)  # refuses with the reason, before anything is read
    shelf = Cache(cache)
    surveys, weights = _survey(sources)
    splits = [split(survey) for survey in surveys]
    used = given or _learned(shelf, splits, weights, vocab_size or DEFAULT_VOCABULARY)
    encoder = _Encoder(shelf, used)
    total = sum(weights)
    train = []
    for one, weight in zip(splits, weights, strict=True):
        # A little more than its part, since turns are taken in whole samples of an unknown length.
        need = None if budget is None else math.ceil(budget * weight / total * 1.01) + _SLACK
        train.append(encoder.train(one, need))
    validation = encoder.validation(splits)
    content = [[s.survey.hash, weight, s.kind, s.edge] for s, weight in zip(splits, weights, strict=True)]
    corpus = Corpus(
        tokenizer=used,
        train=tuple(train),
        weights=tuple(weights),
        validation=validation,
        hash=digest([_RECIPE, content, used.hash]),
        name="+".join(survey.name for survey in surveys),
        report={},
    )
    corpus.report.update(_report(corpus, splits))
    _announce(corpus, surveys)
    return corpus


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    """Raise DataError where a design's vocabulary is below the tokenizer's (None: it takes the tokenizer's).

    A tokenizer that cannot be measured is refused here too, before anything is encoded.
    """
    if len(tokenizer.byte_lengths) > (vocab_size or tokenizer.vocab_size):
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but vocab_size is {vocab_size}: "
            f"set vocab_size to at least {tokenizer.vocab_size}, or take a smaller tokenizer."
        )


def _survey(arguments: Sequence[str]) -> tuple[list[Survey], list[float]]:
    opened = [open_source(argument) for argument in arguments]
    with progress.bar("reading", sum(source.size for source, _ in opened), "bytes") as bar:
        return [source.survey(bar.advance) for source, _ in opened], [weight for _, weight in opened]


def _learned(shelf: Cache, splits: Sequence[Split], weights: Sequence[float], vocab_size: int) -> Tokenizer:
    content = [[s.survey.hash, s.kind, s.edge, weight] for s, weight in zip(splits, weights, strict=True)]
    path = shelf.path(
        "tokenizer.json", _RECIPE, LONGEST_RUN, LEARNING_BYTES, LEARNING_DISTINCT_BYTES, vocab_size, content
    )
    if path.exists():
        # A damaged file of ours is made again.
        with contextlib.suppress(DataError):
            return Tokenizer.load(path)
    shares = []
    for one, weight in zip(splits, weights, strict=True):
        bound = LEARNING_BYTES * weight / sum(weights)
        shares.append(min(1.0, bound / one.size(TRAIN).bytes))

    def sample(part: float) -> Iterator[str]:
        for one, share in zip(splits, shares, strict=True):
            yield from one.sample(TRAIN, share * part)

    part = 1.0
    while part > 1e-3 and distinct_bytes(sample(part), LEARNING_DISTINCT_BYTES) > LEARNING_DISTINCT_BYTES:
        part /= 2
    size = sum(int(one.size(TRAIN).bytes * share * part) for one, share in zip(splits, shares, strict=True))

    def texts() -> Iterator[str]:
        with progress.bar("learning a tokenizer", size, "bytes") as bar:
            for text in sample(part):
                yield text
                bar.advance(len(text.encode("utf-8")))

    tokenizer = Tokenizer.train(texts(), vocab_size)
    write_text(path, tokenizer.to_json())
    return tokenizer


class _Encoder:
    """Token files of splits under one tokenizer, found in the cache or made there."""

    def __init__(self, shelf: Cache, tokenizer: Tokenizer) -> None:
        self._shelf, self._tokenizer = shelf, tokenizer

    def train(self, one: Split, need: int | None) -> TokenFile:
        """The training side, or an even sample of it that holds `need` tokens."""
        size = one.size(TRAIN).bytes
        share = 1.0
        # No token is shorter than a byte, so a split of fewer bytes than tokens needed is needed whole.
        if need is not None and size > max(WHOLE_BYTES, need):
            share = self._share(one, need)
        while True:
            file = self._file([one], [share], TRAIN)
            if share == 1.0 or need is None or len(file) > need:
                return file
            share = _step_up(share * 1.01)

    def validation(self, splits: Sequence[Split]) -> TokenFile:
        """The validation sides, in order, each at most its equal part of VALIDATION_TOKENS."""
        shares = []
        for one in splits:
            allowed = VALIDATION_TOKENS // len(splits)
            expected = one.size(VALIDATION).bytes
            if expected > allowed:
                expected = math.ceil(expected * self._tokens_per_byte(one))
            shares.append(min(1.0, allowed / expected))
        return self._file(splits, shares, VALIDATION)

    def _share(self, one: Split, need: int) -> float:
        wanted = need / (one.size(TRAIN).bytes * self._tokens_per_byte(one))
        return _step_up(max(wanted * 1.05, WHOLE_BYTES / one.size(TRAIN).bytes))

    def _tokens_per_byte(self, one: Split) -> float:
        """Measured on about a megabyte, spread over the training side."""
        key = (_RECIPE, one.survey.hash, one.kind, one.edge, self._tokenizer.hash)
        path = self._shelf.path("density", *key)
        with contextlib.suppress(OSError, ValueError):
            found = float(path.read_text(encoding="utf-8"))
            if 0 < found <= 1:
                return found
        tokens = size = 0
        for texts, text_bytes in _batches(one.sample(TRAIN, _BATCH_BYTES / one.size(TRAIN).bytes)):
            tokens += sum(len(ids) for ids in self._tokenizer.encode_batch(texts))
            size += text_bytes
        write_text(path, repr(tokens / size))
        return tokens / size

    def _file(self, splits: Sequence[Split], shares: Sequence[float], side: str) -> TokenFile:
        content = [[s.survey.hash, s.kind, s.edge, share] for s, share in zip(splits, shares, strict=True)]
        path = self._shelf.path("bin", _RECIPE, side, content, self._tokenizer.hash)
        if path.exists():
            # The name says that the file is ours: one that is damaged is made again.
            with contextlib.suppress(DataError):
                return TokenFile(path)
        size = sum(int(one.size(side).bytes * share) for one, share in zip(splits, shares, strict=True))
        t = self._tokenizer
        with (
            write_token_file(path, vocabulary=t.vocab_size, end=t.end, tokenizer=t.hash) as writer,
            progress.bar(f"encoding {side}", size, "bytes") as bar,
        ):
            for one, share in zip(splits, shares, strict=True):
                self._encode(one.sample(side, share), writer, bar)
                writer.end_part()
        return TokenFile(path)

    def _encode(self, documents: Iterator[str], writer: TokenWriter, bar: progress.Bar) -> None:
        for texts, text_bytes in _batches(documents):
            writer.add(self._tokenizer.encode_batch(texts), text_bytes)
            bar.advance(text_bytes)


def _batches(documents: Iterator[str]) -> Iterator[tuple[list[str], int]]:
    """Lists of about a megabyte of documents, with their bytes: enough for all cores, little for memory."""
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


def _step_up(share: float) -> float:
    """The next of the steps 1, 2^-1/4, 2^-2/4 ..., so that like budgets use the same token file."""
    return min(1.0, 2.0 ** (math.ceil(4 * math.log2(share)) / 4)) if share < 1 else 1.0


def _report(corpus: Corpus, splits: Sequence[Split]) -> dict[str, Any]:
    sources = []
    for number, one in enumerate(splits):
        survey, train = one.survey, corpus.train[number]
        sources.append(
            {
                "name": survey.name,
                "hash": survey.hash,
                "weight": corpus.weights[number],
                "files": survey.files,
                "bytes": survey.tally.bytes,
                "documents": survey.tally.documents,
                "split": one.kind,
                "train": {"documents": train.documents, "bytes": train.bytes, "tokens": len(train)},
                "validation": {"tokens": corpus.validation.parts[number]},
                "empty_files": survey.empty,
                "ignored_files": survey.ignored,
                "skipped_files": len(survey.skipped),
                "skipped": [{"file": s.file, "reason": s.reason} for s in survey.skipped[:_LISTED]],
            }
        )
    held, t = corpus.validation, corpus.tokenizer
    return {
        "name": corpus.name,
        "hash": corpus.hash,
        "tokenizer": {"hash": t.hash, "vocab_size": t.vocab_size, "end": t.end},
        "sources": sources,
        "validation": {"documents": held.documents, "bytes": held.bytes, "tokens": len(held)},
    }


def _announce(corpus: Corpus, surveys: Sequence[Survey]) -> None:
    size = sum(survey.tally.bytes for survey in surveys)
    tokens = sum(len(file) for file in corpus.train)
    progress.say(
        f"corpus {corpus.name}, hash {corpus.hash[:16]}: {progress.amount(size, 'bytes')}, "
        f"{tokens:,} tokens to train on, {len(corpus.validation):,} to validate on, "
        f"vocabulary {corpus.tokenizer.vocab_size:,}"
    )
    for survey in surveys:
        if survey.skipped:
            shown = ", ".join(skipped.file for skipped in survey.skipped[:5])
            more = f" and {len(survey.skipped) - 5} more" if len(survey.skipped) > 5 else ""
            progress.say(f"skipped {len(survey.skipped)} unreadable or non-UTF-8 files of {survey.name}: {shown}{more}")
