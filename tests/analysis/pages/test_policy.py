"""What may run in a page: the scripts whose hashes its policy names, and nothing that a value brings along."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from heddle.cli.serve import ServedModel, chat_page
from heddle.lab.conformance.run import NOT_SEEN, WRONG, Finding, conformance_page
from heddle.lab.explore.page import explorer_page
from heddle.lab.pages.conversion import conversion_page
from heddle.lab.pages.judge import judge_page
from heddle.lab.pages.render import FOLDER, environment, script_sources
from heddle.lab.pages.runs import runs_page, watch_page
from tests.analysis.comparison.plain import report_page
from tests.analysis.comparison.reports import make_report
from tests.analysis.conversion.conversions import single
from tests.html_page import Page
from tests.source import ROOT

LOOM = ServedModel("loom", "", 12345, is_chat=True, has_scores=True, vocab_size=50)
JUDGED: dict[str, Any] = {
    "first": "loom", "incumbent": "<b>wide</b>", "incumbent_number": 1, "decisions_left": 7, "alpha": 0.1,
    "alpha_spent": 0.02, "rule": "e-lond", "counts": {"better": 1, "refused": 1}, "final": None,
    "proposals": [
        {"number": 1, "name": "<b>wide</b>", "verdict": "better", "sentence": "%{x} <b>", "against": 0, "pairs": 5,
         "improvement": {"mean": 0.1, "low": 0.02, "high": None}, "evidence": 200.0, "needed": 150.0,
         "incumbent": True, "sizes": [{"parameters": 6000, "tokens": 4096}]},
        {"number": 2, "name": "leak", "verdict": "refused", "rule": "causality", "case": "2 tokens: <script>",
         "sentence": "", "against": 1, "incumbent": False},
    ],
}  # fmt: skip
FINDINGS = [
    Finding("llama", "plain", "logits", "whole", WRONG, 0.1, 1e-5, bug="<script>"),
    Finding("llama", "plain", "cuts", "cut", NOT_SEEN, reason="</ul><script>"),
]
# Ladders and inspections are parsed by the tests of their own pages.
PAGES: dict[str, Callable[[], str]] = {
    "chat": lambda: chat_page([LOOM], 64),
    "conformance": lambda: conformance_page("<b>engine</b>", "fp32", FINDINGS),
    "conversion": lambda: conversion_page(single()),
    "explorer": explorer_page,
    "judge": lambda: judge_page(JUDGED),
    "report": lambda: report_page(make_report()),
    "live report": lambda: report_page(make_report(), revision=1),
    "runs": lambda: runs_page([], []),
    "watch": lambda: watch_page([]),
    "live watch": lambda: watch_page([], revision=1),
}
PROGRAMS = {"chat": 1, "conversion": 2, "explorer": 1, "judge": 2, "report": 2, "live report": 3, "live watch": 3}
WRITES_MARKUP = re.compile(
    r"innerHTML\s*\+?=|outerHTML\s*\+?=|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|HTMLUnsafe"
    r"|new Markup\(|\beval\(|new Function|srcdoc|javascript:|\.src\s*="
)
# Where a script turns text into elements, and why nothing of others can be in it.
ALLOWED = {
    ("explorer.js", "new Markup("): "docstrings, escaped by pages/explorer.py",
    ("explorer_pictures.js", "innerHTML ="): "the one place that writes markup",
    ("explorer_pictures.js", "new Markup("): "a template whose values are escaped",
    ("live.js", "DOMParser"): "the next version of the page itself, under the same policy",
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_its_own_scripts_only(name: str) -> None:
    page = Page(PAGES[name]())
    assert len(page.programs) == PROGRAMS.get(name, 0)
    assert page.policy["base-uri"] == page.policy["form-action"] == ["'none'"]


def test_every_template_of_a_page_has_the_policy() -> None:
    """A file that is no piece of a page extends the frame, or is the frame."""
    pages = set()
    for file in (FOLDER / "templates").glob("*.html"):
        text = file.read_text(encoding="utf-8")
        assert ("<html" in text) == (file.name == "base.html")
        pages |= {file.stem} if text.startswith('{% extends "base.html" %}') else set()
    assert pages == {
        "chat",
        "conformance",
        "conversion",
        "explorer",
        "inspect",
        "judge",
        "ladder",
        "report",
        "runs",
        "watch",
    }


def test_a_new_page_gets_the_policy() -> None:
    text = """{% extends "base.html" %}{% block main %}<p>{{ word|safe }}</p>{% endblock %}{% block scripts %}
    <script type="application/json">{{ ["<script>"]|script_json }}</script><script>\nlet a = 1;\r\n</script>
    {% endblock %}"""
    rendered = environment().from_string(text).render(title="new", word="x")
    assert len(Page(rendered).programs) == 1
    assert Page(environment().from_string('{% extends "base.html" %}').render(title="new")).policy["script-src"] == [
        "'none'"
    ]
    with pytest.raises(AssertionError):  # planted: markup of others in the page
        Page(environment().from_string(text).render(title="new", word="<script>window.RAN = 1</script>"))


FAULTS = {
    "a wrong hash": (r"sha256-...", "sha256-AAA"),
    "no hash": (r"'sha256-[^;]*", ""),
    "any script": (r"script-src ", "script-src 'unsafe-inline' "),
    "no policy": (r"<meta http-equiv[^>]*>", ""),
    "another script": (r"</body>", "<script>1</script></body>"),
    "a script above the policy": (r"<head>", "<head><script>1</script>"),
    "a handler": (r"<form ", '<form onsubmit="return false" '),
    "a handler in a picture": (r"<path ", '<path onload="1" '),
    "an address that runs": (r"<main>", '<main><a href=" JavaScript:1">x</a>'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_the_policy_is_noticed(fault: str) -> None:
    pattern, instead = FAULTS[fault]
    page = PAGES["chat"]()
    planted = re.sub(pattern, instead, page, count=1)
    assert planted != page
    with pytest.raises(AssertionError):
        Page(planted)


def test_hashes_are_of_what_a_browser_reads() -> None:
    """The example of the specification (Content Security Policy Level 3, 2.3.1), and line breaks, which become \\n."""
    known = "'sha256-qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng='"
    assert script_sources("<script>alert('Hello, world.');</script>") == known
    assert script_sources("<script>a\r\nb\rc</script>") == script_sources("<script>a\nb\nc</script>")
    assert script_sources("<script type='application/json'>[]</script>") == "'none'"


def test_scripts_write_text_not_markup() -> None:
    found = {
        (file.name, match)
        for folder in (FOLDER / "static", ROOT / "tools/site")
        for file in folder.glob("*.js")
        for match in WRITES_MARKUP.findall(file.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED.keys()
    assert WRITES_MARKUP.search("box.innerHTML += words")


def test_no_line_ends_at_plus_minus() -> None:
    shown = environment().from_string("<p>{{ sentence }}</p>").render(sentence="adds 0.012 ± 0.003 bits")
    assert "0.012 ±\u00a00.003 bits" in shown


@pytest.mark.parametrize("mark", ["\u202a", "\u202e", "\u2066", "\u2069"])
def test_a_text_that_turns_others_around_is_shown_as_it_is(mark: str) -> None:
    """In what is read, in attributes, and in the data of scripts; a mark of one character stays."""
    findings = [Finding(f"lla{mark}ma", "pla\u200fin", "logits", "whole", WRONG, reason=f"a{mark}b")]
    pages = (
        conformance_page(f"eng{mark}ine", "fp32", findings),
        judge_page(JUDGED | {"proposals": [JUDGED["proposals"][0] | {"name": f"lo{mark}om"}]}),
    )
    number = f"\\u{ord(mark):04x}"
    for page in pages:
        assert mark not in page
        assert number in page
    assert "\u200f" in pages[0]
    data = environment().from_string("{{ {'a': name}|script_json }}").render(name=f"a{mark}b")
    assert json.loads(data) == {"a": f"a{number}b"}
