"""What the tokens of an engine stand for: bytes by id, and how a text is put together from them, piece by piece.

Two families of decoders are taken apart: byte-level (GPT-2: every token is bytes) and SentencePiece's (▁ is a space, a
byte that no piece has is a token <0xE2>). Of any other only the engine itself knows what its tokens say.
"""

import codecs
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers import Tokenizer as Engine

from heddle.errors import DataError

SPACE = "\u2581"  # ▁, which SentencePiece writes for a space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# What a decoder takes from the beginning of a text: nothing, a space, or every space of the first token.
Start = Literal["whole", "strip", "first"]


@dataclass(frozen=True)
class Spelling:
    """pieces: bytes by id, none for special tokens; absent: ids below the largest that no token has.

    fallback: tokens of one byte, which are decoded together with their neighbours. known: whether the pieces say what
    the engine's decoder says.
    """

    pieces: list[bytes]
    absent: tuple[int, ...] = ()
    fallback: frozenset[int] = frozenset()
    start: Start = "whole"
    known: bool = True


def spelling_of(engine: Engine, name: str) -> Spelling:
    """Read an engine's tokens. Raises DataError, with the tokenizer's `name`, for ids far apart."""
    added = engine.get_added_tokens_decoder()
    vocabulary = engine.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=-1)
    if largest > 4 * len(vocabulary) + 1024:
        raise DataError(
            f"tokenizer {name} gives a token the id {largest}, with only {len(vocabulary)} tokens: number them."
        )
    pieces = [b""] * (largest + 1)
    absent = tuple(sorted(set(range(largest + 1)) - set(vocabulary.values())))
    steps = _steps(engine.decoder)
    spaced = _spaced(steps)
    if spaced is None:
        spelling = {character: byte for byte, character in enumerate(_alphabet())}
        for token, i in vocabulary.items():
            plain = i in added or not all(character in spelling for character in token)
            pieces[i] = token.encode("utf-8") if plain else bytes(spelling[character] for character in token)
    else:
        for token, i in vocabulary.items():
            pieces[i] = token.replace(SPACE, " ").encode("utf-8")
    for i, one in added.items():
        if one.special:
            pieces[i] = b""
    if spaced is None:
        return Spelling(pieces, absent, known=[step["type"] for step in steps] == ["ByteLevel"])
    fallback = set()
    if any(step["type"] == "ByteFallback" for step in steps):
        for token, i in vocabulary.items():
            if (found := _BYTE.fullmatch(token)) and pieces[i]:
                pieces[i] = bytes.fromhex(found[1])
                fallback.add(i)
    return Spelling(pieces, absent, frozenset(fallback), spaced)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """A decoder's settings, one table a step."""
    if decoder is None:
        return []
    told = json.loads(decoder.__getstate__())
    return list(told["decoders"]) if told["type"] == "Sequence" else [told]


def _spaced(steps: list[dict[str, Any]]) -> Start | None:
    """How a decoder of SentencePiece's begins a text; None for any other."""
    kinds = [step["type"] for step in steps]
    if kinds == ["Metaspace"]:
        if steps[0].get("replacement") != SPACE:
            return None
        return "whole" if steps[0].get("prepend_scheme", "always") == "never" else "first"
    # In another order, a space would also be made of the bytes of a ▁.
    if kinds not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return None
    if steps[0]["pattern"] != {"String": SPACE} or steps[0]["content"] != " ":
        return None
    if kinds[-1] == "Fuse":
        return "whole"
    last = steps[-1]
    return "strip" if (last["content"], last["start"], last["stop"]) == (" ", 1, 0) else None


def _alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself where visible, else U+0100 and on (GPT-2)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, hidden = [], 0
    for byte in range(256):
        characters.append(chr(byte) if byte in visible else chr(256 + hidden))
        hidden += byte not in visible
    return characters


class Stream:
    """Incremental decoding: what `push` and the last `finish` return, joined, is `decode` of all ids."""

    def __init__(self, spelling: Spelling, begun: bool) -> None:
        """begun: whether a text stands before, so that the first token is not the text's first."""
        self._spelling, self._begun = spelling, begun
        self._run = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters completed by this token; never half a character."""
        piece = self._spelling.pieces[token]
        if not piece:
            return ""
        if token in self._spelling.fallback:
            self._run += piece  # such bytes are text only if all in a row are
            return ""
        before, first = self._flush(), not self._begun
        if first and self._spelling.start == "first":
            piece = piece.replace(b" ", b"")
        elif first and self._spelling.start == "strip":
            piece = piece.removeprefix(b" ")
        self._begun = True
        return before + self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left of an unfinished character, as U+FFFD, or nothing."""
        return self._flush() + self._decoder.decode(b"", final=True)

    def _flush(self) -> str:
        run, self._run = self._run, b""
        if not run:
            return ""
        first, self._begun = not self._begun, True
        try:
            text = run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)
        return text.removeprefix(" ") if first and self._spelling.start == "strip" else text


@dataclass
class WholeStream:
    """For an engine that alone knows its tokens: the text comes when all of it is there."""

    engine: Engine
    before: Sequence[int] = ()
    ids: list[int] = field(default_factory=list)

    def push(self, token: int) -> str:
        """Nothing yet."""
        self.ids.append(token)
        return ""

    def finish(self) -> str:
        """What the ids add to the text of those before."""
        known = self.engine.decode(list(self.before))
        text = self.engine.decode([*self.before, *self.ids])
        return text.removeprefix(known) if text.startswith(known) else self.engine.decode(self.ids)


def added_bytes(engine: Engine, spelling: Spelling) -> int | None:
    """How many bytes (0 or 1: a space) an engine sets before a text that it otherwise gives back; None: it does not.

    A text may come back in its normal form NFC, which is the same text to Unicode, with spaces for ▁, and where it
    begins with a space that was there already.
    """
    if not spelling.known:
        return None
    normalizer = engine.normalizer
    canonical = normalizer is not None and json.loads(normalizer.__getstate__())["type"] == "NFC"
    texts = [text.replace(SPACE, "") for text in probes(engine)]
    added = set()
    try:
        encoded = engine.encode_batch_fast(texts, add_special_tokens=False)
    except Exception:  # the library raises bare Exception where it has no token for a text
        return None
    for text, one in zip(texts, encoded, strict=True):
        want = (normalizer.normalize_str(text) if canonical else text).encode("utf-8")
        told = b"".join(spelling.pieces[i] for i in one.ids)
        if told not in (want, b" " + want):
            return None
        if not text.startswith(" "):
            added.add(len(told) - len(want))
    return added.pop() if len(added) == 1 else None


def probes(engine: Engine) -> Iterator[str]:
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
