"""`heddle.show` from Python: the facts of the command, for every form of a design, and a table for notebooks."""

import json

import pytest

import heddle
from heddle.cli.main import run_command
from heddle.errors import ConfigError
from heddle.notebook import html_table


def test_show_returns_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["show", "preset:gqa-tiny", "vocab_size=256", "--context-length", "64", "--json"]
    assert run_command(arguments) == 0
    expected = json.loads(capsys.readouterr().out)
    overrides = ["vocab_size=256"]
    config = heddle.load_config("preset:gqa-tiny", overrides)
    for shown in (
        heddle.show("preset:gqa-tiny", overrides, context_length=64),
        heddle.show(config, context_length=[64]),
        heddle.show(config.dump(), context_length=[64]),
    ):
        assert shown.facts == expected
        assert f"{expected['parameters']:,} parameters" in shown._repr_html_()
    assert capsys.readouterr().out == ""


def test_bad_options_are_sentences() -> None:
    with pytest.raises(ConfigError, match=r"context_lenght:.*'context_length'"):
        heddle.show("preset:gqa-tiny", context_lenght=3)
    with pytest.raises(ConfigError, match="at least 1"):
        heddle.show("preset:gqa-tiny", context_length=0)
    with pytest.raises(ConfigError, match="width"):
        heddle.show({"width": 0})


def test_texts_of_a_table_are_escaped() -> None:
    table = html_table(("<b>",), [("<script>",), (1234,), (0.5,)], "a & b")
    assert "<script>" not in table
    assert "&lt;script&gt;" in table
    assert ">1,234<" in table
    assert "<caption>a &amp; b</caption>" in table
