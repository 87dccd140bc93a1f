"""The live page: it serves this machine only, follows what is published, and ends with its block."""

import json
import socket
import threading
from http.client import HTTPConnection
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.errors import ConfigError
from heddle.lab import live as live_module
from heddle.lab.live import LivePage


def fetch(
    live: LivePage, path: str = "/", method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], str]:
    """(status, headers, content) of one request."""
    address = live.address.removeprefix("http://").rstrip("/")
    connection = HTTPConnection(address, timeout=20)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), content


def publish(live: LivePage, word: str, is_complete: bool = False) -> None:
    live.publish(
        lambda revision, scripts: f"<p>{word} {revision}{'' if scripts else ' again'}",
        lambda: json.dumps([word]),
        {"is_complete": is_complete},
    )


def test_it_serves_the_newest_version() -> None:
    with LivePage() as live:
        assert live.address.startswith("http://127.0.0.1:")
        for revision, word in enumerate(("first", "second"), start=1):
            publish(live, word)
            status, headers, page = fetch(live)
            assert (status, page) == (200, f"<p>{word} {revision}")
            assert fetch(live, "/content")[2] == f"<p>{word} {revision} again"
            assert headers["Content-Type"] == "text/html; charset=utf-8"
            assert headers["Cache-Control"] == "no-store"
            assert json.loads(fetch(live, "/report.json")[2]) == [word]
            assert json.loads(fetch(live, "/status.json?x=1")[2]) == {"is_complete": False, "revision": revision}
        assert fetch(live, "/../etc/passwd")[0] == 404
        assert fetch(live, "/report.html")[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            status, headers, _ = fetch(live, "/", method)
            assert (status, headers["Content-Type"]) == (501, "text/plain; charset=utf-8")


def test_a_page_that_is_opened_early_waits_for_the_first_version() -> None:
    with LivePage() as live:
        pages: list[str] = []
        reader = threading.Thread(target=lambda: pages.append(fetch(live)[2]))
        reader.start()
        publish(live, "first")
        reader.join()
        assert pages == ["<p>first 1"]


STRANGERS = ["example.org", "127.0.0.1", "127.0.0.1:1", "localhost", "[::1]:80", ""]


@pytest.mark.parametrize("host", STRANGERS)
def test_another_host_name_is_refused(host: str) -> None:
    """A page of another site may give its own name this machine's address; the browser then names that host."""
    with LivePage() as live:
        publish(live, "secret")
        for path in ("/", "/report.json", "/status.json"):
            status, _, content = fetch(live, path, host=host)
            assert (status, content) == (403, "")
        port = live.address.rstrip("/").rpartition(":")[2]
        assert fetch(live, host=f"localhost:{port}")[0] == 200


def test_a_server_that_takes_any_host_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module._Handler, "_names_this_server", lambda handler: True)
    with pytest.raises(AssertionError):
        test_another_host_name_is_refused("example.org")


def test_it_listens_on_loopback_only_and_ends_with_its_block() -> None:
    with LivePage() as live:
        publish(live, "x")
        port = live._server.server_port
        assert live._server.socket.getsockname() == ("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert not live._thread.is_alive()


def test_an_open_page_gets_the_last_version_before_the_end() -> None:
    pages: list[str] = []

    def follow(live: LivePage) -> None:
        while json.loads(fetch(live, "/status.json")[2]).get("is_complete") is not True:
            pass
        pages.append(fetch(live)[2])

    with LivePage() as live:
        publish(live, "partial")
        fetch(live, "/status.json")
        viewer = threading.Thread(target=follow, args=(live,))
        viewer.start()
        publish(live, "whole", is_complete=True)
    viewer.join()
    assert pages == ["<p>whole 2"]


def test_after_an_error_it_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LivePage, "_wait_for_viewer", lambda live: pytest.fail("it waited"))
    with pytest.raises(KeyError), LivePage():
        raise KeyError


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LivePage() as first:
        port = first._server.server_port
        with pytest.raises(ConfigError, match=f"port {port}:"):
            LivePage(port)
        with pytest.raises(ConfigError, match="port 65536:"):
            LivePage(2**16)
        assert (
            run_command(["compare", "preset:gqa-tiny", "--out", str(tmp_path), "--dry-run", "--port", str(port)]) == 2
        )
        assert capsys.readouterr().err.startswith(f"heddle: --port {port}:")
