"""`heddle serve` as a process: what it refuses to start with, and how SIGTERM ends it."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.errors import pip_install
from heddle.numerics import dispatch
from heddle.storage.model import save
from tests.serving.running import small_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "small"
    model, tokenizer = small_model()
    save(model, path, tokenizer)
    return path


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0:"),
        (["--streams", "0"], "streams 0:"),
        (["--port", "99999999"], "--port 99999999:"),
    ],
)
def test_what_cannot_be_served_is_refused(
    options: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["serve", str(folder), "--device", "cpu", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_short_or_missing_token_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("short")
    (tmp_path / "latin").write_bytes(b"\xe9" * 20)
    for name, reason in {
        "token": "least 16 ASCII",
        "none": "does not exist",
        "": "is a folder",
        "latin": "is not UTF-8",
        "/dev/zero": "has more than",
    }.items():
        assert run_command(["serve", str(folder), "--token-file", str(tmp_path / name)]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"heddle: --token-file {tmp_path / name}: ")
        assert reason in told


def test_a_missing_library_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dispatch, "optional_module", lambda name: None)
    assert run_command(["serve", str(folder)]) == 2
    assert pip_install("serve") in capsys.readouterr().err


def test_sigterm_lets_a_running_request_end_and_exits_with_0(folder: Path) -> None:
    command = [sys.executable, "-m", "heddle", "serve", str(folder), "--port", "0", "--device", "cpu", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    body = {"model": "small", "prompt": "The", "max_tokens": 400, "temperature": 0, "stream": True}
    request = urllib.request.Request(f"{address}/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        process.send_signal(signal.SIGTERM)
        assert answer.read().endswith(b"data: [DONE]\n\n")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    start, drain = err.splitlines()
    assert start == (
        "serve: small; prompts up to 8,192 tokens, answers up to 2,048; "
        "on Ctrl-C or SIGTERM, running requests finish first, within 30 s"
    )
    assert "still run: 1," in drain
