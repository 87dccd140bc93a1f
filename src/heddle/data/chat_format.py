"""A conversation as tokens: a chat template writes it as one text, and the assistant's own tokens are marked in it.

The template is the one a tokenizer came with (Jinja, in a sandbox), or heddle's: `<|end|>ROLE`, a line end and the
content for each message, and `<|end|>` after the last answer. An answer is what stands after the prompt to generate it,
up to the special token that ends its turn, which is learned too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from heddle.data.documents import UnreadableError
from heddle.progress import printable
from heddle.tokenization.tokenizer import Tokenizer

TEMPLATE = "chat_template.jinja"
SETTINGS = "tokenizer_config.json"
ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")
OWN = (
    "{% for message in messages %}{{ 'END' + message['role'] + '\\n' + message['content'] }}"
    "{% if loop.last and message['role'] == 'assistant' %}END{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ENDassistant\\n' }}{% endif %}"
)
Messages = Sequence[Mapping[str, str]]


class Spoken(NamedTuple):
    """A conversation: tokens int32 [n], and which of them the assistant says, bool [n]."""

    tokens: np.ndarray
    scored: np.ndarray


class ChatFormat:
    """Writes messages as tokens. `template` is Jinja's text, `hash` names it with its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, documents: Mapping[str, str] | None = None) -> None:
        """`documents`: what lies beside the tokenizer, by file name. Raises UnreadableError for a bad template."""
        settings = _settings(documents or {})
        found = (documents or {}).get(TEMPLATE) or _named(settings.get("chat_template"))
        self.tokenizer = tokenizer
        self.template = OWN.replace("END", tokenizer.special[tokenizer.end]) if found is None else found
        self._marks = {name: text for name in settings if name.endswith("_token") and (text := _text(settings[name]))}
        self._special = re.compile("|".join(map(re.escape, tokenizer.special.values())))
        self._compiled = _compile(self.template)
        content = json.dumps([self.template, self._marks, tokenizer.hash])
        self.hash = hashlib.sha256(content.encode()).hexdigest()

    def prompt(self, messages: Messages) -> list[int]:
        """The tokens after which the assistant's next answer begins. Raises UnreadableError."""
        return [token for token, _ in self.tokenizer.encode_marked(self._write(messages, True))]

    def rows(self, messages: Messages) -> list[Spoken]:
        """The conversation as one row; a row an answer where the template writes earlier turns otherwise than the last.

        What follows the last answer is left out. Raises UnreadableError, as the end of a sentence about the data.
        """
        turns: list[tuple[int, str]] = []  # where an answer begins, and the text up to its end
        for number, message in enumerate(messages):
            self._check(message["content"])
            if message["role"] == ASSISTANT:
                before, after = self._write(messages[:number], True), self._write(messages[: number + 1], False)
                if not after.startswith(before):
                    raise UnreadableError("does not fit the chat template: it writes an answer not after its prompt")
                turns.append((len(before), after))
        whole = turns[-1][1]
        if all(whole.startswith(after) for _, after in turns):
            return [self._marked(whole, [(begin, len(after)) for begin, after in turns])]
        return [self._marked(after, [(begin, len(after))]) for begin, after in turns]

    def _marked(self, text: str, answers: Sequence[tuple[int, int]]) -> Spoken:
        encoded = self.tokenizer.encode_marked(text)
        tokens = np.array([token for token, _ in encoded], dtype=np.int32)
        starts = np.array([start for _, start in encoded], dtype=np.int64)
        special = np.isin(tokens, list(self.tokenizer.special))
        scored = np.zeros(len(tokens), dtype=bool)
        for begin, end in answers:
            inside = (starts >= begin) & (starts < end)
            ends = np.flatnonzero(inside & special)
            if not len(ends):
                raise UnreadableError("does not fit the chat template: no special token ends the assistant's turn")
            scored[: ends[-1] + 1] |= inside[: ends[-1] + 1]  # a line end after it is the template's
        return Spoken(tokens, scored)

    def _check(self, content: str) -> None:
        found = self._special.search(content)
        if found is not None:
            raise UnreadableError(f"holds '{printable(found[0])}' in a content, a special token: leave it out")

    def _write(self, messages: Messages, prompt: bool) -> str:
        try:
            text: str = self._compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=prompt,
                tools=None,
                documents=None,
                **self._marks,
            )
        except Exception as error:  # a template may raise anything
            raise UnreadableError(f"does not fit the chat template ({printable(str(error))[:120]})") from error
        return text


def _compile(template: str) -> Any:
    """The template in Jinja's sandbox: no attributes of Python's, no change of what it is given, no files."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}`, which some templates put around answers: what is inside."""

        tags = {"generation"}  # noqa: RUF012 - Jinja asks for a set here

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    place = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    place.globals["raise_exception"] = refuse
    place.filters["tojson"] = to_json
    try:
        return place.from_string(template)
    except (TemplateError, RecursionError) as error:
        raise UnreadableError(f"cannot be read as Jinja ({printable(str(error))[:120]})") from error


def _settings(documents: Mapping[str, str]) -> dict[str, Any]:
    try:
        data = json.loads(documents.get(SETTINGS, "{}"))
    except (ValueError, RecursionError):
        data = {}
    return data if isinstance(data, dict) else {}


def _named(templates: Any) -> str | None:
    """The template itself, or the one named `default` of a list of them."""
    if isinstance(templates, list):
        known = {one.get("name"): one.get("template") for one in templates if isinstance(one, dict)}
        templates = known.get("default")
    return templates if isinstance(templates, str) else None


def _text(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
