"""Tools: what a template reads of them, as transformers renders it, and calls in an answer, whole and streamed."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from heddle.serving.app import CALL_BEGINS, Choice, read_tool_calls, split_before_call
from heddle.serving.engine import Event
from heddle.serving.limits import ServerLimits
from heddle.serving.requests import RequestError, RequestReader, TextRequest
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.laws import planting
from tests.serving import running
from tests.serving.running import NAME, Running, running_server

# In the manner of Hermes and Qwen2.5, and of Llama 3.1.
HERMES = (
    "{%- if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}</tools>\n{%- endif %}"
    "{%- for message in messages %}{{ '\\n' + message.role + ': ' }}"
    "{%- if message.content %}{{ message.content }}{% endif %}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n"
    "{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "{%- endfor %}{% if add_generation_prompt %}\nassistant: {% endif %}"
)
LLAMA = (
    '{%- if tools is not none %}{{ \'Answer with {"name": …, "parameters": …}.\' }}'
    "{%- for tool in tools %}{{ '\\n' + tool.function | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{%- for message in messages %}{{ '\\n[' + message['role'] + '] ' }}"
    "{%- if 'tool_calls' in message %}{%- set call = message.tool_calls[0].function %}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}"
    "{%- elif message.role == 'tool' %}{{ message.content | tojson }}{{ message.tool_call_id }}"
    "{%- else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '\\n[assistant] ' }}{% endif %}"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weave",
            "description": "Weave a cloth; „für“ 布.",
            "parameters": {"type": "object", "properties": {"threads": {"type": "integer"}}, "required": ["threads"]},
        },
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weave", "arguments": '{"threads": 3, "kind": "布"}'}}
TALK: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weave."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "weave", "content": "done"},
    {"role": "user", "content": "Again."},
]


def reader(template: str) -> RequestReader:
    tokenizer = Tokenizer.train([small.text(4000)], small.VOCABULARY)
    tokenizer.companion_files = {"chat_template.jinja": template}
    return RequestReader(tokenizer, NAME, ServerLimits(max_prompt=5000))


def body(messages: list[Any] = TALK, **fields: Any) -> bytes:
    return json.dumps({"model": NAME, "messages": messages} | fields).encode()


def with_tables(messages: list[Any]) -> list[Any]:
    """What programs give transformers: the arguments of calls are tables."""
    read = json.loads(json.dumps(messages))
    for message in read:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return list(read)


@pytest.mark.parametrize("template", [HERMES, LLAMA])
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_a_prompt_is_that_of_transformers(template: str, tools: Any) -> None:
    ours = reader(template)
    theirs = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(ours.tokenizer.to_json()))
    theirs.chat_template = template
    expected = theirs.apply_chat_template(with_tables(TALK), tools=tools, add_generation_prompt=True, tokenize=False)
    asked = {} if tools is None else {"tools": tools}
    request = ours.read("chat", body(**asked))
    assert ours.tokenizer.decode(request.prompt_ids) == expected
    assert request.has_tools is (tools is not None)
    plain = ours.read("chat", body(**asked, tool_choice="none"))
    assert ours.tokenizer.decode(plain.prompt_ids) != expected if tools else True
    assert not plain.has_tools


def called(calls: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": calls}]}


@pytest.mark.parametrize("arguments", ["", "{}", None])
def test_a_call_without_arguments_has_none(arguments: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weave", "arguments": arguments}}
    ours = reader(HERMES)
    prompt = ours.tokenizer.decode(ours.read("chat", body(**called([call]))).prompt_ids)
    assert '{"name": "weave", "arguments": {}}' in prompt


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [{"type": "function"}]}),
    ("tools", {"tools": "weave"}),
    ("tools", {"tools": TOOLS * 200}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "<|end|>"}}]}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "required"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weave"}}}),
    ("messages", {"messages": [{"role": "user", "content": None}]}),
    ("messages", {"messages": [{"role": "tool", "content": None}]}),
    ("messages", called([CALL | {"function": {"name": "weave", "arguments": "{"}}])),
    ("messages", called([CALL | {"function": {"name": "weave", "arguments": "3"}}])),
    ("messages", called([CALL | {"function": {"arguments": "{}"}}])),
    ("messages", called("weave")),
    ("messages", {"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]}),
    ("messages", {"messages": [{"role": "tool", "content": "x", "tool_call_id": 3}]}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "fields"), REFUSED)
def test_what_cannot_be_is_refused_by_its_field(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        reader(HERMES).read("chat", body(**fields))
    assert refused.value.status == 400
    assert refused.value.field in (field, "tool_call_id")


def test_a_special_token_with_a_quote_is_seen_wherever_it_stands() -> None:
    """In JSON text its quote is escaped."""
    ours = reader(HERMES)
    backend = Backend.from_str(ours.tokenizer.to_json())
    backend.add_special_tokens([AddedToken('<|"|>', special=True, normalized=False)])
    tokenizer = Tokenizer.from_json(backend.to_str())
    tokenizer.companion_files = {"chat_template.jinja": HERMES}
    quoted, text = RequestReader(tokenizer, NAME, ServerLimits(max_prompt=5000)), 'a <|"|> b'
    described = {"type": "function", "function": {"name": "weave", "description": text}}
    named = {"type": "function", "function": {"name": "weave", "parameters": {"properties": {text: {}}}}}
    argued = [CALL | {"function": {"name": "weave", "arguments": json.dumps({"kind": [text]})}}]
    for field, fields in (
        ("tools", {"tools": [described]}),
        ("tools", {"tools": [named]}),
        ("messages", called(argued)),
    ):
        with pytest.raises(RequestError) as refused:
            quoted.read("chat", body(**fields))
        assert refused.value.field == field
    assert quoted.read("chat", body(tools=TOOLS)).has_tools


@pytest.mark.parametrize(("field", "fields"), [("tools", {"tools": TOOLS}), ("messages", {"messages": TALK})])
def test_a_template_without_tools_refuses_them(field: str, fields: dict[str, Any]) -> None:
    plain = reader("{% for message in messages %}{{ message.content or '' }}{% endfor %}")
    with pytest.raises(RequestError) as refused:
        plain.read("chat", body(**({"messages": HI} | fields)))
    assert refused.value.field == field


HI: list[Any] = [{"role": "user", "content": "Hi"}]
ONE = '{"name": "weave", "arguments": {"threads": 3}}'
ANSWERS = {
    f"<tool_call>\n{ONE}\n</tool_call>": ("", ["weave"]),
    f"Well.\n<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>": ("Well.", ["weave", "weave"]),
    f"<tool_call>{ONE}": ("", ["weave"]),  # the end of the turn follows at once
    '{"name": "weave", "parameters": {"threads": 3}}': ("", ["weave"]),
    ' {"name": "weave"}': ("", ["weave"]),
    "<tool_call>weave</tool_call>": None,
    f"<tool_call>{ONE}</tool_call> and more": None,
    '{"name": 3}': None,
    '{"threads": 3}': None,
    '{"name": "weave", "arguments": "3"}': None,
    f"It is {ONE}": None,
    "a <tool_ca": None,
    "{": None,
    "": None,
}


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_in_an_answer(text: str, size: int) -> None:
    """In pieces of any size; no piece of a call is given out as text."""
    choice = Choice(TextRequest([0], 9, 1.0, None, 0, has_tools=True))
    pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
    shown = [
        choice.add(Event(piece, new_tokens=number + 1, finish_reason="stop" if number == len(pieces) - 1 else None))
        for number, piece in enumerate(pieces)
    ]
    found = ANSWERS[text]
    if found is None:
        assert ("".join(shown), choice.calls, choice.finish_reason) == (text, [], "stop")
        return
    assert ("".join(shown), [call["function"]["name"] for call in choice.calls]) == found
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.calls[0]["function"]["arguments"]) in ({"threads": 3}, {})
    assert len({call["id"] for call in choice.calls}) == len(choice.calls)


def test_without_tools_a_text_is_a_text() -> None:
    choice = Choice(TextRequest([0], 9, 1.0, None, 0))
    assert choice.add(Event(f"<tool_call>{ONE}</tool_call>", new_tokens=1, finish_reason="stop")).startswith(
        "<tool_call>"
    )
    assert choice.finish_reason == "stop"


def test_a_text_that_goes_on_is_split_before_what_may_be_a_call() -> None:
    for length in range(len(CALL_BEGINS)):
        assert split_before_call("a " + CALL_BEGINS[:length]) == ("a", " " + CALL_BEGINS[:length])
    assert split_before_call("a < b") == ("a < b", "")
    assert read_tool_calls("a")[1] == []


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Of a model that calls a tool: a small one, whose first text is replaced as it leaves the engine."""
    monkeypatch.setattr(running, "TEMPLATE", HERMES)
    add = Choice.add

    def replaced(choice: Choice, event: Event) -> str:
        return add(choice, replace(event, text="" if choice.new_tokens else f"Well. <tool_call>{ONE}</tool_call>"))

    monkeypatch.setattr(Choice, "add", replaced)
    with running_server(max_new_tokens=64, max_prompt=2000) as started:
        yield started


