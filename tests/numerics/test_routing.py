"""Routing against plain loops in Python's numbers, written from the papers, one token at a time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.numerics.experts.mixture import (
    Route,
    RoutingConfig,
    log_sqrt_softplus,
    near_gates,
    route,
    router_logits,
    select_experts,
    stable_topk,
    within_capacity,
)
from tests.laws.planting import Plant, assigned, calls, condition, reads, result, wrapped

CONFIGS = {
    "softmax, renormalized": RoutingConfig("softmax_topk", 3),
    "softmax": RoutingConfig("softmax_topk", 2, renormalize=False, scale=1.5),
    "top-k before the softmax": RoutingConfig("topk_softmax", 3, scale=0.5),
    "sigmoid": RoutingConfig("sigmoid", 3, renormalize=False),
    "sigmoid, renormalized": RoutingConfig("sigmoid", 2, scale=2.5),
    "sigmoid, chosen by logits": RoutingConfig("sigmoid_logits", 3, renormalize=False),
    "roots of softplus": RoutingConfig("sqrt_softplus", 3, renormalize=False),
    "roots of softplus, renormalized": RoutingConfig("sqrt_softplus", 2, scale=1.5),
    "sigmoid, best groups": RoutingConfig("sigmoid", 4, True, 4, 2, 2.5),
    "softmax, best groups": RoutingConfig("softmax_group_max", 4, False, 4, 2, 16.0),
    "softmax, best groups, renormalized": RoutingConfig("softmax_group_max", 1, True, 6, 1),
    "all of them": RoutingConfig("softmax_topk", 12, renormalize=False),
    "sparse mixer": RoutingConfig("sparse_mixer", 3, renormalize=False, scale=1.5, tolerance=0.7),
    "sparse mixer, renormalized": RoutingConfig("sparse_mixer", 2, tolerance=1.2),
    "sparse mixer, its first": RoutingConfig("sparse_mixer", 1, renormalize=False, tolerance=0.4),
}


def ranked(scores: list[float], number: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:number]


def softmax(numbers: list[float]) -> list[float]:
    exponentials = [math.exp(number - max(numbers)) for number in numbers]
    return [exponential / math.fsum(exponentials) for exponential in exponentials]


def near_gate(logits: list[float], chosen: list[int], place: int, tolerance: float) -> float:
    """The gate of the expert chosen in this place: a softmax over the logits near its own, without those before it."""
    own, left = logits[chosen[place]], [index for index in range(len(logits)) if index not in chosen[:place]]
    near = [index for index in left if own - logits[index] <= tolerance * max(abs(logits[index]), own)]
    return softmax([own, *(logits[index] for index in near if index != chosen[place])])[0]


def route_token(
    logits: list[float], balancing_bias: list[float], config: RoutingConfig
) -> tuple[list[int], list[float], list[float]]:
    """Expert indices, gates and probabilities of one token."""
    sigmoids = [1 / (1 + math.exp(-number)) for number in logits]
    roots = [math.sqrt(math.log1p(math.exp(number))) for number in logits]
    own = {"sigmoid": sigmoids, "sigmoid_logits": sigmoids, "topk_softmax": logits, "sparse_mixer": logits}
    own["sqrt_softplus"] = roots
    scores = own.get(config.routing, softmax(logits))
    chosen_by = logits if config.routing == "sigmoid_logits" else scores
    biased = [score + bias for score, bias in zip(chosen_by, balancing_bias, strict=True)]
    if config.groups > 1:
        size = len(logits) // config.groups
        groups = [biased[start : start + size] for start in range(0, len(logits), size)]
        group_scores = [sum(sorted(group)[-2:]) if config.routing == "sigmoid" else max(group) for group in groups]
        best_groups = ranked(group_scores, config.top_groups)
        biased = [score if index // size in best_groups else -math.inf for index, score in enumerate(biased)]
    expert_indices = ranked(biased, config.top_k)
    gates = [scores[index] for index in expert_indices]
    if config.routing == "sparse_mixer":
        gates = [near_gate(logits, expert_indices, place, config.tolerance) for place in range(config.top_k)]
    if config.routing == "topk_softmax":
        gates = softmax(gates)
    elif config.renormalize:
        gates = [gate / math.fsum(gates) for gate in gates]
    shares = {"sigmoid": sigmoids, "sigmoid_logits": sigmoids, "sqrt_softplus": roots}.get(config.routing)
    probabilities = softmax(logits) if shares is None else [score / math.fsum(shares) for score in shares]
    return expert_indices, [gate * config.scale for gate in gates], probabilities


def draw(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    options: Any = {"generator": generator, "dtype": torch.float64}
    return torch.randn(40, 12, **options) * 2, torch.randn(12, **options) * 0.3


def check(config: RoutingConfig, balanced: bool) -> None:
    logits, balancing_bias = draw()
    result = route(logits, balancing_bias if balanced else None, config)
    bias_values = balancing_bias.tolist() if balanced else [0.0] * 12
    for token in range(len(logits)):
        expert_indices, gates, probabilities = route_token(logits[token].tolist(), bias_values, config)
        assert result.expert_indices[token].tolist() == expert_indices
        assert result.gates[token].tolist() == pytest.approx(gates, rel=1e-12)
        assert result.probabilities[token].tolist() == pytest.approx(probabilities, rel=1e-12)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_formulas(name: str, balanced: bool) -> None:
    check(CONFIGS[name], balanced)


MISTAKES = [
    ("softmax", condition(route, "renormalize", True, nth=1)),
    (
        "top-k before the softmax",
        assigned(route, "gates", lambda _, *, scores, expert_indices: scores.gather(-1, expert_indices), nth=2),
    ),
    ("sigmoid, renormalized", condition(route, "routing", False, nth=0)),
    ("softmax, renormalized", result(route, lambda route: route._replace(probabilities=2 * route.probabilities))),
    ("sigmoid", reads(route, "sigmoid", lambda _, *, probabilities: lambda: probabilities)),
    ("roots of softplus", reads(route, "exp", lambda _, *, probabilities: lambda: probabilities)),
    ("roots of softplus, renormalized", result(log_sqrt_softplus, lambda logs: 2 * logs)),
    ("sigmoid, chosen by logits", assigned(route, "chosen_by", lambda _, *, scores: scores)),
    ("softmax", condition(route, "scale", True)),
    ("sigmoid, best groups", condition(select_experts, "routing", False)),
    ("softmax, best groups", condition(select_experts, "routing", True)),
    ("softmax, best groups", reads(select_experts, "top_groups", lambda count: count + 1)),
    ("sparse mixer", reads(route, "tolerance", lambda tolerance: tolerance / 2)),
    ("sparse mixer", calls(near_gates, "cumsum", lambda selected, dim: 0 * selected.cumsum(dim))),
    ("sparse mixer, renormalized", condition(route, "renormalize", False, nth=0)),
    ("sigmoid", calls(route, "gather", lambda _, dim, experts, *, biased: biased.gather(dim, experts), nth=1)),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_detected(mistake: tuple[str, Plant], monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = mistake
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(CONFIGS[name], balanced=True)


def test_roots_of_softplus_of_any_size() -> None:
    """Far below zero, where softplus has no bits left, as of float64's logarithms; gradients are finite everywhere."""
    x = torch.tensor([-3000.0, -120.0, -41.0, -40.0, -7.0, 0.0, 3.0, 39.0, 41.0, 3000.0], requires_grad=True)
    logs = log_sqrt_softplus(x)
    exact = [
        value / 2 if value < -40 else math.log(value if value > 40 else math.log1p(math.exp(value))) / 2
        for value in x.tolist()
    ]
    assert logs.tolist() == pytest.approx(exact, rel=1e-6)
    (gradient,) = torch.autograd.grad(logs.sum(), x)
    assert bool(gradient.isfinite().all())
    assert gradient[:3].tolist() == pytest.approx([0.5] * 3, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_scores_go_to_the_lowest(dtype: torch.dtype) -> None:
    scores = torch.tensor([[1, 2, 2, 0, 2, 1], [0, 0, 0, 0, 0, 0], [5, 5, 5, 9, 5, 5]], dtype=dtype)
    assert stable_topk(scores, 4).tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [3, 0, 1, 2]]
    wide = torch.zeros(3, 4096, dtype=dtype)
    assert stable_topk(wide, 3).tolist() == [[0, 1, 2]] * 3
    assert select_experts(torch.zeros(1, 8), RoutingConfig("sigmoid", 3, True, 4, 2)).tolist() == [[0, 1, 2]]
    later = torch.tensor([[0.0, 0, 1, 1, 1, 1, 0, 2]])
    assert select_experts(later, RoutingConfig("sigmoid", 3, True, 4, 2)).tolist() == [
        [2, 3, 4]
    ]  # three groups have a score of 2


