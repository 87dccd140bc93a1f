"""The server answers as OpenAI's does, and refuses wrong requests in a sentence that names the field."""

import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from heddle.generation.generate import generate
from tests.serving.running import NAME, Running, running_server, small_model


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(max_body=20_000, max_new_tokens=64, max_prompt=100) as running:
        yield running


def test_openai_client_reads_completions_and_streams(server: Running) -> None:
    model, tokenizer = small_model()
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        assert [entry.id for entry in client.models.list()] == [NAME]
        settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 5}
        text = generate(model, "The loom", tokenizer, max_new_tokens=12, temperature=0.9, top_p=0.9, seed=5)
        whole = client.completions.create(model=NAME, prompt="The loom", logprobs=2, **settings)
        assert whole.choices[0].text == text
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        scores = whole.choices[0].logprobs
        assert scores is not None
        assert scores.token_logprobs is not None
        assert len(scores.token_logprobs) == 12
        assert all(score < 0 for score in scores.token_logprobs if score is not None)
        streamed = client.completions.create(model=NAME, prompt="The loom", stream=True, **settings)
        assert "".join(chunk.choices[0].text for chunk in streamed) == text


def test_openai_client_chats_by_the_template(server: Running) -> None:
    model, tokenizer = small_model()
    prompt = "user: Hi\nassistant: "
    text = generate(model, prompt, tokenizer, max_new_tokens=8)
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        chat = client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
        )
        assert chat.choices[0].message.content == text
        assert chat.choices[0].finish_reason == "length"
        scores = chat.choices[0].logprobs
        assert scores is not None
        assert scores.content is not None
        best = [entry.top_logprobs[0].token for entry in scores.content]
        assert best == [entry.token for entry in scores.content]  # greedy takes the most likely one
        stream = client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=8, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 8


@pytest.mark.parametrize("scores", [{}, {"logprobs": 1}])
def test_top_k_is_that_of_generate(scores: dict[str, int], server: Running) -> None:
    model, tokenizer = small_model()
    texts = {}
    for top_k in (-1, 1, 3):
        expected = generate(
            model, "The weaver", tokenizer, max_new_tokens=12, temperature=1.5, top_k=max(0, top_k) or None, seed=7
        )
        answer = server.complete(max_tokens=12, temperature=1.5, top_k=top_k, seed=7, **scores).json()
        texts[top_k] = answer["choices"][0]["text"]
        assert texts[top_k] == expected
    assert len(set(texts.values())) == 3
    assert texts[1] == generate(model, "The weaver", tokenizer, max_new_tokens=12)


def test_a_stream_counts_its_tokens_as_they_come(server: Running) -> None:
    asked = {"stream": True, "max_tokens": 6, "temperature": 0, "logprobs": 0}
    counted, plain = (
        [
            json.loads(line[6:])
            for line in server.complete(**asked, stream_options=options).text.split("\n\n")
            if "{" in line
        ]
        for options in ({"continuous_usage_stats": True}, {})
    )
    usages = [piece["usage"] for piece in counted if "usage" in piece]
    assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3, 4, 5, 6]
    assert {usage["total_tokens"] - usage["completion_tokens"] for usage in usages} == {usages[0]["prompt_tokens"]}
    assert [piece for piece in plain if "usage" in piece] == []


