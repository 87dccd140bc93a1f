"""Every snippet of the documentation runs: Python in one namespace a page, `console` commands, and `sh` ones parsed."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from heddle.cli.main import app, run
from tests.docs.pages import Block, blocks, commands, pages, save
from tests.small import forget_parts

OWN = ("deploy/",)  # pages with tests of their own
LANGUAGES = {"python", "console", "sh", "yaml", "text"}
PRINTED = re.compile(r"  # (wrong \S+, right \S+)$", re.MULTILINE)  # a comment that says what its line prints


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    forget_parts()


def run_block(block: Block, space: dict[str, Any]) -> None:
    """Do what a block says; a bad one raises or fails."""
    if block.file is not None:
        save(block, Path())
    elif block.language == "python":
        source = "\n" * (block.line - 1) + block.text  # a traceback tells the line of the page
        exec(compile(source, "the page", "exec"), space)
    elif block.language == "console":
        for command in commands(block):
            assert run(shlex.split(command)) == 0, command
            forget_parts()
    elif block.language == "sh":
        for command in commands(block):
            parse(command)


def parse(command: str) -> None:
    """Raise where the command line has an unknown verb or option, or a value of the wrong type."""
    verb, *arguments = shlex.split(command)
    typer.main.get_command(app).commands[verb].make_context(verb, arguments)  # type: ignore[attr-defined]


# PEFT reads a name that transformers is giving up.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("page", [page for page in pages() if not page.startswith(OWN)])
def test_page(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{page}, line {block.line}"
        run_block(block, space)
    told = capsys.readouterr().out
    assert [said for block in blocks(page) for said in PRINTED.findall(block.text) if said not in told] == []


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "import heddle\nassert heddle.no_such_name\n"),
        ("console", "$ heddle show preset:no-such-preset\n"),
        ("console", "$ ls\n"),
        ("sh", "heddle weave preset:gqa-tiny\n"),
        ("sh", "heddle train preset:gqa-tiny --stepps 3\n"),
        ("sh", "heddle train preset:gqa-tiny --steps many\n"),
    ],
)
def test_planted_snippets_fail(language: str, text: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - whatever the mistake raises
        run_block(Block(language, None, text, 1), {})
