"""Conversations for tests: random ones, chat templates, a tokenizer, and a reference encoding in a plain loop."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heddle.data.chat import ChatFormat
from heddle.tokenization.tokenizer import Tokenizer
from tests import small

Messages = list[dict[str, str]]

# Templates like those of well-known models.
GENERATION_TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
HEADER_TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] not in ['user', 'assistant', 'system'] %}
{{ raise_exception('Unknown role') }}
{% endif %}
{{ '<|head|>' + message['role'] + '<|/head|>\n\n' + message['content'] | trim + '<|eot|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"""
THINK_DROPPING_TEMPLATE = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{{- m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<s>"]


def conversation(seed: int, turns: int = 2) -> Messages:
    """A random conversation of a few words per message."""
    generator = random.Random(seed)
    messages = [{"role": "system", "content": "Weave."}] if generator.random() < 0.5 else []
    for _ in range(turns):
        messages.append({"role": "user", "content": small.text(20, generator.randrange(10**6))})
        messages.append({"role": "assistant", "content": small.text(20, generator.randrange(10**6))})
    return messages


def write_chat_file(path: Path, conversations: Sequence[Any]) -> str:
    """Write a file of one conversation per line; return its data argument."""
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations), encoding="utf-8")
    return f"chat:{path}"


def train_tokenizer() -> Tokenizer:
    """Train a tokenizer with 300 tokens on the small texts."""
    return Tokenizer.train([small.text(3000)], small.VOCABULARY)


def reference_encoding(tokenizer: Tokenizer, messages: Messages) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation and the mask of the assistant's, by the documented default template."""
    tokens: list[int] = []
    assistant_mask: list[bool] = []
    last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
    for number, message in enumerate(messages[: last + 1]):
        # The end token begins each message, so it also ends the message before.
        tokens.append(tokenizer.eod_id)
        assistant_mask.append(number > 0 and messages[number - 1]["role"] == "assistant")
        for text, is_answer in ((message["role"] + "\n", False), (message["content"], message["role"] == "assistant")):
            ids = tokenizer.encode(text)
            tokens += ids
            assistant_mask += [is_answer] * len(ids)
    return [*tokens, tokenizer.eod_id], [*assistant_mask, True]


def encode(chat_format: ChatFormat, messages: Messages) -> list[tuple[list[int], list[bool]]]:
    """The rows of a conversation as (tokens, assistant mask)."""
    return [(row.tokens.tolist(), row.assistant_mask.tolist()) for row in chat_format.encode(messages)]
