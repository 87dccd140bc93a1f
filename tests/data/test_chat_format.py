"""Chat templates: the tokens and masks are those of transformers, and templates that do not fit are refused."""

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from heddle.data.chat import CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, ChatFormat
from heddle.data.documents import UnreadableError
from heddle.tokenization.tokenizer import Tokenizer
from tests.data import chats


@pytest.fixture(scope="module")
def chat_tokenizer() -> Tokenizer:
    """A tokenizer with the special tokens of a chat model."""
    backend = BackendTokenizer.from_str(chats.train_tokenizer().to_json())
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in chats.SPECIAL_TOKENS])
    backend.add_tokens(["<think>", "</think>"])
    return Tokenizer.from_json(backend.to_str())


def text_of(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """The text of the tokens, including special tokens."""
    return b"".join(
        tokenizer.special_tokens.get(t, "").encode() or tokenizer.token_bytes(t) for t in tokens.tolist()
    ).decode()


@pytest.mark.parametrize("template", [chats.GENERATION_TEMPLATE, chats.HEADER_TEMPLATE, None])
@pytest.mark.parametrize("where", [CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE])
def test_a_template_gives_the_tokens_that_transformers_gives(
    chat_tokenizer: Tokenizer, template: str, where: str
) -> None:
    settings: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "model_max_length": 99}
    documents = {CHAT_TEMPLATE_FILE: template} if template is not None and where == CHAT_TEMPLATE_FILE else {}
    if template is not None and where == TOKENIZER_CONFIG_FILE:
        settings["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]
    chat_format = ChatFormat(chat_tokenizer, documents | {TOKENIZER_CONFIG_FILE: json.dumps(settings)})
    hf_tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=BackendTokenizer.from_str(chat_tokenizer.to_json()), bos_token="<s>"
    )
    for seed in range(6):
        messages = chats.conversation(seed)
        ((tokens, assistant_mask),) = chats.encode(chat_format, messages)
        hf_encoding = hf_tokenizer.apply_chat_template(
            messages, chat_template=chat_format.template, tokenize=True, return_dict=True
        )
        assert tokens == hf_encoding["input_ids"]
        prompt = hf_tokenizer.apply_chat_template(
            messages[:-1], chat_template=chat_format.template, add_generation_prompt=True
        )
        assert chat_format.encode_prompt(messages[:-1]) == prompt["input_ids"]
        assistant_text = text_of(chat_tokenizer, np.array(tokens)[assistant_mask])
        end = (
            "<|im_end|>"
            if template == chats.GENERATION_TEMPLATE
            else "<|eot|>"
            if template == chats.HEADER_TEMPLATE
            else "<|end|>"
        )
        trim = str.strip if template == chats.HEADER_TEMPLATE else str
        assert assistant_text == "".join(
            trim(message["content"]) + end for message in messages if message["role"] == "assistant"
        )
        if template == chats.GENERATION_TEMPLATE:
            masked = hf_tokenizer.apply_chat_template(
                messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
            )
            assert [int(flag) for flag in assistant_mask] == masked["assistant_masks"]


def test_answers_get_their_own_rows_if_the_template_renders_past_turns_differently(chat_tokenizer: Tokenizer) -> None:
    chat_format = ChatFormat(chat_tokenizer, {CHAT_TEMPLATE_FILE: chats.THINK_DROPPING_TEMPLATE})
    messages = chats.conversation(3)
    rows = chat_format.encode(messages)
    assert len(rows) == 2
    for row, stop in zip(rows, (len(messages) - 2, len(messages)), strict=True):
        prompt = chat_format.encode_prompt(messages[: stop - 1])
        assert row.tokens[: len(prompt)].tolist() == prompt
        assert not row.assistant_mask[: len(prompt)].any()
        learned = text_of(chat_tokenizer, row.tokens[row.assistant_mask])
        assert learned == "<think>\n\n</think>\n\n" + messages[stop - 1]["content"] + "<|im_end|>"


def test_a_template_that_reads_parts_alone_gets_them(chat_tokenizer: Tokenizer) -> None:
    text, parts = "m.content", "m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join"
    template = "{%% for m in messages %%}{{ '<|head|>' + m.role + (%s) + '<|eot|>' }}{%% endfor %%}"
    template += "{%% if add_generation_prompt %%}<|head|>assistant{%% endif %%}"
    plain, other = (ChatFormat(chat_tokenizer, {CHAT_TEMPLATE_FILE: template % each}) for each in (text, parts))
    messages = chats.conversation(1)
    assert chats.encode(other, messages) == chats.encode(plain, messages)
    assert other.encode_prompt(messages[:-1]) == plain.encode_prompt(messages[:-1])


def test_a_template_that_changes_texts_gets_texts(chat_tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.role + (m.content | list | join('-')) + '<|eot|>' }}{% endfor %}"
    chat_format = ChatFormat(chat_tokenizer, {CHAT_TEMPLATE_FILE: template})
    messages: Any = chats.conversation(1)
    hf_tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=BackendTokenizer.from_str(chat_tokenizer.to_json()))
    expected = hf_tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)["input_ids"]
    assert chat_format.encode_prompt(messages) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "special token"),
        ("{{ messages | length }}", r"answer.*prompt"),
        ("{{ raise_exception('roles must alternate') }}", r"chat template.*roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", r"chat template.*unsafe"),
        ("{{ messages.append(1) }}", r"unsafe|not safely callable"),
        ("{{ nothing.at_all }}", "'nothing'"),
        ("{% for %}", "Jinja"),
        ("{% include 'secret' %}", "chat template"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(chat_tokenizer: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        ChatFormat(chat_tokenizer, {CHAT_TEMPLATE_FILE: template}).encode(chats.conversation(0))
