"""Encoding the splits of sources to token files, as far as needed, with a cache."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

from heddle import progress
from heddle.data.cache import DataCache, report_damage
from heddle.data.split import TRAIN, VALIDATION, SourceSplit
from heddle.data.token_file import TokenFile, TokenFileWriter, write_token_file
from heddle.errors import DataError
from heddle.tokenization import fast_encoder
from heddle.tokenization.tokenizer import Tokenizer

# Validation uses at most about this many tokens, evenly over the documents of the validation split.
MAX_VALIDATION_TOKENS = 2_000_000
# A training split up to this size is always encoded fully, so that its samples do not depend on max_train_tokens.
FULLY_ENCODED_BYTES = 48 * 1024 * 1024
_BATCH_BYTES = 1024 * 1024
_HINT_BYTES = 8 * 1024 * 1024  # from here on a user waits for the encoding
RECIPE_VERSION = 1  # raise this with any change that gives other tokens for the same text


class CorpusEncoder:
    """Encodes splits to token files with one tokenizer, or finds them in the cache."""

    def __init__(self, cache: DataCache, tokenizer: Tokenizer) -> None:
        self._cache, self._tokenizer = cache, tokenizer

    def train_file(self, split: SourceSplit, needed_tokens: int | None) -> TokenFile:
        """The training split, or an even sample of it with at least `needed_tokens` tokens."""
        split_bytes = split.size(TRAIN).bytes
        fraction = 1.0
        # No token is shorter than a byte, so a split with fewer bytes than needed tokens is needed entirely.
        if needed_tokens is not None and split_bytes > max(FULLY_ENCODED_BYTES, needed_tokens):
            fraction = self._train_fraction(split, needed_tokens)
        while True:
            file = self._token_file([split], [fraction], TRAIN)
            if fraction == 1.0 or needed_tokens is None or len(file) > needed_tokens:
                return file
            fraction = _round_up_fraction(fraction * 1.01)

    def validation_file(self, splits: Sequence[SourceSplit]) -> TokenFile:
        """The validation splits, in order, each cut to an equal part of MAX_VALIDATION_TOKENS."""
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
            progress.print_status("with gigatoken (pip install 'heddle-lm[data]'), text is encoded many times as fast")
        with (
            write_token_file(
                path, vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id, tokenizer_hash=tokenizer.hash
            ) as writer,
            progress.progress_bar(f"encoding {split_name}", total_bytes, "bytes") as bar,
        ):
            for split, fraction in samples:
                self._encode(split.sample(split_name, fraction), writer, bar)
                writer.end_source()
        return TokenFile(path)

    def _encode(self, documents: Iterator[str], writer: TokenFileWriter, progress_bar: progress.ProgressBar) -> None:
        for texts, text_bytes in _batches(documents):
            writer.add(self._tokenizer.encode_documents(texts), text_bytes)
            progress_bar.advance(text_bytes)


def _batches(documents: Iterator[str]) -> Iterator[tuple[list[str], int]]:
    """Group documents into lists of about a megabyte, with their bytes: enough for all cores, little memory."""
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
