"""Conversations for tests: lines of a file, a tokenizer that reads them, and how heddle writes one, in a plain loop."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heddle.tokenization.tokenizer import Tokenizer
from tests import small

Messages = list[dict[str, str]]


def talk(seed: int, turns: int = 2) -> Messages:
    """A few words of each side, in a fixed disorder."""
    draw = random.Random(seed)
    said = [{"role": "system", "content": "Weave."}] if draw.random() < 0.5 else []
    for _ in range(turns):
        said.append({"role": "user", "content": small.text(20, draw.randrange(10**6))})
        said.append({"role": "assistant", "content": small.text(20, draw.randrange(10**6))})
    return said


def write(path: Path, talks: Sequence[Any]) -> str:
    """A file of one conversation a line; returns its `--data` argument."""
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in talks), encoding="utf-8")
    return f"chat:{path}"


def tokenizer() -> Tokenizer:
    """Of the small texts, with 300 tokens."""
    return Tokenizer.train([small.text(3000)], small.VOCABULARY)


def plainly(known: Tokenizer, said: Messages) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and which the assistant says, from the description in words."""
    tokens: list[int] = []
    scored: list[bool] = []
    last = max(number for number, one in enumerate(said) if one["role"] == "assistant")
    for number, one in enumerate(said[: last + 1]):
        # The end token opens each message, so it also ends the one before.
        tokens.append(known.end)
        scored.append(number > 0 and said[number - 1]["role"] == "assistant")
        for text, learned in ((one["role"] + "\n", False), (one["content"], one["role"] == "assistant")):
            ids = known.encode(text)
            tokens += ids
            scored += [learned] * len(ids)
    return [*tokens, known.end], [*scored, True]
