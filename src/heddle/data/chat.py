"""`chat:FILE`: conversations packed into rows; the loss counts only the assistant's tokens.

A line, or a row of a Parquet or Arrow file, is
`{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heddle import progress
from heddle.data.documents import UnreadableError
from heddle.data.hub import TABLE_SUFFIXES, read_rows
from heddle.data.samples import Batch, epoch_shuffle
from heddle.data.sources import is_in_validation
from heddle.errors import DataError, describe_path
from heddle.progress import printable
from heddle.tokenization.tokenizer import Tokenizer

# Conversations as tokens: a chat template renders a conversation as one text, and a mask marks the assistant's tokens.
#
# The template is the tokenizer's own (Jinja, in a sandbox), or heddle's default: `<|end|>ROLE`, a line end and the
# content for each message, and `<|end|>` after the last answer. An answer is the text after its generation prompt, up
# to and including the special token that ends the turn.


CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE = "tokenizer_config.json", "special_tokens_map.json"
ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ 'END' + message['role'] + '\\n' + message['content'] }}"
    "{% if loop.last and message['role'] == 'assistant' %}END{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ENDassistant\\n' }}{% endif %}"
)
Messages = Sequence[Mapping[str, Any]]  # role, content, and further fields that a template reads


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
        template = chat_template_text(tokenizer_files or {})
        self.tokenizer = tokenizer
        self.template = (
            DEFAULT_TEMPLATE.replace("END", tokenizer.special_tokens[tokenizer.eod_id])
            if template is None
            else template
        )
        token_map = _read_tokenizer_config(tokenizer_files or {}, SPECIAL_TOKENS_FILE)
        named = {
            name: value for name, value in token_map.items() if re.search(rf"\b{re.escape(name)}\b", self.template)
        }
        self._special_tokens = {
            name: text
            for name, token in special_token_settings(config, named).items()
            if name.endswith("_token") and (text := special_token_text(token))
        }
        from heddle.data.chat_template import ChatTemplate  # Jinja is imported only for conversations

        self._compiled_template = ChatTemplate(self.template)
        content = json.dumps([self.template, self._special_tokens, tokenizer.hash])
        self.hash = hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The token that ends an answer in this template; empty if there is none.

        It is the last of the special tokens that follow the answer, after white space at most, else of the other added
        tokens; tokens further on may end the text. If none follows so, it is the last token that an answer adds.
        """
        if self._following_ids:
            return self._following_ids
        try:  # the last one of what an answer adds
            [answered] = self.encode(_ASKED)
        except (UnreadableError, ValueError):
            return ()
        return (int(answered.tokens[answered.assistant_mask][-1]),)

    @cached_property
    def _following_ids(self) -> tuple[int, ...]:
        """The added token that follows an answer; empty if none does."""
        for messages in _ASKING:
            try:
                _, found, rest = self._render(messages, False).rpartition(_PROBE)
            except UnreadableError:
                continue
            for added in (self.tokenizer.special_tokens, self.tokenizer.other_added_tokens):
                texts = "|".join(map(re.escape, filter(None, added.values())))
                match = re.match(rf"\s*(?:{texts})*({texts})", rest) if found and texts else None
                if match is not None:
                    return tuple(token for token, text in added.items() if text == match[1])
        return ()

    @cached_property
    def reserved_texts(self) -> frozenset[str]:
        """The tokens that only the template may write: special ones, and the end of a turn."""
        added = self.tokenizer.other_added_tokens
        turn_ends = [added[token] for token in self._following_ids if token in added]
        return frozenset(filter(None, [*self.tokenizer.special_tokens.values(), *turn_ends]))

    @cached_property
    def _reserved_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.reserved_texts))) or r"(?!)")

    @property
    def takes_tools(self) -> bool:
        """Whether the template reads tools, functions that the assistant may call."""
        return "tools" in self._compiled_template.names

    @property
    def takes_calls(self) -> bool:
        """Whether the template writes an assistant's calls of tools."""
        return "tool_calls" in self.template

    def encode_prompt(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Return the tokens up to the start of the assistant's next answer. Raises UnreadableError.

        tools: functions that the assistant may call, in OpenAI's format, as transformers passes them to a template.
        """
        text = self._render(messages, True, tools)
        return [token for token, _ in self._encode_with_seams(text, self._seams(messages, text, tools))]

    def _seams(self, messages: Messages, text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Where answers begin in a rendered conversation: after what a template writes for the next one."""
        if all(message["role"] != ASSISTANT for message in messages):
            return []
        begin, plain = self._render(messages, True, tools), self._render(messages, False, tools)
        begin = begin[
            next((i for i, two in enumerate(zip(begin, plain, strict=False)) if two[0] != two[1]), len(plain)) :
        ]
        seams, position = list[int](), 0
        for message in messages:
            if message["role"] == ASSISTANT and begin:
                if (found := text.find(begin, position)) < 0:
                    break
                position = found + len(begin)
                seams.append(position)
            content = (message["content"] or "").strip()
            found = text.find(content, position)
            position = position if found < 0 else found + len(content)
        return seams

    def encode(
        self, messages: Messages, untrained: Collection[int] = (), most_tokens: int | None = None
    ) -> list[TokenizedConversation]:
        """Encode the conversation as one sequence; anything after the last answer is left out.

        untrained: indices of answers without loss. Some templates render earlier turns differently from the last one
        (they drop its reasoning); then each answer gets its own sequence. Raises UnreadableError, whose text completes
        a sentence about the data.

        most_tokens: sequences will be cut to so many, so the first answer that begins after them is the last one read.
        (Each answer is rendered with all messages before it.)
        """
        for message in messages:
            self._check_content(message["content"])
        answers: list[tuple[int, str, bool]] = []  # begin, text up to its end, whether it is trained on
        counted = most_tokens or 0  # the length at which a prompt's tokens are counted next
        ends, full_text = [number for number, message in enumerate(messages, 1) if message["role"] == ASSISTANT], ""
        for end in ends:
            prompt, full_text = self._render(messages[: end - 1], True), self._render(messages[:end], False)
            if not full_text.startswith(prompt):
                raise UnreadableError("does not fit the chat template: an answer does not follow its prompt")
            answers.append((len(prompt), full_text, end - 1 not in untrained))
            if most_tokens is not None and len(prompt) > counted:
                tokens = len(self.tokenizer.encode_with_offsets(prompt))
                if tokens > most_tokens:
                    full_text = self._render(messages[: ends[-1]], False)
                    break
                counted = len(prompt) * most_tokens // tokens
        if all(full_text.startswith(text) for _, text, _ in answers):
            spans = [(start, len(text), is_learned) for start, text, is_learned in answers]
            return [self._encode_answers(full_text, spans)]
        return [
            self._encode_answers(text, [(start, len(text), True)], self._seams(messages[:end], text))
            for end, (start, text, is_learned) in zip(ends, answers, strict=False)
            if is_learned
        ]

    def _encode_answers(
        self, text: str, answers: Sequence[tuple[int, int, bool]], seams: Sequence[int] = ()
    ) -> TokenizedConversation:
        """answers: (begin, end, whether it is trained on), as offsets in the text. seams: of other answers."""
        encoded = self._encode_with_seams(text, [*seams, *(answer[0] for answer in answers)])
        tokens = np.array([token for token, _ in encoded], dtype=np.int32)
        starts = np.array([start for _, start in encoded], dtype=np.int64)
        is_special = np.isin(tokens, [*self.tokenizer.special_tokens, *self._following_ids])
        assistant_mask = np.zeros(len(tokens), dtype=bool)
        for begin, end, is_learned in answers:
            inside = (starts >= begin) & (starts < end)
            stop_indices = np.flatnonzero(inside & is_special)
            if not len(stop_indices):
                raise UnreadableError("does not fit the chat template: no special token ends the assistant's turn")
            stop = stop_indices[-1] + 1  # without the line end that a template adds
            if is_learned:
                assistant_mask[:stop] |= inside[:stop]
        return TokenizedConversation(tokens, assistant_mask)

    def _encode_with_seams(self, text: str, seams: Sequence[int]) -> list[tuple[int, int]]:
        """Return (token, index of its first character). No token crosses a seam, where an answer begins.

        Otherwise an answer's first token would not be trained on, and a prompt would end in different tokens.
        """
        encoded = self.tokenizer.encode_with_offsets(text)
        starts = {start for _, start in encoded}
        cuts = {seam for seam in seams if seam not in starts and seam < len(text)}
        if not cuts:
            return encoded
        added = self.tokenizer.special_tokens.keys() | self.tokenizer.other_added_tokens.keys()
        added_starts = [start for token, start in encoded if token in added]  # where a text may be cut anyway
        resumed = {start for seam in cuts if (start := next((s for s in added_starts if s > seam), None)) is not None}
        return [
            (token, first + start)
            for first, last in pairwise([0, *sorted(cuts | resumed), len(text)])
            for token, start in self.tokenizer.encode_with_offsets(text[first:last], continues=first in cuts)
        ]

    def _check_content(self, content: str) -> None:
        match = self._reserved_pattern.search(content)
        if match is not None:
            raise UnreadableError(f"has the special token '{printable(match[0])}' in a message: leave it out")

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes the text of a content that is a list of parts, and loses one that is a text."""
        return not any(map(self._writes, _ASKING)) and any(
            self._writes([*map(_in_parts, messages)]) for messages in _ASKING
        )

    def _writes(self, messages: Messages) -> bool:
        try:
            text = self._rendered(messages, False)
        except UnreadableError:
            return False
        return _PROBE in text and not _WRITTEN_PART.search(text)

    def _render(
        self, messages: Messages, add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        if self._takes_parts:
            messages = [_in_parts(message) for message in messages]
        return self._rendered(messages, add_generation_prompt, tools)

    def _rendered(
        self, messages: Messages, add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        return self._compiled_template.render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=None,
            **self._special_tokens,
        )


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its text as a list of parts."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def chat_template_text(tokenizer_files: Mapping[str, str]) -> str | None:
    """Return the Jinja text of the chat template in a tokenizer's files (content by name), or None."""
    config = _read_tokenizer_config(tokenizer_files)
    return tokenizer_files.get(CHAT_TEMPLATE_FILE) or select_template(config.get("chat_template"))


def special_token_settings(config: Mapping[str, Any], token_map: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of tokenizer_config.json and special_tokens_map.json; which wins where both set one.

    As in transformers: the latter, unless the former lists the added tokens itself.
    """
    first, last = (token_map, config) if "added_tokens_decoder" in config else (config, token_map)
    return {**first, **{name: value for name, value in last.items() if value is not None}}


def named_tokens(tokenizer_files: Mapping[str, str]) -> dict[str, str]:
    """The special tokens that a tokenizer's files (content by name) name, such as `pad_token`, as texts."""
    config, token_map = (
        _read_tokenizer_config(tokenizer_files, name) for name in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE)
    )
    named = special_token_settings(config, token_map).items()
    return {name: text for name, token in named if name.endswith("_token") and (text := special_token_text(token))}


def turn_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the special token that ends an answer in the tokenizer's chat template; empty without a valid template."""
    if chat_template_text(tokenizer.companion_files) is None:
        return ()
    try:
        return ChatFormat(tokenizer, tokenizer.companion_files).turn_end_ids
    except UnreadableError:
        return ()


def _read_tokenizer_config(tokenizer_files: Mapping[str, str], name: str = TOKENIZER_CONFIG_FILE) -> dict[str, Any]:
    try:
        data = json.loads(tokenizer_files.get(name, "{}"))
    except (ValueError, RecursionError):
        data = {}
    return data if isinstance(data, dict) else {}


def select_template(templates: Any) -> str | None:
    """The template itself, or the one named `default` among several."""
    if isinstance(templates, list):
        templates = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
    if isinstance(templates, dict):
        templates = templates.get("default")
    return templates if isinstance(templates, str) else None


def special_token_text(token: Any) -> str | None:
    """The text of a special token, which is stored as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


CHAT_PREFIX = "chat:"
_PROBE = "Xyzzy"  # an answer
_WRITTEN_PART = re.compile(r"""['"]type['"]""")  # the part itself, not its text
_ASKED = ({"role": "user", "content": "a"}, {"role": ASSISTANT, "content": _PROBE})
_ASKING = (_ASKED, ({"role": "system", "content": "a"}, *_ASKED))  # some templates need a system message
TRAIN_FIELDS = ("weight", "train", "training")  # of a message, in OpenAI's and axolotl's files
_ABOUT_TRAINING = re.compile(r"train|learn|loss|weight|mask", re.IGNORECASE)  # names of fields beside `messages`
_LEFT_OUT = re.compile(r"(is_)?(ignored?|skip(ped)?|excluded?)")
_BESIDE_MESSAGES = (  # what a template or a model would read with them
    "system", "system_prompt", "tools", "functions", "documents", "images", "videos", "audios", "chat_template_kwargs",
)  # fmt: skip
MAX_MESSAGES = 1000  # per conversation


@dataclass(frozen=True, eq=False)
class PackedConversations:
    """Conversations of at most `sequence_length` inputs; `rows` lists the conversations packed into each row."""

    conversations: Sequence[TokenizedConversation]
    rows: Sequence[Sequence[int]]
    sequence_length: int

    def batch(self, row_indices: np.ndarray, sample_indices: np.ndarray) -> Batch:
        """Return the rows of these indices, int64 [B], padded on the right. Only the assistant's tokens have labels."""
        tokens = np.zeros((len(row_indices), self.sequence_length + 1), dtype=np.int64)
        labels = np.full((len(row_indices), self.sequence_length), -1, dtype=np.int64)
        doc_lengths = []
        for row, row_index in enumerate(row_indices.tolist()):
            start = 0
            lengths = []
            for conversation_index in self.rows[row_index]:
                ids, mask = self.conversations[conversation_index]
                lengths.append(len(ids) - 1)
                stop = start + lengths[-1]
                tokens[row, start:stop] = ids[:-1]
                labels[row, start:stop] = np.where(mask[1:], ids[1:], -1)
                start = stop
            doc_lengths.append(tuple(lengths))
        return Batch(tokens, tuple(doc_lengths), sample_indices, labels=labels)


@dataclass(frozen=True, eq=False)
class ChatDataset:
    """Training and validation conversations; `hash` identifies their content, chat template and tokenizer."""

    chat_format: ChatFormat
    train: PackedConversations
    validation: PackedConversations
    hash: str
    report: dict[str, Any]

    @property
    def sequence_length(self) -> int:
        """Input tokens per row."""
        return self.train.sequence_length

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that encoded the conversations."""
        return self.chat_format.tokenizer

    def batch(self, seed: int, first_row: int, num_rows: int) -> Batch:
        """Return `num_rows` rows from `first_row` on, in an endless order that is reshuffled every epoch."""
        sample_indices = np.arange(first_row, first_row + num_rows, dtype=np.int64)
        return self.train.batch(epoch_shuffle(sample_indices, len(self.train.rows), (seed, 0)), sample_indices)

    def validation_batches(self, num_rows: int, batch_size: int) -> Iterator[Batch]:
        """Yield about `num_rows` validation rows, evenly spaced, in batches."""
        row_indices = np.arange(
            0, len(self.validation.rows), max(1, len(self.validation.rows) // max(1, num_rows)), dtype=np.int64
        )
        for first in range(0, len(row_indices), batch_size):
            batch_rows = row_indices[first : first + batch_size]
            yield self.validation.batch(batch_rows, batch_rows)


def is_chat_argument(argument: str) -> bool:
    """Whether a data argument names conversations; write ./chat:… for a file of that name."""
    return argument.startswith(CHAT_PREFIX)


def prepare_chat(
    arguments: Sequence[str],
    tokenizer: Tokenizer,
    sequence_length: int,
    tokenizer_files: Mapping[str, str] | None = None,
) -> ChatDataset:
    """Read, check, tokenize and pack conversations.

    `tokenizer_files`: the other files of the tokenizer's folder, content by name, such as its chat template. One
    conversation in twenty, chosen by its hash, goes to the validation split, so equal conversations are always in the
    same split; if a split would be empty, a single conversation is for validation. A conversation longer than
    `sequence_length` is truncated. Raises DataError, naming file and line.
    """
    try:
        chat_format = ChatFormat(tokenizer, tokenizer_files)
    except UnreadableError as error:
        raise DataError(f"the chat template of the tokenizer {error}: repair it.") from error
    paths = [Path(argument.removeprefix(CHAT_PREFIX)) for argument in arguments]
    content_hash, splits, count = hashlib.sha256(), _ConversationSplit(sequence_length), 0
    with progress.progress_bar("reading", None, "bytes") as bar:
        for path in paths:
            for digest, rows, size in _read_conversations(path, chat_format, sequence_length + 1):
                content_hash.update(digest)
                splits.add(digest, rows)
                count += 1
                bar.advance(size)
    train, validation = splits.packed()
    truncated, without_answer = splits.truncated, splits.without_answer
    report: dict[str, Any] = {
        "name": "+".join(printable(path.name) for path in paths),
        "hash": hashlib.sha256(content_hash.digest() + chat_format.hash.encode()).hexdigest(),
        "conversations": count,
        "cut": truncated,
        "without_answer_after_cut": without_answer,
        "template": chat_format.template,
        "tokenizer": {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size, "end": tokenizer.eod_id},
    }
    for name, packed in (("train", train), ("validation", validation)):
        assistant_tokens = sum(int(conversation.assistant_mask[1:].sum()) for conversation in packed.conversations)
        report[name] = {
            "conversations": len(packed.conversations),
            "rows": len(packed.rows),
            "scored_tokens": assistant_tokens,
        }
    progress.print_status(
        f"chat {report['name']}: {len(train.conversations):,} conversations in {len(train.rows):,} rows to train on, "
        f"{len(validation.conversations):,} to validate on, {report['train']['scored_tokens']:,} assistant tokens"
    )
    if truncated:
        progress.print_status(
            f"{truncated:,} conversations are longer than sequence_length {sequence_length} and were truncated"
            + (f"; {without_answer:,} have no assistant token left and are left out" if without_answer else "")
        )
    return ChatDataset(chat_format, train, validation, report["hash"], report)


class _ConversationSplit:
    """Collects rows, truncated to `sequence_length`, by the hash of their conversation, and splits them."""

    def __init__(self, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self.conversations: dict[bytes, list[TokenizedConversation]] = {}
        self.truncated = self.without_answer = 0

    def add(self, digest: bytes, rows: Sequence[TokenizedConversation]) -> None:
        """Add the rows of a conversation; the same conversation may be added again."""
        shortened = [
            TokenizedConversation(tokens[: self.sequence_length + 1], assistant_mask[: self.sequence_length + 1])
            for tokens, assistant_mask in rows
        ]
        with_answer = [row for row in shortened if row.assistant_mask[1:].any()]
        self.truncated += any(len(row.tokens) > self.sequence_length + 1 for row in rows)
        self.without_answer += not with_answer
        self.conversations.setdefault(digest, []).extend(with_answer)

    def packed(self) -> tuple[PackedConversations, PackedConversations]:
        """Pack the training and validation splits. Raises DataError for fewer than two conversations with an answer."""
        digests = [digest for digest, rows in self.conversations.items() if rows]
        if len(digests) < 2:
            raise DataError(
                f"chat: {len(digests)} different conversations have an answer within sequence_length "
                f"{self.sequence_length}, and at least two are needed, one for validation: give more conversations, or "
                "a larger sequence_length."
            )
        validation = {digest for digest in digests if is_in_validation(digest)}
        if len(validation) in (0, len(digests)):
            validation = {min(digests)}
        splits = []
        for is_validation in (False, True):
            conversations = [
                conversation
                for digest in digests
                if (digest in validation) == is_validation
                for conversation in self.conversations[digest]
            ]
            rows = pack_best_fit([len(conversation.tokens) - 1 for conversation in conversations], self.sequence_length)
            splits.append(PackedConversations(conversations, rows, self.sequence_length))
        return splits[0], splits[1]


def pack_best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Pack items of these lengths (each 1 to `row_length`) into rows: best fit, the longest first.

    Returns the indices of the items in each row.
    """
    rows: list[list[int]] = []
    rows_by_space: list[list[int]] = [[] for _ in range(row_length + 1)]  # the rows with this much free space
    nonempty = 0  # bit n is set where rows_by_space[n] is not empty
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = nonempty >> lengths[item]
        if fitting:
            space = lengths[item] + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[space].pop()
            nonempty ^= 0 if rows_by_space[space] else 1 << space
            rows[row].append(item)
        else:
            space, row = row_length, len(rows)
            rows.append([item])
        space -= lengths[item]
        rows_by_space[space].append(row)
        nonempty |= 1 << space
    return rows


def _read_conversations(
    path: Path, chat_format: ChatFormat, most_tokens: int
) -> Iterator[tuple[bytes, list[TokenizedConversation], int]]:
    """For each line: the hash of the conversation, its rows, and its size in bytes. Raises DataError."""
    label = printable(str(path))
    what = describe_path(path)
    if what != "is a file":
        raise DataError(f"data file {label} {what}: give chat:FILE.jsonl.")
    line_number, unit = 0, "row" if path.suffix.lower() in TABLE_SUFFIXES else "line"
    try:
        for number, record in read_rows(path):
            line_number = number
            messages, untrained = _parse_messages(record)
            parts: list[Any] = [[message["role"], message["content"]] for message in messages]
            content = json.dumps(parts + ([{"untrained": untrained}] if untrained else [])).encode()
            yield hashlib.sha256(content).digest(), chat_format.encode(messages, untrained, most_tokens), len(content)
    except _InvalidRecordError as error:
        raise DataError(f"data file {label} {error} on {unit} {line_number}: give {_EXPECTED_RECORD}.") from error
    except UnreadableError as error:
        is_placed = not line_number or re.search(r"(line|item|row) \d", str(error))
        location = "" if is_placed else f", {unit} {line_number},"
        raise DataError(f"data file {label}{location} {error}.") from error
    if line_number == 0:
        raise DataError(f"data file {label} is empty: give one conversation per {unit}.")


_EXPECTED_RECORD = f'{{"messages": [{{"role": "{"|".join(ROLES)}", "content": "…"}}, …]}} with text and an answer'


class _InvalidRecordError(Exception):
    """What is wrong with a line, as the middle of an error message."""


def _parse_messages(record: Any) -> tuple[list[dict[str, str]], list[int]]:
    """Check a line; return role and content of its messages, and the indices of answers that are not trained on.

    Null and empty fields are ignored. TRAIN_FIELDS say whether an answer is trained on.
    """
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise _InvalidRecordError('has no list "messages"')
    if len(messages) > MAX_MESSAGES:  # each answer is rendered with all messages before it
        raise _InvalidRecordError(f"has more than {MAX_MESSAGES} messages")
    for number, message in enumerate(messages):
        location = f"messages[{number}]"
        if not isinstance(message, dict):
            raise _InvalidRecordError(f"has a {location} that is not an object")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise _InvalidRecordError(f"has the unknown role {printable(json.dumps(role))[:40]} in {location}")
        known = ("role", "content", *TRAIN_FIELDS)
        extra_fields = [name for name, value in message.items() if name not in known and not _is_neutral(value)]
        if extra_fields:
            raise _InvalidRecordError(
                f"has the field {printable(json.dumps(extra_fields[0]))[:40]}, which is not supported, in {location}"
            )
        if not isinstance(content, str) or not content.strip():
            raise _InvalidRecordError(f"has no text as the content of {location}")
        if any("\ud800" <= character <= "\udfff" for character in content):
            raise _InvalidRecordError(f"has half a surrogate pair in {location}")
        _check_train_fields(message, location)
    for name in _BESIDE_MESSAGES:
        if not _is_neutral(record.get(name)) and record[name] != messages[0]["content"]:  # a system message, said twice
            raise _InvalidRecordError(
                f'has "{name}" beside "messages", which is not read: write it in a message, or leave it out,'
            )
    for name, value in record.items():
        if _says_not_to_train(name, value):
            label = printable(json.dumps(name))[:40]
            raise _InvalidRecordError(f"has a {label} that says not to train on all of the conversation: leave it out,")
    if all(message["role"] != ASSISTANT for message in messages):
        raise _InvalidRecordError("has no message of the assistant")
    untrained = [
        number
        for number, message in enumerate(messages)
        if message["role"] == ASSISTANT and any(message.get(name) in (0, False) for name in TRAIN_FIELDS)
    ]
    if len(untrained) == sum(message["role"] == ASSISTANT for message in messages):
        raise _InvalidRecordError("has no answer to train on")
    return [{"role": message["role"], "content": message["content"]} for message in messages], untrained


def _is_neutral(value: Any) -> bool:
    """Whether an unknown field can be ignored: null or empty. False and 0 might mean not to train on the message."""
    return value is None or value in ("", [], {})


def _says_not_to_train(name: str, value: Any) -> bool:
    """Whether a field beside `messages` leaves a part of them out of the loss, or weighs it."""
    if _LEFT_OUT.fullmatch(name):
        return bool(value)
    if name in ("label", "labels"):  # of a bad answer, or of tokens without loss
        return value is False or -100 in (value if isinstance(value, list) else [value])
    if not _ABOUT_TRAINING.search(name):
        return False
    is_weight, parts = name in TRAIN_FIELDS or "weight" in name.lower(), [value]
    while parts:
        part = parts.pop()
        if isinstance(part, list | dict):
            parts += part.values() if isinstance(part, dict) else part
        elif isinstance(part, str):
            if part and name in TRAIN_FIELDS:
                return True
        elif part is not None and (part == 0 or (is_weight and part != 1)):
            return True
    return False


def _check_train_fields(message: Mapping[str, Any], location: str) -> None:
    """Raise for a field that is neither true nor false, or that asks to train on a message that is not an answer."""
    for name in TRAIN_FIELDS:
        value = message.get(name)
        if _is_neutral(value):
            continue
        is_answer = message["role"] == ASSISTANT
        allowed = (None, 0, False, 1, True) if is_answer else (None, 0, False)
        if isinstance(value, str | list | dict) or value not in allowed:
            choices = "0, 1, true or false" if is_answer else "0 or false, because only answers are trained on"
            raise _InvalidRecordError(f'has a "{name}" in {location} that is not {choices},')
