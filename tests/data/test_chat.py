"""Chat data: only the assistant's tokens have labels; templates give what transformers gives."""

import gzip
import json
import lzma
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather, parquet
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from heddle.data.chat import (
    CHAT_TEMPLATE_FILE,
    ChatDataset,
    ChatFormat,
    PackedConversations,
    pack_best_fit,
    prepare_chat,
)
from heddle.data.chat_template import ChatTemplate
from heddle.data.documents import UnreadableError
from heddle.data.hub import read_any_text
from heddle.data.sources import parse_source
from heddle.errors import DataError
from heddle.tokenization.backend import without_added_space
from heddle.tokenization.tokenizer import BoundaryTokens, Tokenizer
from tests.data import chats
from tests.exchange.tokenizer_cases import tokenizer_json
from tests.laws.planting import Plant, assigned, calls, reads, replaced, result


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return chats.train_tokenizer()


def check_default_template(tokenizer: Tokenizer) -> None:
    chat_format = ChatFormat(tokenizer)
    for seed in range(12):
        messages = chats.conversation(seed, 1 + seed % 3)
        tokens, assistant_mask = chats.reference_encoding(tokenizer, messages)
        assert chats.encode(chat_format, messages) == [(tokens, assistant_mask)]
        assert chats.encode(chat_format, [*messages, {"role": "user", "content": "And then?"}]) == [
            (tokens, assistant_mask)
        ]
        prompt = chat_format.encode_prompt(messages[:-1])
        assert tokens[: len(prompt)] == prompt
        assert assistant_mask[len(prompt) - 1 : len(prompt) + 1] == [False, True]


def pack_conversations(
    tokenizer: Tokenizer, tmp_path: Path, conversations: list[Any], sequence_length: int = 400
) -> ChatDataset:
    return prepare_chat([chats.write_chat_file(tmp_path / "talks.jsonl", conversations)], tokenizer, sequence_length)


