"""Fixtures of the pages' tests."""

import pytest

from heddle.lab.pages import render


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves plotly's five megabytes out."""
    monkeypatch.setattr(render, "plotly_script", lambda: "/* plotly */")
