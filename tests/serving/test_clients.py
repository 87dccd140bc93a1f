"""What clients of OpenAI's interface send by themselves passes; what asks for something else is refused by its name."""

import asyncio
import copy
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx2 as httpx
import pytest
import torch
from starlette.requests import ClientDisconnect
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from heddle.generation.scheduler import BatchScheduler
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.serving import engine as engines
from heddle.serving.app import Access, Gate
from heddle.serving.engine import Engine, Event, TokenScore, completion_scores, token_text
from heddle.serving.limits import ServerLimits
from heddle.serving.requests import RequestError, RequestReader, TextRequest
from heddle.tokenization.tokenizer import BoundaryTokens, Tokenizer
from tests import small
from tests.exchange.tokenizer_cases import tokenizer_json
from tests.laws.planting import Plant, result
from tests.serving.running import NAME, Running, running_server, small_model

HI: list[Any] = [{"role": "user", "content": "Hi"}]
ECHOED: dict[str, Any] = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(max_new_tokens=64, max_prompt=100, max_body=10**6) as running:
        yield running


PASSES: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"presence_penalty": 0, "frequency_penalty": 0.0},
    {"n": 1, "user": "u", "seed": 1},
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
    {"functions": None, "logit_bias": {}, "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    {"stop": None, "top_p": 1, "temperature": None, "stream": None, "stream_options": None, "logprobs": None},
    {"modalities": ["text"], "audio": None, "prediction": None, "response_format": None},
    {"min_p": 0.0, "repetition_penalty": 1, "length_penalty": 1.0, "min_tokens": 0, "use_beam_search": False},
    {"ignore_eos": False, "skip_special_tokens": True, "add_generation_prompt": True, "chat_template_kwargs": {}},
    {"typical_p": 1, "repeat_penalty": 1.0, "mirostat": 0, "xtc_probability": 0, "dry_multiplier": 0.0, "seed": -1},
    {"cache_prompt": True, "timings_per_token": False, "dynatemp_range": 0, "min_new_tokens": 0, "request_id": "r"},
    {"verbosity": "medium", "top_logprobs": 0, "best_of": 1, "logprobs": False, "prompt_cache_retention": "24h"},
    {"documents": [], "bad_words": [], "priority": 0, "return_token_ids": False, "stop_token_ids": [], "stop": []},
    {"add_special_tokens": False, "continue_final_message": False, "separate_reasoning": True, "no_stop_trim": False},
    {"logit_bias": {"5": 0, "6": 0.0}, "max_tokens": 4},
    {"guided_json": None, "structured_outputs": None, "reasoning_effort": None, "verbosity": None, "n": None},
    {"stop": "", "stream_options": {"include_obfuscation": False, "include_usage": None}},
]
MESSAGES: list[list[Any]] = [
    [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}],
    [{"role": "user", "name": "ann", "content": "Hi"}],
    [{"role": "user", "content": "Hi", "tool_calls": []}],
    [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": None, "annotations": []}]}],
    [{"role": "user", "content": "Hi", "prefix": False, "cache_control": None, "attachments": [], "id": ""}],
]


@pytest.mark.parametrize("fields", PASSES)
def test_neutral_values_pass_and_change_nothing(fields: dict[str, Any], server: Running) -> None:
    body = {"model": NAME, "messages": HI, "max_tokens": 4, "top_k": 1}
    plain, answer = (server.client.post("/v1/chat/completions", json=body | extra) for extra in ({}, fields))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize("messages", MESSAGES)