def test_a_client_gets_calls_whole_and_streamed(server: Running) -> None:
    request = {"model": NAME, "messages": TALK, "tools": TOOLS, "max_tokens": 5, "n": 2}
    whole = server.client.post("/v1/chat/completions", json=request)
    assert whole.status_code == 200, whole.text
    for choice in whole.json()["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Well."
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weave", "arguments": '{"threads": 3}'}
    streamed = server.client.post("/v1/chat/completions", json=request | {"stream": True})
    chunks = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
    for index in range(2):
        deltas = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert "".join(each["delta"].get("content") or "" for each in deltas) == "Well."
        [calls] = [each["delta"]["tool_calls"] for each in deltas if "tool_calls" in each["delta"]]
        assert [call["index"] for call in calls] == [0]
        assert calls[0]["function"]["name"] == "weave"
        assert [each["finish_reason"] for each in deltas if each["finish_reason"]] == ["tool_calls"]
    plain = server.client.post("/v1/chat/completions", json=request | {"tool_choice": "none"}).json()["choices"][0]
    assert plain["message"]["content"].startswith("Well. <tool_call>")
    assert "tool_calls" not in plain["message"]


def test_a_call_that_is_given_out_as_text_is_caught(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    planting.replaced(split_before_call, lambda text: (text, ""))(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_client_gets_calls_whole_and_streamed(server)
