"""The bytes of each token, and incremental decoding: from token ids to text, one id at a time.

Two families of decoders are supported: byte-level (GPT-2: every token is a string of bytes) and SentencePiece's
(▁ is a space; a byte outside the vocabulary is a token such as <0xE2>). For any other decoder, the `tokenizers` library
decodes.
"""

import codecs
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from tokenizers import Tokenizer as BackendTokenizer

from heddle.errors import DataError
from heddle.tokenization.backend import is_backend_error

SPIECE_UNDERLINE = "\u2581"  # ▁: a space in SentencePiece
_BYTE_FALLBACK_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Which spaces a decoder removes at the start of a text: none, one, or all spaces of the first token.
LeadingSpace = Literal["keep", "strip_one", "strip_first_token"]


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of each token of a tokenizer.

    by_id: the bytes of each id, empty for special tokens. unused_token_ids: ids below the largest without a token.
    byte_fallback_ids: tokens of one byte, which are decoded together with their neighbors. leading_space: see
    `LeadingSpace`. matches_decoder: whether these bytes give the same text as the decoder of the `tokenizers` library.
    """

    by_id: list[bytes]
    unused_token_ids: tuple[int, ...] = ()
    byte_fallback_ids: frozenset[int] = frozenset()
    leading_space: LeadingSpace = "keep"
    matches_decoder: bool = True


def read_token_bytes(backend: BackendTokenizer, name: str) -> TokenBytes:
    """Read the bytes of every token. Raises DataError, naming the tokenizer, for large gaps between ids."""
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=-1)
    if largest > 4 * len(vocabulary) + 1024:
        raise DataError(
            f"tokenizer {name} gives a token the id {largest}, with only {len(vocabulary)} tokens: "
            "number the tokens without gaps."
        )
    by_id = [b""] * (largest + 1)
    unused_token_ids = tuple(sorted(set(range(largest + 1)) - set(vocabulary.values())))
    steps = _decoder_steps(backend.decoder)
    leading_space = _sentencepiece_leading_space(steps)
    if leading_space is None:
        byte_of_character = {character: byte for byte, character in enumerate(byte_level_alphabet())}
        for token, i in vocabulary.items():
            is_text = i in added or not all(character in byte_of_character for character in token)
            by_id[i] = token.encode("utf-8") if is_text else bytes(byte_of_character[character] for character in token)
    else:
        for token, i in vocabulary.items():
            by_id[i] = token.replace(SPIECE_UNDERLINE, " ").encode("utf-8")
    for i, added_token in added.items():
        if added_token.special:
            by_id[i] = b""
    if leading_space is None:
        return TokenBytes(by_id, unused_token_ids, matches_decoder=[step["type"] for step in steps] == ["ByteLevel"])
    byte_fallback_ids = set()
    if any(step["type"] == "ByteFallback" for step in steps):
        for token, i in vocabulary.items():
            if (match := _BYTE_FALLBACK_TOKEN.fullmatch(token)) and by_id[i]:
                by_id[i] = bytes.fromhex(match[1])
                byte_fallback_ids.add(i)
    return TokenBytes(by_id, unused_token_ids, frozenset(byte_fallback_ids), leading_space)


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """Return the settings of each step of a decoder."""
    if decoder is None:
        return []
    settings = json.loads(decoder.__getstate__())
    return list(settings["decoders"]) if settings["type"] == "Sequence" else [settings]


def _sentencepiece_leading_space(steps: list[dict[str, Any]]) -> LeadingSpace | None:
    """How a SentencePiece decoder treats the spaces at the start of a text; None for any other decoder."""
    kinds = [step["type"] for step in steps]
    if kinds == ["Metaspace"]:
        if steps[0].get("replacement") != SPIECE_UNDERLINE:
            return None
        return "keep" if steps[0].get("prepend_scheme", "always") == "never" else "strip_first_token"
    # In another order, the byte tokens of a literal ▁ would become a space as well.
    if kinds not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return None
    if steps[0]["pattern"] != {"String": SPIECE_UNDERLINE} or steps[0]["content"] != " ":
        return None
    if kinds[-1] == "Fuse":
        return "keep"
    strip = steps[-1]
    return "strip_one" if (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0) else None


@cache
def byte_level_alphabet() -> tuple[str, ...]:
    """Return byte-level BPE's character for each byte: itself if visible, else U+0100 and up (GPT-2)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, hidden = [], 0
    for byte in range(256):
        characters.append(chr(byte) if byte in visible else chr(256 + hidden))
        hidden += byte not in visible
    return tuple(characters)


