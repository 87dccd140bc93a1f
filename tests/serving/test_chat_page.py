"""The chat page's addresses, the terminal's conversation, and what both show of a model."""

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from heddle.cli.chat import Terminal
from heddle.cli.main import run_command
from heddle.cli.serve import page_of
from heddle.generation.generate import generate
from heddle.model.attention_maps import attention_weights
from heddle.model.size import size
from heddle.serving import chat_page
from heddle.serving.app import Access, Application
from heddle.serving.chat_page import ModelView, add_chat_page
from heddle.serving.conversation import Conversation, SamplingSettings
from heddle.serving.engine import Engine
from heddle.serving.limits import ServerLimits
from heddle.serving.requests import RequestError, RequestReader
from tests.html_page import Page
from tests.serving.running import TEMPLATE, running_server, small_model

GREEDY = SamplingSettings(temperature=0.0, max_tokens=12)


@pytest.fixture
def conversation() -> Iterator[Conversation]:
    model, tokenizer = small_model()
    tokenizer.companion_files = {}
    limits = ServerLimits()
    with Engine(model, tokenizer, limits) as engine:
        yield Conversation(engine, RequestReader(tokenizer, "small", limits))


def test_the_last_step_of_attention_is_that_of_the_model() -> None:
    model, tokenizer = small_model()
    tokens = tokenizer.encode("The weaver and the loom")
    view = ModelView(model)
    assert all(a is b for a, b in zip(model.parameters(), view._twin.parameters(), strict=True))
    layers = view.last_step(tokens)
    with torch.no_grad():
        expected = attention_weights(model, torch.tensor([tokens]))
    for layer, weights in zip(layers, expected, strict=True):
        assert weights is not None
        assert torch.allclose(torch.tensor(layer["heads"]), weights[0, :, -1], atol=1e-4)
    with pytest.raises(RequestError, match=r"attention.* 1 to"):
        view.last_step([1] * (chat_page.MAX_TOKENS + 1))


def test_a_view_leaves_another_threads_observation_alone() -> None:
    """Hooks on a shared module would end up in the other thread's observation."""
    model, _ = small_model()
    view = ModelView(model)
    seen: list[int] = []
    mixer = model.mixers()[0]
    assert mixer is not None
    hook = mixer.register_forward_hook(lambda *_: seen.append(threading.get_ident()))
    try:
        view.last_step([1, 2, 3])
    finally:
        hook.remove()
    assert seen == []


def test_state_bytes_are_those_of_the_size() -> None:
    model, _ = small_model()
    lengths = [1, 7, 300]
    assert ModelView(model).state_bytes(lengths) == [
        size(model.config, context_length=length).state_bytes for length in lengths
    ]
    for wrong in ([], [0], [True], ["1"], [2**21], [1] * 65):
        with pytest.raises(RequestError, match="lengths:"):
            ModelView(model).state_bytes(wrong)  # type: ignore[arg-type]


def test_a_conversation_goes_on_from_its_text(conversation: Conversation) -> None:
    model, tokenizer = small_model()
    pieces: list[str] = []
    reply = conversation.answer("The weaver", GREEDY, pieces.append)
    expected = generate(model, "The weaver", tokenizer, max_new_tokens=12)
    assert reply.text == "".join(pieces) == expected
    assert len(reply.scores) == reply.new_tokens
    assert reply.tokens == len(tokenizer.bos_ids) + len(tokenizer.encode("The weaver")) + reply.new_tokens
    second = conversation.answer(" and", GREEDY, pieces.append)
    assert second.text == generate(model, f"The weaver{expected} and", tokenizer, max_new_tokens=12)
    assert conversation.undo()
    assert conversation.turns == [("The weaver", expected)]


def test_top_k_of_a_conversation(conversation: Conversation) -> None:
    settings = SamplingSettings(temperature=2.0, top_k=1, top_p=1.0, max_tokens=12, seed=3)
    greedy = conversation.answer("The weaver", GREEDY, lambda piece: None).text
    conversation.undo()
    assert conversation.answer("The weaver", settings, lambda piece: None).text == greedy
    conversation.undo()
    assert conversation.answer("The weaver", replace(settings, top_k=0), lambda piece: None).text != greedy


