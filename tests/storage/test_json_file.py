"""JSON files with their own SHA-256: they come back equal, and every altered byte is refused in a sentence."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from heddle.errors import CheckpointError
from heddle.storage import file_io
from heddle.storage.file_io import read_json_file, write_json_file

CONTENT: dict[str, Any] = {
    "z": [1, 2.5, None, True, "βῆτα 🧵\u2028"],
    "a": {"nested": {"deep": [[], {}]}, "learning_rate": 3e-3, "large": 2**70},
    "": "a field without a name",
    "infinite": float("inf"),
}


def test_content_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json_file(path, CONTENT)
    assert read_json_file(path) == CONTENT
    assert list(read_json_file(path)) == list(CONTENT)
    write_json_file(path, {"tuple": (1, 2), "table": {5: "five"}})
    assert read_json_file(path) == {"tuple": [1, 2], "table": {"5": "five"}}


def test_anyone_can_check_the_hash(tmp_path: Path) -> None:
    write_json_file(tmp_path / "run.json", CONTENT)
    content = json.loads((tmp_path / "run.json").read_text())
    sha256 = content.pop("sha256")
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert sha256 == hashlib.sha256(canonical.encode()).hexdigest()


def altered(path: Path) -> list[str]:
    """Flip bits in every byte of a file; what was read all the same, or refused in other words than these."""
    raw = path.read_bytes()
    missed = []
    for offset in range(len(raw)):
        for bit in range(8):
            path.write_bytes(raw[:offset] + bytes([raw[offset] ^ 1 << bit]) + raw[offset + 1 :])
            try:
                missed.append(str(read_json_file(path)))
            except CheckpointError as error:
                text = str(error)
                if not text.startswith(f"{path}: ") or "\n" in text or "; " not in text:
                    missed.append(text)
    path.write_bytes(raw)
    return missed


def test_every_altered_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json_file(path, CONTENT)
    assert altered(path) == []
    assert read_json_file(path) == CONTENT
    raw = path.read_bytes()
    for version in (b"", raw[:-1], raw + b"\n", raw.replace(b"\n", b"\r\n"), raw[: len(raw) // 2], raw + raw, b"[1]"):
        path.write_bytes(version)
        with pytest.raises(CheckpointError, match=r"run\.json:.*altered"):
            read_json_file(path)


@pytest.mark.parametrize("planted", ["content_sha256", "_text"])
def test_a_reader_that_compares_less_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    write_json_file(tmp_path / "run.json", CONTENT)
    if planted == "content_sha256":
        saved = json.loads((tmp_path / "run.json").read_text())["sha256"]
        monkeypatch.setattr(file_io, "content_sha256", lambda content: saved)
    else:
        raw = type("Anything", (bytes,), {"__ne__": lambda self, other: False, "__hash__": None})
        monkeypatch.setattr(file_io, "_text", lambda c: type("T", (str,), {"encode": lambda self, codec: raw()})())
    assert altered(tmp_path / "run.json") != []


def test_a_file_of_format_1_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"design": {}, "settings": {}}, indent=2) + "\n")
    with pytest.raises(CheckpointError, match=r"run\.json:.*sha256"):
        read_json_file(path)


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for raw in (b"{" + b'"a":{' * 100_000, b'{"sha256": ' + b"9" * 5000 + b"}", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"run\.json:.*altered"):
            read_json_file(path)
    with open(path, "wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(CheckpointError, match=r"run\.json:.*larger"):
        read_json_file(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"run\.json:.*missing"):
        read_json_file(path)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"run\.json:.*pipe"):
        read_json_file(path)
