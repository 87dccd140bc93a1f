"""The token that ends a turn in a chat template ends an answer, in a server and in exports; and what templates get."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from heddle.data.chat import CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, ChatFormat, turn_end_ids
from heddle.data.chat_template import ChatTemplate, unknown_names
from heddle.data.documents import UnreadableError
from heddle.errors import ConfigError
from heddle.exchange import tokenizer_files
from heddle.exchange.export import export
from heddle.exchange.tokenizer_files import read_tokenizer_files
from heddle.serving.engine import TokenReader
from heddle.serving.limits import ServerLimits
from heddle.serving.requests import RequestError, RequestReader
from heddle.storage.model import load, save
from heddle.tokenization.tokenizer import BoundaryTokens, Tokenizer
from tests.data import chats
from tests.exchange.test_tokenizer_files import model
from tests.laws.planting import Plant, result

TEMPLATES = {"generation": (chats.GENERATION_TEMPLATE, "<|im_end|>"), "header": (chats.HEADER_TEMPLATE, "<|eot|>")}


def tokenizer(template: str | None = None, **settings: Any) -> Tokenizer:
    """An imported tokenizer whose files name `<|end|>` alone as what ends a text."""
    backend = Backend.from_str(chats.train_tokenizer().to_json())
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in chats.SPECIAL_TOKENS])
    files = {} if template is None else {CHAT_TEMPLATE_FILE: template}
    files |= {TOKENIZER_CONFIG_FILE: json.dumps(settings)} if settings else {}
    end = backend.token_to_id("<|end|>")
    assert end is not None
    boundaries = BoundaryTokens((), (end,), files)
    return Tokenizer.from_json(backend.to_str(), boundary_tokens=boundaries)


def read_by_both(folder: Path, backend: str, files: dict[str, Any]) -> tuple[Tokenizer, Any]:
    """What heddle and transformers make of a tokenizer.json beside these files."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text(backend, encoding="utf-8")
    got, _ = read_tokenizer_files(folder, 2**20)
    assert got is not None
    return got, AutoTokenizer.from_pretrained(folder)


def token(name: str) -> int:
    return next(index for index, text in tokenizer().special_tokens.items() if text == name)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_ends_at_the_template_s_token(name: str) -> None:
    template, end = TEMPLATES[name]
    chat = tokenizer(template)
    assert turn_end_ids(chat) == (token(end),)
    assert token(end) not in chat.eos_ids
    reader = RequestReader(chat, "m", ServerLimits())
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    request = reader.read("chat", json.dumps(body).encode())
    events = [TokenReader(request, chat, float("inf")).read(index) for index in (5, token(end))]
    assert [event.finish_reason for event in events] == [None, "stop"]
    assert events[1].text == ""
    text = reader.read("completions", json.dumps({"model": "m", "prompt": "hi"}).encode())
    assert TokenReader(text, chat, float("inf")).read(token(end)).finish_reason is None


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
AFTER = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHAT + AFTER, "<|im_end|>"),  # an answer begins otherwise than its prompt ends
        (CHAT + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}", "<|im_end|>"),  # the text ends, too
        ("{% if messages[0].role != 'system' %}{{ raise_exception('x') }}{% endif %}" + CHAT, "<|im_end|>"),
        ("{% for m in messages %}{{ m.content }} <|/head|><|eot|>{% endfor %}", "<|eot|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}<s>\n{% endfor %}", "<s>"),
        ("{% for m in messages %}{{ m.content }}, he said<|eot|>{% endfor %}", "<|eot|>"),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}<|eot|>{% endfor %}", "<|eot|>"),
    ],
)
def test_what_follows_an_answer_ends_a_turn(template: str, end: str) -> None:
    assert turn_end_ids(tokenizer(template, eos_token="<|end|>")) == (token(end),)


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}", "{% for %}"])
def test_other_templates_end_no_turn(template: str | None) -> None:
    assert turn_end_ids(tokenizer(template)) == ()


def test_an_export_ends_turns_and_keeps_hash_and_separator(tmp_path: Path) -> None:
    template, end = TEMPLATES["generation"]
    chat = tokenizer(template)
    assert chat.hash == tokenizer().hash
    assert chat.eod_id == tokenizer().eod_id
    save(model(), tmp_path / "ours", chat)
    decoder, again = load(tmp_path / "ours")
    export(decoder, tmp_path / "theirs", again)
    ends = json.loads((tmp_path / "theirs/generation_config.json").read_text())
    assert ends["eos_token_id"] == [token("<|end|>"), token(end)]
    assert ends.get("pad_token_id") not in ends["eos_token_id"]  # or training would mask the end


