"""The server's addresses: OpenAI's interface, /metrics and /health."""

import asyncio
import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from heddle.progress import print_warning
from heddle.serving.engine import (
    Engine,
    Event,
    Job,
    TokenScore,
    answer_lines,
    chat_scores,
    completion_scores,
    gauge_lines,
)
from heddle.serving.requests import RequestError, RequestReader, TextRequest

# Who may ask the server: the Host and Origin of a request, and its token.


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class Access:
    """hosts: the names a request may give as its Host; None: any, which needs a token. token: None asks for none."""

    hosts: frozenset[str] | None
    token: str | None = None

    def check(self, headers: Mapping[str, str], path: str) -> None:
        """Raise RequestError for a request that must not be answered. headers: by names in lower case."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts is not None and host not in self.hosts:
            raise RequestError("Host: is not the name of this server; use its address", "Host", 403)
        if origin is not None and origin.partition("://")[2] != host:
            raise RequestError("Origin: pages of other sites may not ask this server", "Origin", 403)
        if path == "/health" or self.token is None:
            return
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise RequestError("Authorization: needs 'Bearer' and the server's token", "Authorization", 401)


class Gate:
    """Around the whole application: refuses what may not come in, counts answers by status, sets safe headers."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], access: Access) -> None:
        self.app, self.access = app, access
        self.is_draining = False
        self.answers: dict[int, int] = {}  # how many, by status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.answers[message["status"]] = self.answers.get(message["status"], 0) + 1
                safe = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *safe]
            await send(message)

        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self.access.check(headers, scope["path"])
            if self.is_draining and scope["method"] == "POST":
                raise RequestError("the server is about to end; try another one, or later", status=503)
        except RequestError as error:
            await refusal(error)(scope, receive, send_counted)
        else:
            try:
                await self.app(scope, receive, send_counted)
            except Exception as error:  # a bug; FastAPI has answered with 500 and raised it again
                print_warning(f"serve: {scope['path']} failed inside the server ({type(error).__name__})")


def refusal(error: RequestError) -> JSONResponse:
    """The answer to a refused request, in OpenAI's shape."""
    headers = {"Retry-After": str(error.retry_seconds)} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


