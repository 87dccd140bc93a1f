"""Show a page in the browser while a command runs: a server on the loopback address that ends with the command.

It serves one page, its data and its status, to this machine only. A request must name the server's own address as its
host, so that no other web page can read it under another host name (DNS rebinding).
"""

import json
import threading
import time
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from heddle.errors import ConfigError
from heddle.progress import print_status, print_warning

ADDRESS = "127.0.0.1"
POLL_SECONDS = 1.0  # between a page's requests for the status; the same as in static/live.js
OPEN_PAGE_SECONDS = 3 * POLL_SECONDS  # a page that asked within this time is still open
FIRST_PAGE_SECONDS = 60.0  # how long a browser that opened the page at once waits for its first version
REQUEST_SECONDS = 10.0  # a connection that sends nothing for this long is closed
_HTML, _JSON = "text/html; charset=utf-8", "application/json; charset=utf-8"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class LivePage:
    """`with LivePage(port) as live: live.publish(…)` serves the newest version of a page until the block ends.

    port: 0 for any free one. Raises ConfigError if the port is taken. At the end of the block an open page gets a
    moment to fetch the last version, but not after an error.
    """

    def __init__(self, port: int = 0) -> None:
        self._lock = threading.Condition()
        self._revision = 0
        self._status: dict[str, Any] = {}
        self._render: Callable[[int, bool], str] = lambda revision, scripts: ""
        self._data: Callable[[], str] = str
        self._pages: dict[bool, tuple[int, bytes]] = {}  # with and without scripts: (revision, page)
        self._asked_at = -OPEN_PAGE_SECONDS  # in time.monotonic() seconds; no page has asked yet
        self._fetched = 0  # the newest revision that a page has fetched
        try:
            self._server = _Server(port, self)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no such port"
            raise ConfigError(f"port {port}: cannot be used ({reason}); choose another, or none") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def address(self) -> str:
        """The page's URL."""
        return f"http://{ADDRESS}:{self._server.server_port}/"

    def publish(self, page: Callable[[int, bool], str], data: Callable[[], str], status: Mapping[str, Any]) -> None:
        """Replace the page, its data as JSON, and its status of plain values.

        page: called with the revision, a number that grows, and whether to include scripts, which a page that takes
        over newer content has already. `page` and `data` are called on request.
        """
        with self._lock:
            self._revision += 1
            self._render, self._data = page, data
            self._status = {**status, "revision": self._revision}
            self._lock.notify_all()

    def __enter__(self) -> "LivePage":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._wait_for_viewer()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _wait_for_viewer(self) -> None:
        with self._lock:
            is_open = time.monotonic() - self._asked_at < OPEN_PAGE_SECONDS
            if is_open:
                self._lock.wait_for(lambda: self._fetched >= self._revision, timeout=OPEN_PAGE_SECONDS)

    def _answer(self, path: str) -> tuple[str, bytes] | None:
        """The content type and content of a path, or None."""
        with self._lock:
            if path == "/status.json":
                self._asked_at = time.monotonic()
                return _JSON, json.dumps(self._status).encode()
            if path == "/report.json":
                return _JSON, self._data().encode()
            is_page = path in ("/", "/content")
            if is_page and self._lock.wait_for(lambda: self._revision, timeout=FIRST_PAGE_SECONDS):
                scripts = path == "/"
                if self._pages.get(scripts, (0, b""))[0] != self._revision:
                    self._pages[scripts] = self._revision, self._render(self._revision, scripts).encode()
                self._fetched = self._revision
                self._lock.notify_all()
                return _HTML, self._pages[scripts][1]
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a browser may keep a connection open

    def __init__(self, port: int, live: LivePage) -> None:
        self.live = live
        super().__init__((ADDRESS, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a browser that leaves in the middle of an answer is not an error."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS
    server_version, sys_version = "heddle", ""
    error_content_type, error_message_format = "text/plain; charset=utf-8", "%(code)d %(message)s"

    def do_GET(self) -> None:
        """Answer with the page, its data or its status."""
        if not self._names_this_server():
            self._send(HTTPStatus.FORBIDDEN)
            return
        answer = self.server.live._answer(self.path.partition("?")[0])
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND)
        else:
            self._send(HTTPStatus.OK, *answer)

    def _names_this_server(self) -> bool:
        port = self.server.server_port
        return self.headers.get("Host") in (f"{ADDRESS}:{port}", f"localhost:{port}")

    def _send(self, status: HTTPStatus, content_type: str = "text/plain; charset=utf-8", content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": content_type, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing: the terminal belongs to the command."""


def check_port(port: int) -> None:
    """Raise ConfigError before long work if a live page could not be served there after it."""
    with ExitStack() as stack:
        open_live_page(stack, port, open_page=False)


def open_live_page(stack: ExitStack, port: int | None, open_page: bool, what: str | None = None) -> LivePage | None:
    """A live page, until the stack closes.

    what: the page's subject, shown live beside other work; if this machine has no loopback address and no port was
    requested, a warning is printed and the page is None. Without it, raises ConfigError then.
    """
    try:
        live = stack.enter_context(LivePage(port or 0))
    except ConfigError as error:
        if port is not None or what is None:
            raise ConfigError(f"--{error}") from error
        print_warning(f"{what} is not live: {error}")
        return None
    if what is not None:
        print_status(f"{what} is live at {live.address}")
    if open_page:
        webbrowser.open(live.address)
    return live
