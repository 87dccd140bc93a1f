"""Tokenizers over the `tokenizers` library: heddle's byte-level BPE, which round-trips any text, and imported ones."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from heddle.errors import DataError, describe_path
from heddle.progress import printable
from heddle.tokenization import size_problem
from heddle.tokenization.backend import (
    EOD_TOKEN,
    byte_level_pre_tokenizer,
    canonical_json,
    find_eod_id,
    is_backend_error,
    read_backend,
    without_added_space,
)
from heddle.tokenization.fast_encoder import FastEncoder, fast_encoder
from heddle.tokenization.token_bytes import (
    BufferedDecodeStream,
    DecodeStream,
    prefix_space_bytes,
    read_token_bytes,
    round_trip_texts,
)

TOKENIZER_FILE = "tokenizer.json"
BOUNDARY_TOKENS_FILE = "texts.json"  # the BOS and EOS ids of an imported tokenizer
COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
_MAX_FILE_BYTES = 256 * 1024 * 1024
_CHECKED: set[str] = set()  # hashes of native tokenizers that were seen to round-trip; runs load one many times


@dataclass(frozen=True)
class BoundaryTokens:
    """How an imported tokenizer marks the start and end of a text.

    bos_ids: ids before each text. eos_ids: ids that end a text, the usual one first. companion_files: other files of
    the tokenizer's folder by name, which are saved wherever the tokenizer is saved.
    """

    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    companion_files: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Text to token ids and back. Ids are below `vocab_size`, except `unused_token_ids`.

    A native tokenizer (`is_native`: trained or checked by heddle) round-trips any Unicode text exactly and begins each
    text with `eod_id`, a token that no text contains. An imported tokenizer behaves as its files say. `bos_ids` precede
    each text, `eos_ids` end a text, `eod_id` separates documents in training. `special_tokens` maps the ids of special
    tokens to their text, `other_added_tokens` the ids of other added tokens. `hash` identifies the tokenizer by its
    content.
    """

    def __init__(
        self,
        backend: BackendTokenizer,
        name: str,
        json_text: str | None = None,
        boundary_tokens: BoundaryTokens | None = None,
    ) -> None:
        """Wrap a backend tokenizer; `name` is for error messages.

        With `boundary_tokens` the tokenizer is imported, and `json_text` is the content of its tokenizer.json.
        Raises DataError for a native tokenizer that does not round-trip.
        """
        self._lock = threading.RLock()  # settings of the backend change while a text is encoded
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, models.BPE):
            backend.model.dropout = None
        self.is_native, self._name, self._backend, self._json = boundary_tokens is None, name, backend, json_text
        eod_id = find_eod_id(backend) if boundary_tokens is None else None
        self.bos_ids, self.eos_ids = ([eod_id], [eod_id]) if eod_id is not None else ([], [])
        # "<|end|>" written in a text is seven characters, never the token.
        backend.encode_special_tokens = True
        added_tokens = backend.get_added_tokens_decoder()
        self.special_tokens = {i: token.content for i, token in added_tokens.items() if token.special}
        self.other_added_tokens = {
            i: token.content for i, token in added_tokens.items() if not token.special and token.content.strip()
        }
        self._token_bytes = read_token_bytes(backend, name)
        self.unused_token_ids = self._token_bytes.unused_token_ids
        self.vocab_size = len(self._token_bytes.by_id)
        self.companion_files: Mapping[str, str] = {} if boundary_tokens is None else boundary_tokens.companion_files
        if boundary_tokens is None:
            self.hash = hashlib.sha256(canonical_json(self.to_json())).hexdigest()
            self._check_round_trip(name)
            return
        self.bos_ids = self._check_token_ids(boundary_tokens.bos_ids)
        self.eos_ids = list(dict.fromkeys([*self._check_token_ids(boundary_tokens.eos_ids), *self.bos_ids[:1]]))
        self.hash = hashlib.sha256(f"{self.bos_ids}{self.eos_ids}{json_text}".encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copy, without the lock and the fast encoder, which is made again when needed."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_fast_encoder", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state of `__getstate__`."""
        self.__dict__ |= state
        self._lock = threading.RLock()

    @property
    def eod_id(self) -> int:
        """Return the end-of-document token, which separates documents: the first of `bos_ids`, else of `eos_ids`.

        Raises DataError if both are empty.
        """
        if boundary_ids := [*self.bos_ids, *self.eos_ids]:
            return boundary_ids[0]
        raise DataError(f"tokenizer {self._name} has no token that begins or ends a text: train another one.")

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train byte-level BPE on the documents: at most `vocab_size` tokens, fewer if the text is too small.

        The same documents give the same tokenizer. Raises DataError for a `vocab_size` below 257 or above 2^20.
        """
        if problem := size_problem(vocab_size):
            raise DataError(f"vocab_size {vocab_size} {problem}.")
        backend = BackendTokenizer(models.BPE())
        backend.pre_tokenizer = byte_level_pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOD_TOKEN],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(documents, trainer)
        return cls(backend, "trained here")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`. Raises DataError if it is missing, malformed or does not round-trip."""
        name = printable(str(path))
        try:
            what = describe_path(path)
            if what != "is a file":
                raise DataError(f"tokenizer {name} {what}: give the path of a tokenizer.json.")
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise DataError(f"tokenizer {name} is over {_MAX_FILE_BYTES // 2**20} MB: give a tokenizer.json.")
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"tokenizer {name} cannot be read as UTF-8 text: give a tokenizer.json.") from error
        return cls.from_json(text, name=name)

    @classmethod
    def from_json(
        cls, json_text: str, name: str = "given as JSON", boundary_tokens: BoundaryTokens | None = None
    ) -> Tokenizer:
        """Read the content of a `tokenizer.json`; with `boundary_tokens` the tokenizer is imported.

        Raises DataError as `load` does.
        """
        return cls(read_backend(json_text, name), name, json_text, boundary_tokens)

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> Tokenizer | None:
        """Read the tokenizer from a checkpoint's text files, content by name; None if there is none."""
        if TOKENIZER_FILE not in files:
            return None
        companion_files = {name: text for name, text in files.items() if name in COMPANION_FILES}
        if BOUNDARY_TOKENS_FILE not in files:
            tokenizer = cls.from_json(files[TOKENIZER_FILE])
            tokenizer.companion_files = companion_files
            return tokenizer
        try:
            boundary_ids = json.loads(files[BOUNDARY_TOKENS_FILE])
            marks = BoundaryTokens(tuple(boundary_ids["opening"]), tuple(boundary_ids["ends"]), companion_files)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DataError(
                f"{BOUNDARY_TOKENS_FILE} does not say which tokens begin and end a text: import the model again."
            ) from None
        return cls.from_json(files[TOKENIZER_FILE], boundary_tokens=marks)

    def to_files(self) -> dict[str, str]:
        """Return the text files of a checkpoint that `from_files` reads, content by name."""
        files = {TOKENIZER_FILE: self.to_json(), **self.companion_files}
        boundary_ids = {"opening": self.bos_ids, "ends": self.eos_ids}
        return files if self.is_native else files | {BOUNDARY_TOKENS_FILE: json.dumps(boundary_ids) + "\n"}

    def to_json(self) -> str:
        """Return the tokenizer.json, which `tokenizers` and `transformers` read; an imported one is unchanged."""
        return self._backend.to_str(pretty=True) if self.is_native or self._json is None else self._json

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without BOS or EOS. Raises DataError for half a surrogate pair.

        Names of special tokens in the text are plain characters for a native tokenizer. For an imported one they are
        the special tokens, as in `transformers`, so that text from a chat template is encoded correctly.
        """
        if self.is_native:
            return self.encode_batch([text])[0]
        with self._lock:
            self._backend.encode_special_tokens = False
            try:
                return self.encode_batch([text])[0]
            finally:
                self._backend.encode_special_tokens = True

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of documents, encoded in parallel; names of special tokens are plain characters."""
        try:
            with self._lock:
                encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise DataError("a text holds half a surrogate pair, which is not Unicode: repair the text.") from error
        except BaseException as error:
            if not is_backend_error(error):
                raise
            raise DataError(
                f"tokenizer {self._name} cannot encode every text: use a byte-level one, or let heddle train one."
            ) from error
        return [encoding.ids for encoding in encoded]

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the token ids of documents, uint32 [n] each, as `encode_batch` does, but faster where possible."""
        encode = self._fast_encoder.encode if self._fast_encoder else lambda text: None
        documents = [encode(text) for text in texts]
        rest = iter(self.encode_batch([text for text, ids in zip(texts, documents, strict=True) if ids is None]))
        return [np.array(next(rest), dtype=np.uint32) if ids is None else ids for ids in documents]

    @cached_property
    def _fast_encoder(self) -> FastEncoder | None:
        return fast_encoder(self._backend, self._token_bytes.by_id) if self.is_native else None

    def encode_with_offsets(self, text: str, continues: bool = False) -> list[tuple[int, int]]:
        """Return (id, index of its first character) of each token; names of special tokens become the tokens.

        continues: whether other text precedes, so that no space is added before this one.
        """
        with self._lock:
            steps, processor = (self._backend.normalizer, self._backend.pre_tokenizer), self._backend.post_processor
            self._backend.encode_special_tokens = False
            self._backend.post_processor = None  # it may move a token's start behind its spaces
            try:
                if continues:
                    self._backend.normalizer, self._backend.pre_tokenizer = without_added_space(self._backend)
                encoded = self._backend.encode(text, add_special_tokens=False)
            finally:
                self._backend.encode_special_tokens, self._backend.post_processor = True, processor
                if continues:
                    self._backend.normalizer, self._backend.pre_tokenizer = steps
        return [(token, start) for token, (start, _) in zip(encoded.ids, encoded.offsets, strict=True)]

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """Return the bytes of each token, int64 [vocab_size]; 0 for special tokens.

        If an imported tokenizer adds a space before each text, `eod_id` has length −1 to compensate for that byte.
        Raises DataError for an imported tokenizer that does not round-trip, Unicode normal form NFC aside.
        """
        lengths = np.array([len(piece) for piece in self._token_bytes.by_id], dtype=np.int64)
        space_bytes = 0 if self.is_native else prefix_space_bytes(self._backend, self._token_bytes)
        if space_bytes is None:
            raise DataError(
                f"tokenizer {self._name} does not round-trip every text, so bits per byte cannot be measured with it: "
                "it can generate, but training needs another one."
            )
        lengths[self.eod_id] = -space_bytes
        return lengths

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for special tokens. Raises DataError for an id out of range."""
        if not 0 <= token_id < self.vocab_size:
            raise DataError(f"token {token_id} is outside the tokenizer's vocabulary of {self.vocab_size}.")
        return self._token_bytes.by_id[token_id]

    def id_to_token(self, token_id: int) -> str:
        """Return the token as written in the vocabulary."""
        return str(self._backend.id_to_token(token_id))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        token_ids = [int(i) for i in ids]
        if self.is_native:
            return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")
        stream = self.decode_stream()
        return "".join(map(stream.push, token_ids)) + stream.finish()

    def decode_stream(self, previous_ids: Sequence[int] = ()) -> DecodeStream | BufferedDecodeStream:
        """Return a stream that decodes ids one at a time; `previous_ids` were decoded before them."""
        if self.is_native or self._token_bytes.matches_decoder:
            return DecodeStream(self._token_bytes, any(map(self.token_bytes, previous_ids)))
        return BufferedDecodeStream(self._backend, list(previous_ids))

    def _check_token_ids(self, token_ids: Sequence[int]) -> list[int]:
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise DataError(
                    f"tokenizer {self._name}: BOS or EOS token {token_id!r} is outside its vocabulary of "
                    f"{self.vocab_size}: restore the files of its folder."
                )
        return list(token_ids)

    def _check_round_trip(self, name: str) -> None:
        if self.hash in _CHECKED:
            return
        texts, token_bytes = list(round_trip_texts(self._backend)), self._token_bytes.by_id
        encoded = self.encode_batch(texts)
        for text, ids in zip(texts, encoded, strict=True):
            if b"".join(token_bytes[i] for i in ids) != text.encode("utf-8") or self.eod_id in ids:
                decoded = printable(self.decode(ids))[:40]
                raise DataError(
                    f"tokenizer {name} does not round-trip ('{printable(text)[:40]}' comes back as '{decoded}'): "
                    "use a byte-level one without a normalizer, or let heddle train one."
                )
        _CHECKED.add(self.hash)