@pytest.mark.parametrize("where", [TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE])
def test_special_tokens_are_read_where_transformers_reads_them(where: str, tmp_path: Path) -> None:
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    got, theirs = read_by_both(tmp_path, tokenizer().to_json(), {where: named})
    assert got.eos_ids == [token("<|im_end|>")]
    assert got.bos_ids == []  # named, and not added
    template = "{{ bos_token }}|{{ messages[0].content }}|{{ eos_token }}"
    rendered = theirs.apply_chat_template([{"role": "user", "content": "x"}], chat_template=template, tokenize=False)
    ours = ChatFormat(got, {**got.companion_files, CHAT_TEMPLATE_FILE: template})
    assert ours._render([{"role": "user", "content": "x"}], False) == rendered == "<s>|x|<|im_end|>"


def test_tokens_that_the_config_adds_are_added(tmp_path: Path) -> None:
    size = Backend.from_str(tokenizer().to_json()).get_vocab_size()
    added = {str(size + 1): {"content": "<b>", "special": False}, str(size): {"content": "<a>", "special": True}}
    config = {"added_tokens_decoder": added, "eos_token": "<a>"}
    got, theirs = read_by_both(tmp_path, tokenizer().to_json(), {TOKENIZER_CONFIG_FILE: config})
    assert got.eos_ids == [size]
    assert got.encode("x<b>y<a>") == theirs("x<b>y<a>")["input_ids"]
    for far in (str(size + 7), "9" * 5000):  # Python reads no integer of so many digits
        far_away = {"added_tokens_decoder": {far: {"content": "<far>"}}}
        (tmp_path / TOKENIZER_CONFIG_FILE).write_text(json.dumps(far_away))
        with pytest.raises(ConfigError, match=f"token {far[:4]}"):
            read_tokenizer_files(tmp_path, 2**20)


NAMED: list[tuple[str, dict[str, Any]]] = [
    ("added_tokens.json", {"<b>": 0, "<a>": 1}),
    (SPECIAL_TOKENS_FILE, {"additional_special_tokens": ["<a>", "<s>"]}),
    (TOKENIZER_CONFIG_FILE, {"additional_special_tokens": ["<a>", "<b>"]}),
    (TOKENIZER_CONFIG_FILE, {"extra_special_tokens": {"image_token": "<a>"}}),
    (TOKENIZER_CONFIG_FILE, {"eos_token": "<b>", "pad_token": {"content": "<a>", "__type": "AddedToken"}}),
    (TOKENIZER_CONFIG_FILE, {"bos_token": "<a>", "image_token": "<b>"}),
]


@pytest.mark.parametrize(("file", "content"), NAMED)
def test_tokens_that_other_files_name_are_added(file: str, content: dict[str, Any], tmp_path: Path) -> None:
    """With the ids that transformers gives them, and with `eos_token` of the map above that of the config."""
    text = tokenizer().to_json()
    size = Backend.from_str(text).get_vocab_size()
    if file == "added_tokens.json":
        content = {token: size + index for token, index in content.items()}
    ends = {TOKENIZER_CONFIG_FILE: {"eos_token": "<|end|>"}, SPECIAL_TOKENS_FILE: {"eos_token": "<|eot|>"}}
    got, theirs = read_by_both(tmp_path, text, ends | {file: content})
    assert got.encode("x<b>y<a> z") == theirs("x<b>y<a> z")["input_ids"]
    assert [got.id_to_token(index) for index in got.eos_ids] == [theirs.eos_token]


FLAGS = {"lstrip": True, "rstrip": True, "single_word": False, "normalized": False}
SPLIT_OFF: list[tuple[str, dict[str, Any]]] = [
    (TOKENIZER_CONFIG_FILE, {"eos_token": "<a>"}),
    (TOKENIZER_CONFIG_FILE, {"eos_token": {"__type": "AddedToken", "content": "<a>", **FLAGS}}),
    (TOKENIZER_CONFIG_FILE, {"model_specific_special_tokens": {"image_token": "<a>"}}),
    (SPECIAL_TOKENS_FILE, {"pad_token": {"content": "<a>", **FLAGS}}),
    (SPECIAL_TOKENS_FILE, {"additional_special_tokens": ["<a>"]}),
    (TOKENIZER_CONFIG_FILE, {"added_tokens_decoder": {"300": {"content": "<a>", "special": True, "lstrip": True}}}),
    (TOKENIZER_CONFIG_FILE, {"added_tokens_decoder": {"300": {"content": "<a>", "special": False}}}),
    ("added_tokens.json", {"<a>": 300}),
]


