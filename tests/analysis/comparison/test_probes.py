"""Probes: what the small copy of a design keeps, that all are trained alike, and the sentences about them."""

from typing import Any

import pytest

from heddle.analysis.comparison import trades
from heddle.analysis.comparison.probes import PROBES, chosen
from heddle.analysis.comparison.statistics import verdict
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.training.step import gradients
from tests import small
from tests.analysis.comparison import reports


def layer(window: int | None = None, mixer: bool = True, feedforward: bool = True) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if mixer:
        made["mixer"] = {"kind": "attention", "heads": 2} | ({} if window is None else {"window": window})
    return made | ({"feedforward": {"kind": "mlp", "hidden": 8}} if feedforward else {})


def windows(layers: list[dict[str, Any]], probe: str = "mqar") -> list[tuple[int, Any, bool]]:
    """(repeat, window, whether a feed-forward is kept) of each entry of the copy."""

    def told(kept: LayerConfig) -> tuple[int, Any, bool]:
        window = None if kept.mixer is None else kept.mixer.dump().get("window")
        return kept.repeat, window, kept.feedforward is not None

    copy = PROBES[probe].copy(small.config(small.design(layers=layers)))
    return [told(kept) for kept in copy.layers]


@pytest.mark.parametrize(
    ("layers", "kept"),
    [
        ([layer()], [(1, None, False)]),
        ([{"repeat": 6, **layer()}], [(2, None, False)]),
        ([layer()] * 6, [(2, None, False)]),
        ([{"repeat": 2, "layers": [{"repeat": 5, **layer(4)}, layer()]}], [(1, 4, False), (1, None, False)]),
        ([layer(4), layer(), layer(4)], [(1, 4, False), (1, None, False)]),
        ([layer(4), layer(), layer(2)], [(1, 4, False), (1, None, False), (1, 2, False)]),
        ([layer(), layer(mixer=False)], [(1, None, False)]),
        ([{"repeat": 3, **layer(mixer=False)}], [(2, None, True)]),
    ],
)
def test_runs_are_cut_and_patterns_stand_once(layers: list[dict[str, Any]], kept: list[tuple[int, Any, bool]]) -> None:
    assert windows(layers) == kept


def test_state_tracking_keeps_the_feed_forwards() -> None:
    assert windows([{"repeat": 3, **layer()}], "s5") == [(2, None, True)]


@pytest.mark.parametrize("name", PROBES)
def test_every_probe_can_be_trained(name: str) -> None:
    probe = PROBES[name]
    settings = probe.settings()
    copy = probe.copy(load_config("preset:local_global-tiny"))
    assert copy.vocab_size == probe.practice.vocab_size
    assert copy.initialisation.std == pytest.approx(128**-0.5)
    loss = gradients(build(copy), probe.practice.batch(0, 0, 2), (0, 0)).loss
    assert 0 < float(loss) < 20
    assert settings.context == probe.practice.task.length
    assert probe.describe()["train_tokens"] == settings.steps * settings.tokens_per_step


def test_choices() -> None:
    assert chosen("mqar") == ("mqar",)
    assert chosen("none") == ()
    assert chosen("all") == tuple(PROBES)
    with pytest.raises(ConfigError, match="--recall al: unknown choice; did you mean 'all'"):
        chosen("al")


@pytest.mark.parametrize(
    ("per_token", "fixed", "words"),
    [
        (100, 0, "It keeps 100 B for each token."),
        (0, 5000, "It keeps 5.00 kB, however long the context: constant."),
        (100, 500_000, "It keeps 500 kB and 100 B for each token."),
    ],
)
def test_states_in_words(per_token: int, fixed: int, words: str) -> None:
    states = [[place, float(per_token * place + fixed)] for place in reports.CONTEXTS]
    assert trades.state_growth({"state_bytes": states}) == words


def test_windows_in_words() -> None:
    ring = [[place, 8.0 * min(place, 4096)] for place in reports.CONTEXTS]
    assert trades.state_growth({"state_bytes": ring}) == "Its state grows up to 32.8 kB and is constant from there."
    mixed = [[place, 8.0 * min(place, 4096) + 2.0 * place] for place in reports.CONTEXTS]
    assert trades.state_growth({"state_bytes": mixed}) == "Once its windows are full, it keeps 2 B for each token."
    assert trades.state_growth({"state_bytes": []}) == "Its state was not measured."


def test_designs_beside_the_baseline() -> None:
    made = reports.report()
    base, gqa, *_ = made["designs"]
    assert trades.against(made, base) == []
    assert trades.against(made, gqa) == [
        "a quarter of its state at 8k", "2.0 times its decoding speed at 8k", "1.1 times its training speed",
        "+0.009 ± 0.015 bits per byte: not resolved", "90 % right answers on MQAR, it 100 %",
    ]  # fmt: skip
    assert trades.against(reports.hollow(), reports.hollow()["designs"][1]) == []


def verdict_of(shares: list[float | None]) -> str:
    made = reports.report()
    for row, share in zip(made["designs"], shares, strict=True):
        row["recall"]["mqar"]["accuracy"] = share
    return next((sentence for sentence in verdict(made) if sentence.startswith("Recall")), "")


def test_recall_in_the_verdict() -> None:
    blind = "picking blindly gives 8.3 %"
    assert verdict_of([1.0, 0.99, 0.95, 0.96]) == f"Recall (MQAR): each design answers at least 95 % right; {blind}."
    assert verdict_of([1.0, 1.0, 0.9999, 1.0]) == f"Recall (MQAR): each design answers 100 % right; {blind}."
    assert verdict_of([0.1, 0.09, None, 0.5]) == (
        "Recall (MQAR): no design learned it within the budget; "
        f"hybrid-delta-tiny 50 %, mha-tiny 10 % and gqa-tiny 9.0 % ({blind})."
    )
    assert verdict_of([1.0, 0.09, 1.0, 0.5]) == (
        "Recall (MQAR): mha-tiny and window-tiny learned it within the budget; "
        f"hybrid-delta-tiny 50 % and gqa-tiny 9.0 % ({blind})."
    )
    assert verdict_of([None] * 4) == ""
