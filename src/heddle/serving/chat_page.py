"""The page of the server, on which one talks to its model, or to two models side by side."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response

from heddle.serving.app import Application, json_answer, read_body
from heddle.serving.model_view import ModelView
from heddle.serving.requests import RequestError, parse_object


def add_chat_page(application: Application, page: str, other_models: Sequence[Application] = ()) -> None:
    """Answer `/` with a page, and what it asks besides OpenAI's interface: /chat/attention and /chat/state.

    other_models: applications of further models, whose addresses begin with /models/1, /models/2 … The caller enters
    their engines.
    """
    app = _app(application)

    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers={"X-Frame-Options": "DENY"})

    app.add_api_route("/", show, methods=["GET"], response_class=HTMLResponse)
    _add_routes(application)
    for number, other in enumerate(other_models, start=1):
        _add_routes(other)
        app.mount(f"/models/{number}", _app(other))


def _app(application: Application) -> FastAPI:
    app = application.gate.app
    assert isinstance(app, FastAPI)
    return app


def _add_routes(application: Application) -> None:
    view, reader = ModelView(application.engine.model), application.reader

    def look(body: bytes) -> dict[str, Any]:
        kind, request, reply = _attention_fields(body, reader.tokenizer.vocab_size)
        new_tokens = reader.tokenizer.encode(reply) if isinstance(reply, str) else reply
        tokens = [*reader.read(kind, request).prompt_ids, *new_tokens]
        return {"tokens": [reader.tokenizer.decode([token]) for token in tokens], "layers": view.last_step(tokens)}

    async def attention(request: Request) -> Response:
        body = await read_body(request, application.engine.limits.max_body)
        return json_answer(await asyncio.to_thread(look, body))

    async def state(request: Request) -> Response:
        body = await read_body(request, application.engine.limits.max_body)
        lengths = parse_object(body).get("lengths")
        if not isinstance(lengths, list):
            raise RequestError("lengths: must be a list of numbers of tokens", "lengths")
        return json_answer({"bytes": await asyncio.to_thread(view.state_bytes, lengths)})

    app = _app(application)
    app.add_api_route("/chat/attention", attention, methods=["POST"], response_model=None)
    app.add_api_route("/chat/state", state, methods=["POST"], response_model=None)


def _attention_fields(body: bytes, vocab_size: int) -> tuple[str, bytes, str | list[int]]:
    """(kind, the request as JSON, the part of its answer that was given). Raises RequestError."""
    fields = parse_object(body)
    kind, request, reply = fields.get("kind"), fields.get("request"), fields.get("reply", "")
    is_text = isinstance(reply, str)
    is_tokens = isinstance(reply, list) and all(type(token) is int and 0 <= token < vocab_size for token in reply)
    if kind not in ("completions", "chat") or not isinstance(request, dict):
        raise RequestError("kind: must be completions or chat, with its request", "kind")
    if not is_text and not is_tokens:
        raise RequestError(f"reply: must be a text, or tokens from 0 to {vocab_size - 1}", "reply")
    return kind, json.dumps(request).encode(), reply
