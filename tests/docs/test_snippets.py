"""Run every snippet of the documentation: Python in one namespace per page, and `console` commands. Parse `sh` ones."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from heddle.cli.main import VerbCommand, app, run_command
from heddle.lab.compare.probes import measure_speeds as speeds
from heddle.lab.conversion import run as conversion_run
from tests.docs.pages import Block, blocks, commands, pages, save
from tests.small import forget_parts

PAGES_TESTED_ELSEWHERE = ("deploy/",)  # these have their own test files
LANGUAGES = {"python", "console", "sh", "yaml", "text"}
PRINTED_RESULT = re.compile(r"  # (wrong \S+, right \S+)$", re.MULTILINE)  # a comment with what its line prints


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    # A conversion's speeds at 512 tokens; at 2,048 and 8,192 they took most of the time of its pages.
    monkeypatch.setattr(
        conversion_run, "measure_speeds", lambda design, contexts, *rest: speeds(design, contexts[:1], *rest)
    )
    yield
    forget_parts()


def run_block(block: Block, namespace: dict[str, Any]) -> None:
    """Save, run or parse a block. A wrong one raises."""
    if block.file is not None:
        save(block, Path())
    elif block.language == "python":
        source = "\n" * (block.line - 1) + block.text  # so that a traceback has the line number of the page
        exec(compile(source, "the page", "exec"), namespace)
    elif block.language == "console":
        for command in commands(block):
            assert run_command(shlex.split(command)) == 0, command
            forget_parts()
    elif block.language == "sh":
        for command in commands(block):
            parse_command(command)


def parse_command(command: str) -> None:
    """Raise if the command line has an unknown command or option, or a value of the wrong type."""
    name, *arguments = shlex.split(command)
    with click.Context(app, info_name="heddle") as context:
        _, verb, rest = app.resolve_command(context, [name, *arguments])
        assert isinstance(verb, VerbCommand)
        verb.read_settings(verb.make_context(name, rest, parent=context))


# PEFT reads an attribute that transformers has deprecated.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("page", [page for page in pages() if not page.startswith(PAGES_TESTED_ELSEWHERE)])
def test_page(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{page}, line {block.line}"
        run_block(block, namespace)
    output = capsys.readouterr().out
    expected_results = [result for block in blocks(page) for result in PRINTED_RESULT.findall(block.text)]
    assert [result for result in expected_results if result not in output] == []


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
    with pytest.raises(Exception):  # noqa: B017 - each mistake raises another type
        run_block(Block(language, None, text, 1), {})