def check_batches(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Every conversation comes once per epoch, with its own labels at its own positions and no other labels."""
    conversations = [chats.conversation(seed, 1 + seed % 2) for seed in range(60)]
    chat = pack_conversations(tokenizer, tmp_path, conversations)
    assert chat.report["cut"] == 0
    expected = {
        tuple(tokens): mask
        for tokens, mask in (chats.reference_encoding(tokenizer, messages) for messages in conversations)
    }
    rows, size = len(chat.train.rows), 7
    trained = []
    epoch = chat.train.batch(np.arange(rows), np.arange(rows))
    batches = [chat.batch(3, first, size) for first in range(0, rows, size)]
    assert {row.tobytes() for batch in batches for row in batch.tokens} == {row.tobytes() for row in epoch.tokens}
    for batch in [epoch, *chat.validation_batches(99, 4)]:
        for tokens, labels, lengths in zip(batch.tokens, batch.targets, batch.doc_lengths, strict=True):
            start = 0
            for length in lengths:
                inputs, row_labels = tokens[start : start + length].tolist(), labels[start : start + length]
                (tokens_of_row,) = [ids for ids in expected if list(ids[:-1]) == inputs]
                expected_labels = [
                    token if is_answer else -1
                    for token, is_answer in zip(tokens_of_row[1:], expected[tokens_of_row][1:], strict=True)
                ]
                assert row_labels.tolist() == expected_labels
                assert row_labels[-1] == tokenizer.eod_id
                trained.append(tokens_of_row)
                start += length
            assert (labels[start:] == -1).all()
    assert sorted(trained) == sorted(
        tuple(chats.reference_encoding(tokenizer, messages)[0]) for messages in conversations
    )


def check_everything(tokenizer: Tokenizer, tmp_path: Path) -> None:
    check_default_template(tokenizer)
    check_batches(tokenizer, tmp_path)


def test_default_template_and_labels_of_batches(tokenizer: Tokenizer, tmp_path: Path) -> None:
    check_everything(tokenizer, tmp_path)


@pytest.mark.parametrize(
    "plant",
    [
        reads(ChatFormat._encode_answers, "begin", lambda begin: 0),
        assigned(
            ChatFormat._encode_answers,
            "assistant_mask",
            lambda inside, *, is_special: inside & ~is_special[: len(inside)],
            nth=1,
        ),
        reads(ChatFormat._encode_answers, "begin", lambda begin: begin - 1),
        calls(PackedConversations.batch, "full", lambda np, shape, fill, dtype: np.full(shape, 0, dtype=dtype)),
        calls(PackedConversations.batch, "where", lambda np, _, ids, fill, *, mask: np.where(mask[:-1], ids, fill)),
        calls(PackedConversations.batch, "where", lambda np, chosen, _, fill, *, ids: np.where(chosen, ids[:-1], fill)),
    ],
    ids=[
        "labels on the user's tokens",
        "no label on the end of a turn",
        "a label on the prompt's last token",
        "labels on padding",
        "labels one position too early",
        "the input token as its own label",
    ],
)
def test_planted_bugs_are_caught(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        check_everything(tokenizer, tmp_path)


@given(st.lists(st.integers(1, 40)), st.integers(40, 50))
def test_packing(lengths: list[int], row_length: int) -> None:
    rows = pack_best_fit(lengths, row_length)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    sums = sorted(sum(lengths[item] for item in row) for row in rows)
    assert all(0 < size <= row_length for size in sums)
    assert len(sums) < 2 or sums[0] + sums[1] > row_length  # no two rows fit into one


def test_equal_conversations_are_in_one_split_and_the_hash_is_of_the_content(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    conversations = [chats.conversation(seed) for seed in range(40)] * 2
    chat = pack_conversations(tokenizer, tmp_path, conversations)
    train, validation = (
        {row.tokens.tobytes() for row in split.conversations} for split in (chat.train, chat.validation)
    )
    assert train
    assert validation
    assert not train & validation
    assert len(chat.train.conversations) + len(chat.validation.conversations) == 80
    assert pack_conversations(tokenizer, tmp_path, conversations).hash == chat.hash
    assert pack_conversations(tokenizer, tmp_path, [*conversations[:-1], chats.conversation(99)]).hash != chat.hash
    other = {CHAT_TEMPLATE_FILE: chat.chat_format.template + "{# other #}"}
    assert prepare_chat([f"chat:{tmp_path}/talks.jsonl"], tokenizer, 400, other).hash != chat.hash
    few = pack_conversations(tokenizer, tmp_path, conversations[:2])
    assert (len(few.train.conversations), len(few.validation.conversations)) == (1, 1)
    two = prepare_chat(
        [chats.write_chat_file(tmp_path / f"{n}", conversations[n : n + 20]) for n in (0, 20)], tokenizer, 64
    )
    assert two.hash == pack_conversations(tokenizer, tmp_path, conversations[:40]).hash


def test_long_conversations_are_cut_and_counted(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = [{"role": "user", "content": "warp " * 50}, {"role": "assistant", "content": "weft"}]
    long = [{"role": "user", "content": "warp"}, {"role": "assistant", "content": "weft " * 50}]
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = pack_conversations(tokenizer, tmp_path, [late, long, short], 64)
    assert (chat.report["cut"], chat.report["without_answer_after_cut"]) == (2, 1)
    rows = sorted((row for split in (chat.train, chat.validation) for row in split.conversations), key=len)
    assert sorted(len(row.tokens) for row in rows)[-1] == 65
    assert all(row.assistant_mask[1:].any() for row in rows)
    err = capsys.readouterr().err
    assert "2 conversations" in err
    with pytest.raises(DataError, match=r"1 different.*sequence_length 64"):
        pack_conversations(tokenizer, tmp_path, [late, late, short], 64)


def line(messages: Any, **fields: Any) -> str:
    return json.dumps({"messages": messages, **fields})


SAYS, ANSWERS = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", r"UTF-8 JSON.*line 2"),
        ("[" * 100_000, r"UTF-8 JSON.*line 2"),
        ('{"text": "x"}', r'"messages".*line 2.*{"messages"'),
        ("[1]", r'"messages".*line 2'),
        (line([]), r'"messages".*line 2'),
        (line("hello"), r'"messages".*line 2'),
        (line(["hello"]), r"messages\[0\].*line 2"),
        (line([SAYS, {"role": "robot", "content": "b"}]), r'"robot".*messages\[1\].*line 2'),
        (line([{"content": "b"}]), r"messages\[0\].*line 2"),
        (line([{"role": ["user"], "content": "b"}]), r'\["user"\].*messages\[0\]'),
        (line([SAYS, {"role": "assistant", "content": " \n"}]), r"messages\[1\].*line 2"),
        (line([SAYS, {"role": "assistant", "content": None}]), r"messages\[1\].*line 2"),
        (line([SAYS, {"role": "assistant", "content": ["b"]}]), r"messages\[1\]"),
        (line([SAYS]), r"assistant.*line 2"),
        (
            line([SAYS, ANSWERS | {"tool_calls": [1]}]),
            '"tool_calls"',
        ),
        (line([SAYS, ANSWERS | {"content": None, "tool_calls": [1]}]), '"tool_calls"'),
        (line([SAYS, ANSWERS], tools=[{}]), r'"tools".*line 2'),
        (line([SAYS, ANSWERS], functions=[{}]), r'"functions".*line 2'),
        (line([SAYS, ANSWERS], system="Weave."), r'"system" beside.*in a message, or.*line 2'),
        (line([SAYS, ANSWERS], images=["a.png"]), r'"images" beside.*line 2'),
        (line([SAYS, ANSWERS], chat_template_kwargs={"think": False}), r'"chat_template_kwargs" beside.*line 2'),
        (line([SAYS, {"role": "assistant", "content": "\ud800"}]), r"surrogate.*messages\[1\]"),
        (
            line([SAYS, {"role": "assistant", "content": "x<|end|>"}]),
            r"line 2.*'<\|end\|>'",
        ),
    ],
)
def test_a_bad_line_is_named(tokenizer: Tokenizer, tmp_path: Path, bad: str, message: str) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(line([SAYS, ANSWERS]) + "\n" + bad + "\n")
    with pytest.raises(DataError, match=message) as error:
        prepare_chat([f"chat:{path}"], tokenizer, 64)
    assert str(error.value).startswith(f"data file {path}")
    assert "\n" not in str(error.value)


FLAGS: list[tuple[dict[str, Any], bool | None]] = [
    ({"weight": 0}, False),
    ({"weight": 1}, True),
    ({"weight": 1.0}, True),
    ({"train": False}, False),
    ({"training": True}, True),
    ({"weight": None, "train": None, "name": "", "tool_calls": []}, True),
    ({"weight": 0.5}, None),
    ({"weight": "0"}, None),
    ({"train": ""}, True),
    ({"training": []}, True),
    ({"weight": "", "train": {}}, True),
    ({"weight": -1}, None),
]


@pytest.mark.parametrize(("fields", "is_learned"), FLAGS)
def test_a_field_that_says_whether_to_train_is_obeyed_or_refused(
    fields: dict[str, Any], is_learned: bool | None, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "talks.jsonl"
    second = {"role": "assistant", "content": "second"}
    path.write_text((line([SAYS, ANSWERS | fields, SAYS, second]) + "\n") * 2 + line([SAYS, second]) + "\n")
    if is_learned is None:
        with pytest.raises(DataError, match=rf'"{next(iter(fields))}".*messages\[1\].*line 1'):
            prepare_chat([f"chat:{path}"], tokenizer, 64)
        return
    chat = prepare_chat([f"chat:{path}"], tokenizer, 64)
    learned = {
        tokenizer.decode(tokens[mask].tolist())
        for split in (chat.train, chat.validation)
        for tokens, mask in split.conversations
    }
    assert learned == {ANSWERS["content"] * is_learned + "second", "second"}


@pytest.mark.parametrize("name", ["loss", "trainable", "learn", "loss_weight", "mask"])
@pytest.mark.parametrize("value", [0, False, 0.0])
def test_a_field_of_another_name_that_may_say_not_to_train_is_refused(
    name: str, value: float, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(line([SAYS, ANSWERS | {name: value}, SAYS, ANSWERS]))
    with pytest.raises(DataError, match=rf'"{name}", which is not supported, in messages\[1\]'):
        prepare_chat([f"chat:{path}"], tokenizer, 64)


WHOLE: list[dict[str, Any]] = [{"weight": 0}, {"train": False}, {"weight": 0.5}, {"training": "no"}, {"loss": False}]
WHOLE += [{"loss_mask": 0}, {"trainable": False}, {"train_on_this": False}, {"sample_weight": 0.0}]
WHOLE += [{"weights": [1, 0.5]}, {"loss_mask": [0, 1]}, {"mask": {"b": [[True, False]]}}, {"loss_weight": 2}]
WHOLE += [{"ignore": True}, {"is_skipped": 1}, {"label": False}, {"labels": [-100, 5]}]


@pytest.mark.parametrize("field", WHOLE)
def test_a_conversation_that_is_not_to_be_trained_on_is_refused(
    field: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(line([SAYS, ANSWERS], **field))
    with pytest.raises(DataError, match=rf'"{next(iter(field))}" that says not to train.*line 1'):
        prepare_chat([f"chat:{path}"], tokenizer, 64)


@pytest.mark.parametrize(
    "fields",
    [
        {"weight": None, "train": "", "training": []},
        {"weight": 1, "train": True, "weights": [1, None], "loss": 2.3, "training_source": "a book"},
        {"source": 0, "ok": False, "ignore": False, "label": 0, "labels": [1]},
        {"system": "a", "system_prompt": "", "images": [], "tools": None},  # the first message's text
    ],
)
def test_neutral_fields_of_a_conversation_pass(fields: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(line([SAYS, ANSWERS], **fields) + "\n" + line([SAYS, {"role": "assistant", "content": "c"}]) + "\n")
    assert prepare_chat([f"chat:{path}"], tokenizer, 64).report["conversations"] == 2


@pytest.mark.parametrize("name", ["talks.jsonl.gz", "talks.json", "talks.ndjson.xz", "talks.parquet", "talks.arrow"])
def test_conversations_are_read_under_every_usual_name(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [line([SAYS, ANSWERS]), line([SAYS, ANSWERS | {"content": "other"}])]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    content = ("[\n" + ",\n".join(lines) + "]" if name.endswith(".json") else "\n".join(lines)).encode()
    packed = {".gz": gzip.compress(content), ".xz": lzma.compress(content)}
    (tmp_path / name).write_bytes(packed.get(Path(name).suffix, content))
    rows = pa.Table.from_pylist([*map(json.loads, lines)])
    if name.endswith(".parquet"):
        parquet.write_table(rows, tmp_path / name)
    if name.endswith(".arrow"):
        feather.write_feather(rows, tmp_path / name, compression="uncompressed")
    plain, other = (prepare_chat([f"chat:{tmp_path / each}"], tokenizer, 64) for each in ("talks.jsonl", name))
    assert other.hash == plain.hash
    with pytest.raises(UnreadableError) as caught:  # as plain text
        list(read_any_text(tmp_path / name))
    assert shlex.split(str(caught.value).split(" with ")[1]) == [f"chat:{tmp_path / name}"]
    assert len(plain.train.conversations) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [SAYS, ANSWERS], "tools": ["f"]}, '"tools".*row 2'),
        ({"messages": [SAYS, ANSWERS | {"weight": 0}]}, "no answer to train on.*row 2"),
        ({"messages": None, "text": "x"}, 'no list "messages" on row 2'),
    ],
)
def test_other_columns_of_a_table_are_read_too(
    row: dict[str, Any], message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [dict.fromkeys(row) | {"messages": [SAYS, ANSWERS]}, row]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        prepare_chat([f"chat:{tmp_path / 'a.parquet'}"], tokenizer, 64)


@pytest.mark.parametrize("template", [None, chats.GENERATION_TEMPLATE, chats.THINK_DROPPING_TEMPLATE])
def test_what_is_cut_off_is_not_rendered(
    template: str | None, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a long conversation are those of one encoded whole, and few of its answers are rendered."""
    backend = Backend.from_str(tokenizer.to_json())
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in chats.SPECIAL_TOKENS])
    chat_format = ChatFormat(
        Tokenizer.from_json(backend.to_str()), {} if template is None else {CHAT_TEMPLATE_FILE: template}
    )
    messages, rendered = chats.conversation(3, 60), list[ChatTemplate]()
    whole = chat_format.encode(messages)
    render = ChatTemplate.render

    def counted(template: ChatTemplate, *args: Any, **names: Any) -> str:
        rendered.append(template)
        return render(template, *args, **names)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    for most in (1, 40, 300, 10**6):
        rendered.clear()
        rows = chat_format.encode(messages, (), most)
        expected, found = (
            [(row.tokens[:most].tolist(), mask) for row in each if any(mask := row.assistant_mask[:most].tolist())]
            for each in (whole, rows)
        )
        assert found == expected
        assert most > 300 or len(rendered) < 60


