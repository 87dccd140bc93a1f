"""The server's endpoints: the OpenAI API, /metrics and /health."""

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
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from heddle.errors import shorten_value
from heddle.progress import print_warning
from heddle.serving.engine import (
    Engine,
    Event,
    Job,
    TokenScore,
    chat_scores,
    completion_scores,
    metric_lines,
)
from heddle.serving.requests import RequestError, RequestReader, TextRequest, raised_by

# Access control by a request's Host, Origin and token.


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
    """hosts: the Host headers that are allowed; None: any, which requires a token. token: None requires none."""

    hosts: frozenset[str] | None
    token: str | None = None

    def check(self, headers: Mapping[str, str], path: str) -> None:
        """Raise RequestError for a request that must not be answered. headers: by lower-case name."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts is not None and host not in self.hosts:
            raise RequestError("Host: is not the name of this server; use its address", "Host", 403)
        if origin is not None and origin.partition("://")[2] != host:
            raise RequestError("Origin: pages of other sites may not use this server; use its own page", "Origin", 403)
        if path == "/health" or self.token is None:
            return
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            sentence = "Authorization: must be 'Bearer' and the server's token"
            raise RequestError(sentence, "Authorization", 401, code="invalid_api_key")


class Gate:
    """Wraps the whole application: refuses forbidden requests, counts responses by status, sets security headers."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], access: Access) -> None:
        self.app, self.access = app, access
        self.is_draining = False
        self.answers: dict[int, int] = {}  # number by status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        answering = False

        async def send_counted(message: MutableMapping[str, Any]) -> None:
            nonlocal answering
            if message["type"] == "http.response.start":
                answering = True
                self.answers[message["status"]] = self.answers.get(message["status"], 0) + 1
                safe = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *safe]
            await send(message)

        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self.access.check(headers, scope["path"])
            if self.is_draining and scope["method"] == "POST":
                raise RequestError("the server is shutting down; try again later", status=503)
        except RequestError as error:
            await refusal(error)(scope, receive, send_counted)
        else:
            try:
                await self.app(scope, receive, send_counted)
            except asyncio.CancelledError:  # the time to finish is over
                if not answering:
                    cut = RequestError("the server was shut down before it finished; try again later", status=503)
                    await refusal(cut)(scope, receive, send_counted)
                raise
            except ClientDisconnect:  # before its body was there
                pass
            except Exception as error:  # a bug; FastAPI has answered with 500 and raised it again
                print_warning(f"serve: {scope['path']} failed inside the server ({type(error).__name__})")


def refusal(error: RequestError) -> JSONResponse:
    """The response to a refused request, in OpenAI's format."""
    headers = {"Retry-After": str(error.retry_seconds)} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


class Turns:
    """Does one kind of work, for one request at a time and at most a share of the time, to limit how it slows others.

    most: how many requests may wait for their turn.
    """

    def __init__(self, share: float, most: int) -> None:
        self.share, self.most = share, most
        self._lock, self._waiting, self._next = asyncio.Lock(), 0, 0.0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and take it. Raises RequestError if too many requests wait."""
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


BODY_SECONDS = 10.0  # limit on receiving a body
LARGE_BODY = 2**16  # bytes; larger ones are read in turns
READING_SHARE, LOOKING_SHARE = 0.1, 0.25  # of the time: for large bodies, and for the chat page's views of the model
LEAST_TURN = 0.005  # seconds: what a connection alone costs
DISCONNECT_SECONDS = 0.25  # between two checks whether a waiting client is still connected


ENDPOINTS = "GET /v1/models and POST /v1/completions and /v1/chat/completions"  # what a refusal names


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
        app.add_api_route("/v1/models/{name:path}", self._model, methods=["GET"])
        app.add_api_route("/v1/completions", self._completions, methods=["POST"], response_model=None)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        app.add_exception_handler(RequestError, _answer_refused)
        app.add_exception_handler(HTTPException, _answer_refused)
        app.add_exception_handler(Exception, _answer_refused)
        self.gate = Gate(app, access)

    async def _health(self) -> dict[str, str]:
        return {"status": "draining" if self.gate.is_draining else "ok"}

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self._model(self.reader.name)]}

    async def _model(self, name: str) -> dict[str, Any]:
        self.reader.check_model(name)
        return {"id": name, "object": "model", "created": self.started, "owned_by": "heddle"}

    async def _metrics(self) -> PlainTextResponse:
        engine, answers = self.engine, sorted(self.gate.answers.items())
        by_status = {f'{{status="{status}"}}': count for status, count in answers}
        gauges = {
            "queue_length": ("Requests that wait.", engine.queue_length),
            "states": ("Requests that are being decoded.", engine.states),
            "up_seconds": ("Seconds since the server started.", int(time.time()) - self.started),
        }
        lines = (
            metric_lines("answers_total", "counter", "HTTP responses by status.", by_status) + engine.metrics.lines()
        )
        for name, (meaning, value) in gauges.items():
            lines += metric_lines(name, "gauge", meaning, {"": value})
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
        """Read a request's body. Raises RequestError as soon as it is too long or too slow."""
        limit, body = self.engine.limits.max_body, bytearray()
        coding = request.headers.get("content-encoding", "")
        if coding.strip().lower() not in ("", "identity"):
            sentence = f"Content-Encoding: {shorten_value(coding)} is not supported; send the body as plain JSON"
            raise RequestError(sentence, "Content-Encoding", 415)
        length = request.headers.get("content-length", "0")
        is_long = length.isdecimal() and int(length[:20]) > limit  # then nothing of it is read
        try:
            async with asyncio.timeout(BODY_SECONDS):
                stream = request.stream()
                while not is_long and (chunk := await anext(stream, None)) is not None:
                    body += chunk
                    is_long = len(body) > limit
        except TimeoutError:
            sentence = f"body: did not arrive within {BODY_SECONDS:.0f} s; send it at once"
            raise RequestError(sentence, status=408) from None
        if is_long:
            async with self.large_bodies.turn():
                raise RequestError(f"body: has more than {limit:,} bytes; {raised_by('max_body')}", status=413)
        return bytes(body)


