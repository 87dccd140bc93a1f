"""Connections of clients, bounded: how many are open, and how long one may take to send a request's headers."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

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
        """Refuse a connection too many; else wait for headers."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(FULL)
            transport.close()
        else:
            self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Read data. The time for headers ends with them, and begins again with a later request."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_headers()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
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
    """The protocol of a server with at most so many connections."""
    return type("BoundedConnection", (BoundedConnection,), {"most": most})