class Turns:
    """Work of one kind, one request at a time and at most a share of the time, so that it slows others by no more.

    most: how many requests may wait for their turn.
    """

    def __init__(self, share: float, most: int) -> None:
        self.share, self.most = share, most
        self._lock, self._waiting, self._next = asyncio.Lock(), 0, 0.0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and take it. Raises RequestError where too many wait."""
        if self._waiting >= self.most:
            raise RequestError("the server has too many requests of this kind; try again after 1 s", None, 429, 1)
        self._waiting += 1
        try:
            async with self._lock:
                await asyncio.sleep(self._next - time.monotonic())
                started = time.monotonic()
                try:
                    yield
                finally:
                    ended = time.monotonic()
                    self._next = ended + max(LEAST_TURN, ended - started) * (1 / self.share - 1)
        finally:
            self._waiting -= 1


BODY_SECONDS = 10.0  # within which a body must have come
LARGE_BODY = 2**16  # bytes; larger ones are read in turns
READING_SHARE, LOOKING_SHARE = 0.1, 0.25  # of the time, for large bodies, and for the chat page's looks at the model
LEAST_TURN = 0.005  # seconds: a connection costs as much
DISCONNECT_SECONDS = 0.25  # between two looks whether a client that waits for a whole answer is still there


class Application:
    """Answers requests with an engine. `gate` is the ASGI application to run."""

    def __init__(self, engine: Engine, reader: RequestReader, access: Access) -> None:
        self.engine, self.reader = engine, reader
        self.started = int(time.time())
        self.large_bodies = Turns(READING_SHARE, engine.limits.queue)
        self.looks = Turns(LOOKING_SHARE, engine.limits.queue)
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/metrics", self._metrics, methods=["GET"])
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_api_route("/v1/completions", self._completions, methods=["POST"], response_model=None)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        app.add_exception_handler(RequestError, _answer_refused)
        app.add_exception_handler(HTTPException, _answer_refused)
        app.add_exception_handler(Exception, _answer_refused)
        self.gate = Gate(app, access)

    async def _health(self) -> dict[str, str]:
        return {"status": "draining" if self.gate.is_draining else "ok"}

    async def _models(self) -> dict[str, Any]:
        model = {"id": self.reader.name, "object": "model", "created": self.started, "owned_by": "heddle"}
        return {"object": "list", "data": [model]}

    async def _metrics(self) -> PlainTextResponse:
        engine, up_seconds = self.engine, int(time.time()) - self.started
        gauges = {"queue_length": engine.queue_length, "states": engine.states, "up_seconds": up_seconds}
        lines = [*answer_lines(self.gate.answers), *engine.metrics.lines(), *gauge_lines(gauges)]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, "completions")

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, "chat")

    async def _answer(self, request: Request, kind: str) -> Response:
        body = await self.read_body(request)
        async with self.large_bodies.turn() if len(body) > LARGE_BODY else contextlib.nullcontext():
            with self.engine.entry() as entry:  # before the body is tokenized
                requests = await asyncio.to_thread(self.reader.read_choices, kind, body)
                answer = Answer(self, kind, requests, entry)
        if not requests[0].stream:
            return await answer.whole(request.is_disconnected)
        first = await answer.first_event(request.is_disconnected)
        return ClosingStream(answer, first)

    async def read_body(self, request: Request) -> bytes:
        """The body. Raises RequestError as soon as it is too long, or comes too slowly."""
        limit, body = self.engine.limits.max_body, bytearray()
        length = request.headers.get("content-length", "0")
        is_long = length.isdecimal() and int(length[:20]) > limit  # then no byte of it is read
        try:
            async with asyncio.timeout(BODY_SECONDS):
                stream = request.stream()
                while not is_long and (chunk := await anext(stream, None)) is not None:
                    body += chunk
                    is_long = len(body) > limit
        except TimeoutError:
            sentence = f"body: did not come within {BODY_SECONDS:.0f} s; send it at once"
            raise RequestError(sentence, status=408) from None
        if is_long:
            async with self.large_bodies.turn():
                raise RequestError(f"body: has more than {limit:,} bytes; send a shorter one", status=413)
        return bytes(body)


# What an answer that calls tools begins its calls with (Hermes, Qwen), or is as a whole (Llama 3.1).
CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"


@dataclass
class Choice:
    """How far one text of an answer is. score_bytes: of the tokens whose scores were given.

    added_spaces: of the prompt's first token, which the echo of a text has not.
    held: text that may be a call of a tool, until its end tells. calls: those that it was.
    """

    request: TextRequest
    score_bytes: bytes = b""
    new_tokens: int = 0
    finish_reason: str | None = None
    held: str = ""
    added_spaces: int = 0
    has_begun: bool = False  # text of the client's has been given out
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: Event) -> str:
        """Take an event in; what of its text is new to the client, with the echo of the prompt before the first."""
        text = event.text if self.new_tokens else (self.request.echo or "") + event.text
        self.new_tokens, self.finish_reason = event.new_tokens, event.finish_reason
        return self._without_calls(text) if self.request.has_tools else text

    def _without_calls(self, text: str) -> str:
        self.held += text
        if self.finish_reason is None:
            if not self.has_begun and self.held.lstrip()[:1] in ("", "{"):
                return ""
            text, self.held = split_before_call(self.held)
            self.has_begun = self.has_begun or bool(text)
            return text
        text, self.calls = read_tool_calls(self.held) if not self.has_begun or CALL_BEGINS in self.held else ("", [])
        if not self.calls:
            return self.held
        self.finish_reason = "tool_calls"
        return text


def split_before_call(text: str) -> tuple[str, str]:
    """What no call of a tool can begin in, and the rest of a text that goes on, with the spaces before it."""
    begin = text.find(CALL_BEGINS)
    if begin < 0:  # its first characters may have come
        lengths = range(min(len(CALL_BEGINS) - 1, len(text)), -1, -1)
        begin = len(text) - next(length for length in lengths if text.endswith(CALL_BEGINS[:length]))
    begin = len(text[:begin].rstrip())
    return text[:begin], text[begin:]


def read_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of an answer before its calls of tools, and these in OpenAI's shape.

    Where one of them cannot be read, the whole text and none.
    """
    before, *parts = text.split(CALL_BEGINS)
    if not parts:
        before, parts = "", [text]
    calls = []
    for part in parts:
        body, _, after = part.partition(CALL_ENDS)
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            return text, []
        if after.strip() or not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return text, []
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, dict):
            return text, []
        function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return before.rstrip(), calls


