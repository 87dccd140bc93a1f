"""response_format: whatever a model would write, its text is JSON of the schema, and no other request changes."""

import json
import threading
from functools import partial
from typing import Any

import jsonschema
import pytest
import torch

from heddle.serving import requests
from heddle.serving.engine import Engine, Event
from heddle.serving.limits import ServerLimits
from heddle.serving.requests import Grammar, RequestError, RequestReader, TextRequest
from tests.laws import planting
from tests.serving.running import NAME, TEMPLATE, small_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "cloth": {"enum": ["plain", "twill", "布"]},
        "threads": {"type": "integer", "minimum": 0, "maximum": 99},
        "dry": {"type": "boolean"},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["cloth", "threads", "dry", "names"],
    "additionalProperties": False,
}
LIMITS = ServerLimits(max_new_tokens=512, max_prompt=200)


def reader() -> RequestReader:
    _, tokenizer = small_model()
    tokenizer.companion_files = {"chat_template.jinja": TEMPLATE}
    return RequestReader(tokenizer, NAME, LIMITS)


def body(form: Any, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": "Hi"}]
    return json.dumps(
        {"model": NAME, "messages": messages, "response_format": form, "max_tokens": 400} | fields
    ).encode()


def of_schema(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "cloth", "schema": schema}}


def answers(asked: list[TextRequest], **options: Any) -> list[list[Event]]:
    """What a server gives for requests that come at the same time."""
    model, tokenizer = small_model()
    events: list[list[Event]] = [[] for _ in asked]
    done = threading.Semaphore(0)
    with Engine(model, tokenizer, LIMITS, **options) as engine:

        def deliver(index: int, event: Event) -> None:
            events[index].append(event)
            if event.is_last:
                done.release()

        for index, request in enumerate(asked):
            engine.submit(request, partial(deliver, index))
        for _ in asked:
            assert done.acquire(timeout=60)
    return events


def text_of(events: list[Event]) -> str:
    assert events[-1].error is None, events[-1].error
    return "".join(event.text for event in events)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_texts_are_of_the_schema(temperature: float) -> None:
    asked = reader().read_choices("chat", body(of_schema(SCHEMA), n=6, temperature=temperature, logprobs=True))
    for events in answers(asked):
        assert events[-1].finish_reason == "stop"
        jsonschema.validate(json.loads(text_of(events)), SCHEMA)
        assert sum(len(event.scores) for event in events) == events[-1].new_tokens


def test_a_schema_that_never_ends_is_refused_in_a_sentence() -> None:
    [events] = answers([reader().read("chat", body(of_schema({"$ref": "#"})))])
    assert isinstance(events[-1].error, RequestError)
    assert len(events[-1].error.sentence) < 120
    assert "compute_time" not in events[-1].error.sentence


def test_any_object_is_json_as_far_as_it_goes() -> None:
    [events] = answers([reader().read("chat", body({"type": "json_object"}, seed=3, max_tokens=20))])
    text = text_of(events)
    assert text.startswith("{")
    if events[-1].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_an_object_may_come_with_its_schema() -> None:
    [events] = answers([reader().read("chat", body({"type": "json_object", "schema": SCHEMA}))])
    jsonschema.validate(json.loads(text_of(events)), SCHEMA)


def test_others_keep_their_bits() -> None:
    plain = [reader().read("chat", body({"type": "text"}, seed=seed, max_tokens=30, logprobs=True)) for seed in (1, 2)]
    constrained = reader().read("chat", body(of_schema(SCHEMA), seed=5))
    alone = answers(plain, batch_invariant=True)
    beside = answers([plain[0], constrained, plain[1]], batch_invariant=True)
    for before, after in zip(alone, (beside[0], beside[2]), strict=True):
        assert text_of(before) == text_of(after)
        assert [event.scores for event in before] == [event.scores for event in after]


def test_a_mask_that_allows_all_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    planting.replaced(Grammar.masked, lambda grammar, logits: logits)(monkeypatch)
    with pytest.raises(AssertionError):
        test_texts_are_of_the_schema(1.0)


def test_a_grammar_that_ends_with_an_error_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = reader().read("chat", body({"type": "text"}, seed=1, max_tokens=5))
    broken = reader().read("chat", body(of_schema(SCHEMA)))
    take = Grammar.take

    def fail(grammar: Grammar, token: int) -> None:
        take(grammar, token)
        grammar.error = "too many items"

    monkeypatch.setattr(Grammar, "take", fail)
    first, second = answers([broken, other])
    error = first[-1].error
    assert error is not None
    assert error.field == "response_format"
    assert text_of(second)


WRONG: list[Any] = [
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"schema": 3}},
    {"type": "xml"},
    "json",
    of_schema({"type": "object", "properties": {"a": {"type": "cloth"}}}),
    of_schema({"$ref": "https://example.com/schema"}),
]


@pytest.mark.parametrize("form", WRONG)
def test_what_cannot_be_followed_is_refused(form: Any) -> None:
    with pytest.raises(RequestError) as refused:
        reader().read("chat", body(form))
    assert (refused.value.status, refused.value.field) == (400, "response_format")


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "optional_module", lambda _: None)
    with pytest.raises(RequestError) as refused:
        reader().read("chat", body({"type": "json_object"}))
    assert (refused.value.status, refused.value.field) == (501, "response_format")
    assert "pip install" in refused.value.sentence


def test_masks_are_as_wide_as_the_logits() -> None:
    """A model may have more rows than its tokenizer has words."""
    made = reader().read("chat", body({"type": "json_object"})).grammar
    assert made is not None
    logits = torch.zeros(1, small_model()[1].vocab_size + 40)
    masked = made().masked(logits)
    assert masked[0, -40:].isneginf().all()
    assert 0 < int(masked[0].isfinite().sum()) < 40  # what can begin an object
