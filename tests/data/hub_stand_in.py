"""A stand-in of the hub on loopback: one data set, with the answers that `datasets` needs to stream it."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

COMMIT = "5" * 40
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Hub(ThreadingHTTPServer):
    """name: of its data set, OWNER/NAME. files: content by path. requests: what was asked for, `GET /…`."""

    daemon_threads = True

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.files, self.requests = name, files, list[str]()
        self.broken = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def info(self) -> dict[str, Any]:
        """What the hub says of a data set."""
        siblings = [{"rfilename": path} for path in self.files]
        return {"id": self.name, "sha": COMMIT, "private": False, "gated": False, "siblings": siblings, "tags": []}

    def tree(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        """What is in a folder: files and folders, or all files below it."""
        prefix = f"{folder}/" if folder else ""
        inner = {path.removeprefix(prefix): data for path, data in self.files.items() if path.startswith(prefix)}
        folders = sorted({path.partition("/")[0] for path in inner if "/" in path})
        files = {path: data for path, data in inner.items() if recursive or "/" not in path}
        return [{"type": "directory", "path": prefix + path, "oid": "0" * 40} for path in folders] + [
            {"type": "file", "path": prefix + path, "size": len(data), "oid": "0" * 40} for path, data in files.items()
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        path, _, query = self.path.partition("?")
        self.server.requests.append(f"{self.command} {self.path}")
        repository = f"/api/datasets/{self.server.name}"
        if self.server.broken:
            self._send(403, b"", {})
        elif path.startswith(f"/datasets/{self.server.name}/resolve/"):
            self._send_file(path.split("/", 6)[6])
        elif path == repository or path.startswith(f"{repository}/revision/"):
            self._send_json(self.server.info())
        elif path.startswith(f"{repository}/tree/"):
            folder = unquote(path.removeprefix(f"{repository}/tree/").partition("/")[2])
            self._send_json(self.server.tree(folder, "recursive=true" in query.lower()))
        elif path.startswith(f"{repository}/paths-info/"):
            asked = json.loads(body)["paths"] if body.startswith("{") else []
            self._send_json([entry for entry in self.server.tree("", True) if entry["path"] in asked])
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_file(self, name: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{len(data)}"', "Accept-Ranges": "bytes"}
        match = RANGE.fullmatch(self.headers.get("range") or "")
        if match is None:
            self._send(200, data, headers)
            return
        first, last = int(match[1]), min(int(match[2] or len(data) - 1), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._send(206, data[first : last + 1], headers)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve_hub(name: str, files: dict[str, bytes]) -> Iterator[Hub]:
    """Serve a data set until the block ends."""
    hub = Hub(name, files)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
