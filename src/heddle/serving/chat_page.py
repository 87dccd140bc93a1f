"""The server's chat page, for one model or two side by side."""

import asyncio
import copy
import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response

from heddle.model.attention_maps import forward_with_weights
from heddle.model.config import describe
from heddle.model.decoder import Decoder, build
from heddle.numerics.attention.observer import Observation
from heddle.numerics.transfer import to_device
from heddle.serving.app import Application, json_answer
from heddle.serving.requests import RequestError, parse_object

# What the page shows of the model beside an answer: the attention of its last step, and the size of its state.


MAX_TOKENS = 1024  # of a text whose attention is shown: a layer's weights for all tokens are in memory at once
MAX_LENGTHS = 64
MAX_LENGTH = 2**20


class ModelView:
    """Reads attention and state sizes of a model that another thread may be using."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        # Observing registers hooks, which must not see the calls of the other thread: the twin shares only tensors.
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._twin = copy.deepcopy(model, shared).eval()
        self._meta_model = build(model.config, dtype=model.embed.weight.dtype, device="meta")
        self._lock = threading.Lock()

    def last_step(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """For each layer, the attention of the last token over all tokens: `mixer`, and `heads` [H][T] or None.

        Raises RequestError for too many tokens.
        """
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise RequestError(f"reply: text has {len(tokens):,} tokens; attention is shown for 1 to {MAX_TOKENS:,}")
        heads: dict[int, list[list[float]]] = {}

        def keep_last(layer: int, observation: Observation) -> None:
            weights = observation.weights[0, :, -1].double().cpu()
            if weights.shape[1] == len(tokens):  # else its keys are not the text's tokens
                heads[layer] = [[round(weight, 4) for weight in row] for row in weights.tolist()]

        with self._lock:
            text = to_device(torch.tensor([list(tokens)], device="cpu"), self.model.embed.weight.device)
            forward_with_weights(self._twin, text, None, keep_last)
        mixers = [layer.mixer for _, layer in self.model.config.expand()]
        return [
            {"mixer": "none" if mixer is None else describe(mixer), "heads": heads.get(index)}
            for index, mixer in enumerate(mixers)
        ]

    def state_bytes(self, lengths: Sequence[int]) -> list[int]:
        """State bytes of one sequence of each length, the table of positions included. Nothing is allocated.

        Raises RequestError for invalid lengths.
        """
        is_valid = all(type(length) is int and 0 < length <= MAX_LENGTH for length in lengths)
        if not is_valid or not 0 < len(lengths) <= MAX_LENGTHS:
            raise RequestError(f"lengths: must be a list of 1 to {MAX_LENGTHS} numbers of tokens", "lengths")
        return [self._meta_model.init_state(1, length).bytes for length in lengths]


def add_chat_page(application: Application, page: str, other_models: Sequence[Application] = ()) -> None:
    """Serve a page at `/`, and what it needs besides the OpenAI API: /chat/attention and /chat/state.

    other_models: applications of further models, mounted at /models/1, /models/2 … The caller enters their engines.
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
        body = await application.read_body(request)
        async with application.looks.turn():
            return json_answer(await asyncio.to_thread(look, body))

    async def state(request: Request) -> Response:
        body = await application.read_body(request)
        lengths = parse_object(body).get("lengths")
        if not isinstance(lengths, list):
            raise RequestError("lengths: must be a list of numbers of tokens", "lengths")
        return json_answer({"bytes": await asyncio.to_thread(view.state_bytes, lengths)})

    app = _app(application)
    app.add_api_route("/chat/attention", attention, methods=["POST"], response_model=None)
    app.add_api_route("/chat/state", state, methods=["POST"], response_model=None)


def _attention_fields(body: bytes, vocab_size: int) -> tuple[str, bytes, str | list[int]]:
    """(kind, the request as JSON, the part of its answer so far). Raises RequestError."""
    fields = parse_object(body)
    kind, request, reply = fields.get("kind"), fields.get("request"), fields.get("reply", "")
    is_text = isinstance(reply, str)
    is_tokens = isinstance(reply, list) and all(type(token) is int and 0 <= token < vocab_size for token in reply)
    if kind not in ("completions", "chat") or not isinstance(request, dict):
        raise RequestError("kind: must be completions or chat, with its request", "kind")
    if not is_text and not is_tokens:
        raise RequestError(f"reply: must be a string, or tokens from 0 to {vocab_size - 1}", "reply")
    return kind, json.dumps(request).encode(), reply
