"""docs/deploy followed as a reader would: every command and snippet in order, in one folder, with a small model.

What needs a program that cannot be here stands in `text` blocks, and is held against what that program asks for.
"""

import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from heddle.cli.main import run
from tests.docs.pages import DOCS, Block, blocks, save
from tests.source import ROOT

PAGES = ["deploy/README.md", "deploy/transformers.md", "deploy/llama-cpp.md", "deploy/ollama.md", "deploy/vllm.md"]
# What the pages train at their size, and what the tests train in its place.
SMALLER = {
    "preset:gqa-tiny --data stdlib --steps 600": "preset:gqa-tiny width=48 layers.0.repeat=2 --data notes.txt"
    " --steps 12 --sequence-length 48 --batch-size 4 --vocab-size 300"
}
PORT = "8000"


class Reader:
    """Somebody with a shell and a Python session in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.space: dict[str, Any] = {"__name__": "page"}
        self.servers: list[subprocess.Popen[bytes]] = []
        self.done: list[str] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        self.environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "HF_HUB_OFFLINE": "1"}

    def follow(self, block: Block) -> None:
        """Do what a block says."""
        if block.file is not None:
            save(block, self.folder)
        elif block.language == "python":
            source = "\n" * (block.line - 1) + block.text.replace(PORT, self.port)
            exec(compile(source, "the page", "exec"), self.space)
        elif block.language == "sh":
            for line in block.text.splitlines():
                self.give(line)

    def give(self, line: str) -> None:
        """Give one command."""
        for full, small in SMALLER.items():
            line = line.replace(full, small)
        program, *words = shlex.split(line.removesuffix(" &").replace(PORT, self.port))
        if program == "heddle":
            with redirect_stdout(io.StringIO()) as told:
                assert run(words) == 0, line
            self.done.append(told.getvalue())
            return
        command = (
            [sys.executable, *words] if program == "python" else [str(Path(sys.executable).with_name(program)), *words]
        )
        if line.endswith(" &"):
            self.servers.append(subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL))
            self.wait()
            return
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        self.done.append(done.stdout)

    def wait(self) -> None:
        """Until the server answers, or has ended."""
        for _ in range(600):
            assert self.servers[-1].poll() is None, "the server ended"
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/health"):
                    return
            except (URLError, ConnectionError):
                time.sleep(0.1)
        raise AssertionError("no server answers")


@contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    """A reader in a folder; servers are ended."""
    reader, before = Reader(folder), Path.cwd()
    os.chdir(folder)
    (folder / "notes.txt").write_text((DOCS / "tour.md").read_text(encoding="utf-8"), encoding="utf-8")
    try:
        yield reader
    finally:
        os.chdir(before)
        for server in reader.servers:
            server.terminate()
            server.wait()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """One who has followed every page."""
    with reading(tmp_path_factory.mktemp("deploy")) as one:
        for page in PAGES:
            for block in blocks(page):
                one.follow(block)
        yield one


def test_every_page_can_be_followed(reader: Reader) -> None:
    told = "".join(reader.done)
    assert "out/hf: exports as: LlamaForCausalLM" in told
    assert "out/tiny.gguf: llama.cpp runs it as llama" in told
    assert {f"deploy/{path.name}" for path in (DOCS / "deploy").glob("*.md")} - set(PAGES) == {"deploy/transcript.md"}
    for full in SMALLER:
        assert any(full in block.text for page in PAGES for block in blocks(page)), "the pages train something else"


def test_llama_cpp_wrote_what_heddle_writes(reader: Reader) -> None:
    assert reader.done[-1].removesuffix("\n") == reader.space["text"]
    assert len(reader.space["text"]) > 4


def test_a_wrong_command_fails(reader: Reader) -> None:
    for line in ("heddle export runs/deploy out/other.gguf --format gufg", "python -m tools.no_such_tool"):
        with pytest.raises(AssertionError):
            reader.give(line)


OLLAMA = {
    "num_ctx": int, "num_predict": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float, "seed": int,
    "repeat_penalty": float, "repeat_last_n": int, "stop": str,
}  # fmt: skip
INSTRUCTION = re.compile(r"(FROM|TEMPLATE|PARAMETER|SYSTEM|LICENSE|ADAPTER|MESSAGE) (.+)")


def faults(modelfile: str, folder: Path) -> list[str]:
    """What Ollama would refuse of a Modelfile, or take otherwise than it is meant."""
    found, froms = [], []
    for line in modelfile.splitlines():
        match = INSTRUCTION.fullmatch(line)
        if match is None:
            found.append(f"no instruction: {line}")
            continue
        name, value = match.groups()
        if name == "FROM":
            froms.append(value)
        if name == "PARAMETER":
            key, _, given = value.partition(" ")
            try:
                OLLAMA[key](json.loads(given) if given.startswith('"') else given)
            except (KeyError, ValueError):
                found.append(f"no such parameter: {line}")
        if name == "TEMPLATE" and json.loads(value).count("{{ .Prompt }}") != 1:
            found.append(f"the prompt stands nowhere: {line}")
    if len(froms) != 1 or (folder / froms[0]).read_bytes()[:4] != b"GGUF":
        found.append(f"FROM names no GGUF: {froms}")
    return found


def test_the_modelfile_is_one(reader: Reader) -> None:
    text = (reader.folder / "Modelfile").read_text(encoding="utf-8")
    assert faults(text, reader.folder) == []
    assert 'stop "<|end|>"' in text
    for planted in (
        text.replace("temperature 0", "temperatur 0"),
        text.replace("num_ctx 256", "num_ctx long"),
        text.replace("{{ .Prompt }}", ""),
        text.replace("./out/tiny.gguf", "./out/hf/config.json"),
        text + "RUN something\n",
    ):
        assert len(faults(planted, reader.folder)) == 1, planted


def test_the_model_goes_by_the_prompt_alone(reader: Reader) -> None:
    """The GGUF opens a text itself, so a template that did it again would be read twice."""
    from gguf import GGUFReader

    fields = GGUFReader(reader.folder / "out/tiny.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert "tokenizer.chat_template" not in fields


def served(page: str, program: str) -> list[list[str]]:
    """The words after a program's name in the `text` blocks of a page."""
    lines = [line for block in blocks(page) if block.language == "text" for line in block.text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"{program} ")]


