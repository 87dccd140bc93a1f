"""A budget is spent where it saves most."""

import itertools
import random

import pytest

from heddle.config import parse_config
from heddle.conversion.rewrites.latent_attention import LatentAttentionReplacement
from heddle.conversion.sensitivity import Size, plan_sizes
from heddle.errors import ConfigError


def least_loss(choices: list[list[Size]], budget: int) -> float:
    """By trying every combination."""
    combinations = itertools.product(*choices)
    return min(sum(loss for _, loss in sizes) for sizes in combinations if sum(size for size, _ in sizes) <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_convex_losses_are_spent_at_best(seed: int) -> None:
    rng = random.Random(seed)
    choices = []
    for _ in range(3):
        steps = sorted((rng.random() for _ in range(6)), reverse=True)
        choices.append([(size, sum(steps[size - 1 :])) for size in range(1, 7)])
    for budget in range(3, 19):
        sizes = plan_sizes(choices, budget)
        assert sizes is not None
        assert sum(sizes) <= budget
        loss = sum(dict(layer)[size] for layer, size in zip(choices, sizes, strict=True))
        assert loss == pytest.approx(least_loss(choices, budget))


def test_a_step_that_only_pays_later_is_taken_whole() -> None:
    flat = [(1, 9.0), (2, 9.0), (3, 9.0), (4, 0.0)]
    assert plan_sizes([flat, [(1, 2.0), (2, 1.0)]], 6) == [4, 2]
    assert plan_sizes([flat, [(1, 2.0), (2, 1.0)]], 4) == [1, 2]
    assert plan_sizes([flat, flat], 1) is None


@pytest.mark.parametrize("share", ["25%", "0.25", 0.25])
def test_a_share_is_a_number_or_percents(share: str | float) -> None:
    rewrite = parse_config(LatentAttentionReplacement, {"state_budget": share})
    assert rewrite.state_budget == 0.25


@pytest.mark.parametrize("share", ["0%", "150%", 2.0, "a quarter"])
def test_what_is_no_share_is_refused(share: str | float) -> None:
    with pytest.raises(ConfigError, match=r"^state_budget:"):
        parse_config(LatentAttentionReplacement, {"state_budget": share})