def test_an_answer_that_is_given_up_is_forgotten(conversation: Conversation) -> None:
    def stop(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.answer("The", GREEDY, stop)
    assert conversation.turns == []
    assert conversation.answer("The", GREEDY, lambda piece: None).new_tokens == 12


def test_a_model_with_a_template_answers_messages() -> None:
    model, tokenizer = small_model()
    tokenizer.companion_files = {"chat_template.jinja": TEMPLATE}
    limits = ServerLimits()
    with Engine(model, tokenizer, limits) as engine:
        conversation = Conversation(engine, RequestReader(tokenizer, "small", limits))
        first = conversation.answer("Hello", GREEDY, lambda piece: None)
        assert first.text == generate(model, "user: Hello\nassistant: ", tokenizer, max_new_tokens=12)
        conversation.answer("Again", GREEDY, lambda piece: None)
        expected = f"user: Hello\nassistant: {first.text}\nuser: Again\nassistant: "
        assert conversation.turns[1][1] == generate(model, expected, tokenizer, max_new_tokens=12)


def test_the_terminal_follows_commands(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(
        ["/temperature 0", "/top-k 4", "/max-tokens 3", "//x", "/tokens", "/tokens all", "/state",
         "/temperature 9", "/seed a", "/top-k -2", "/nope", "/help", "/stop z", "/reset", "/tokens", "/quit",
         "never read"]
    )  # fmt: skip
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    Terminal([conversation], SamplingSettings()).run()
    out, err = capsys.readouterr()
    assert next(lines) == "never read"
    assert out.count(" among ") == 3  # a row for each token
    compact = next(line for line in out.splitlines() if "%" in line)
    assert re.fullmatch(r"('[^']*' \d+% *){3}", compact), "all in one line"
    assert "at 4,096 tokens" in out
    assert "now: temperature 0, top-k 4, top-p 0.95, max-tokens 3, seed none, stop none" in out
    assert "/temperature 9:" in err
    assert "/seed a:" in err
    assert "/top-k -2: top_k" in err
    assert "/nope:" in err
    assert "stop 'z'" in err
    assert "has not answered yet" in err
    assert conversation.turns == []


def test_what_is_inside_is_answered_over_http() -> None:
    model, tokenizer = small_model()
    with running_server() as running:
        application = running.server.application
        other_engine = Engine(model, tokenizer, running.engine.limits)
        with ExitStack() as stack:
            stack.enter_context(other_engine)
            other = Application(other_engine, RequestReader(tokenizer, "other", ServerLimits()), Access(None))
            pairs = [(running.engine, application.reader), (other_engine, other.reader)]
            add_chat_page(application, page_of(pairs), [other])
            page = running.client.get("/")
            assert page.headers["x-frame-options"] == "DENY"
            assert Page(page.text).loads == []
            request = {"model": "other", "prompt": "The weaver", "max_tokens": 4, "temperature": 0}
            answer = running.client.post("/models/1/v1/completions", json=request).json()
            reply = answer["choices"][0]["text"]
            body: dict[str, Any] = {"kind": "completions", "request": request, "reply": reply}
            shown = running.client.post("/models/1/chat/attention", json=body).json()
            assert "".join(shown["tokens"]).endswith(f"The weaver{reply}")
            assert [len(head) for layer in shown["layers"] for head in layer["heads"]] == [len(shown["tokens"])] * 2
            by_ids = tokenizer.encode(reply)
            again = running.client.post("/models/1/chat/attention", json={**body, "reply": by_ids}).json()
            assert again == shown
            scored = running.client.post("/models/1/v1/completions", json={**request, "logprobs": 0}).json()
            ids = scored["choices"][0]["logprobs"]["token_ids"]
            assert tokenizer.decode(ids) == reply
            sizes = running.client.post("/chat/state", json={"lengths": [1, 64]}).json()["bytes"]
            assert sizes == ModelView(model).state_bytes([1, 64])
            no_model, no_text = {**body, "request": {"model": "none"}}, {**body, "reply": 3}
            refusals: list[Any] = [{"kind": "x"}, no_model, [], no_text, {**body, "reply": [-1]}]
            for wrong in refusals:
                refused = running.client.post("/models/1/chat/attention", json=wrong)
                assert 400 <= refused.status_code < 500
                assert refused.json()["error"]["message"]
            assert running.client.post("/chat/state", json={"lengths": 4}).status_code == 400
            strange = {"Origin": "https://example.org"}
            assert running.client.post("/models/1/v1/completions", json=request, headers=strange).status_code == 403
            assert running.client.get("/", headers={"Host": "example.org"}).status_code == 403


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["a", "b", "c"], "c: at most two models can answer"),
        (["a", "--open"], "--open:"),
        (["none"], "none:"),
    ],
)
def test_errors_of_chat_are_a_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["chat", *arguments]) == 2
    assert sentence in capsys.readouterr().err
