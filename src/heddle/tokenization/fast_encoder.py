"""Encoding with the optional library `gigatoken`, many times faster than `tokenizers`, if the ids are the same.

gigatoken splits a text into words by GPT-2's pattern, with its own version of Unicode and without MAX_RUN_LENGTH. So
it encodes a text only if no run of characters is longer, and if both libraries give every character of the text the
same class. Each character is compared once, when it first occurs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import models

from heddle.tokenization.backend import EOD_TOKEN, MAX_RUN_LENGTH, byte_level_pre_tokenizer, is_backend_error
from heddle.tokenization.token_bytes import byte_level_alphabet

# The library keeps every word that it has seen: at most about 5 bytes for each byte of text.
_RENEW_AFTER_BYTES = 32 * 1024 * 1024
_GPT2_PRE_TOKENIZER = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_MODEL_OPTIONS = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges",
)  # fmt: skip
_UNKNOWN, _SPACE, _DIFFERENT = 0, 4, 5  # classes; 1, 2 and 3 are letters, numbers and symbols
_BEFORE = "a1!"  # a letter, a number, a symbol: a character merges with the one of its class
_LONG_RUNS = tuple(bytes([character_class]) * (MAX_RUN_LENGTH + 1) for character_class in range(1, _SPACE + 1))


class FastEncoder:
    """Encodes texts with gigatoken, to the same ids as `tokenizers`; see `fast_encoder`."""

    def __init__(self, library: ModuleType, model: dict[str, Any]) -> None:
        """model: the content of a tokenizer.json. Raises gigatoken's errors if it cannot read it."""
        self._library = library
        self._json = json.dumps(model | {"pre_tokenizer": _GPT2_PRE_TOKENIZER, "added_tokens": []})
        self._renew()

    def encode(self, text: str) -> NDArray[np.uint32] | None:
        """Return the token ids of a text, or None if `tokenizers` may give different ids or refuses the text."""
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:
            return None
        classes = character_classes(self._library).of_text(text)
        if classes is None or any(run in classes for run in _LONG_RUNS):
            return None
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self._renew()
        ids: NDArray[np.uint32] = self._tokenizer.encode(data)
        return ids

    def _renew(self) -> None:
        self._tokenizer = self._library.Tokenizer.from_json(self._json)
        self._bytes_left = _RENEW_AFTER_BYTES


class CharacterClasses:
    """The class of each character for both libraries: letter, number, symbol or white space, else different."""

    def __init__(self, library: ModuleType) -> None:
        self._classes = np.zeros(0x110000, np.uint8)
        alphabet = byte_level_alphabet()
        vocabulary = {character: byte for byte, character in enumerate(alphabet)}
        merges = [(alphabet[ord(first)], second) for first in (*_BEFORE, " ") for second in alphabet]
        for first, second in merges:
            vocabulary[first + second] = len(vocabulary)
        self._backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=merges))
        self._backend.pre_tokenizer = byte_level_pre_tokenizer()
        self._fast = library.Tokenizer.from_json(
            json.dumps(json.loads(self._backend.to_str()) | {"pre_tokenizer": _GPT2_PRE_TOKENIZER})
        )
        self._compare(np.arange(128, dtype=np.uint32))
        self._ascii = self._classes[:256].tobytes()

    def of_text(self, text: str) -> bytes | None:
        """Return the class of each character, or None if the libraries disagree on one."""
        if text.isascii():
            classes = text.encode("ascii").translate(self._ascii)
            return None if bytes([_DIFFERENT]) in classes else classes
        code_points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        of_each = self._classes[code_points]
        if not of_each.all():
            self._compare(np.unique(code_points[of_each == _UNKNOWN]))
            of_each = self._classes[code_points]
        return None if (of_each == _DIFFERENT).any() else of_each.tobytes()

    def _compare(self, code_points: NDArray[np.uint32]) -> None:
        """Compare what each character merges with in both libraries: the character before it and its first byte."""
        texts = [before + chr(i) for i in code_points.tolist() for before in (*_BEFORE, " ")]
        ids = [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        fast_ids = [self._fast.encode(text.encode("utf-8")).tolist() for text in texts]
        agree = np.array([own == fast for own, fast in zip(ids, fast_ids, strict=True)]).reshape(len(code_points), -1)
        joins = np.array([text_ids[0] >= len(byte_level_alphabet()) for text_ids in ids]).reshape(len(code_points), -1)
        own_class = np.where(joins[:, :-1].any(-1), joins[:, :-1].argmax(-1) + 1, _SPACE)
        self._classes[code_points] = np.where(agree.all(-1), own_class, _DIFFERENT)


@cache
def character_classes(module: ModuleType) -> CharacterClasses:
    """Return the classes, which are shared within this process."""
    return CharacterClasses(module)


@cache
def _gigatoken() -> ModuleType | None:
    try:
        return import_module("gigatoken")
    except ImportError:
        return None


def is_installed() -> bool:
    """Whether gigatoken can be imported."""
    return _gigatoken() is not None


def fast_encoder(backend: BackendTokenizer, token_bytes: Sequence[bytes]) -> FastEncoder | None:
    """Return a fast encoder with the ids of `backend`; None if gigatoken is missing, or it is not heddle's BPE.

    token_bytes: the bytes of each token. Both libraries encode their texts; if an id differs, the result is None.
    """
    library = _gigatoken()
    data = json.loads(backend.to_str())
    if library is None or not _is_plain_bpe(data):
        return None
    texts = [*(piece.decode("utf-8", "ignore") for piece in token_bytes), EOD_TOKEN]
    expected = backend.encode_batch_fast(texts, add_special_tokens=False)
    try:
        encoder = FastEncoder(library, data)
        for text, encoding in zip(texts, expected, strict=True):
            ids = encoder.encode(text)
            if ids is not None and ids.tolist() != encoding.ids:
                return None
    except BaseException as error:
        if not is_backend_error(error):
            raise
        return None
    return encoder


def _is_plain_bpe(data: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is byte-level BPE as heddle trains it, with tokens in the order of merges."""
    model, vocabulary = data["model"], data["model"].get("vocab")
    if model["type"] != "BPE" or any(model.get(option) for option in _MODEL_OPTIONS) or data["normalizer"]:
        return False
    if data["pre_tokenizer"] != json.loads(byte_level_pre_tokenizer().__getstate__()):
        return False
    ids = [vocabulary.get("".join(merge), -1) for merge in model["merges"]]
    is_ascending = all(first < second for first, second in pairwise(ids))
    return is_ascending and all(token["special"] for token in data["added_tokens"])
