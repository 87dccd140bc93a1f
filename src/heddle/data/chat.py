"""`chat:FILE.jsonl`: conversations packed into rows, of which only what the assistant says is learned.

A line is `{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heddle import progress
from heddle.data.chat_format import ASSISTANT, ROLES, ChatFormat, Spoken
from heddle.data.documents import UnreadableError, json_lines
from heddle.data.samples import Batch, shuffled
from heddle.data.sources import is_held_out
from heddle.errors import DataError
from heddle.progress import printable
from heddle.tokenization.tokenizer import Tokenizer

PREFIX = "chat:"


@dataclass(frozen=True, eq=False)
class Packed:
    """Conversations of at most `context` inputs, and which of them stand side by side in each row."""

    said: Sequence[Spoken]
    rows: Sequence[Sequence[int]]
    context: int

    def batch(self, index: np.ndarray, samples: np.ndarray) -> Batch:
        """The rows of an index int64 [B], padded on the right; neither padding nor what others say is asked."""
        tokens = np.zeros((len(index), self.context + 1), dtype=np.int64)
        answers = np.full((len(index), self.context), -1, dtype=np.int64)
        lengths = []
        for row, which in enumerate(index.tolist()):
            start = 0
            for one in self.rows[which]:
                said, scored = self.said[one]
                stop = start + len(said) - 1
                tokens[row, start:stop] = said[:-1]
                answers[row, start:stop] = np.where(scored[1:], said[1:], -1)
                start = stop
            lengths.append(tuple(len(self.said[one].tokens) - 1 for one in self.rows[which]))
        return Batch(tokens, tuple(lengths), samples, answers=answers)


@dataclass(frozen=True, eq=False)
class Chat:
    """Conversations to train on and conversations held out; `hash` names all of them, and how they are written."""

    form: ChatFormat
    train: Packed
    held: Packed
    hash: str
    report: dict[str, Any]

    @property
    def context(self) -> int:
        """Tokens of a row."""
        return self.train.context

    @property
    def tokenizer(self) -> Tokenizer:
        """That which they are written with."""
        return self.form.tokenizer

    def batch(self, seed: int, first: int, rows: int) -> Batch:
        """Rows `first` to `first + rows − 1` of an endless order: every row once an epoch, each epoch anew."""
        samples = np.arange(first, first + rows, dtype=np.int64)
        return self.train.batch(shuffled(samples, len(self.train.rows), (seed, 0)), samples)

    def held_out(self, rows: int, batch_size: int) -> Iterator[Batch]:
        """About `rows` of the rows held out, evenly over them."""
        index = np.arange(0, len(self.held.rows), max(1, len(self.held.rows) // max(1, rows)), dtype=np.int64)
        for first in range(0, len(index), batch_size):
            some = index[first : first + batch_size]
            yield self.held.batch(some, some)


def is_chat(argument: str) -> bool:
    """Whether a `--data` argument names conversations; a file of such a name is written ./chat:…"""
    return argument.startswith(PREFIX)


def prepare_chat(
    arguments: Sequence[str], tokenizer: Tokenizer, context: int, documents: Mapping[str, str] | None = None
) -> Chat:
    """Read, check, write as tokens and pack. `documents`: what lies beside the tokenizer, such as its chat template.

    One conversation in twenty, chosen by its hash, is held out, so equal ones are never on both sides; where that
    leaves a side empty, one. A conversation longer than `context` is cut there. Raises DataError naming file and line.
    """
    try:
        form = ChatFormat(tokenizer, documents)
    except UnreadableError as error:
        raise DataError(f"the chat template beside the tokenizer {error}: repair it.") from error
    paths = [Path(argument.removeprefix(PREFIX)) for argument in arguments]
    content, sides, found = hashlib.sha256(), _Sides(context), 0
    with progress.bar("reading", None, "bytes") as bar:
        for path in paths:
            for digest, rows, size in _conversations(path, form):
                content.update(digest)
                sides.add(digest, rows)
                found += 1
                bar.advance(size)
    train, held = sides.packed()
    cut, lost = sides.cut, sides.lost
    report: dict[str, Any] = {
        "name": "+".join(printable(path.name) for path in paths),
        "hash": hashlib.sha256(content.digest() + form.hash.encode()).hexdigest(),
        "conversations": found,
        "cut": cut,
        "without_answer_after_cut": lost,
        "template": form.template,
        "tokenizer": {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end},
    }
    for name, side in (("train", train), ("validation", held)):
        scored = sum(int(one.scored[1:].sum()) for one in side.said)
        report[name] = {"conversations": len(side.said), "rows": len(side.rows), "scored_tokens": scored}
    progress.say(
        f"chat {report['name']}: {len(train.said):,} conversations in {len(train.rows):,} rows to train on, "
        f"{len(held.said):,} to validate on, {report['train']['scored_tokens']:,} tokens are the assistant's"
    )
    if cut:
        progress.say(
            f"{cut:,} conversations are longer than --context {context} and were cut there"
            + (f"; of {lost:,} nothing of the assistant is left, so they teach nothing" if lost else "")
        )
    return Chat(form, train, held, report["hash"], report)


class _Sides:
    """Gathers rows, cut to the context, by the hash of their conversation."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.said: dict[bytes, list[Spoken]] = {}
        self.cut = self.lost = 0

    def add(self, digest: bytes, rows: Sequence[Spoken]) -> None:
        """One conversation, which may have come before."""
        short = [Spoken(tokens[: self.context + 1], scored[: self.context + 1]) for tokens, scored in rows]
        kept = [one for one in short if one.scored[1:].any()]
        self.cut += any(len(one.tokens) > self.context + 1 for one in rows)
        self.lost += not kept
        self.said.setdefault(digest, []).extend(kept)

    def packed(self) -> tuple[Packed, Packed]:
        """Both sides. Raises DataError where there are not two different conversations with an answer."""
        known = [digest for digest, rows in self.said.items() if rows]
        if len(known) < 2:
            raise DataError(
                f"chat: {len(known)} different conversations have an answer within --context {self.context}, and two "
                "are needed, one to be held out: give more conversations, or a longer context."
            )
        held = {digest for digest in known if is_held_out(digest)}
        if len(held) in (0, len(known)):
            held = {min(known)}
        sides = []
        for side in (False, True):
            said = [one for digest in known if (digest in held) == side for one in self.said[digest]]
            sides.append(Packed(said, pack([len(one.tokens) - 1 for one in said], self.context), self.context))
        return sides[0], sides[1]


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which of the lengths (each 1 to `room`) share a row of `room`: best fit, the longest first."""
    rows: list[list[int]] = []
    free: list[list[int]] = [[] for _ in range(room + 1)]  # rows by how much is left in them
    some = 0  # bit n: there is a row with n left
    for one in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fits = some >> lengths[one]
        if fits:
            left = lengths[one] + (fits & -fits).bit_length() - 1
            row = free[left].pop()
            some ^= 0 if free[left] else 1 << left
            rows[row].append(one)
        else:
            left, row = room, len(rows)
            rows.append([one])
        left -= lengths[one]
        free[left].append(row)
        some |= 1 << left
    return rows


def _conversations(path: Path, form: ChatFormat) -> Iterator[tuple[bytes, list[Spoken], int]]:
    """Of each line: the conversation's hash, its rows, and its size in bytes. Raises DataError."""
    label = printable(str(path))
    if not path.is_file():
        raise DataError(f"data file {label} is no file: give chat:FILE.jsonl.")
    line = 0
    try:
        with open(path, "rb") as file:
            for number, record in json_lines(file):
                line = number
                messages = _messages(record)
                plain = json.dumps([[one["role"], one["content"]] for one in messages]).encode()
                yield hashlib.sha256(plain).digest(), form.rows(messages), len(plain)
    except _Misfit as error:
        raise DataError(f"data file {label} {error} on line {line}: give {_EXPECTED}.") from error
    except UnreadableError as error:
        place = "" if "on line" in str(error) else f", line {line},"
        raise DataError(f"data file {label}{place} {error}.") from error
    except OSError as error:
        raise DataError(f"data file {label} cannot be read ({error.strerror or error}): make it readable.") from error
    if line == 0:
        raise DataError(f"data file {label} is empty: give one conversation a line.")


_EXPECTED = f'{{"messages": [{{"role": "{"|".join(ROLES)}", "content": "…"}}, …]}} with text and an answer'


class _Misfit(Exception):
    """What is wrong with a line, as the middle of a sentence."""


def _messages(record: Any) -> list[dict[str, str]]:
    """The checked messages of a line, role and content."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise _Misfit('has no list "messages"')
    if record.get("tools"):
        raise _Misfit('has "tools", which are not read,')
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise _Misfit(f"has a {place} that is no object")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise _Misfit(f"has the unknown role {printable(json.dumps(role))[:40]} in {place}")
        if not isinstance(content, str) or not content.strip():
            raise _Misfit(f"has no content in {place}")
        others = [name for name, value in message.items() if name not in ("role", "content") and value]
        if others:
            raise _Misfit(f"has the field {printable(json.dumps(others[0]))[:40]}, which is not read, in {place}")
        if any("\ud800" <= character <= "\udfff" for character in content):
            raise _Misfit(f"has half a surrogate pair in {place}")
    if all(message["role"] != ASSISTANT for message in messages):
        raise _Misfit("has no message of the assistant")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
