"""A server in a process of its own: what the hour of `tools/soak.py --name server` measures can fail."""

from pathlib import Path

import pytest

import tests.serving.server_process as server_process
from tests.serving.server_process import grown, under_crowd


@pytest.mark.parametrize(
    ("samples", "grows"),
    [
        ([100, 300, 310, 310, 311, 310, 312, 311], False),  # at the start it may
        ([100, 300, 310, 312, 320, 330, 340, 350], True),
        ([300, 300, 300], False),
    ],
)
def test_memory_that_grows_after_the_start_is_seen(samples: list[float], grows: bool) -> None:
    assert bool(grown(samples)) == grows


@pytest.mark.soak
def test_a_wrong_status_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "CLIENTS", 4)
    monkeypatch.setattr(server_process, "ALLOWED", {0, 400, 413})
    monkeypatch.setattr(server_process, "grown", lambda samples: "")
    requests, failures, samples = under_crowd(tmp_path, 0.5)
    assert requests > 3
    assert "status 200" in failures
    assert len(samples) > 3
