"""The terminal table: complete at 80 columns, plain off a terminal, and never reading names as markup."""

from typing import Any

import pytest

from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import print_report


@pytest.mark.parametrize("width", [80, 100, 140])
def test_every_number_is_there(width: int) -> None:
    report = reports.make_report()
    text = reports.printed(report, width)
    for words in ("2.249", "+0.031 ± 0.011", "not resolved", "better", "worse", "baseline", "1.31 M", "parameters"):
        assert words in text
    for words in ("21.4 k", "910 MB", "25.2 MB", "125", "tok/s", "at 8k", "Caveats"):
        assert words in text
    for words in ("MQAR", "100 %", "90 %", "17 %"):
        assert words in text
    for words in (*report["verdict"], *report["warnings"]):
        assert words in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


@pytest.mark.parametrize("make", [reports.single, reports.crowd, reports.hollow])
def test_unusual_reports_are_printed(make: Any) -> None:
    report = make()
    text = "".join(reports.printed(report, 80).split())
    for row in report["designs"]:
        assert row["name"] in text or row["name"][:14] in text
    assert "".join(report["verdict"][0].split()) in text


def test_one_design_has_no_difference() -> None:
    assert "difference" not in reports.printed(reports.single(), 100)


def test_names_are_not_markup() -> None:
    report = reports.make_report({"[red]a[/red]": reports.TINY["mha-tiny"], "[/]": reports.TINY["gqa-tiny"]})
    report["warnings"] = ["[bold]mind[/bold]"]
    text = reports.printed(report, 100)
    for words in ("[red]a[/red]", "[/]", "[bold]mind[/bold]"):
        assert words in text


def test_off_a_terminal_the_table_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(reports.make_report())
    text = capsys.readouterr().out
    assert "hybrid-delta-tiny" in text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) == 100


def test_long_names_are_whole_and_leave_room_for_numbers() -> None:
    names = ("gated_delta-tiny", "local_global-tiny")
    traits = (reports.TINY["mha-tiny"], reports.TINY["gqa-tiny"])
    text = reports.printed(reports.make_report(dict(zip(names, traits, strict=True))), 80)
    costs, _, unresolved = text.partition("ruled out")
    for words in ("decode", "tok/s", "at 8k", "125"):
        assert words in costs
    rows = unresolved.partition("No clear winner")[0]
    for words in (*names, "narrower", "−0.009 ± 0.015", "16 min"):
        assert words in rows
