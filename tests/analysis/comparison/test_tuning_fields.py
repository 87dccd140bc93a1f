"""Which training fields are tuned, over which values: parsing, grids, and what they set."""

import itertools
import math

import pytest

from heddle.errors import ConfigError
from heddle.lab.compare.plan import (
    Value,
    all_candidates,
    describe_candidate,
    parse_tuned_fields,
    parse_tuning_budget,
    tuned_paths,
    tuned_settings,
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=0.001..0.002", (0.001, 0.002)),
        ("lr=0.0005..0.02", (0.0005, 0.000925, 0.00171, 0.00316, 0.00585, 0.0108, 0.02)),
        ("learning_rate=0.01,0.001", (0.001, 0.01)),
        ("batch_size=2..16", (2, 4, 8, 16)),
        ("warmup=20,0,10", (0, 10, 20)),
        ("weight_decay=0,0.1", (0.0, 0.1)),
        ("optimizer=muon,adamw", ("muon", "adamw")),
        ("lr_scale.layers.*.mixer=0.25..1", (0.25, 0.5, 1.0)),
    ],
)
def test_grids(text: str, values: tuple[Value, ...]) -> None:
    [field] = parse_tuned_fields([text])
    assert field.values == values
    assert all(type(value) is type(values[-1]) for value in field.values)


def test_a_range_has_neighbors_within_a_factor_of_two() -> None:
    for high in (0.0013, 0.004, 0.1, 3.0):
        [field] = parse_tuned_fields([f"lr=0.001..{high}"])
        numbers = [float(value) for value in field.values]
        ratios = [after / before for before, after in itertools.pairwise(numbers)]
        assert max(ratios) < 2.01
        assert max(ratios) / min(ratios) < 1.01  # evenly in log space
        assert (numbers[0], numbers[-1]) == (0.001, high)


def test_a_grid_is_continued_by_its_own_ratio() -> None:
    rate, batch, decay, optimizer = parse_tuned_fields(
        ["lr=0.001,0.003,0.03", "batch_size=1,2", "weight_decay=0,0.1,0.3", "optimizer=adamw,muon"]
    )
    assert rate.next_value(rate.values, 1) == pytest.approx(0.3)
    assert rate.next_value(rate.values, -1) == pytest.approx(0.000333)
    assert batch.next_value(batch.values, 1) == 4
    assert batch.next_value(batch.values, -1) is None  # half a sequence
    assert decay.next_value(decay.values, -1) is None  # below 0
    assert decay.next_value(decay.values, 1) == pytest.approx(0.9)
    assert optimizer.next_value(optimizer.values, 1) is None


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["lr"], "tune lr:"),
        (["rate=1..2"], "tune rate=1..2:"),
        (["lr=0.02..0.001"], "tune lr=0.02..0.001:"),
        (["weight_decay=0..1"], "a range must start above 0 (its values are spaced by factors); list 0 instead"),
        (["lr=0,0.1"], "tune lr=0,0.1: learning_rate 0.0"),
        (["lr=0.1"], "tune lr=0.1:"),
        (["lr=0.1..0.1"], "give two ends that differ"),
        (["lr=0.1,0.1"], "tune lr=0.1,0.1: 0.1"),
        (["lr=a,b"], "tune lr=a,b: 'a'"),
        (["lr=nan..1"], "nan must be at least 0 and finite"),
        (["batch_size=1.5,2"], "'1.5'"),
        (["optimizer=adamw,sgd"], "unknown optimizer sgd; choices: adamw, muon"),
        (["schedule=wsd..linear"], "schedule has no range; list values of wsd, cosine, linear"),
        (["lr=0.1,0.2", "learning_rate=1,2"], "lr is tuned already; give all its values at once"),
        (["lr=0.0001..1", "batch_size=1..32"], "90 combinations"),
        (["lr=1e-30..1"], "64 factors"),
    ],
)
def test_what_cannot_be_tuned(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tuned_fields(texts)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_candidate_sets() -> None:
    fields = parse_tuned_fields(["lr=0.1,0.2", "optimizer=adamw,muon", "lr_scale.embed=0.5,1"])
    candidates = all_candidates(fields)
    assert len(candidates) == math.prod((2, 2, 2))
    assert tuned_settings(fields, (0.1, "muon", 0.5), (("head", 2.0),)) == {
        "learning_rate": 0.1,
        "optimizer": "muon",
        "lr_scale": (("head", 2.0), ("embed", 0.5)),
    }
    assert tuned_paths(fields) == (("embed", 1.0),)
    assert describe_candidate([field.name for field in fields], (0.1, "muon", 0.5)) == (
        "lr 0.1, optimizer muon, lr_scale.embed 0.5"
    )
    assert tuned_settings(fields[:1], (0.1,), (("head", 2.0),)) == {"learning_rate": 0.1}


def test_the_budget() -> None:
    budgets = {"0.5": ("share", 0.5), "50%": ("share", 0.5), "90s": ("seconds", 90), "10m": ("seconds", 600)}
    assert {text: parse_tuning_budget(text) for text in budgets} == budgets
    assert parse_tuning_budget("1.5h") == ("seconds", 5400)
    assert parse_tuning_budget("1d") == ("seconds", 86400)
    for text in ("", "m", "0", "-1", "nan", "10x", "inf"):
        with pytest.raises(ConfigError, match="share"):
            parse_tuning_budget(text)