@pytest.mark.parametrize("fields", [{"weight": 0}, {"train": False}, {"weight": None}])
def test_only_answers_are_trained_on(fields: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(line([SAYS | fields, ANSWERS]) + "\n" + line([SAYS | {"weight": 1}, ANSWERS]) + "\n")
    with pytest.raises(DataError, match=r'"weight".*messages\[0\].*only answers.*line 2'):
        prepare_chat([f"chat:{path}"], tokenizer, 64)
    path.write_text(line([SAYS, ANSWERS | {"weight": 0}]) + "\n")
    with pytest.raises(DataError, match="no answer to train on"):
        prepare_chat([f"chat:{path}"], tokenizer, 64)


def test_no_token_reaches_over_the_seam(tokenizer: Tokenizer) -> None:
    """Where the last character of a prompt and the first of the answer are one token, it is cut there."""
    template = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}t{% endif %}{{ m.content }}<|end|>"
    template += "{% endfor %}{% if add_generation_prompt %}assistant: t{% endif %}"
    chat_format = ChatFormat(tokenizer, {CHAT_TEMPLATE_FILE: template})
    messages = [SAYS, {"role": "assistant", "content": "he warp"}]
    assert len(tokenizer.encode("the")) < len(tokenizer.encode("t")) + len(tokenizer.encode("he"))
    [row] = chat_format.encode(messages)
    prompt = chat_format.encode_prompt(messages[:1])
    assert row.tokens[: len(prompt)].tolist() == prompt
    assert not row.assistant_mask[: len(prompt)].any()
    assert tokenizer.decode(row.tokens[row.assistant_mask].tolist()) == "he warp"


