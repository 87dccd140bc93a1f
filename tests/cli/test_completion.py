"""Shell completion: click's, through the same program."""

from pathlib import Path

import pytest

from heddle.cli.main import run_command


@pytest.mark.parametrize(
    ("words", "expected"),
    [("heddle w", ["watch"]), ("heddle runs --pr", ["--prune"]), ("heddle compare la", ["ladder"]), ("heddle xyz", [])],
)
def test_words_are_completed(
    words: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_HEDDLE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert run_command([]) == 0
    assert [line.removeprefix("plain,") for line in capsys.readouterr().out.split()] == expected


def test_the_script_of_a_shell_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SHELL", "/bin/zsh")
    assert run_command(["--show-completion"]) == 0
    assert "_HEDDLE_COMPLETE=zsh_complete" in capsys.readouterr().out
    monkeypatch.setenv("SHELL", "/bin/none")
    assert run_command(["--show-completion"]) == 2
    assert capsys.readouterr().err.startswith("heddle: SHELL none: completion is not supported; ")


def test_completion_is_installed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text("alias ll='ls -l'\n")
    for _ in range(2):
        assert run_command(["--install-completion"]) == 0
    assert (tmp_path / ".bashrc").read_text() == "alias ll='ls -l'\n\nsource ~/.bash_completions/heddle.sh\n"
    assert "_HEDDLE_COMPLETE=bash_complete" in (tmp_path / ".bash_completions" / "heddle.sh").read_text()