def test_the_end_token_counts_and_is_not_in_the_text(server: Running) -> None:
    """As in vLLM: `completion_tokens` is the number of tokens that the model generated."""
    settings = {"max_tokens": 6, "temperature": 1.5, "seed": 7}
    free = server.complete(**settings, logprobs=0).json()["choices"][0]
    tokens = free["logprobs"]["token_ids"]
    place = next(index for index in range(2, 6) if tokens[index] not in tokens[:index])
    fields = settings | {"stop_token_ids": [tokens[place]]}
    ended = server.complete(**fields).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["text"] == free["text"][: free["logprobs"]["text_offset"][place]]
    assert ended["usage"]["completion_tokens"] == place + 1
    lines = server.complete(**fields, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    assert json.loads(lines[-3][6:])["usage"] == ended["usage"]


def test_a_stop_string_ends_the_text(server: Running) -> None:
    text = server.complete(max_tokens=40, temperature=0).json()["choices"][0]["text"]
    stop = text[5:9]
    choice = server.complete(max_tokens=40, temperature=0, stop=[stop]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.find(stop)], "stop")


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"stop": ["x"] * 100_000}, 413, "body"),
    ({"stop": ["x"] * 1000}, 400, "stop"),
    ({"stop": ["x" * 1000]}, 400, "stop"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": 3}, 400, "stop"),
    ({"max_tokens": 65}, 400, "max_tokens"),
    ({"max_tokens": 10**300}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": True}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"top_k": 10**6}, 400, "top_k"),
    ({"top_k": 2.5}, 400, "top_k"),
    ({"seed": -2}, 400, "seed"),
    ({"n": 17}, 400, "n"),
    ({"n": 0}, 400, "n"),
    ({"prompt": ["a", "b", "c"], "n": 6}, 400, "n"),
    ({"prompt": ["a"] * 17}, 400, "prompt"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"echo": 1}, 400, "echo"),
    ({"logprobs": 1000}, 400, "logprobs"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"a": 1}}, 400, "stream_options"),
    ({"best_of": 4}, 400, "best_of"),
    ({"model": "gpt"}, 404, "model"),
    ({"model": 3}, 400, "model"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": ["a", 3]}, 400, "prompt"),
    ({"prompt": [["a"]]}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": "word " * 1000}, 400, "prompt"),
    ({"prompt": "\ud800"}, 400, "body"),
]


@pytest.mark.parametrize(("fields", "status", "named"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_values_are_refused_by_name(fields: dict[str, Any], status: int, named: str, server: Running) -> None:
    body = {"model": NAME, "prompt": "The", "max_tokens": 2} | fields
    answer = server.client.post("/v1/completions", content=json.dumps(body))
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert error["message"].startswith(named) or error["param"] == named
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) <= 400
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "gpt"}, "model_not_found"),
        ({"model": 3}, None),
        ({"prompt": "word " * 1000}, "context_length_exceeded"),
        ({"prompt": [5] * 101}, "context_length_exceeded"),
        ({"prompt": [[]]}, None),
        ({"max_tokens": 65}, None),
    ],
)
def test_refusals_have_the_codes_of_openai(fields: dict[str, Any], code: str | None, server: Running) -> None:
    assert server.complete(**fields).json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": "word " * 1000}, "prompt: has .*; its operator can raise --max-prompt"),
        ({"prompt": [5] * 600}, "prompt: has 600 tokens; .*1 to 100; its operator can raise --max-prompt"),
        ({"stop": ["x"] * 5}, "stop: must be a string, or a list of at most 4; its operator can raise --max-stops"),
        ({"stop": ["x" * 1000]}, "stop: each must be .* 256 characters; its operator can raise --max-stop-length"),
        ({"stop_token_ids": [1] * 5}, "stop_token_ids: .*; its operator can raise --max-stops"),
        ({"max_tokens": 65}, ".* from 1 to 64; its operator can raise --max-new-tokens, and 0 needs echo"),
        ({"max_tokens": 65, "echo": True}, ".* from 0 to 64; its operator can raise --max-new-tokens"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: is not supported; leave it out, or give 0"),
        ({"best_of": 4}, "best_of: is not supported; leave it out, or give 1"),
    ],
)
def test_a_refusal_says_what_would_pass(fields: dict[str, Any], sentence: str, server: Running) -> None:
    """A limit names the option of the server; a field without effect here, the values that have none anywhere."""
    error = server.client.post("/v1/completions", json={"model": NAME, "prompt": "The"} | fields).json()["error"]
    assert re.fullmatch(sentence, error["message"]), error["message"]


@pytest.mark.parametrize(
    ("path", "name", "value", "home"),
    [
        ("completions", "response_format", {"type": "json_object"}, "/v1/chat/completions"),
        ("completions", "messages", [], "/v1/chat/completions"),
        ("chat/completions", "echo", True, "/v1/completions"),
    ],
)
def test_a_field_of_the_other_address_names_it(path: str, name: str, value: Any, home: str, server: Running) -> None:
    error = server.client.post(f"/v1/{path}", json={"model": NAME, name: value}).json()["error"]
    assert error["message"] == f"{name}: is read at {home} only; ask there, or leave it out"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[1]", "object"),
        (b"\xff", "UTF-8"),
        (b"[" * 9000, "nested"),
        (b'{"seed": NaN}', "NaN"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
        (b'{"prompt": "a", "seed": 1, "prompt": "b"}', "'prompt' twice"),
        (b'{"tools": [{"type": 1, "type": 2}]}', "'type' twice"),
    ],
)
def test_bodies_that_are_no_request_are_refused(content: bytes, named: str, server: Running) -> None:
    answer = server.client.post("/v1/completions", content=content)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("body: ")
    assert named in message


def test_a_body_is_json_without_a_coding(server: Running) -> None:
    body = json.dumps({"prompt": "The", "max_tokens": 1}).encode()
    answers = [
        server.client.post("/v1/completions", content=content, headers={"Content-Encoding": coding})
        for content, coding in ((b"\xef\xbb\xbf" + body, "identity"), (gzip.compress(body), "gzip"))
    ]
    assert [answer.status_code for answer in answers] == [200, 415]
    assert answers[1].json()["error"]["param"] == "Content-Encoding"


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [{"role": "user"}], [{"role": "king", "content": "a"}], [{"role": ["user"], "content": "a"}],
     [{"role": "user", "content": ["a"]}], [{"role": "user", "content": "a", "voice": "b"}]],
)  # fmt: skip
def test_wrong_messages_are_refused(messages: Any, server: Running) -> None:
    answer = server.client.post("/v1/chat/completions", json={"model": NAME, "messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_a_chat_that_asks_for_no_token_is_not_sent_to_echo(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}
    error = server.client.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "max_tokens"
    assert "echo" not in error["message"]


def test_special_tokens_in_a_message_are_refused(server: Running) -> None:
    special = next(iter(small_model()[1].special_tokens.values()))
    messages = [{"role": "user", "content": f"a {special} b"}]
    answer = server.client.post("/v1/chat/completions", json={"model": NAME, "messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_a_model_without_a_template_refuses_chats() -> None:
    with running_server(template=False) as server:
        messages = [{"role": "user", "content": "Hi"}]
        answer = server.client.post("/v1/chat/completions", json={"model": NAME, "messages": messages})
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]


def test_other_addresses_and_methods_are_refused(server: Running) -> None:
    assert server.client.get("/v1/engines").status_code == 404
    answer = server.client.get("/v1/completions")
    assert answer.status_code == 405
    assert "error" in answer.json()
