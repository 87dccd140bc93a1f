"""Conversations: what the assistant says is asked, and nothing else; templates as transformers applies them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine
from transformers import PreTrainedTokenizerFast

from heddle.data.chat import Chat, pack, prepare_chat
from heddle.data.chat_format import SETTINGS, TEMPLATE, ChatFormat
from heddle.data.documents import UnreadableError
from heddle.data.sources import open_source
from heddle.errors import DataError
from heddle.tokenization.tokenizer import Tokenizer
from tests.data import chats
from tests.laws.planting import plant

# Templates in the manner of well-known models.
MARKED = """{%- for message in messages %}
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
HEADED = """{{ bos_token }}{% for message in messages %}{% if message['role'] not in ['user', 'assistant', 'system'] %}
{{ raise_exception('Unknown role') }}
{% endif %}
{{ '<|head|>' + message['role'] + '<|/head|>\n\n' + message['content'] | trim + '<|eot|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"""
FORGETFUL = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{{- m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<s>"]


@pytest.fixture(scope="module")
def known() -> Tokenizer:
    return chats.tokenizer()


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    """With more special tokens, as a chat model's."""
    engine = Engine.from_str(chats.tokenizer().to_json())
    engine.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    engine.add_tokens(["<think>", "</think>"])
    return Tokenizer.from_json(engine.to_str())


def written(known: Tokenizer, tokens: np.ndarray) -> str:
    """The text of tokens, special ones with it."""
    return b"".join(known.special.get(t, "").encode() or known.token_bytes(t) for t in tokens.tolist()).decode()


def spoken(form: ChatFormat, said: chats.Messages) -> list[tuple[list[int], list[bool]]]:
    return [(one.tokens.tolist(), one.scored.tolist()) for one in form.rows(said)]


def check_our_own(known: Tokenizer) -> None:
    form = ChatFormat(known)
    for seed in range(12):
        said = chats.talk(seed, 1 + seed % 3)
        tokens, scored = chats.plainly(known, said)
        assert spoken(form, said) == [(tokens, scored)]
        assert spoken(form, [*said, {"role": "user", "content": "And then?"}]) == [(tokens, scored)]
        prompt = form.prompt(said[:-1])
        assert tokens[: len(prompt)] == prompt
        assert scored[len(prompt) - 1 : len(prompt) + 1] == [False, True]


@pytest.mark.parametrize("template", [MARKED, HEADED, None])
@pytest.mark.parametrize("where", [TEMPLATE, SETTINGS])
def test_a_template_gives_the_tokens_that_transformers_gives(marked: Tokenizer, template: str, where: str) -> None:
    settings: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "model_max_length": 99}
    documents = {TEMPLATE: template} if template is not None and where == TEMPLATE else {}
    if template is not None and where == SETTINGS:
        settings["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]
    form = ChatFormat(marked, documents | {SETTINGS: json.dumps(settings)})
    theirs: Any = PreTrainedTokenizerFast(tokenizer_object=Engine.from_str(marked.to_json()), bos_token="<s>")
    for seed in range(6):
        said = chats.talk(seed)
        ((tokens, scored),) = spoken(form, said)
        asked = theirs.apply_chat_template(said, chat_template=form.template, tokenize=True, return_dict=True)
        assert tokens == asked["input_ids"]
        prompt = theirs.apply_chat_template(said[:-1], chat_template=form.template, add_generation_prompt=True)
        assert form.prompt(said[:-1]) == prompt["input_ids"]
        said_by_it = written(marked, np.array(tokens)[scored])
        end = "<|im_end|>" if template == MARKED else "<|eot|>" if template == HEADED else "<|end|>"
        trim = str.strip if template == HEADED else str
        assert said_by_it == "".join(trim(one["content"]) + end for one in said if one["role"] == "assistant")
        if template == MARKED:
            masked = theirs.apply_chat_template(
                said, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
            )
            assert [int(one) for one in scored] == masked["assistant_masks"]


def test_turns_that_are_written_otherwise_once_they_are_past_have_rows_of_their_own(marked: Tokenizer) -> None:
    form = ChatFormat(marked, {TEMPLATE: FORGETFUL})
    said = chats.talk(3)
    rows = form.rows(said)
    assert len(rows) == 2
    for row, stop in zip(rows, (len(said) - 2, len(said)), strict=True):
        prompt = form.prompt(said[: stop - 1])
        assert row.tokens[: len(prompt)].tolist() == prompt
        assert not row.scored[: len(prompt)].any()
        learned = written(marked, row.tokens[row.scored])
        assert learned == "<think>\n\n</think>\n\n" + said[stop - 1]["content"] + "<|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "no special token ends the assistant's turn"),
        ("{{ messages | length }}", "writes an answer not after its prompt"),
        ("{{ raise_exception('roles must alternate') }}", r"does not fit the chat template \(roles must alternate\)"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "does not fit the chat template .*unsafe"),
        ("{{ messages.append(1) }}", "does not fit the chat template .*unsafe|not safely callable"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{% for %}", "cannot be read as Jinja"),
        ("{% include 'secret' %}", "does not fit the chat template"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(marked: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        ChatFormat(marked, {TEMPLATE: template}).rows(chats.talk(0))


def packed(known: Tokenizer, tmp_path: Path, talks: list[Any], context: int = 400) -> Chat:
    return prepare_chat([chats.write(tmp_path / "talks.jsonl", talks)], known, context)


def check_batches(known: Tokenizer, tmp_path: Path) -> None:
    """Every conversation once an epoch, its own targets at its own place, and no other target."""
    talks = [chats.talk(seed, 1 + seed % 2) for seed in range(60)]
    chat = packed(known, tmp_path, talks)
    assert chat.report["cut"] == 0
    expected = {tuple(chats.plainly(known, one)[0]): chats.plainly(known, one)[1] for one in talks}
    rows, size = len(chat.train.rows), 7
    seen = []
    epoch = chat.train.batch(np.arange(rows), np.arange(rows))
    drawn = [chat.batch(3, first, size) for first in range(0, rows, size)]
    assert {row.tobytes() for one in drawn for row in one.tokens} == {row.tobytes() for row in epoch.tokens}
    for batch in [epoch, *chat.held_out(99, 4)]:
        for tokens, answers, lengths in zip(batch.tokens, batch.targets, batch.lengths, strict=True):
            start = 0
            for length in lengths:
                inputs, asked = tokens[start : start + length].tolist(), answers[start : start + length]
                (whole,) = [one for one in expected if list(one[:-1]) == inputs]
                right = [token if s else -1 for token, s in zip(whole[1:], expected[whole][1:], strict=True)]
                assert asked.tolist() == right
                assert asked[-1] == known.end
                seen.append(whole)
                start += length
            assert (answers[start:] == -1).all()
    assert sorted(seen) == sorted(tuple(chats.plainly(known, one)[0]) for one in talks)


def check_everything(known: Tokenizer, tmp_path: Path) -> None:
    check_our_own(known)
    check_batches(known, tmp_path)


def test_our_own_format_is_as_described_and_batches_ask_what_the_assistant_says(
    known: Tokenizer, tmp_path: Path
) -> None:
    check_everything(known, tmp_path)


@pytest.mark.parametrize(
    ("what", "place", "old", "new"),
    [
        ("loss on what the user says", "data.chat_format:ChatFormat._marked", "(starts >= begin)", "(starts >= 0)"),
        ("the end of a turn not learned", "data.chat_format:ChatFormat._marked", "|= inside[: ends[-1] + 1]",
         "|= (inside & ~special)[: ends[-1] + 1]"),
        ("the prompt's last token learned", "data.chat_format:ChatFormat._marked", "(starts >= begin)",
         "(starts >= begin - 1)"),
        ("padding learned", "data.chat:Packed.batch", "self.context), -1,", "self.context), 0,"),
        ("targets one place too early", "data.chat:Packed.batch", "np.where(scored[1:]", "np.where(scored[:-1]"),
        ("the token itself asked", "data.chat:Packed.batch", "said[1:], -1", "said[:-1], -1"),
    ],
)  # fmt: skip
def test_planted_faults_are_caught(
    known: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, place: str, old: str, new: str
) -> None:
    plant(monkeypatch, place, old, new)
    with pytest.raises((AssertionError, ValueError)):
        check_everything(known, tmp_path)


@given(st.lists(st.integers(1, 40)), st.integers(40, 50))
def test_packing(lengths: list[int], room: int) -> None:
    rows = pack(lengths, room)
    assert sorted(one for row in rows for one in row) == list(range(len(lengths)))
    sums = sorted(sum(lengths[one] for one in row) for row in rows)
    assert all(0 < size <= room for size in sums)
    assert len(sums) < 2 or sums[0] + sums[1] > room  # no two rows fit into one


def test_equal_conversations_are_on_one_side_and_the_hash_is_of_the_content(known: Tokenizer, tmp_path: Path) -> None:
    talks = [chats.talk(seed) for seed in range(40)] * 2
    chat = packed(known, tmp_path, talks)
    train, held = ({one.tokens.tobytes() for one in side.said} for side in (chat.train, chat.held))
    assert train
    assert held
    assert not train & held
    assert len(chat.train.said) + len(chat.held.said) == 80
    assert packed(known, tmp_path, talks).hash == chat.hash
    assert packed(known, tmp_path, [*talks[:-1], chats.talk(99)]).hash != chat.hash
    other = {TEMPLATE: chat.form.template + "{# other #}"}
    assert prepare_chat([f"chat:{tmp_path}/talks.jsonl"], known, 400, other).hash != chat.hash
    few = packed(known, tmp_path, talks[:2])
    assert (len(few.train.said), len(few.held.said)) == (1, 1)
    two = prepare_chat([chats.write(tmp_path / f"{n}", talks[n : n + 20]) for n in (0, 20)], known, 64)
    assert two.hash == packed(known, tmp_path, talks[:40]).hash


def test_long_conversations_are_cut_and_counted(
    known: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = [{"role": "user", "content": "warp " * 50}, {"role": "assistant", "content": "weft"}]
    long = [{"role": "user", "content": "warp"}, {"role": "assistant", "content": "weft " * 50}]
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = packed(known, tmp_path, [late, long, short], 64)
    assert (chat.report["cut"], chat.report["without_answer_after_cut"]) == (2, 1)
    said = sorted((one for side in (chat.train, chat.held) for one in side.said), key=len)
    assert sorted(len(one.tokens) for one in said)[-1] == 65
    assert all(one.scored[1:].any() for one in said)
    told = capsys.readouterr().err
    assert "2 conversations are longer than --context 64 and were cut there; of 1 nothing of the assistant" in told
    with pytest.raises(DataError, match="1 different conversations have an answer within --context 64, and two are"):
        packed(known, tmp_path, [late, late, short], 64)


def line(messages: Any, **more: Any) -> str:
    return json.dumps({"messages": messages, **more})


SAYS, ANSWERS = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "has no valid UTF-8 JSON on line 2: give one object a line"),
        ("[" * 100_000, "has no valid UTF-8 JSON on line 2"),
        ('{"text": "x"}', 'has no list "messages" on line 2: give {"messages"'),
        ("[1]", 'has no list "messages" on line 2'),
        (line([]), 'has no list "messages" on line 2'),
        (line("hello"), 'has no list "messages" on line 2'),
        (line(["hello"]), r"has a messages\[0\] that is no object on line 2"),
        (line([SAYS, {"role": "robot", "content": "b"}]), r'has the unknown role "robot" in messages\[1\] on line 2'),
        (line([{"content": "b"}]), r"has the unknown role null in messages\[0\] on line 2"),
        (line([{"role": ["user"], "content": "b"}]), r'has the unknown role \["user"\] in messages\[0\]'),
        (line([SAYS, {"role": "assistant", "content": " \n"}]), r"has no content in messages\[1\] on line 2"),
        (line([SAYS, {"role": "assistant", "content": None}]), r"has no content in messages\[1\] on line 2"),
        (line([SAYS, {"role": "assistant", "content": ["b"]}]), r"has no content in messages\[1\]"),
        (line([SAYS]), "has no message of the assistant on line 2"),
        (line([SAYS, ANSWERS | {"tool_calls": [1]}]), r'has the field "tool_calls", which is not read, in messages'),
        (line([SAYS, ANSWERS], tools=[{}]), 'has "tools", which are not read, on line 2'),
        (line([SAYS, {"role": "assistant", "content": "\ud800"}]), r"has half a surrogate pair in messages\[1\]"),
        (line([SAYS, {"role": "assistant", "content": "x<|end|>"}]), r"line 2, holds '<\|end\|>' in a content"),
    ],
)
def test_a_bad_line_is_named(known: Tokenizer, tmp_path: Path, bad: str, message: str) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(line([SAYS, ANSWERS]) + "\n" + bad + "\n")
    with pytest.raises(DataError, match=message) as error:
        prepare_chat([f"chat:{path}"], known, 64)
    assert str(error.value).startswith(f"data file {path}")
    assert "\n" not in str(error.value)


def test_files_that_are_none_and_places_where_chats_do_not_belong(known: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl is empty: give one conversation a line"):
        prepare_chat([f"chat:{tmp_path}/empty.jsonl"], known, 64)
    with pytest.raises(DataError, match=r"is no file: give chat:FILE\.jsonl"):
        prepare_chat([f"chat:{tmp_path}"], known, 64)
    with pytest.raises(DataError, match="is conversations, not text: give them to train, beside nothing else"):
        open_source(f"chat:{tmp_path}/empty.jsonl")
    with pytest.raises(DataError, match="the chat template beside the tokenizer cannot be read as Jinja"):
        prepare_chat([f"chat:{tmp_path}/empty.jsonl"], known, 64, {TEMPLATE: "{% for %}"})
