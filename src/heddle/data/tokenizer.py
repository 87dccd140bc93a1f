"""Byte-level BPE over `tokenizers`: every text comes back exactly, and every token stands for known bytes."""

from __future__ import annotations

import codecs
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from heddle.errors import DataError
from heddle.progress import printable

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
_WORD = re.compile(rf"\w{{1,{LONGEST_RUN}}}|[^\w\s]{{1,{LONGEST_RUN}}}")
_FILE_BYTES = 256 * 1024 * 1024


class Tokenizer:
    """Text to token ids and back. Round-trips any Unicode text exactly; ids are below `vocab_size`.

    `end` is the id of the token that opens each document; it is never the encoding of any text. `hash`
    names the tokenizer by its content. `byte_lengths[id]` is the number of bytes a token stands for, int64
    [vocab_size]; 0 for the end token and other special tokens, which `special` names: id to text.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        """Take over an engine; `name` is for messages. Raises DataError where it does not round-trip."""
        engine.no_truncation()
        engine.no_padding()
        if isinstance(engine.model, models.BPE):
            engine.model.dropout = None
        self.end = _end_token(engine)
        # "<|end|>" written in a text is seven characters, never the token.
        engine.encode_special_tokens = True
        self._engine = engine
        self._bytes = _token_bytes(engine, name)
        self.special = {i: one.content for i, one in engine.get_added_tokens_decoder().items() if one.special}
        self.vocab_size = len(self._bytes)
        self.byte_lengths = np.array([len(b) for b in self._bytes], dtype=np.int64)
        self.hash = hashlib.sha256(_canonical(self.to_json())).hexdigest()
        self._check_round_trip(name)

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
    def from_json(cls, text: str, name: str = "given as JSON") -> Tokenizer:
        """Read the content of a `tokenizer.json`. Raises DataError as `load` does."""
        try:
            engine = Engine.from_str(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exception, and panics that are not one
            raise DataError(
                f"tokenizer {name} is not a valid tokenizer.json: save it again with `tokenizers`."
            ) from error
        return cls(engine, name)

    def to_json(self) -> str:
        """The content of a `tokenizer.json` that `from_json`, `tokenizers` and `transformers` read."""
        return self._engine.to_str(pretty=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without an end token. Raises DataError for half a surrogate pair."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, encoded in parallel."""
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

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for; empty for special tokens. Raises DataError for an id out of range."""
        if not 0 <= token < self.vocab_size:
            raise DataError(f"token {token} is outside the tokenizer's vocabulary of {self.vocab_size}.")
        return self._bytes[token]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; special tokens are left out, bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", "replace")

    def stream(self) -> Stream:
        """A decoder to push ids into one at a time."""
        return Stream(self)

    def _check_round_trip(self, name: str) -> None:
        texts = list(_probes(self._engine))
        try:
            encoded = self.encode_batch(texts)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"tokenizer {name} cannot encode every text: use a byte-level one, or leave --tokenizer out."
            ) from error
        for text, ids in zip(texts, encoded, strict=True):
            if b"".join(self._bytes[i] for i in ids) != text.encode("utf-8") or self.end in ids:
                back = printable(self.decode(ids))[:40]
                raise DataError(
                    f"tokenizer {name} does not round-trip ('{printable(text)[:40]}' comes back as '{back}'): "
                    "use a byte-level one without a normalizer, or leave --tokenizer out to train one."
                )


class Stream:
    """Incremental decoding: what `push` and the last `finish` return, joined, is `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters completed by this token; never half a character."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left of an unfinished character, as U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


def distinct_bytes(texts: Iterable[str], bound: int) -> int:
    """UTF-8 bytes of the distinct words of the texts, counted until they pass `bound`.

    Learning holds every distinct word, at about 100 bytes a byte: scripts without spaces have many, source code few.
    """
    seen: set[str] = set()
    total = 0
    for text in texts:
        new = set(_WORD.findall(text)) - seen
        seen |= new
        total += sum(len(word.encode("utf-8")) for word in new)
        if total > bound:
            break
    return total


def _end_token(engine: Engine) -> int:
    special = {token.content: i for i, token in engine.get_added_tokens_decoder().items() if token.special}
    for name in _END_NAMES:
        if name in special:
            return special[name]
    engine.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    end = engine.token_to_id(END)
    assert end is not None
    return end


def _token_bytes(engine: Engine, name: str) -> list[bytes]:
    """Bytes by id: the byte-level spelling, an added token's own text, and nothing for special tokens."""
    spelling = {character: byte for byte, character in enumerate(_spelling())}
    added = engine.get_added_tokens_decoder()
    vocabulary = engine.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values())
    if largest > 4 * len(vocabulary) + 1024:
        raise DataError(
            f"tokenizer {name} gives a token the id {largest}, with only {len(vocabulary)} tokens: number them."
        )
    table = [b""] * (largest + 1)
    for token, i in vocabulary.items():
        if i in added:
            table[i] = b"" if added[i].special else token.encode("utf-8")
        elif all(character in spelling for character in token):
            table[i] = bytes(spelling[character] for character in token)
    return table


def _spelling() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself where visible, else U+0100 and on (GPT-2)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, hidden = [], 0
    for byte in range(256):
        characters.append(chr(byte) if byte in visible else chr(256 + hidden))
        hidden += byte not in visible
    return characters


def _canonical(text: str) -> bytes:
    """The JSON with sorted keys and without nulls, so that formatting and new optional fields do not count."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items() if inner is not None}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(clean(json.loads(text)), sort_keys=True).encode()


def _probes(engine: Engine) -> Iterator[str]:
    """Texts that a tokenizer loses something of, if it loses anything: every range of Unicode, spaces, forms."""
    yield from ("a", " a", "a ", "  a  b ", "A b\tc\r\nd\n\n\n  e", "\n", " ", "\t\t", "\r", "don't I'LL x'y")
    yield from (
        "e\u0301 \u00e9 \u212b \ufb01 \uff21",
        "\u2581a\u2581",
        "\u0120a\u010a",
        "<0x41> ## @@ </w>",
        "\ufeffa",
    )
    yield from (
        "日本語の文章。",
        "한국어",
        "العربية",
        "हिन्दी",
        "👩‍👩‍👧‍👦🏽",
        "1234567 3.14",
        "\u3000\u00a0\u200b\u2028",
    )
    yield "".join(map(chr, range(0x800)))
    draw = random.Random(0)
    for _ in range(64):
        points = (draw.randrange(0x110000 - 0x800) for _ in range(64))
        yield "".join(chr(point if point < 0xD800 else point + 0x800) for point in points)
    for token in list(engine.get_added_tokens_decoder().values())[:2000]:
        yield f"x {token.content} y{token.content}"
