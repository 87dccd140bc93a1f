"""Recall probes: what the small copy of a design has, and that all copies are trained alike."""

from typing import Any

import pytest

from heddle.errors import ConfigError
from heddle.lab.compare.probes import RECALL_PROBES, select_probes
from heddle.model.config import LayerConfig
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.training.step import accumulate_gradients
from tests import small


def layer(window: int | None = None, mixer: bool = True, feedforward: bool = True) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if mixer:
        data["mixer"] = {"kind": "attention", "heads": 2} | ({} if window is None else {"window": window})
    return data | ({"feedforward": {"kind": "mlp", "hidden": 8}} if feedforward else {})


def windows(layers: list[dict[str, Any]], probe: str = "mqar") -> list[tuple[int, Any, bool]]:
    """(repeat, window, whether it has a feed-forward) of each layer of the copy."""

    def summary(config: LayerConfig) -> tuple[int, Any, bool]:
        window = None if config.mixer is None else config.mixer.dump().get("window")
        return config.repeat, window, config.feedforward is not None

    copy = RECALL_PROBES[probe].small_copy(small.config(small.design(layers=layers)))
    return [summary(config) for config in copy.layers]


@pytest.mark.parametrize(
    ("layers", "expected"),
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
def test_runs_are_shortened_and_patterns_are_kept_once(
    layers: list[dict[str, Any]], expected: list[tuple[int, Any, bool]]
) -> None:
    assert windows(layers) == expected


def test_state_tracking_keeps_the_feed_forwards() -> None:
    assert windows([{"repeat": 3, **layer()}], "s5") == [(2, None, True)]


@pytest.mark.parametrize("name", RECALL_PROBES)
def test_every_probe_can_be_trained(name: str) -> None:
    probe = RECALL_PROBES[name]
    settings = probe.settings()
    copy = probe.small_copy(load_config("preset:local_global-tiny"))
    assert copy.vocab_size == probe.task_stream.vocab_size
    assert copy.initialization.std == pytest.approx(128**-0.5)
    loss = accumulate_gradients(build(copy), probe.task_stream.batch(0, 0, 2), (0, 0)).loss
    assert 0 < float(loss) < 20
    assert settings.sequence_length == probe.task_stream.task.length
    assert probe.summary().train_tokens == settings.steps * settings.tokens_per_step


def test_choices() -> None:
    assert select_probes("mqar") == ("mqar",)
    assert select_probes("none") == ()
    assert select_probes("all") == tuple(RECALL_PROBES)
    with pytest.raises(ConfigError, match=r"recall al:.*'all'"):
        select_probes("al")