@pytest.mark.parametrize(("file", "content"), SPLIT_OFF)
@pytest.mark.parametrize("place", ["vocabulary", "added tokens"])
def test_a_token_that_is_there_is_split_off_as_other_files_say(
    place: str, file: str, content: dict[str, Any], tmp_path: Path
) -> None:
    """A token of the vocabulary is only a word until it is added; an added one has the flags of the settings."""
    data = json.loads(chats.train_tokenizer().to_json())
    assert len(data["model"]["vocab"]) == 300
    if place == "vocabulary":
        data["model"]["vocab"]["<a>"] = 300
    else:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        data["added_tokens"].append({"id": 300, "content": "<a>"} | flags)
    got, theirs = read_by_both(tmp_path, json.dumps(data), {file: content})
    for text in ("x<a>y", "the <a> warp", "<a><a> <|end|>"):
        assert got.encode(text) == theirs(text)["input_ids"]
    named = {theirs.convert_tokens_to_ids(text) for text in theirs.all_special_tokens}
    assert {*got.special_tokens} == named | {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert [got.id_to_token(index) for index in got.eos_ids] == [theirs.eos_token] * (theirs.eos_token is not None)


def test_a_token_that_is_only_a_word_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result(tokenizer_files._is_added, lambda is_added: True)(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_token_that_is_there_is_split_off_as_other_files_say("vocabulary", *SPLIT_OFF[0], tmp_path)


def test_a_turn_may_end_at_a_token_that_is_added_and_not_special() -> None:
    """It ends answers and training rows, and no message may contain it."""
    backend = Backend.from_str(chats.train_tokenizer().to_json())
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    files = {CHAT_TEMPLATE_FILE: CHAT + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"}
    end, mark = backend.token_to_id("<|end|>"), backend.token_to_id("<|im_end|>")
    assert end is not None
    assert mark is not None
    chat = Tokenizer.from_json(backend.to_str(), boundary_tokens=BoundaryTokens((), (end,), files))
    assert turn_end_ids(chat) == (mark,)
    talk = [{"role": "user", "content": "warp"}, {"role": "assistant", "content": "weft"}]
    [row] = ChatFormat(chat, files).encode(talk)
    assert row.tokens[row.assistant_mask].tolist() == [*chat.encode("weft"), mark]
    talk[0]["content"] = "a<|im_end|>"
    with pytest.raises(UnreadableError, match="special token"):
        ChatFormat(chat, files).encode(talk)
    reader = RequestReader(chat, "m", ServerLimits())
    with pytest.raises(RequestError, match="special token"):
        reader.read("chat", json.dumps({"model": "m", "messages": talk}).encode())
    asked = reader.read("chat", json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}]}).encode())
    assert mark in asked.stop_ids


def test_a_named_token_without_a_row_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tokenizer().to_json()
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    (tmp_path / TOKENIZER_CONFIG_FILE).write_text(json.dumps({"bos_token": "<a>", "pad_token": "<b>"}))
    size = Backend.from_str(text).get_vocab_size()
    got, _ = read_tokenizer_files(tmp_path, size + 1)
    assert got is not None
    assert (got.vocab_size, got.id_to_token(size)) == (size + 1, "<a>")
    assert "without a row of the embedding are left out: '<b>'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "plant",
    [
        result(tokenizer_files._named_tokens, lambda names: {}),
        result(tokenizer_files._named_tokens, lambda names: dict(reversed(names.items()))),
    ],
)
def test_a_named_token_that_is_not_added_is_caught(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_tokens_that_other_files_name_are_added(*NAMED[5], tmp_path)


CALLS = [
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=2) }}",
    "{{ messages | tojson(ensure_ascii=True) }}",
    "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}",
    "{{ strftime_now('%Y-%m-%d') }}",
]


@pytest.mark.parametrize("template", CALLS)
def test_templates_get_what_transformers_gives_them(template: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer().to_json(), encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "é <b> 'x'"}]
    want = theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert ChatTemplate(template).render(messages=messages) == want


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{{ messages }}{{ bos_token }}{{ tools }}{{ strftime_now('%Y') }}{{ raise_exception('x') }}", []),
        ("{{ thinking_budget }}{{ messages }}", ["thinking_budget"]),
        ("{% if enable_thinking is defined and enable_thinking %}x{% endif %}", []),
        ("{{ date_string | default('today') }}", []),
        ("{% if not day is defined %}{% set day = 'x' %}{% endif %}{{ day }}", []),
        ("{% for x in messages %}{% set y = x %}{{ y }}{{ z }}{% endfor %}", ["z"]),
        ("{% if name %}{{ name }}{% endif %}{{ other or 'x' }}{{ third if third else 'x' }}", []),
        ("{% if a == 'x' and not b %}{% endif %}{% if c is not none %}{{ c }}{% endif %}", ["a", "c"]),
        ("{% if messages %}{% set rest = messages[1:] %}{% else %}{% set rest = [] %}{% endif %}{{ rest }}", []),
        *[(template, []) for template, _ in TEMPLATES.values()],
    ],
)
def test_names_that_nothing_sets_are_found(template: str, names: list[str]) -> None:
    assert unknown_names(template) == names


@pytest.mark.parametrize("plant", [result(turn_end_ids, lambda ids: ()), result(turn_end_ids, lambda ids: (0,))])
def test_a_planted_bug_is_caught(plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_an_export_ends_turns_and_keeps_hash_and_separator(tmp_path)
