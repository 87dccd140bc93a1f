"""Progress goes to stderr only: bars on a terminal, occasional lines elsewhere, nothing when quiet."""

import io
import re
import sys
import time

import pytest

from heddle import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ticking = Clock()
    monkeypatch.setattr(time, "monotonic", ticking)
    return ticking


def test_lines_come_at_most_every_five_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar("encoding", 40_000_000, "bytes") as bar:
        for _ in range(20):
            clock.now += 1
            bar.advance(2_000_000, note="loss 3.1")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"encoding: {done} MB of 40.0 MB ({share}), 2.0 MB/s, loss 3.1{left}"
        for done, share, left in (
            ("10.0", "25%", ", 15 s left"),
            ("20.0", "50%", ", 10 s left"),
            ("30.0", "75%", ", 5 s left"),
            ("40.0", "100%", ""),
        )
    ]


def test_short_tasks_print_nothing_and_long_tasks_print_their_end(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.progress_bar("short", None, "steps") as bar:
        bar.advance(3)
    assert capsys.readouterr().err == ""
    with progress.progress_bar("long", None, "steps") as bar:
        clock.now += 6
        bar.advance(1200)
        bar.advance(34)
    assert capsys.readouterr().err.splitlines() == ["long: 1,200 steps, 200 steps/s", "long: 1,234 steps, 205 steps/s"]


def test_a_rate_of_the_caller_is_shown_instead(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar("training", 1000, "tokens") as bar:
        clock.now += 10
        bar.advance(500, rate=200.0)  # half of the time went into an evaluation
    assert capsys.readouterr().err == "training: 500 of 1,000 tokens (50%), 200 tokens/s, 10 s left\n"


def test_quiet(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.quiet():
        with progress.quiet():
            pass
        progress.print_status("hidden")
        with progress.progress_bar("hidden", 2, "steps") as bar:
            clock.now += 10
            bar.advance(1)
    progress.print_status("shown")
    assert capsys.readouterr() == ("", "shown\n")


def test_a_warning_is_printed_even_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.quiet():
        progress.print_warning("one bit of\x1b was lost")
    assert capsys.readouterr() == ("", "warning: one bit of\\x1b was lost\n")


def test_a_terminal_gets_a_bar_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress_bar("weaving [red]", 10, "steps") as bar:
        bar.advance(4, note="loss [bold]")
        progress.print_status("a line [in] between")
        with progress.progress_bar("inner", 2, "steps") as inner:
            inner.advance(1)
        bar.advance(6)
    text = screen.getvalue()
    assert "weaving [red]" in text
    assert "loss [bold]" in text
    assert "a line [in] between" in text
    assert "inner" in text
    assert capsys.readouterr().out == ""
    progress.print_status("after")
    assert screen.getvalue().endswith("after\n")


def test_no_color_and_dumb_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> str:
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        with progress.progress_bar("weaving", 10, "steps") as bar:
            bar.advance(4)
        return screen.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    color = re.compile(r"\x1b\[3[0-9]")
    assert color.search(drawn())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not color.search(drawn())
    monkeypatch.setenv("TERM", "dumb")
    assert drawn() == ""


def test_an_error_inside_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyError), progress.progress_bar("first", 1, "steps"):
        raise KeyError
    with progress.progress_bar("second", 1, "steps") as bar:
        bar.advance(1)


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress.print_status("a\x1b[31mb\ud800\nc 日本")
    assert capsys.readouterr().err == "a\\x1b[31mb\\ud800\\nc 日本\n"


def test_a_closed_stderr_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        progress.print_status("nobody hears")
        with progress.progress_bar("nobody sees", 1, "steps") as bar:
            bar.advance(1)


@pytest.mark.parametrize(
    ("n", "unit", "text"),
    [
        (999, "bytes", "999 bytes"),
        (1500, "bytes", "1.5 kB"),
        (2_000_000_000, "bytes", "2.0 GB"),
        (1e6, "tokens", "1,000,000 tokens"),
    ],
)
def test_amounts(n: float, unit: str, text: str) -> None:
    assert progress.format_amount(n, unit) == text


@pytest.mark.parametrize(
    ("rate", "unit", "text"),
    [
        (0.137, "layers", "0.14 layers/s"),
        (9.96, "runs", "10 runs/s"),
        (12.6, "steps", "12 steps/s"),
        (0.0, "runs", "0 runs/s"),
        (0.5, "bytes", "0 bytes/s"),
    ],
)
def test_slow_rates_keep_two_digits(rate: float, unit: str, text: str) -> None:
    assert progress.format_rate(rate, unit) == text
