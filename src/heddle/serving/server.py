"""Run the server until a signal: the first SIGTERM or SIGINT drains it, a second one ends it at once."""

import asyncio
import signal
import socket
import sys
import time
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from heddle.errors import ConfigError
from heddle.progress import print_status
from heddle.serving.app import Application
from heddle.signals import Interrupted

# Limits on client connections: how many are open, and how long one may take to send a request's headers.


HEADER_SECONDS = 10.0  # from the connection, or from the first byte of a later request, to the end of the headers
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: 57\r\n\r\nthe server has no more connections; try again in a second"
)


class BoundedConnection(H11Protocol):
    """One connection. most: how many may be open at once."""

    most = 512
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a connection over the limit; otherwise wait for headers."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(FULL)
            transport.close()
        else:
            self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Read data. The timeout for headers stops once they are complete, and restarts with a later request."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_headers()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout for headers."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._end)

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end(self) -> None:
        self._header_timer = None
        self.transport.close()


def bounded_connection(most: int) -> type[BoundedConnection]:
    """The protocol class of a server with at most this many connections."""
    return type("BoundedConnection", (BoundedConnection,), {"most": most})


LOOPBACK = ("127.0.0.1", "localhost", "::1")
IDLE_CONNECTION_SECONDS = 5  # after which a connection without a request is closed
GRACE_SECONDS = 1  # for the last bytes of answers to leave
SWITCH_SECONDS = 0.0003  # that another thread may delay the decoding one; Python's default is 0.005


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets requests finish after a signal. interrupted_by: the signal that cut them off."""

    def __init__(self, application: Application) -> None:
        config = uvicorn.Config(
            application.gate,
            http=bounded_connection(application.engine.limits.connections),
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=IDLE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        super().__init__(config)
        self.application = application
        self.interrupted_by: int | None = None
        self._drain_until = 0.0
        self._has_told = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain; end at once at the second signal."""
        if self.application.gate.is_draining:
            self.interrupted_by, self.should_exit = sig, True
        self.application.gate.is_draining = True
        self._drain_until = self._drain_until or time.monotonic() + self.application.engine.limits.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Whether to end now; called ten times a second."""
        engine = self.application.engine
        if self.application.gate.is_draining and not self.should_exit:
            if not engine.states and not engine.queue_length:
                return True
            if time.monotonic() > self._drain_until:
                self.interrupted_by = signal.SIGTERM
                return True
            if not self._has_told:  # here, as a signal handler must not print
                self._has_told = True
                count, seconds = engine.states + engine.queue_length, engine.limits.drain_seconds
                print_status(f"serve: requests that still run: {count}, for {seconds} s, or until a second signal")
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. Raises ConfigError if the address cannot be used."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"{host} port {port}: cannot be used (no such port); choose one below 65536, or 0")
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)  # asyncio turns Nagle's delay off by `protocol`
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # before the address is printed: clients may come at once
    except (OSError, OverflowError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        reason = (error.strerror if isinstance(error, OSError) else None) or "no such address"
        raise ConfigError(f"{host} port {port}: cannot be used ({reason}); choose another") from error
    return listener


def host_names(host: str, port: int) -> frozenset[str]:
    """The Host headers that are allowed for a server on a loopback address."""
    names = [f"[{name}]" if ":" in name else name for name in {*LOOPBACK, host}]
    return frozenset(f"{name}:{port}" for name in names)


def run_server(application: Application, listener: socket.socket) -> None:
    """Answer requests until a signal. Raises Interrupted if running requests were cut off."""
    sys.setswitchinterval(SWITCH_SECONDS)
    server = DrainingServer(application)
    server.run([listener])
    if server.interrupted_by is not None:
        sentence = "ended before all running requests were answered"
        raise Interrupted(server.interrupted_by, sentence)
