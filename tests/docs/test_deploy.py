"""Follow docs/deploy like a reader: every command and snippet in order, in one folder, with a small model.

Commands of programs that are not installed here are in `text` blocks. The tests check the files that they would read.
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

from heddle.cli.main import run_command
from tests.docs.pages import DOCS, Block, blocks, save
from tests.source import ROOT

PAGES = ["deploy/README.md", "deploy/transformers.md", "deploy/llama-cpp.md", "deploy/ollama.md", "deploy/vllm.md"]
# The command of the pages, and the smaller one that the tests run instead.
SMALLER_COMMANDS = {
    "preset:gqa-tiny --data stdlib --steps 600": "preset:gqa-tiny width=48 layers.0.repeat=2 --data notes.txt"
    " --steps 12 --sequence-length 48 --batch-size 4 --vocab-size 300"
}
PORT = "8000"


class Reader:
    """A reader with a shell and a Python session in one folder. outputs: what each command printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespace: dict[str, Any] = {"__name__": "page"}
        self.servers: list[subprocess.Popen[bytes]] = []
        self.outputs: list[str] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = str(probe.getsockname()[1])
        self.environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "HF_HUB_OFFLINE": "1"}

    def run_block(self, block: Block) -> None:
        """Save or run a block."""
        if block.file is not None:
            save(block, self.folder)
        elif block.language == "python":
            source = "\n" * (block.line - 1) + block.text.replace(PORT, self.port)
            exec(compile(source, "the page", "exec"), self.namespace)
        elif block.language == "sh":
            for line in block.text.splitlines():
                self.run_command(line)

    def run_command(self, line: str) -> None:
        """Run one command line."""
        for full_size, small in SMALLER_COMMANDS.items():
            line = line.replace(full_size, small)
        program, *arguments = shlex.split(line.removesuffix(" &").replace(PORT, self.port))
        if program == "heddle":
            with redirect_stdout(io.StringIO()) as output:
                assert run_command(arguments) == 0, line
            self.outputs.append(output.getvalue())
            return
        command = (
            [sys.executable, *arguments]
            if program == "python"
            else [str(Path(sys.executable).with_name(program)), *arguments]
        )
        if line.endswith(" &"):
            self.servers.append(subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL))
            self.wait_for_server()
            return
        completed = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert completed.returncode == 0, f"{line}: {completed.stderr}"
        self.outputs.append(completed.stdout)

    def wait_for_server(self) -> None:
        """Wait until the server answers."""
        for _ in range(600):
            assert self.servers[-1].poll() is None, "the server ended"
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/health"):
                    return
            except (URLError, ConnectionError):
                time.sleep(0.1)
        raise AssertionError("the server does not answer")