def by_loops(row: list[float], k: int) -> list[int]:
    """NaN first, then the highest; of equal ones the lowest index."""
    order = sorted(range(len(row)), key=lambda i: (not math.isnan(row[i]), 0 if math.isnan(row[i]) else -row[i], i))
    return order[:k]


def topk_is_right() -> bool:
    """Rows of few distinct values, among them NaN, both zeros and infinities, as one launch and in order."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([math.nan, -math.inf, math.inf, 0.0, -0.0, 1.0, 2.0])
    rows = values[torch.randint(0, len(values), (300, 9), generator=generator)]
    rows = torch.cat((rows, torch.full((1, 9), -math.inf), torch.full((1, 9), math.nan)))
    return all(stable_topk(rows, k).tolist() == [by_loops(row, k) for row in rows.tolist()] for k in range(1, 10))


def test_topk_equals_loops_with_ties_and_numbers_that_are_not_finite() -> None:
    assert topk_is_right()


@pytest.mark.parametrize(
    "plant",
    [
        calls(stable_topk, "sort", lambda scores, *, k, **_: scores.topk(k)),
        calls(stable_topk, "sort", lambda scores, dim, descending, stable: scores.sort(dim=dim, stable=stable)),
        wrapped(stable_topk, lambda topk, scores, k: topk(scores, scores.shape[-1])[..., -k:]),
    ],
    ids=["in any order of ties", "lowest first", "the lowest"],
)
def test_a_planted_mistake_in_topk_is_detected(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert not topk_is_right()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_any_size(name: str, size: float) -> None:
    logits = (draw()[0].float() * size).requires_grad_()
    result = route(logits, None, CONFIGS[name])
    (gradient,) = torch.autograd.grad((result.gates.sum() + result.probabilities.square().sum()), logits)
    assert all(bool(value.isfinite().all()) for value in (result.gates, result.probabilities, gradient))
    if CONFIGS[name].renormalize:
        torch.testing.assert_close(result.gates.sum(-1), torch.full((40,), CONFIGS[name].scale))


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients(name: str) -> None:
    logits, balancing_bias = draw(1)
    logits = logits[:4].requires_grad_()

    def gates_and_probabilities(logits: Tensor) -> tuple[Tensor, Tensor]:
        result: Route = route(logits, balancing_bias, CONFIGS[name])
        return result.gates, result.probabilities

    assert torch.autograd.gradcheck(gates_and_probabilities, logits)


def test_bfloat16_and_autocast_are_widened() -> None:
    x, weight, bias = torch.randn(5, 16).bfloat16(), torch.randn(7, 16).bfloat16(), torch.randn(7).bfloat16()
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(router_logits(x, weight, bias).double(), expected, rtol=0, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        actual = router_logits(x.float(), weight.float(), bias.float())
        assert actual.dtype == route(actual, None, CONFIGS["sigmoid"]).gates.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("capacity_factor", [0.3, 0.75, 1.0, 4.0])
def test_capacity(capacity_factor: float) -> None:
    """One token after the other, each row separately. Padding is not counted and takes no capacity."""
    generator = torch.Generator().manual_seed(2)
    expert_indices = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(33)]).view(3, 11, 2)
    is_token = torch.rand(3, 11, generator=generator) < 0.8
    for mask in (is_token, None):
        within = within_capacity(expert_indices, mask, 4, capacity_factor)
        for row in range(3):
            tokens = 11 if mask is None else int(mask[row].sum())
            capacity = [math.ceil(capacity_factor * 2 * tokens / 4)] * 4
            for token in range(11):
                if mask is not None and not mask[row, token]:
                    continue
                for slot in range(2):
                    expert = int(expert_indices[row, token, slot])
                    assert bool(within[row, token, slot]) == (capacity[expert] > 0)
                    capacity[expert] -= 1