class Answer:
    """One request in the engine, of one or several texts, and its answer in OpenAI's shape."""

    def __init__(self, application: Application, kind: str, requests: list[TextRequest], entry: object) -> None:
        self.engine, self.reader, self.request, self.kind = application.engine, application.reader, requests[0], kind
        self.choices = [Choice(request, added_spaces=self._added_spaces(request)) for request in requests]
        self.id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._look_at = time.monotonic() + DISCONNECT_SECONDS  # when to look whether the client is there
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()
        self._jobs: list[Job] = []
        try:
            for index, request in enumerate(requests):
                deliver = partial(self._deliver, index)
                self._jobs.append(self.engine.submit(request, deliver, None if index else entry))
        except RequestError:  # the queue is full
            self.cancel()
            raise

    def _added_spaces(self, request: TextRequest) -> int:
        """Whether the tokens of a prompt begin with a space that its text has not: some tokenizers add one."""
        pieces = map(self.reader.tokenizer.token_bytes, request.prompt_ids)
        text = next((piece for piece in pieces if piece), b"")
        return int(bool(request.echo) and text.startswith(b" ") and not str(request.echo).startswith(" "))

    def _deliver(self, index: int, event: Event) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    @property
    def is_done(self) -> bool:
        """Whether every text has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def cancel(self) -> None:
        """Free what the engine holds for it."""
        for job in self._jobs:
            self.engine.cancel(job)

    async def first_event(self, is_disconnected: Callable[[], Awaitable[bool]]) -> tuple[int, Event]:
        """The next event, and of which text. Raises RequestError if it is an error, or if the client has gone."""
        try:
            while True:
                if time.monotonic() > self._look_at:  # also while events come: nobody may read them
                    self._look_at = time.monotonic() + DISCONNECT_SECONDS
                    if await is_disconnected():
                        raise RequestError("the client has gone", status=499)
                with contextlib.suppress(TimeoutError):
                    index, event = await asyncio.wait_for(self._events.get(), DISCONNECT_SECONDS)
                    if event.error is not None:
                        raise event.error
                    return index, event
        except BaseException:
            self.cancel()
            raise

    async def whole(self, is_disconnected: Callable[[], Awaitable[bool]]) -> Response:
        """The answer in one piece."""
        texts, scores = [""] * len(self.choices), [list[TokenScore]() for _ in self.choices]
        while not self.is_done:
            index, event = await self.first_event(is_disconnected)
            texts[index] += self.choices[index].add(event)
            scores[index] += event.scores
        choices = [
            self._choice(index, texts[index], scores[index], choice.finish_reason, "message")
            for index, choice in enumerate(self.choices)
        ]
        return json_answer(self._object("") | {"choices": choices, "usage": self._usage()})

    async def stream(self, first: tuple[int, Event]) -> AsyncIterator[str]:
        """The answer as server-sent events; those of several texts come as they are computed, each with its index."""
        if self.kind == "chat":
            for index in range(len(self.choices)):
                delta = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield self._chunk([delta])
        index, event = first
        while event.error is None:
            text = self.choices[index].add(event)
            if text or event.scores:
                usage = self._usage() if self.request.continuous_usage else None
                yield self._chunk([self._choice(index, text, list(event.scores), None, "delta")], usage)
            if event.is_last:
                if self.choices[index].calls:
                    yield self._chunk([self._calls_delta(index)])
                yield self._chunk([self._choice(index, "", [], self.choices[index].finish_reason, "delta")])
            if self.is_done:
                if self.request.include_usage:
                    yield self._chunk([], self._usage())
                break
            index, event = await self._events.get()
        else:
            yield f"data: {json.dumps(event.error.body())}\n\n"
        yield "data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        content = self._object(".chunk") | {"choices": choices} | ({} if usage is None else {"usage": usage})
        return f"data: {json.dumps(content)}\n\n"

    def _object(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self.kind == "chat" else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.reader.name}

    def _choice(self, index: int, text: str, scores: list[TokenScore], reason: str | None, part: str) -> dict[str, Any]:
        """A choice; `part` is what holds the text of a chat: `message`, or `delta` of a stream."""
        has_scores, tokenizer = self.request.alternatives is not None and bool(scores), self.reader.tokenizer
        if self.kind == "completions":
            choice = self.choices[index]
            logprobs = None
            if has_scores:
                logprobs = completion_scores(scores, tokenizer, choice.score_bytes, choice.added_spaces)
            choice.score_bytes += b"".join(tokenizer.token_bytes(score.token) for score in scores)
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        logprobs = chat_scores(scores, tokenizer) if has_scores else None
        role: dict[str, Any] = {"role": "assistant"} if part == "message" else {}
        content: dict[str, Any] = {} if part == "delta" and reason is not None else {"content": text}
        if part == "message" and self.choices[index].calls:
            content = {"content": text or None, "tool_calls": self.choices[index].calls}
        return {"index": index, part: role | content, "logprobs": logprobs, "finish_reason": reason}

    def _calls_delta(self, index: int) -> dict[str, Any]:
        """The calls of tools in a stream: each whole, in one piece."""
        calls = [{"index": number} | call for number, call in enumerate(self.choices[index].calls)]
        return {"index": index, "delta": {"tool_calls": calls}, "logprobs": None, "finish_reason": None}

    def _usage(self) -> dict[str, int]:
        """Tokens of all texts; a prompt that several texts continue counts once."""
        prompts = {id(choice.request.prompt_ids): len(choice.request.prompt_ids) for choice in self.choices}
        prompt, new = sum(prompts.values()), sum(choice.new_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class ClosingStream(StreamingResponse):
    """A stream whose end, also by a client that goes away, frees what the engine holds for it."""

    def __init__(self, answer: Answer, first: tuple[int, Event]) -> None:
        super().__init__(answer.stream(first), media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.cancel()


async def _answer_refused(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return refusal(error)
    if not isinstance(error, HTTPException):
        return refusal(RequestError("the request failed inside the server", status=500))
    what = "has no such address" if error.status_code == 404 else "does not take this method here"
    return refusal(RequestError(f"the server {what}; see /v1/models", status=error.status_code))


def json_answer(content: dict[str, Any]) -> Response:
    """An answer in JSON."""
    return Response(json.dumps(content), media_type="application/json")