# The marks around each tool call in an answer (Hermes, Qwen). In Llama 3.1 the whole answer is a call without marks.
CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"


@dataclass
class Choice:
    """The progress of one completion. score_bytes: of the tokens whose logprobs were sent.

    held: text that may be a tool call, until that is known. calls: the parsed tool calls.
    """

    request: TextRequest
    score_bytes: bytes = b""
    new_tokens: int = 0
    finish_reason: str | None = None
    held: str = ""
    has_begun: bool = False  # whether text was sent to the client
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: Event) -> str:
        """Add an event; returns the text that is new to the client, after the echo of the prompt at first."""
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
    """Split unfinished text into what cannot belong to a tool call, and the rest with the spaces before it."""
    begin = text.find(CALL_BEGINS)
    if begin < 0:  # the text may end with its first characters
        lengths = range(min(len(CALL_BEGINS) - 1, len(text)), -1, -1)
        begin = len(text) - next(length for length in lengths if text.endswith(CALL_BEGINS[:length]))
    begin = len(text[:begin].rstrip())
    return text[:begin], text[begin:]


def read_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into the text before its tool calls, and the calls in OpenAI's format.

    If one of the calls cannot be parsed, the whole text and no calls.
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
    """A request in the engine, for one or several completions, and its response in OpenAI's format."""

    def __init__(self, application: Application, kind: str, requests: list[TextRequest], entry: object) -> None:
        self.engine, self.reader, self.request, self.kind = application.engine, application.reader, requests[0], kind
        self.choices = [Choice(request) for request in requests]
        self.id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._look_at = time.monotonic() + DISCONNECT_SECONDS  # when to check whether the client is connected
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()
        self._jobs: list[Job] = []
        try:
            for index, request in enumerate(requests):
                deliver = partial(self._deliver, index)
                self._jobs.append(self.engine.submit(request, deliver, None if index else entry))
        except RequestError:  # the queue is full
            self.cancel()
            raise

    def _deliver(self, index: int, event: Event) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    @property
    def is_done(self) -> bool:
        """Whether every completion has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def cancel(self) -> None:
        """Cancel its jobs, which frees their states."""
        for job in self._jobs:
            self.engine.cancel(job)

    async def first_event(self, is_disconnected: Callable[[], Awaitable[bool]]) -> tuple[int, Event]:
        """The next event, and its choice's index. Raises RequestError if it is an error, or the client disconnected."""
        try:
            while True:
                if time.monotonic() > self._look_at:  # also while events arrive: the client may be gone
                    self._look_at = time.monotonic() + DISCONNECT_SECONDS
                    if await is_disconnected():
                        raise RequestError("the client disconnected", status=499)
                with contextlib.suppress(TimeoutError):
                    index, event = await asyncio.wait_for(self._events.get(), DISCONNECT_SECONDS)
                    if event.error is not None:
                        raise event.error
                    return index, event
        except BaseException:
            self.cancel()
            raise

    async def whole(self, is_disconnected: Callable[[], Awaitable[bool]]) -> Response:
        """The complete response."""
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
        """The response as server-sent events; several choices interleave as they are computed, each with its index."""
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
        """A choice. `part`: the field with a chat's text, `message`, or `delta` in a stream."""
        has_scores, tokenizer = self.request.alternatives is not None and bool(scores), self.reader.tokenizer
        if self.kind == "completions":
            choice = self.choices[index]
            logprobs = None
            if has_scores:
                echo = choice.request.echo or ""
                logprobs, choice.score_bytes = completion_scores(scores, tokenizer, choice.score_bytes, echo)
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        logprobs = chat_scores(scores, tokenizer) if has_scores else None
        role: dict[str, Any] = {"role": "assistant"} if part == "message" else {}
        content: dict[str, Any] = {} if part == "delta" and reason is not None else {"content": text}
        if part == "message" and self.choices[index].calls:
            content = {"content": text or None, "tool_calls": self.choices[index].calls}
        return {"index": index, part: role | content, "logprobs": logprobs, "finish_reason": reason}

    def _calls_delta(self, index: int) -> dict[str, Any]:
        """The tool calls in a stream: all in one chunk."""
        calls = [{"index": number} | call for number, call in enumerate(self.choices[index].calls)]
        return {"index": index, "delta": {"tool_calls": calls}, "logprobs": None, "finish_reason": None}

    def _usage(self) -> dict[str, int]:
        """Token counts over all choices; a prompt that several choices continue counts once."""
        prompts = {id(choice.request.prompt_ids): len(choice.request.prompt_ids) for choice in self.choices}
        prompt, new = sum(prompts.values()), sum(choice.new_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class ClosingStream(StreamingResponse):
    """A streaming response that cancels its jobs when it ends, also if the client disconnects."""

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
    what = "has no such endpoint" if error.status_code == 404 else "does not allow this method here"
    return refusal(RequestError(f"the server {what}; it has {ENDPOINTS}", status=error.status_code))


def json_answer(content: dict[str, Any]) -> Response:
    """An answer in JSON."""
    return Response(json.dumps(content), media_type="application/json")