class DecodeStream:
    """Decode ids one at a time. The results of all `push` calls and of `finish`, joined, equal `decode` of all ids."""

    def __init__(self, token_bytes: TokenBytes, has_text_before: bool) -> None:
        """has_text_before: whether text precedes, so that the first pushed token is not the first of the text."""
        self._token_bytes, self._has_text = token_bytes, has_text_before
        self._byte_run = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes; never half a character."""
        data = self._token_bytes.by_id[token_id]
        if not data:
            return ""
        if token_id in self._token_bytes.byte_fallback_ids:
            self._byte_run += data  # a run of byte tokens is text only if the whole run is valid UTF-8
            return ""
        flushed, is_first = self._flush(), not self._has_text
        if is_first and self._token_bytes.leading_space == "strip_first_token":
            data = data.replace(b" ", b"")
        elif is_first and self._token_bytes.leading_space == "strip_one":
            data = data.removeprefix(b" ")
        self._has_text = True
        return flushed + self._decoder.decode(data)

    def finish(self) -> str:
        """Return what is left: an unfinished character becomes U+FFFD."""
        return self._flush() + self._decoder.decode(b"", final=True)

    def _flush(self) -> str:
        byte_run, self._byte_run = self._byte_run, b""
        if not byte_run:
            return ""
        is_first, self._has_text = not self._has_text, True
        try:
            text = byte_run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(byte_run)
        return text.removeprefix(" ") if is_first and self._token_bytes.leading_space == "strip_one" else text


@dataclass
class BufferedDecodeStream:
    """Collects ids and decodes them all in `finish`, for tokenizers with an unknown decoder."""

    backend: BackendTokenizer
    previous_ids: Sequence[int] = ()
    ids: list[int] = field(default_factory=list)

    def push(self, token_id: int) -> str:
        """Store the id and return ""."""
        self.ids.append(token_id)
        return ""

    def finish(self) -> str:
        """Return the text that the pushed ids add to the text of the previous ids."""
        previous_text = self.backend.decode(list(self.previous_ids))
        text = self.backend.decode([*self.previous_ids, *self.ids])
        return text.removeprefix(previous_text) if text.startswith(previous_text) else self.backend.decode(self.ids)


def prefix_space_bytes(backend: BackendTokenizer, token_bytes: TokenBytes) -> int | None:
    """Return the bytes (0, or 1 for a space) that a tokenizer adds before each text; None if it does not round-trip.

    Three changes still count as a round trip: the text returns in Unicode normal form NFC; a ▁ returns as a space; no
    space is added before a text that begins with one.
    """
    if not token_bytes.matches_decoder:
        return None
    normalizer = backend.normalizer
    normalizes_nfc = normalizer is not None and json.loads(normalizer.__getstate__())["type"] == "NFC"
    texts = [text.replace(SPIECE_UNDERLINE, "") for text in round_trip_texts(backend)]
    added = set()
    try:
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
    except BaseException as error:  # a text has no tokens
        if not is_backend_error(error):
            raise
        return None
    for text, encoding in zip(texts, encoded, strict=True):
        expected = (normalizer.normalize_str(text) if normalizes_nfc else text).encode("utf-8")
        actual = b"".join(token_bytes.by_id[i] for i in encoding.ids)
        if actual not in (expected, b" " + expected):
            return None
        if not text.startswith(" "):
            added.add(len(actual) - len(expected))
    return added.pop() if len(added) == 1 else None


def round_trip_texts(backend: BackendTokenizer) -> Iterator[str]:
    """Yield texts that a lossy tokenizer is likely to change: every range of Unicode, spaces, normal forms."""
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
    yield from _random_texts()
    for token in list(backend.get_added_tokens_decoder().values())[:2000]:
        yield f"x {token.content} y{token.content}"


@cache
def _random_texts() -> list[str]:
    """Texts of code points that are drawn from all of Unicode, the same in every process."""
    generator = random.Random(0)
    drawn = ((generator.randrange(0x110000 - 0x800) for _ in range(64)) for _ in range(64))
    return ["".join(chr(point if point < 0xD800 else point + 0x800) for point in points) for points in drawn]
