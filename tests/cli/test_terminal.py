"""Control characters of data, models and names are escaped on a terminal, and come as they are into a pipe."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.generation import generate as generation
from heddle.progress import CONTROL_CHARACTERS, print_text, terminal_safe
from tests import small

HOSTILE = "a\x1b[2Jb\x9b31mc\rd\x07e\u202ef\x7fg"
ESCAPED = r"a\u001b[2Jb\u009b31mc\u000dd\u0007e\u202ef\u007fg"
HARMLESS = "日本\té\n\u200d\u00a0\u200f🧵"
SIZE = ["--sequence-length", "16", "--batch-size", "4", "--steps", "1", "--device", "cpu"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    small.folder(root / "text")
    small.design_file(root / "a\x1b[2Jb.yaml")
    data = ["--data", f"{root}/text", "--out", f"{root}/run", "--quiet"]
    assert run_command(["train", f"{root}/a\x1b[2Jb.yaml", *data, *SIZE]) == 0
    return root


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    return screen


@pytest.fixture
def hostile_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text that a model generates holds control characters."""

    def generate(model: object, prompts: list[str], *arguments: object, **options: object) -> list[str]:
        on_text = options.get("on_text")
        if callable(on_text):
            on_text(0, HOSTILE[:5])
            on_text(0, HOSTILE[5:])
        return [HOSTILE for _ in prompts]

    monkeypatch.setattr(generation, "generate", generate)
    monkeypatch.setattr(generation, "sample_text", lambda *arguments: HOSTILE)


def test_text_is_escaped_on_a_terminal_and_raw_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terminal_safe(HOSTILE) == HOSTILE
    print_text(HARMLESS + "\x1b")
    assert capsys.readouterr().out == HARMLESS + "\x1b\n"
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    print_text(HARMLESS + HOSTILE, end="")
    print_text("\ud800", end="")  # a name of a file may hold half a surrogate pair
    assert screen.getvalue() == HARMLESS + ESCAPED + r"\ud800"


def test_every_control_character_but_line_ends_and_tabs_is_escaped() -> None:
    controls = {chr(code) for code in (*range(32), *range(127, 160))} - {"\n", "\t"}
    assert {c for c in map(chr, range(0x250)) if CONTROL_CHARACTERS.match(c)} == controls


COMMANDS = [
    ["generate", "@/run", "--prompt", HOSTILE, "--device", "cpu"],
    ["generate", "@/run", "--prompt", HOSTILE, "--prompt", "b", "--device", "cpu"],
    ["generate", "@/run", "--json", "--device", "cpu"],
    ["train", "@/a\x1b[2Jb.yaml", "--data", "@/text", "--out", "@/ne\x1b[2Jw", "--quiet", *SIZE],
    ["train", "@/a\x1b[2Jb.yaml", "--data", "@/text", "--out", "@/ne\x1b[2Jw", "--quiet", "--json", *SIZE],
    ["show", "@/a\x1b[2Jb.yaml", "--device", "cpu"],
    ["inspect", "@/run", "--text", "x", "--out", "@/a\x1b[2J.html", "--device", "cpu", "--quiet"],
    ["export", "@/run", "@/ex\x1b[2Jported", "--quiet"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=[ascii(" ".join(row[:3])) for row in COMMANDS])
def test_no_command_moves_the_cursor(
    command: list[str],
    workspace: Path,
    hostile_model: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    arguments = [word.replace("@/", f"{workspace}/") for word in command]
    capsys.readouterr()
    assert run_command(arguments) == 0
    raw = capsys.readouterr().out
    assert "--json" in command or "\x1b[2J" in raw
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    if command[0] == "export":  # it replaces nothing
        shutil.rmtree(arguments[2])
    assert run_command(arguments) == 0
    shown = screen.getvalue()
    assert not CONTROL_CHARACTERS.search(shown), shown
    assert r"\u001b[2J" in shown
    if "--json" in command:
        assert json.loads(shown) == json.loads(raw)


def test_errors_quote_values_escaped(workspace: Path, terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["show", f"{workspace}/a\x1b[2Jb.yaml", "width=\x1b[2J"],
        ["show", f"{workspace}/\x1b[2J\u202e.yaml"],
        ["train", f"{workspace}/a\x1b[2Jb.yaml", "--data", "\x1b[2J", "--out", f"{workspace}/x"],
        ["generate", f"{workspace}/\x9b2J"],
    ):
        assert run_command(arguments) == 2
        err = capsys.readouterr().err
        assert not CONTROL_CHARACTERS.search(err), err