@contextmanager
def reader_in(folder: Path) -> Iterator[Reader]:
    """A reader in a folder. At the end, the servers are stopped."""
    reader, original_folder = Reader(folder), Path.cwd()
    os.chdir(folder)
    (folder / "notes.txt").write_text((DOCS / "tour.md").read_text(encoding="utf-8"), encoding="utf-8")
    try:
        yield reader
    finally:
        os.chdir(original_folder)
        for server in reader.servers:
            server.terminate()
            server.wait()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader who has followed every page."""
    with reader_in(tmp_path_factory.mktemp("deploy")) as new_reader:
        for page in PAGES:
            for block in blocks(page):
                new_reader.run_block(block)
        yield new_reader


def test_every_page_can_be_followed(reader: Reader) -> None:
    output = "".join(reader.outputs)
    assert "out/hf: exports as: LlamaForCausalLM" in output
    assert "out/tiny.gguf: llama.cpp runs it as llama" in output
    assert {f"deploy/{path.name}" for path in (DOCS / "deploy").glob("*.md")} == set(PAGES)
    block_texts = [block.text for page in PAGES for block in blocks(page)]
    for full_size in SMALLER_COMMANDS:
        assert any(full_size in text for text in block_texts), "the pages train something else"


def test_llama_cpp_generates_the_text_of_heddle(reader: Reader) -> None:
    assert reader.outputs[-1].removesuffix("\n") == reader.namespace["text"]
    assert len(reader.namespace["text"]) > 4


def test_a_wrong_command_fails(reader: Reader) -> None:
    for line in ("heddle export runs/deploy out/other.gguf --format gufg", "python -m tools.no_such_tool"):
        with pytest.raises(AssertionError):
            reader.run_command(line)


OLLAMA_PARAMETERS = {
    "num_ctx": int, "num_predict": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float, "seed": int,
    "repeat_penalty": float, "repeat_last_n": int, "stop": str,
}  # fmt: skip
INSTRUCTION = re.compile(r"(FROM|TEMPLATE|PARAMETER|SYSTEM|LICENSE|ADAPTER|MESSAGE) (.+)")


def modelfile_errors(modelfile: str, folder: Path) -> list[str]:
    """The lines of a Modelfile that Ollama would reject or misunderstand, each with the reason."""
    errors, from_paths = [], []
    for line in modelfile.splitlines():
        match = INSTRUCTION.fullmatch(line)
        if match is None:
            errors.append(f"not an instruction: {line}")
            continue
        name, value = match.groups()
        if name == "FROM":
            from_paths.append(value)
        if name == "PARAMETER":
            key, _, value_text = value.partition(" ")
            try:
                OLLAMA_PARAMETERS[key](json.loads(value_text) if value_text.startswith('"') else value_text)
            except (KeyError, ValueError):
                errors.append(f"no such parameter: {line}")
        if name == "TEMPLATE" and json.loads(value).count("{{ .Prompt }}") != 1:
            errors.append(f"the prompt is missing: {line}")
    if len(from_paths) != 1 or (folder / from_paths[0]).read_bytes()[:4] != b"GGUF":
        errors.append(f"FROM names no GGUF: {from_paths}")
    return errors


def test_the_modelfile_is_valid(reader: Reader) -> None:
    text = (reader.folder / "Modelfile").read_text(encoding="utf-8")
    assert modelfile_errors(text, reader.folder) == []
    assert 'stop "<|end|>"' in text
    for planted in (
        text.replace("temperature 0", "temperatur 0"),
        text.replace("num_ctx 256", "num_ctx long"),
        text.replace("{{ .Prompt }}", ""),
        text.replace("./out/tiny.gguf", "./out/hf/config.json"),
        text + "RUN something\n",
    ):
        assert len(modelfile_errors(planted, reader.folder)) == 1, planted


def test_only_gguf_metadata_adds_the_start_token(reader: Reader) -> None:
    """llama.cpp adds the start token by the GGUF's metadata; a template that adds it too would double it."""
    from gguf import GGUFReader

    fields = GGUFReader(reader.folder / "out/tiny.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert "tokenizer.chat_template" not in fields


def shell_arguments(page: str, program: str) -> list[list[str]]:
    """The arguments of a program on each line of a page's `text` blocks that starts with its name."""
    lines = [line for block in blocks(page) if block.language == "text" for line in block.text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"{program} ")]


def test_vllm_knows_the_exported_class(reader: Reader) -> None:
    import transformers

    commands = shell_arguments("deploy/vllm.md", "vllm")
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
    assert config["max_position_embeddings"] == 48, "the sequence length of the training"


def test_files_given_to_llama_cpp_and_ollama_exist(reader: Reader) -> None:
    for program in ("llama-completion", "llama-server"):
        (arguments,) = shell_arguments("deploy/llama-cpp.md", program)
        assert any((reader.folder / argument).is_file() for argument in arguments if argument.endswith(".gguf"))
    (arguments,) = shell_arguments("deploy/ollama.md", "ollama create heddle-tiny")
    assert (reader.folder / arguments[-1]).is_file()


def test_the_transcript_is_the_same_text_three_times(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a transcript of the small run; `main` writes the page only if it is so."""
    from tools import transcript

    monkeypatch.setattr(transcript, "PROMPTS", ("The", "import", "| kind"))
    result = transcript.transcript(reader.folder / "runs/deploy", reader.folder / "again")
    assert result.texts["heddle"] == result.texts["transformers"] == result.texts["llama.cpp"]
    assert all(len(text) > 8 for text in result.texts["heddle"])
    assert max(result.differences.values()) < 1e-4
    page = transcript.page(result)
    assert all(f"| {line}".rstrip() in page for text in result.texts["heddle"] for line in text.split("\n"))
    for text in (page, (DOCS.parent / "benchmarks/results/transcript.md").read_text(encoding="utf-8")):
        assert "same text" in " ".join(text.split())
        assert text.count("```text") == text.count("## `") > 2
