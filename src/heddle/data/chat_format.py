"""Conversations as tokens: a chat template renders a conversation as one text, and a mask marks the assistant's tokens.

The template is the tokenizer's own (Jinja, in a sandbox), or heddle's default: `<|end|>ROLE`, a line end and the
content for each message, and `<|end|>` after the last answer. An answer is the text after its generation prompt, up to
and including the special token that ends the turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from heddle.data.compressed import UnreadableError
from heddle.progress import printable
from heddle.tokenization.tokenizer import Tokenizer

CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ 'END' + message['role'] + '\\n' + message['content'] }}"
    "{% if loop.last and message['role'] == 'assistant' %}END{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ENDassistant\\n' }}{% endif %}"
)
Messages = Sequence[Mapping[str, str]]


class TokenizedConversation(NamedTuple):
    """A conversation: tokens int32 [n], and the mask of the assistant's tokens, bool [n]."""

    tokens: np.ndarray
    assistant_mask: np.ndarray


class ChatFormat:
    """Encodes messages with a chat template. `template` is its Jinja text; `hash` identifies template and tokenizer."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_files: Mapping[str, str] | None = None) -> None:
        """`tokenizer_files`: the other files of the tokenizer's folder, content by name.

        Raises UnreadableError for a bad template.
        """
        config = _read_tokenizer_config(tokenizer_files or {})
        template = (tokenizer_files or {}).get(CHAT_TEMPLATE_FILE) or _select_template(config.get("chat_template"))
        self.tokenizer = tokenizer
        self.template = (
            DEFAULT_TEMPLATE.replace("END", tokenizer.special_tokens[tokenizer.eod_id])
            if template is None
            else template
        )
        self._special_tokens = {
            name: text for name in config if name.endswith("_token") and (text := _token_text(config[name]))
        }
        self._special_tokens_pattern = re.compile("|".join(map(re.escape, tokenizer.special_tokens.values())))
        from heddle.data.chat_template import ChatTemplate  # Jinja is imported only for conversations

        self._compiled_template = ChatTemplate(self.template)
        content = json.dumps([self.template, self._special_tokens, tokenizer.hash])
        self.hash = hashlib.sha256(content.encode()).hexdigest()

    def encode_prompt(self, messages: Messages) -> list[int]:
        """The tokens up to where the assistant's next answer begins. Raises UnreadableError."""
        return [token for token, _ in self.tokenizer.encode_with_offsets(self._render(messages, True))]

    def encode(self, messages: Messages) -> list[TokenizedConversation]:
        """Encode the conversation as one row; what follows the last answer is left out.

        Some templates render earlier turns differently from the last one (they drop its reasoning); then each answer
        gets a row of its own. Raises UnreadableError, whose text completes a sentence about the data.
        """
        answers: list[tuple[int, str]] = []  # the index where an answer begins, and the text up to its end
        for number, message in enumerate(messages):
            self._check_content(message["content"])
            if message["role"] == ASSISTANT:
                prompt = self._render(messages[:number], True)
                through_answer = self._render(messages[: number + 1], False)
                if not through_answer.startswith(prompt):
                    raise UnreadableError("does not fit the chat template: an answer does not follow its prompt")
                answers.append((len(prompt), through_answer))
        full_text = answers[-1][1]
        if all(full_text.startswith(text) for _, text in answers):
            return [self._encode_answers(full_text, [(start, len(text)) for start, text in answers])]
        return [self._encode_answers(text, [(start, len(text))]) for start, text in answers]

    def _encode_answers(self, text: str, answers: Sequence[tuple[int, int]]) -> TokenizedConversation:
        encoded = self.tokenizer.encode_with_offsets(text)
        tokens = np.array([token for token, _ in encoded], dtype=np.int32)
        starts = np.array([start for _, start in encoded], dtype=np.int64)
        is_special = np.isin(tokens, list(self.tokenizer.special_tokens))
        assistant_mask = np.zeros(len(tokens), dtype=bool)
        for begin, end in answers:
            inside = (starts >= begin) & (starts < end)
            stop_indices = np.flatnonzero(inside & is_special)
            if not len(stop_indices):
                raise UnreadableError("does not fit the chat template: no special token ends the assistant's turn")
            stop = stop_indices[-1] + 1  # not the line end that a template adds
            assistant_mask[:stop] |= inside[:stop]
        return TokenizedConversation(tokens, assistant_mask)

    def _check_content(self, content: str) -> None:
        match = self._special_tokens_pattern.search(content)
        if match is not None:
            raise UnreadableError(f"has the special token '{printable(match[0])}' in a message: leave it out")

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        return self._compiled_template.render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **self._special_tokens,
        )


def _read_tokenizer_config(tokenizer_files: Mapping[str, str]) -> dict[str, Any]:
    try:
        data = json.loads(tokenizer_files.get(TOKENIZER_CONFIG_FILE, "{}"))
    except (ValueError, RecursionError):
        data = {}
    return data if isinstance(data, dict) else {}


def _select_template(templates: Any) -> str | None:
    """The template itself, or the one named `default` in a list of templates."""
    if isinstance(templates, list):
        by_name = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        templates = by_name.get("default")
    return templates if isinstance(templates, str) else None


def _token_text(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
