"""Shell completion: typer's, through the same program."""

import pytest

from heddle.cli.main import run_command


@pytest.mark.parametrize(
    ("words", "expected"),
    [("heddle w", ["watch"]), ("heddle runs --pr", ["--prune"]), ("heddle xyz", [])],
)
def test_words_are_completed(
    words: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_HEDDLE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert run_command([]) == 0
    assert capsys.readouterr().out.split() == expected


def test_the_script_of_a_shell_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    assert run_command(["--show-completion"]) == 0
    assert "_HEDDLE_COMPLETE=complete_bash" in capsys.readouterr().out