def test_parts_names_and_empty_fields_are_the_same_message(messages: list[Any], server: Running) -> None:
    body = {"model": NAME, "max_tokens": 4, "top_k": 1}
    plain, answer = (
        server.client.post("/v1/chat/completions", json=body | {"messages": each}) for each in (HI, messages)
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain.json()["choices"]


def test_a_developer_is_the_system(server: Running) -> None:
    body = {"model": NAME, "max_tokens": 4, "top_k": 1}
    plain, answer = (
        server.client.post(
            "/v1/chat/completions", json=body | {"messages": [{"role": role, "content": "Be kind"}, *HI]}
        )
        for role in ("system", "developer")
    )
    assert answer.json()["choices"] == plain.json()["choices"]


def test_false_asks_for_no_scores_of_a_completion(server: Running) -> None:
    assert server.complete(logprobs=False, max_tokens=2).json()["choices"][0]["logprobs"] is None
    assert server.complete(logprobs=True, max_tokens=2).status_code == 400


OTHERS = [{}, ECHOED, {"reasoning_content": "", "reasoning": None, "prefix": False, "refusal": "", "audio": {}}]
OTHERS += [{"content": None}, {"content": []}, {"content": [{"type": "text", "text": "yo"}], "tool_calls": []}]


@pytest.mark.parametrize("fields", OTHERS)
def test_an_echoed_answer_passes(fields: dict[str, Any], server: Running) -> None:
    messages = [*HI, {"role": "assistant", "content": "yo"} | fields, {"role": "user", "content": "and"}]
    answer = server.client.post("/v1/chat/completions", json={"model": NAME, "messages": messages, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def test_minus_one_is_no_limit_of_its_own(server: Running) -> None:
    plain, unset = (server.complete(top_k=1, **fields).json() for fields in ({}, {"max_tokens": -1}))
    assert unset["choices"] == plain["choices"]
    body = {"model": NAME, "messages": HI, "max_completion_tokens": -1}
    assert server.client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(("error", "is_said"), [(ClientDisconnect(), False), (KeyError(), True)])
def test_a_client_that_leaves_before_its_body_is_there_is_no_failure_of_the_server(
    error: Exception, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async def app(*_: Any) -> None:
        raise error

    scope, unused = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}, cast(Any, None)
    asyncio.run(Gate(app, Access(None))(scope, unused, unused))
    assert ("failed inside the server" in capsys.readouterr().err) == is_said


def test_the_best_of_as_many_as_asked_for_are_all(server: Running) -> None:
    plain, best = (server.complete(n=2, max_tokens=3, seed=1, **fields).json() for fields in ({}, {"best_of": 2}))
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in plain["choices"]]
    assert server.complete(n=2, best_of=3).json()["error"]["param"] == "best_of"
    assert server.complete(add_special_tokens=True, max_tokens=1).status_code == 200


ASKS: list[tuple[str, Any]] = [
    ("verbosity", "low"),
    ("typical_p", 0.9),
    ("mirostat", 2),
    ("documents", [{"text": "x"}]),
    ("continue_final_message", True),
    ("seed", -2),
    ("response_format", {"type": "json_object", "schema": "x"}),
    ("response_format", {"type": "grammar"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("presence_penalty", 0.5),
    ("frequency_penalty", False),
    ("logit_bias", {"5": -100}),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("echo", True),
    ("best_of", 2),
    ("suffix", "x"),
    ("n", 200),
    ("max_completion_tokens", 5),
    ("modalities", ["audio"]),
    ("reasoning_effort", "high"),
    ("min_p", 0.1),
    ("repetition_penalty", 1.2),
    ("ignore_eos", True),
    ("chat_template_kwargs", {"enable_thinking": False}),
    ("stop_token_ids", ["x"]),
    ("stop_token_ids", [10**6]),
]


@pytest.mark.parametrize(("name", "value"), ASKS)
def test_a_value_that_asks_for_what_is_not_there_is_refused_by_name(name: str, value: Any, server: Running) -> None:
    body = {"model": NAME, "messages": HI, "max_tokens": 4, name: value}
    answer = server.client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, "Hi", {"type": "text"}, None])
def test_a_part_that_is_no_text_is_refused(part: Any, server: Running) -> None:
    messages = [{"role": "user", "content": [part]}]
    answer = server.client.post("/v1/chat/completions", json={"model": NAME, "messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def imported(name: str) -> Tokenizer:
    """A tokenizer that falls back to bytes, with a special token more."""
    backend = Backend.from_str(tokenizer_json(name))
    backend.add_special_tokens([AddedToken("<|stop|>", special=True, normalized=False)])
    return Tokenizer.from_json(backend.to_str(), boundary_tokens=BoundaryTokens((1,), (2,)))


@pytest.mark.parametrize("name", ["llama2", "gemma", "mistral"])
def test_scores_are_by_token_and_byte(name: str) -> None:
    """Each token has its own text, spaces included, and offsets count whole characters."""
    tokenizer = imported(name)
    text = "the warp 🙂日 é"
    ids = tokenizer.encode(text)
    scores = [TokenScore(token, -1.0, [(token, -1.0), (ids[0], -2.0)]) for token in ids]
    answer, whole = completion_scores(scores, tokenizer)
    assert whole.decode().strip() == text
    data = [tokenizer.token_bytes(token) for token in ids]
    assert b"".join(data).decode().strip() == text
    assert answer["text_offset"] == [len(b"".join(data[:index]).decode("utf-8", "ignore")) for index in range(len(ids))]
    for token, shown in zip(ids, answer["tokens"], strict=True):
        piece = tokenizer.token_bytes(token)
        assert shown == (f"bytes:\\x{piece[0]:02x}" if piece[0] >= 0x80 and len(piece) == 1 else piece.decode())
    different = {token: token_text(token, tokenizer) for token in ids}
    assert len(set(different.values())) == len(different)  # no two alternatives are one key
    assert [len(best) for best in answer["top_logprobs"]] == [1 + (token != ids[0]) for token in ids]


def texts_of(answer: httpx.Response) -> dict[int, str]:
    """The texts of an answer by their index: those of a stream put together."""
    assert answer.status_code == 200, answer.text
    if "event-stream" not in answer.headers["content-type"]:
        return {choice["index"]: choice["text"] for choice in answer.json()["choices"]}
    texts: dict[int, str] = {}
    for line in answer.text.split("\n\n"):
        for choice in json.loads(line[6:])["choices"] if "{" in line else []:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("stream", [False, True])
def test_several_texts_and_prompts_are_those_of_single_requests(stream: bool, server: Running) -> None:
    fields = {"max_tokens": 9, "stream": stream, "temperature": 1.0}
    prompts = ["The weaver", "A loom"]
    alone = [
        texts_of(server.complete(prompt=prompt, seed=seed, **fields))[0] for prompt in prompts for seed in (5, 6, 7)
    ]
    assert len(set(alone)) > 1
    together = texts_of(server.complete(prompt=prompts, n=3, seed=5, **fields))
    assert together == dict(enumerate(alone))


def test_several_answers_of_a_chat(server: Running) -> None:
    body = {"model": NAME, "messages": HI, "max_tokens": 5, "n": 2, "seed": 1}
    answer = server.client.post("/v1/chat/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    alone = [server.client.post("/v1/chat/completions", json=body | {"n": 1, "seed": seed}).json() for seed in (1, 2)]
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert contents == [each["choices"][0]["message"]["content"] for each in alone]
    usages = [each["usage"] for each in alone]
    assert answer["usage"]["completion_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert answer["usage"]["prompt_tokens"] == usages[0]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_with_the_prompt(stream: bool, server: Running) -> None:
    fields = {"max_tokens": 4, "seed": 2, "stream": stream}
    tokenizer = server.engine.tokenizer
    tokens = [*tokenizer.bos_ids, *tokenizer.encode("A loom")]
    plain = texts_of(server.complete(prompt=["The weaver", "A loom"], **fields))
    echoed = texts_of(server.complete(prompt=["The weaver", "A loom"], echo=True, **fields))
    assert echoed == {0: "The weaver" + plain[0], 1: "A loom" + plain[1]}
    assert texts_of(server.complete(prompt=[tokens], echo=True, **fields)) == {0: echoed[1]}


LONG = "The weaver of the loom. " * 40  # is read in several pieces


@pytest.mark.parametrize("invariant", [False, True])
def test_scores_of_a_prompt_are_those_of_one_forward_pass(invariant: bool) -> None:
    """With and without new tokens, in float64; other requests run beside them."""
    model, tokenizer = small_model()
    model = copy.deepcopy(model).double()
    reader = RequestReader(tokenizer, NAME, ServerLimits(max_prompt=1000))
    body = {"model": NAME, "echo": True, "logprobs": 3, "top_k": 1}
    bodies = [body | {"prompt": prompt, "max_tokens": count} for prompt in (LONG, "A loom") for count in (0, 1, 3)]
    with Engine(model, tokenizer, ServerLimits(max_prompt=1000), batch_invariant=invariant) as engine:
        requests = [reader.read("completions", json.dumps(body).encode()) for body in bodies]
        answers = events_of(engine, requests)
    for request, events in zip(requests, answers, strict=True):
        scores = [score for event in events for score in event.scores]
        tokens = [score.token for score in scores]
        count = len(request.prompt_ids)
        assert tokens[:count] == request.prompt_ids
        assert len(tokens) == count + request.new_tokens
        assert events[-1].new_tokens == request.new_tokens
        assert scores[0].is_first
        with torch.no_grad():
            expected = model.head(model(torch.tensor([tokens]))[0])[0].log_softmax(-1)
        for position, score in enumerate(scores[1:]):
            assert score.log_probability == pytest.approx(float(expected[position, score.token]), rel=0, abs=1e-10)
            best = expected[position].topk(3)
            assert [token for token, _ in score.alternatives] == best.indices.tolist()
            assert [value for _, value in score.alternatives] == pytest.approx(best.values.tolist(), rel=0, abs=1e-10)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 2])
def test_an_echo_has_scores_and_offsets_of_its_text(stream: bool, count: int, server: Running) -> None:
    tokenizer = server.engine.tokenizer
    fields = {"prompt": "The weaver", "max_tokens": count, "echo": True, "logprobs": 2, "seed": 5, "stream": stream}
    answer = server.complete(**fields)
    assert answer.status_code == 200, answer.text
    text = texts_of(answer)[0]
    bodies = [json.loads(line[6:]) for line in answer.text.split("\n\n") if "{" in line] if stream else [answer.json()]
    pieces = [piece["logprobs"] for body in bodies for piece in body["choices"] if piece["logprobs"]]
    joined = {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}
    assert len(joined["tokens"]) == len(tokenizer.bos_ids) + len(tokenizer.encode("The weaver")) + count
    assert (joined["token_logprobs"][0], joined["top_logprobs"][0]) == (None, None)
    assert all(value < 0 for value in joined["token_logprobs"][1:])
    assert text.startswith("The weaver")
    assert (text == "The weaver") == (count == 0)
    for token, offset in zip(joined["token_ids"], joined["text_offset"], strict=True):
        piece = tokenizer.token_bytes(token).decode("utf-8", "ignore")
        assert text[offset : offset + len(piece)] == piece
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == count


def test_a_damaged_model_scores_no_prompt() -> None:
    model, tokenizer = small_model()
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.embed.weight[tokenizer.encode("loom")[0]] = math.nan
    reader = RequestReader(tokenizer, NAME, ServerLimits())
    body = {"model": NAME, "prompt": "A loom", "echo": True, "logprobs": 1, "max_tokens": 0}
    with Engine(model, tokenizer, ServerLimits()) as engine:
        ((*_, last),) = events_of(engine, [reader.read("completions", json.dumps(body).encode())])
    assert last.error is not None
    assert last.error.status == 500


def test_offsets_leave_out_the_space_that_a_tokenizer_adds() -> None:
    tokenizer = imported("llama2")
    ids = tokenizer.encode("the warp")
    answer, _ = completion_scores([TokenScore(token, -1.0, []) for token in ids], tokenizer, echo="the warp")
    shown = [tokenizer.token_bytes(token).decode() for token in ids]
    assert shown[0].startswith(" ")
    for piece, offset in zip([shown[0][1:], *shown[1:]], answer["text_offset"], strict=True):
        assert "the warp"[offset : offset + len(piece)] == piece


@pytest.mark.parametrize("name", ["llama2", "gemma"])
def test_offsets_count_special_tokens_that_an_echoed_prompt_names(name: str) -> None:
    """A begin token that was added is not in the text; nor is a space that a tokenizer adds after a special token."""
    tokenizer = imported(name)
    text = "warp<|stop|>é 日<|stop|>"
    ids = [1, *tokenizer.encode(text)]
    scores = [TokenScore(token, -1.0, []) for token in ids]
    first, before = completion_scores(scores[:3], tokenizer, echo=text)
    later, whole = completion_scores(scores[3:], tokenizer, before, text)
    assert whole.decode() == text
    offsets = first["text_offset"] + later["text_offset"]
    assert offsets[:2] == [0, 0]
    stops = [offset for token, offset in zip(ids, offsets, strict=True) if token == ids[-1]]
    assert stops == [text.index("<"), text.rindex("<")]


def test_several_texts_that_find_no_room_leave_nothing_behind(server: Running) -> None:
    limits = server.engine.limits
    server.engine.limits = replace(limits, streams=1, queue=2)
    try:
        answer = server.complete(n=4, max_tokens=4)
    finally:
        server.engine.limits = limits
    assert answer.status_code == 429, answer.text
    server.wait_until_free()
    assert texts_of(server.complete(max_tokens=2)).keys() == {0}


def test_offsets_go_on_through_a_stream(server: Running) -> None:
    fields = {"max_tokens": 12, "logprobs": 1, "seed": 3}
    whole = server.complete(**fields).json()["choices"][0]["logprobs"]
    lines = server.complete(**fields, stream=True).text.split("\n\n")
    pieces = [json.loads(line[6:])["choices"][0]["logprobs"] for line in lines if "{" in line]
    assert [offset for piece in pieces if piece for offset in piece["text_offset"]] == whole["text_offset"]


def test_special_tokens_stop_by_their_id() -> None:
    tokenizer = imported("gemma")
    reader = RequestReader(tokenizer, "m", ServerLimits())
    stop = next(token for token, text in tokenizer.special_tokens.items() if text == "<|stop|>")
    for fields in ({"stop": ["<|stop|>"]}, {"stop_token_ids": [stop]}):
        request = reader.read("completions", json.dumps({"model": "m", "prompt": "a"} | fields).encode())
        assert stop in request.stop_ids


def test_a_text_that_is_too_long_is_refused_before_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_model()[1]
    reader = RequestReader(tokenizer, NAME, ServerLimits(max_prompt=100))
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("the text was cut into tokens"))
    monkeypatch.setattr(Tokenizer, "encode_with_offsets", lambda *_: pytest.fail("the text was cut into tokens"))
    for kind, fields in (
        ("completions", {"prompt": "word " * 200_000}),
        ("chat", {"messages": [{"role": "user", "content": "word " * 100_000}] * 2}),
    ):
        with pytest.raises(RequestError, match="at least"):
            reader.read(kind, json.dumps({"model": NAME} | fields).encode())


def limited_engine(limits: ServerLimits) -> tuple[Engine, Tokenizer]:
    """An engine of a model with 24 learned positions."""
    tokenizer = small_model()[1]
    design = small.design() | {"embedding": {"position": {"kind": "learned", "length": 24}}}
    config = load_config(design, [f"vocab_size={tokenizer.vocab_size}"])
    return Engine(build(config, seed=1).eval(), tokenizer, limits), tokenizer


def last_events(engine: Engine, reader: RequestReader, new_tokens: list[int]) -> list[Event]:
    """How requests of the same prompt end that run together, with as many new tokens each."""
    bodies = [
        {"model": NAME, "prompt": "The weaver", "max_tokens": count, "top_k": 1, "stop_token_ids": []}
        for count in new_tokens
    ]
    with engine:
        requests = [reader.read("completions", json.dumps(body).encode()) for body in bodies]
        return [events[-1] for events in events_of(engine, requests)]


PATIENCE = 60.0  # seconds until all requests must have ended


def events_of(engine: Engine, requests: list[TextRequest]) -> list[list[Event]]:
    """The events of requests that run together."""
    ends: list[list[Event]] = [[] for _ in requests]
    done = threading.Semaphore(0)

    def collect(events: list[Event]) -> Any:
        def deliver(event: Event) -> None:
            events.append(event)
            if event.is_last:
                done.release()

        return deliver

    for events, request in zip(ends, requests, strict=True):
        engine.submit(request, collect(events))
    for _ in requests:
        assert done.acquire(timeout=PATIENCE)
    return ends


def test_an_engine_that_has_ended_takes_no_request() -> None:
    """It would never be answered."""
    engine, tokenizer = limited_engine(ServerLimits())
    reader = RequestReader(tokenizer, NAME, engine.limits)
    last_events(engine, reader, [1])
    request = reader.read("completions", json.dumps({"model": NAME, "prompt": "The"}).encode())
    with pytest.raises(RequestError, match="shutting down") as refused:
        engine.submit(request, lambda event: None)
    assert refused.value.status == 503


def test_a_request_that_waited_too_long_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokenizer = limited_engine(ServerLimits())
    reader = RequestReader(tokenizer, NAME, engine.limits)
    monkeypatch.setattr(engine, "limits", SimpleNamespace(**vars(engine.limits) | {"max_seconds": -1}))
    ends = last_events(engine, reader, [1])
    assert ends[0].error is not None
    assert ends[0].error.status == 429
    assert engine.metrics.finished == 1


@pytest.mark.parametrize("invariant", [False, True])
def test_a_text_past_the_positions_ends_alone(invariant: bool) -> None:
    engine, tokenizer = limited_engine(ServerLimits())
    engine = Engine(engine.model, tokenizer, engine.limits, batch_invariant=invariant)
    prompt = 1 + len(tokenizer.encode("The weaver"))
    room = 24 - prompt
    short, exact, long = last_events(engine, RequestReader(tokenizer, NAME, engine.limits), [4, room + 1, 60])
    assert (short.error, short.new_tokens) == (None, 4)
    assert (exact.error, exact.new_tokens) == (None, room + 1)
    assert long.error is not None
    assert "24" in long.error.sentence
    assert "position" in long.error.sentence


def test_an_error_of_no_request_ends_the_step_and_the_worker_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokenizer = limited_engine(ServerLimits())
    reader, calls = RequestReader(tokenizer, NAME, engine.limits), []
    step = BatchScheduler.step

    def failing(self: BatchScheduler) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("of no request")
        return step(self)

    monkeypatch.setattr(BatchScheduler, "step", failing)
    with engine:
        outcomes = []
        for _ in range(2):
            done, events = threading.Event(), list[Event]()

            def deliver(event: Event, events: list[Event] = events, done: threading.Event = done) -> None:
                events.append(event)
                if event.is_last:
                    done.set()

            body = {"model": NAME, "prompt": "The", "max_tokens": 6, "top_k": 1}
            engine.submit(reader.read("completions", json.dumps(body).encode()), deliver)
            assert done.wait(60)
            outcomes.append(events[-1].error)
        assert engine.states == 0
    assert outcomes[0] is not None
    assert outcomes[0].status == 500
    assert outcomes[1] is None


@pytest.mark.parametrize(
    ("plant", "law"),
    [
        (result(engines.token_text, lambda text: "�"), lambda: test_scores_are_by_token_and_byte("gemma")),
        (
            result(BatchScheduler._end_at_limit, lambda ended: []),
            lambda: test_a_text_past_the_positions_ends_alone(False),
        ),
    ],
    ids=["one text for all bytes", "no limit"],
)
def test_planted_faults_are_seen(plant: Plant, law: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE", 5.0)  # one of these faults lets a request never end
    with pytest.raises(AssertionError):
        law()
