"""Chat with a model in a terminal: one conversation, its settings, and the last reply."""

import json
import queue
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from heddle.serving.engine import Engine, Event, TokenScore
from heddle.serving.requests import RequestReader

ALTERNATIVES = 3  # tokens shown beside each chosen one


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of a reply, checked like a request's. seed: None draws a new one for each reply."""

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0  # 0: all tokens
    max_tokens: int = 256
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """As fields of a request."""
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        fields: dict[str, Any] = sampling | {"max_tokens": self.max_tokens}
        seed = {} if self.seed is None else {"seed": self.seed}
        return fields | seed | ({"stop": list(self.stop)} if self.stop else {})


@dataclass(frozen=True)
class Reply:
    """A reply. tokens: of prompt and reply together. scores: of each new token; empty if there are none."""

    text: str
    tokens: int
    new_tokens: int
    scores: list[TokenScore] = field(default_factory=list)


class Conversation:
    """A chat with one model, or one text that user and model continue in turn if it has no chat template."""

    def __init__(self, engine: Engine, reader: RequestReader) -> None:
        self.engine, self.reader = engine, reader
        self.is_chat = reader.chat_format is not None
        self.turns: list[tuple[str, str]] = []  # (the user's text, the reply)
        self.last_reply: Reply | None = None

    def answer(self, text: str, settings: SamplingSettings, on_text: Callable[[str], None]) -> Reply:
        """Generate a reply to a text; `on_text` gets it in pieces. Raises RequestError.

        If `on_text` raises, or a signal arrives, the reply is cancelled and the conversation stays unchanged.
        """
        kind = "chat" if self.is_chat else "completions"
        body = {"model": self.reader.name, "stream": True} | settings.fields() | self._prompt(text)
        request = self.reader.read(kind, json.dumps(body).encode())
        if self.engine.gives_scores:
            request = replace(request, alternatives=ALTERNATIVES)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        job = self.engine.submit(request, events.put)
        pieces, scores = [], list[TokenScore]()
        try:
            while True:
                event = events.get()
                if event.error is not None:
                    raise event.error
                if event.text:
                    on_text(event.text)
                    pieces.append(event.text)
                scores += event.scores
                if event.is_last:
                    break
        finally:
            self.engine.cancel(job)
        count = len(request.prompt_ids) + event.new_tokens
        self.last_reply = Reply("".join(pieces), count, event.new_tokens, scores)
        self.turns.append((text, self.last_reply.text))
        return self.last_reply

    def check(self, settings: SamplingSettings) -> None:
        """Raise RequestError for settings that the model does not accept."""
        body = {"model": self.reader.name, "prompt": "x"} | settings.fields()
        self.reader.read("completions", json.dumps(body).encode())

    def undo(self) -> bool:
        """Forget the last turn; returns whether there was one."""
        self.last_reply = None
        return bool(self.turns and self.turns.pop())

    def _prompt(self, text: str) -> dict[str, Any]:
        if not self.is_chat:
            return {"prompt": "".join(part for turn in self.turns for part in turn) + text}
        messages = []
        for question, answer in self.turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": [*messages, {"role": "user", "content": text}]}
