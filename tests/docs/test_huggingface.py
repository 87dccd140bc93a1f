"""docs/huggingface: what is given to a shell; Python and `heddle` commands run in test_snippets."""

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.docs.pages import DOCS, Block, blocks, pages
from tests.docs.test_snippets import run_block
from tests.source import ROOT

PAGE = "huggingface/serving.md"
PORT = "8000"


def shell(page: str) -> list[str]:
    """The lines of a page's unnamed `text` blocks."""
    return [
        line
        for block in blocks(page)
        if block.language == "text" and block.file is None
        for line in block.text.splitlines()
    ]


def until_first(page: str, heading: str) -> list[Block]:
    """The blocks before a heading."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    return [block for block in blocks(page) if block.line <= lines.index(heading) + 1]


def test_every_line_for_a_shell_is_given_by_a_test() -> None:
    """vLLM's is not: no vLLM is here, and its plug-in has tests of its own."""
    lines = [line for page in pages() if page.startswith("huggingface/") for line in shell(page)]
    server, client, vllm = lines
    assert (shlex.split(server)[1:3], client) == (["-m", "heddle.exchange.transformers.serve"], "python ask.py")
    assert vllm.startswith("vllm serve ")


def test_the_server_answers_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "page"}
    for block in until_first(PAGE, "## A server"):
        run_block(block, space)
    (client,) = (block for block in blocks(PAGE) if block.file == "ask.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    Path("ask.py").write_text(client.text.replace(PORT, port), encoding="utf-8")
    server, ask, _ = shell(PAGE)
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    words = [sys.executable, *shlex.split(server.replace(PORT, port))[1:]]
    with Path("log").open("w") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(1200):
            assert process.poll() is None, Path("log").read_text()
            try:
                with urlopen(f"http://localhost:{port}/health"):
                    break
            except OSError:
                time.sleep(0.1)
        done = subprocess.run([sys.executable, *shlex.split(ask)[1:]], capture_output=True, text=True, check=False)
    finally:
        process.terminate()
        process.wait(30)
    assert done.stdout.removesuffix("\n") == space["told"]["generated_text"], done.stderr
