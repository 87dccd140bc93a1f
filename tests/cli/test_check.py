"""`heddle check`: results as they come, a choice of laws, and exit codes."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from heddle.cli.main import run_command
from heddle.laws import LAWS
from heddle.parts.position_table import PositionTable
from tests import small
from tests.laws.planting import wrapped


@pytest.fixture(scope="module")
def design(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a small design."""
    return str(small.design_file(tmp_path_factory.mktemp("check") / "design.yaml"))


def test_each_result_is_in_the_pipe_before_the_next_law_ends(design: str) -> None:
    command = [sys.executable, "-m", "heddle", "check", design, "--threads", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.kill()
        rest = process.stdout.read().splitlines()
    assert first == f"holds   chunked_decoding: {LAWS['chunked_decoding'].statement}\n"
    assert len(rest) < len(LAWS) - 1


def test_chosen_laws_are_checked_once_in_the_given_order(design: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["tied_head", "causality", "tied_head"]
    assert run_command(["check", design, *(word for name in names for word in ("--law", name))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"holds   tied_head: {LAWS['tied_head'].statement}",
        f"holds   causality: {LAWS['causality'].statement}",
        "2 of 2 laws hold",
    ]


def test_laws_that_say_nothing_are_counted_apart(design: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["check", design, "--law", "top_k_routing", "--law", "tied_head"]
    assert run_command(asked) == 0
    assert capsys.readouterr().out.splitlines() == [
        "–       top_k_routing: does not apply: no experts",
        f"holds   tied_head: {LAWS['tied_head'].statement}",
        "1 of 1 laws hold; 1 does not apply to this design",
    ]
    assert run_command([*asked, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [(result["passed"], result["not_applicable"]) for result in results] == [(True, "no experts"), (True, "")]


def test_a_broken_law_is_printed_with_its_violation_and_ends_with_exit_code_1(
    design: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = wrapped(
        PositionTable.next_layout, lambda next_layout, table, *rest: next_layout(replace(table, max_tokens=0), *rest)
    )
    restart(monkeypatch)
    asked = ["check", design, "--law", "chunked_decoding", "--law", "config_round_trip"]
    assert run_command(asked) == 1
    broken, holding, summary, again = capsys.readouterr().out.splitlines()
    assert broken.startswith("BROKEN  chunked_decoding: text of 11 in ")
    assert holding.startswith("holds   config_round_trip: ")
    assert (summary, again) == ("1 of 2 laws hold", broken)
    assert run_command([*asked, "--json"]) == 1
    results = json.loads(capsys.readouterr().out)
    assert [(result["name"], result["passed"]) for result in results] == [
        ("chunked_decoding", False),
        ("config_round_trip", True),
    ]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--law", "casuality"], "heddle: law 'casuality' is unknown; did you mean 'causality'? choices: "),
        (["--threads", "0"], "heddle: threads 0:"),
    ],
)
def test_a_wrong_option_is_refused_before_any_law_is_checked(
    option: list[str], says: str, design: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["check", design, "--law", "causality", *option]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(says)
    assert err.count("\n") == 1


def test_the_exit_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["check", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit code: 0 if every law holds, 1 if one is broken, 2 if the design or an option is invalid." in text
