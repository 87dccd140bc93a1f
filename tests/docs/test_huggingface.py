"""docs/huggingface: run its shell commands. Its Python code and `heddle` commands run in test_snippets."""

import os
import re
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


def shell_lines(page: str) -> list[str]:
    """The lines of a page's unnamed `text` blocks."""
    return [
        line
        for block in blocks(page)
        if block.language == "text" and block.file is None
        for line in block.text.splitlines()
    ]


def blocks_before(page: str, heading: str) -> list[Block]:
    """The blocks before a heading."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    return [block for block in blocks(page) if block.line <= lines.index(heading) + 1]


def test_every_shell_line_is_known_to_a_test() -> None:
    """Of the lines here, lm-eval's has a test of its own."""
    lines = [line for page in pages() if page.startswith("huggingface/") for line in shell_lines(page)]
    server, client, lm_eval = lines
    assert (shlex.split(server)[:2], client) == (["transformers", "serve"], "python ask.py")
    assert lm_eval.startswith("lm_eval --model hf ")


@pytest.mark.nightly
def test_the_server_gives_the_client_the_text_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks_before(PAGE, "## A server"):
        run_block(block, namespace)
    (client_block,) = (block for block in blocks(PAGE) if block.file == "ask.py")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    Path("ask.py").write_text(client_block.text.replace(PORT, port), encoding="utf-8")
    server_line, client_line, *_ = shell_lines(PAGE)
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    program, *arguments = shlex.split(server_line.replace(PORT, port))
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    with Path("log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(1200):
            assert process.poll() is None, Path("log").read_text()
            try:
                with urlopen(f"http://localhost:{port}/health"):
                    break
            except OSError:
                time.sleep(0.1)
        client_command = [sys.executable, *shlex.split(client_line)[1:]]
        client = subprocess.run(client_command, capture_output=True, text=True, check=False)
    finally:
        process.terminate()
        process.wait(30)
    assert client.stdout.removesuffix("\n") == namespace["output"]["generated_text"], client.stderr


@pytest.mark.soak
def test_the_harness_runs_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks_before(PAGE, "## Attention functions of other libraries"):
        run_block(block, namespace)
    program, *arguments = shlex.split(shell_lines(PAGE)[2])
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "src")])
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    harness = subprocess.run(
        command, env=os.environ | offline | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert harness.returncode == 0, harness.stderr[-3000:]
    accuracy = namespace["results"]["results"]["weaving"]["acc,none"]
    assert re.search(rf"weaving.*acc +\|↑ +\| +{accuracy:g}\|", harness.stdout), harness.stdout