def test_vllm_finds_a_class_that_it_knows(reader: Reader) -> None:
    import transformers

    commands = served("deploy/vllm.md", "vllm")
    assert commands
    for verb, folder, *options in commands:
        assert verb == "serve"
        config = json.loads((reader.folder / folder / "config.json").read_text(encoding="utf-8"))
        (name,) = config["architectures"]
        assert issubclass(getattr(transformers, name), transformers.PreTrainedModel)
        assert transformers.AutoConfig.for_model(config["model_type"]).model_type == config["model_type"]
        assert "auto_map" not in config
        for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (reader.folder / folder / file).is_file(), file
        assert set(options[::2]) <= {"--max-model-len", "--dtype", "--port"}
    assert config["max_position_embeddings"] == 48, "the length of the texts in training is told"


def test_what_is_given_to_llama_cpp_and_ollama_exists(reader: Reader) -> None:
    for program in ("llama-completion", "llama-server", "llama-quantize"):
        (words,) = served("deploy/llama-cpp.md", program)
        assert any((reader.folder / word).is_file() for word in words if word.endswith(".gguf"))
    (words,) = served("deploy/ollama.md", "ollama create heddle-tiny")
    assert (reader.folder / words[-1]).is_file()


def test_the_transcript_has_three_equal_columns(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own, and one made of the small run."""
    from tools import transcript

    monkeypatch.setattr(transcript, "PROMPTS", ("The", "import", "| kind"))
    found = transcript.transcript(reader.folder / "runs/deploy", reader.folder / "again")
    assert found.texts["heddle"] == found.texts["transformers"] == found.texts["llama.cpp"]
    assert all(len(text) > 8 for text in found.texts["heddle"])
    assert max(found.differences.values()) < 1e-4
    for text in (transcript.page(found), (DOCS / "deploy/transcript.md").read_text(encoding="utf-8")):
        columns = [rows_of(text, start) for start in transcript.STARTS]
        assert columns[0] == columns[1] == columns[2]
        assert len(columns[0]) > 3


def rows_of(page: str, start: int) -> list[str]:
    """One column of the blocks of a transcript."""
    rows = [line for text in re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S) for line in text.splitlines()[1:]]
    assert all(row[start] == "|" for row in rows)
    return [row[start : start + 36].rstrip() for row in rows]
