"""What a training may be asked, and the learning rate of each step."""

import math
from typing import Any

import pytest

from heddle.errors import ConfigError
from heddle.training.settings import SCHEDULES, Settings, scheduled_learning_rate


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": 0}, "steps 0:"),
        ({"batch_size": -1}, "batch_size -1:"),
        ({"sequence_length": 0}, "sequence_length 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps 0:"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps 3:"),
        ({"save_every": 0}, "save_every 0"),
        ({"evaluate_every": 0}, "evaluate_every 0"),
        ({"learning_rate": 0.0}, "learning_rate 0.0:"),
        ({"learning_rate": float("nan")}, "learning_rate nan"),
        ({"learning_rate": float("inf")}, "learning_rate inf"),
        ({"weight_decay": -0.1}, "weight_decay -0.1:"),
        ({"weight_decay": float("nan")}, "weight_decay nan:"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm 0.0:"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**62}, "seed 4611686018427387904:"),
        ({"schedule": "cubic"}, "schedule cubic:"),
        ({"optimizer": "sgd"}, "optimizer sgd:"),
        ({"warmup": -1}, "warmup -1:"),
        ({"lr_scale": [("embed", -1.0)]}, "lr_scale embed=-1:"),
        ({"lr_scale": [("embed", float("nan"))]}, "lr_scale embed=nan:"),
        ({"lr_scale": [("head", 1.0), ("embed", float("inf"))]}, "lr_scale embed=inf:"),
        ({"precision": "fp8"}, "precision fp8:"),
        ({"stochastic_rounding": True, "precision": "bf16"}, "stochastic_rounding:"),
        ({"fp8": True}, "fp8: all other operations use bfloat16; set precision bf16 or bf16-params"),
        (
            {"fp8": True, "precision": "bf16", "sequence_length": 9, "batch_size": 8, "gradient_accumulation_steps": 2},
            "fp8: needs a multiple of 16 tokens per micro-batch, and batch_size · sequence_length / "
            "gradient_accumulation_steps is 36; change one of them",
        ),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**({"steps": 10} | wrong))
    assert str(caught.value).startswith(says)


def test_how_often_a_run_saves_does_not_make_it_another_run() -> None:
    assert Settings(steps=9, save_every=2).identity() == Settings(steps=9, save_every=7).identity()
    assert Settings(steps=9, seed=1).identity() != Settings(steps=9).identity()


def formula(schedule: str, steps: int, warmup: int, step: int) -> float:
    """The share of the highest rate at a step, counted from 0."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    shares = {
        "linear": 1 - done,
        "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2,
        "wsd": min(1.0, (steps - step) / max(1, steps // 5)),
        "constant": 1.0,
    }
    return shares[schedule]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (7, 0), (7, 1), (40, 40), (40, 39), (50, 45), (333, 20)])
def test_each_rate_is_that_of_the_formula(schedule: str, steps: int, warmup: int) -> None:
    settings = Settings(steps=steps, schedule=schedule, warmup=warmup, learning_rate=0.3)
    for step in range(steps):
        assert scheduled_learning_rate(settings, step) == pytest.approx(
            0.3 * formula(schedule, steps, warmup, step), rel=1e-12
        )


@pytest.mark.parametrize(("steps", "warmup"), [(5, 5), (50, 10), (1000, 50)])
def test_without_a_warmup_given_it_is_a_twentieth_at_least_ten_and_at_most_all(steps: int, warmup: int) -> None:
    usual, named = (Settings(steps=steps, warmup=value) for value in (None, warmup))
    assert all(scheduled_learning_rate(usual, step) == scheduled_learning_rate(named, step) for step in range(steps))
    assert scheduled_learning_rate(Settings(steps=4, warmup=8), 3) == 3e-3


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11, 100, 1000])
def test_every_step_has_a_rate_above_zero_and_none_above_the_highest(schedule: str, steps: int) -> None:
    settings = Settings(steps=steps, schedule=schedule, learning_rate=0.5)
    rates = [scheduled_learning_rate(settings, step) for step in range(steps)]
    assert all(0 < rate <= 0.5 for rate in rates)
    if steps >= 100:
        assert max(rates) == 0.5
        assert (rates[-1] < 0.06) == (schedule != "constant")


def test_the_shapes_of_the_schedules() -> None:
    def rates(schedule: str) -> list[float]:
        settings = Settings(steps=100, schedule=schedule, learning_rate=1.0, warmup=10)
        return [scheduled_learning_rate(settings, step) for step in range(100)]

    for schedule in SCHEDULES:
        assert rates(schedule)[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates("wsd")[10:81] == [1.0] * 71
    assert rates("wsd")[80:] == pytest.approx([left / 20 for left in range(20, 0, -1)])
    assert rates("linear")[10:] == pytest.approx([left / 90 for left in range(90, 0, -1)])
    assert rates("cosine")[55] == pytest.approx(0.55)
    assert rates("cosine")[99] == pytest.approx(0.1, abs=1e-3)
    assert rates("cosine") == sorted(rates("cosine")[:10]) + sorted(rates("cosine")[10:], reverse=True)
