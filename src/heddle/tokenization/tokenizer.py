"""Tokenizers over `tokenizers`: our byte-level BPE, of which every text comes back exactly, and those of imports."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from heddle.errors import DataError
from heddle.progress import printable
from heddle.tokenization.token_bytes import Stream, WholeStream, added_bytes, probes, spelling_of

FILE = "tokenizer.json"
MARKS = "texts.json"  # what opens and ends a text, beside an imported tokenizer
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
END = "<|end|>"
SMALLEST_VOCABULARY = 257  # the 256 bytes and the end token
# Longest run that BPE merges within: its time grows faster than the run, and one letter may fill 100 MB.
LONGEST_RUN = 256
# GPT-2's pattern, equal to it on every run up to LONGEST_RUN.
_PATTERN = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}{1,N}| ?\p{N}{1,N}| ?[^\s\p{L}\p{N}]{1,N}|\s{1,N}(?!\S)|\s{1,N}").replace(
    "{1,N}", f"{{1,{LONGEST_RUN}}}"
)
_END_NAMES = (
    END, "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>"
)  # fmt: skip
_FILE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Marks:
    """What an imported tokenizer sets around a text: ids that open it, and ids that end it, the usual one first.

    beside: other files of its folder by name, which go where it goes.
    """

    opening: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Text to token ids and back; ids are below `vocab_size`, and none is one of `absent`.

    One of ours (`own`) round-trips any Unicode text exactly, and opens each with `end`, a token that no text holds.
    An imported one does as its folder says. `opening` stands before each text, `ends` end one; `end` divides
    documents in training. `special` names the special tokens: id to text. `hash` names the tokenizer by its content.
    """

    def __init__(self, engine: Engine, name: str, text: str | None = None, marks: Marks | None = None) -> None:
        """Take over an engine; `name` is for messages. With `marks` it is an imported one, whose file is `text`.

        Raises DataError where one of ours does not round-trip.
        """
        engine.no_truncation()
        engine.no_padding()
        if isinstance(engine.model, models.BPE):
            engine.model.dropout = None
        self.own, self._name, self._engine, self._text = marks is None, name, engine, text
        end = _end_token(engine) if marks is None else None
        self.opening, self.ends = ([end], [end]) if end is not None else ([], [])
        # "<|end|>" written in a text is seven characters, never the token.
        engine.encode_special_tokens = True
        self.special = {i: one.content for i, one in engine.get_added_tokens_decoder().items() if one.special}
        self._spelling = spelling_of(engine, name)
        self.absent = self._spelling.absent
        self.vocab_size = len(self._spelling.pieces)
        self.beside: Mapping[str, str] = {} if marks is None else marks.beside
        if marks is None:
            self.hash = hashlib.sha256(_canonical(self.to_json())).hexdigest()
            self._check_round_trip(name)
            return
        self.opening = self._checked(marks.opening)
        self.ends = list(dict.fromkeys([*self._checked(marks.ends), *self.opening[:1]]))
        self.hash = hashlib.sha256(f"{self.opening}{self.ends}{text}".encode()).hexdigest()

    @property
    def end(self) -> int:
        """The token that divides documents: the first of the opening, or of the ends. DataError: there is none."""
        if found := [*self.opening, *self.ends]:
            return found[0]
        raise DataError(f"tokenizer {self._name} has no token that ends or opens a text: train another one.")

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn merges from the documents; at most `vocab_size` tokens, fewer where the text is too small.

        The same documents give the same tokenizer. Raises DataError for a vocabulary below 257.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise DataError(
                f"vocab_size {vocab_size} is too small to hold every byte and the end token: "
                f"give at least {SMALLEST_VOCABULARY}."
            )
        engine = Engine(models.BPE())
        split = pre_tokenizers.Split(Regex(_PATTERN), "isolated")
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
        engine.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        engine.train_from_iterator(documents, trainer)
        return cls(engine, "trained here")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`. Raises DataError where it is missing, malformed or does not round-trip."""
        name = printable(str(path))
        try:
            if not path.is_file():
                raise DataError(f"tokenizer {name} is not a file: give the path of a tokenizer.json.")
            if path.stat().st_size > _FILE_BYTES:
                raise DataError(f"tokenizer {name} is over {_FILE_BYTES // 2**20} MB: give a tokenizer.json.")
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"tokenizer {name} cannot be read as UTF-8 text: give a tokenizer.json.") from error
        return cls.from_json(text, name=name)

    @classmethod
    def from_json(cls, text: str, name: str = "given as JSON", marks: Marks | None = None) -> Tokenizer:
        """Read the content of a `tokenizer.json`, with `marks` an imported one. Raises DataError as `load` does."""
        return cls(read_engine(text, name), name, text, marks)

    @classmethod
    def from_documents(cls, documents: Mapping[str, str]) -> Tokenizer | None:
        """The tokenizer of a checkpoint's documents; None where they hold none."""
        if FILE not in documents:
            return None
        beside = {name: text for name, text in documents.items() if name in BESIDE}
        if MARKS not in documents:
            tokenizer = cls.from_json(documents[FILE])
            tokenizer.beside = beside
            return tokenizer
        try:
            told = json.loads(documents[MARKS])
            marks = Marks(tuple(told["opening"]), tuple(told["ends"]), beside)
        except (ValueError, TypeError, KeyError):
            raise DataError(f"{MARKS} does not say what opens and ends a text: import the model again.") from None
        return cls.from_json(documents[FILE], marks=marks)

    def documents(self) -> dict[str, str]:
        """The files of a checkpoint that `from_documents` reads."""
        found = {FILE: self.to_json(), **self.beside}
        told = {"opening": self.opening, "ends": self.ends}
        return found if self.own else found | {MARKS: json.dumps(told) + "\n"}

    def to_json(self) -> str:
        """The content of a `tokenizer.json` that `tokenizers` and `transformers` read; an import's is as it was."""
        return self._engine.to_str(pretty=True) if self.own or self._text is None else self._text

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without an end token. Raises DataError for half a surrogate pair.

        Names of special tokens in the text are characters; but for an import they are the tokens, as in its library,
        where templates of chats are written so.
        """
        if self.own:
            return self.encode_batch([text])[0]
        self._engine.encode_special_tokens = False
        try:
            return self.encode_batch([text])[0]
        finally:
            self._engine.encode_special_tokens = True

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several documents, encoded in parallel; names of special tokens are characters."""
        try:
            encoded = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise DataError("a text holds half a surrogate pair, which is not Unicode: repair the text.") from error
        return [one.ids for one in encoded]

    def encode_marked(self, text: str) -> list[tuple[int, int]]:
        """(id, first character) of each token of a text in which special tokens count, as a chat template writes it."""
        self._engine.encode_special_tokens = False
        try:
            encoded = self._engine.encode(text, add_special_tokens=False)
        finally:
            self._engine.encode_special_tokens = True
        return [(token, start) for token, (start, _) in zip(encoded.ids, encoded.offsets, strict=True)]

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """Bytes that each token stands for, int64 [vocab_size]; 0 for special tokens.

        Where an import sets a space before each text, the token that divides texts takes its byte back. Raises
        DataError for an import that does not give back what it reads, Unicode's normal form NFC aside.
        """
        lengths = np.array([len(piece) for piece in self._spelling.pieces], dtype=np.int64)
        added = 0 if self.own else added_bytes(self._engine, self._spelling)
        if added is None:
            raise DataError(
                f"tokenizer {self._name} does not give back every text that it reads, so bits per byte cannot be "
                "measured with it: it can generate, but training needs another one."
            )
        lengths[self.end] = -added
        return lengths

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for; empty for special tokens. Raises DataError for an id out of range."""
        if not 0 <= token < self.vocab_size:
            raise DataError(f"token {token} is outside the tokenizer's vocabulary of {self.vocab_size}.")
        return self._spelling.pieces[token]

    def token(self, token: int) -> str:
        """How the file spells a token."""
        return str(self._engine.id_to_token(token))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; special tokens are left out, bytes that are not UTF-8 become U+FFFD."""
        tokens = [int(i) for i in ids]
        if self.own:
            return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")
        stream = self.stream()
        return "".join(map(stream.push, tokens)) + stream.finish()

    def stream(self, before: Sequence[int] = ()) -> Stream | WholeStream:
        """A decoder to push ids into one at a time; `before`: the ids that they follow, whose text is known."""
        if self.own or self._spelling.known:
            return Stream(self._spelling, any(map(self.token_bytes, before)))
        return WholeStream(self._engine, list(before))

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise DataError(
                    f"tokenizer {self._name}: a text is opened or ended by token {token!r}, which is none of its "
                    f"{self.vocab_size}: restore the files beside it."
                )
        return list(tokens)

    def _check_round_trip(self, name: str) -> None:
        texts, pieces = list(probes(self._engine)), self._spelling.pieces
        try:
            encoded = self.encode_batch(texts)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"tokenizer {name} cannot encode every text: use a byte-level one, or leave --tokenizer out."
            ) from error
        for text, ids in zip(texts, encoded, strict=True):
            if b"".join(pieces[i] for i in ids) != text.encode("utf-8") or self.end in ids:
                back = printable(self.decode(ids))[:40]
                raise DataError(
                    f"tokenizer {name} does not round-trip ('{printable(text)[:40]}' comes back as '{back}'): "
                    "use a byte-level one without a normalizer, or leave --tokenizer out to train one."
                )


def read_engine(text: str, name: str) -> Engine:
    """The engine of a tokenizer.json. Raises DataError, with the tokenizer's name, where it is malformed."""
    try:
        return Engine.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and panics that are not one
        raise DataError(f"tokenizer {name} is not a valid tokenizer.json: save it again with `tokenizers`.") from error


def _end_token(engine: Engine) -> int:
    special = {token.content: i for i, token in engine.get_added_tokens_decoder().items() if token.special}
    for name in _END_NAMES:
        if name in special:
            return special[name]
    engine.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    end = engine.token_to_id(END)
    assert end is not None
    return end


def _canonical(text: str) -> bytes:
    """The JSON with sorted keys and without nulls, so that formatting and new optional fields do not count."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items() if inner is not None}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(clean(json.loads(text)), sort_keys=True).encode()
