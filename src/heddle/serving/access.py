"""Who may ask the server: the Host and Origin of a request, and its token."""

import hmac
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from heddle.progress import print_warning
from heddle.serving.requests import RequestError

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