JOINED = "{% for m in messages %}{{ m.role }}: {{ 't' if m.role == 'assistant' }}{{ m.content }}<|im_end|>{% endfor %}"
JOINED += "{% if add_generation_prompt %}assistant: t{% else %}{{ eos_token }}{% endif %}"
SPACED = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
SPACED += "{% if add_generation_prompt %}assistant: {% endif %}"


def foreign(name: str) -> Tokenizer:
    """A tokenizer of another library, most of which put a space before a text."""
    backend = Backend.from_str(tokenizer_json(name))
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    end = backend.token_to_id("<|im_end|>")
    assert end is not None
    return Tokenizer.from_json(backend.to_str(), boundary_tokens=BoundaryTokens((), (end,)))


@pytest.mark.parametrize("name", ["llama2", "gemma", "mistral", "llama3", "qwen", "gpt2", "unigram"])
@pytest.mark.parametrize("template", [JOINED, SPACED])
@pytest.mark.parametrize("answer", ["he warp", "heddle lifts", " x", "yes"])
def test_prompts_are_prefixes_of_rows_at_every_turn(name: str, template: str, answer: str) -> None:
    """And no answer loses its first token, whatever a tokenizer joins or puts before a text."""
    tokenizer = foreign(name)
    chat_format = ChatFormat(tokenizer, {CHAT_TEMPLATE_FILE: template})
    talk = [SAYS, {"role": "assistant", "content": answer}, {"role": "user", "content": "more thread"}, ANSWERS]
    [row] = chat_format.encode(talk)
    for turn in (1, 3):
        prompt = chat_format.encode_prompt(talk[:turn])
        assert row.tokens[: len(prompt)].tolist() == prompt
        assert row.assistant_mask[len(prompt)]
        assert not row.assistant_mask[len(prompt) - 1]
    learned = b"".join(map(tokenizer.token_bytes, row.tokens[row.assistant_mask].tolist()))
    assert learned.decode() == answer + str(ANSWERS["content"])


@pytest.mark.parametrize(
    "plant",
    [
        result(ChatFormat._seams, lambda seams: []),
        replaced(without_added_space, lambda backend: (backend.normalizer, backend.pre_tokenizer)),
    ],
    ids=["no seams of earlier answers", "no steps before a text that goes on"],
)
def test_a_seam_that_is_not_cut_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_prompts_are_prefixes_of_rows_at_every_turn("llama2", JOINED, "he warp")


def test_missing_files_and_chat_data_where_text_is_expected(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl is empty:"):
        prepare_chat([f"chat:{tmp_path}/empty.jsonl"], tokenizer, 64)
    with pytest.raises(DataError, match=r"chat:FILE\.jsonl"):
        prepare_chat([f"chat:{tmp_path}"], tokenizer, 64)
    with pytest.raises(DataError, match="conversations"):
        parse_source(f"chat:{tmp_path}/empty.jsonl")
    with pytest.raises(DataError, match=r"chat template.*Jinja"):
        prepare_chat([f"chat:{tmp_path}/empty.jsonl"], tokenizer, 64, {CHAT_TEMPLATE_FILE: "{% for %}"})
