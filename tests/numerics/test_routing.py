"""Routing against plain loops in Python's numbers, written from the papers, one token at a time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.numerics.experts.routing import Route, Rule, choose, highest, logits, route, within_capacity
from tests.laws.planting import plant

RULES = {
    "softmax, renormalised": Rule("softmax_topk", 3),
    "softmax": Rule("softmax_topk", 2, renormalise=False, scale=1.5),
    "chosen before the softmax": Rule("topk_softmax", 3, scale=0.5),
    "sigmoid": Rule("sigmoid", 3, renormalise=False),
    "sigmoid, renormalised": Rule("sigmoid", 2, scale=2.5),
    "sigmoid, best groups": Rule("sigmoid", 4, True, 4, 2, 2.5),
    "softmax, best groups": Rule("softmax_group_max", 4, False, 4, 2, 16.0),
    "softmax, best groups, renormalised": Rule("softmax_group_max", 1, True, 6, 1),
    "all of them": Rule("softmax_topk", 12, renormalise=False),
}


def ranked(scores: list[float], number: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:number]


def softmax(numbers: list[float]) -> list[float]:
    shares = [math.exp(number - max(numbers)) for number in numbers]
    return [share / math.fsum(shares) for share in shares]


def plain(numbers: list[float], balance: list[float], rule: Rule) -> tuple[list[int], list[float], list[float]]:
    """Choices, gates and probabilities of one token."""
    sigmoids = [1 / (1 + math.exp(-number)) for number in numbers]
    scores = {"sigmoid": sigmoids, "topk_softmax": numbers}.get(rule.routing, softmax(numbers))
    biased = [score + bias for score, bias in zip(scores, balance, strict=True)]
    if rule.groups > 1:
        size = len(numbers) // rule.groups
        groups = [biased[start : start + size] for start in range(0, len(numbers), size)]
        worth = [sum(sorted(group)[-2:]) if rule.routing == "sigmoid" else max(group) for group in groups]
        kept = ranked(worth, rule.top_groups)
        biased = [score if index // size in kept else -math.inf for index, score in enumerate(biased)]
    chosen = ranked(biased, rule.top_k)
    gates = [scores[index] for index in chosen]
    if rule.routing == "topk_softmax":
        gates = softmax(gates)
    elif rule.renormalise:
        gates = [gate / math.fsum(gates) for gate in gates]
    chances = [score / math.fsum(sigmoids) for score in sigmoids] if rule.routing == "sigmoid" else softmax(numbers)
    return chosen, [gate * rule.scale for gate in gates], chances


def drawn(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kind: Any = {"generator": generator, "dtype": torch.float64}
    return torch.randn(40, 12, **kind) * 2, torch.randn(12, **kind) * 0.3


def check(rule: Rule, balanced: bool) -> None:
    numbers, balance = drawn()
    found = route(numbers, balance if balanced else None, rule)
    shift = balance.tolist() if balanced else [0.0] * 12
    for token in range(len(numbers)):
        chosen, gates, chances = plain(numbers[token].tolist(), shift, rule)
        assert found.choices[token].tolist() == chosen
        assert found.gates[token].tolist() == pytest.approx(gates, rel=1e-12)
        assert found.probabilities[token].tolist() == pytest.approx(chances, rel=1e-12)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_formulas(name: str, balanced: bool) -> None:
    check(RULES[name], balanced)


MISTAKES = [
    ("softmax", "route", 'or rule.routing == "topk_softmax"', "or True"),
    ("chosen before the softmax", "route", 'if rule.renormalise or rule.routing == "topk_softmax"', "if False"),
    ("sigmoid, renormalised", "route", 'if rule.routing == "sigmoid" else numbers', "if False else numbers"),
    ("softmax, renormalised", "route", "gates * rule.scale, probabilities", "gates * rule.scale, scores * 2"),
    ("sigmoid", "route", '"sigmoid": numbers.sigmoid', '"sigmoid": lambda: probabilities'),
    ("softmax", "route", "gates * rule.scale", "gates"),
    ("sigmoid, best groups", "choose", "2 if rule", "1 if rule"),
    ("softmax, best groups", "choose", "else 1]", "else 2]"),
    ("softmax, best groups", "choose", "rule.top_groups", "rule.top_groups + 1"),
    ("sigmoid", "route", "scores.gather(-1, chosen)", "(scores + balance).gather(-1, chosen)"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, function, old, new = mistake
    plant(monkeypatch, f"numerics.experts.routing:{function}", old, new)
    with pytest.raises(AssertionError):
        check(RULES[name], balanced=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_scores_go_to_the_lowest(dtype: torch.dtype) -> None:
    scores = torch.tensor([[1, 2, 2, 0, 2, 1], [0, 0, 0, 0, 0, 0], [5, 5, 5, 9, 5, 5]], dtype=dtype)
    assert highest(scores, 4).tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [3, 0, 1, 2]]
    wide = torch.zeros(3, 4096, dtype=dtype)
    assert highest(wide, 3).tolist() == [[0, 1, 2]] * 3
    assert choose(torch.zeros(1, 8), Rule("sigmoid", 3, True, 4, 2)).tolist() == [[0, 1, 2]]
    later = torch.tensor([[0.0, 0, 1, 1, 1, 1, 0, 2]])
    assert choose(later, Rule("sigmoid", 3, True, 4, 2)).tolist() == [[2, 3, 4]]  # three groups are worth 2


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4])
@pytest.mark.parametrize("name", RULES)
def test_numbers_of_any_size(name: str, size: float) -> None:
    numbers = (drawn()[0].float() * size).requires_grad_()
    found = route(numbers, None, RULES[name])
    (slope,) = torch.autograd.grad((found.gates.sum() + found.probabilities.square().sum()), numbers)
    assert all(bool(value.isfinite().all()) for value in (found.gates, found.probabilities, slope))
    if RULES[name].renormalise:
        torch.testing.assert_close(found.gates.sum(-1), torch.full((40,), RULES[name].scale))


@pytest.mark.parametrize("name", RULES)
def test_gradients(name: str) -> None:
    numbers, balance = drawn(1)
    numbers = numbers[:4].requires_grad_()

    def answer(numbers: Tensor) -> tuple[Tensor, Tensor]:
        found: Route = route(numbers, balance, RULES[name])
        return found.gates, found.probabilities

    assert torch.autograd.gradcheck(answer, numbers)


def test_bfloat16_and_autocast_are_widened() -> None:
    x, weight, bias = torch.randn(5, 16).bfloat16(), torch.randn(7, 16).bfloat16(), torch.randn(7).bfloat16()
    want = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(logits(x, weight, bias).double(), want, rtol=0, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        got = logits(x.float(), weight.float(), bias.float())
        assert got.dtype == route(got, None, RULES["sigmoid"]).gates.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("factor", [0.3, 0.75, 1.0, 4.0])
def test_capacity(factor: float) -> None:
    """One token after the other, each row by itself; padding is not counted and takes no room."""
    generator = torch.Generator().manual_seed(2)
    choices = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(33)]).view(3, 11, 2)
    real = torch.rand(3, 11, generator=generator) < 0.8
    for mask in (real, None):
        kept = within_capacity(choices, mask, 4, factor)
        for row in range(3):
            tokens = 11 if mask is None else int(mask[row].sum())
            room = [math.ceil(factor * 2 * tokens / 4)] * 4
            for token in range(11):
                if mask is not None and not mask[row, token]:
                    continue
                for slot in range(2):
                    expert = int(choices[row, token, slot])
                    assert bool(kept[row, token, slot]) == (room[expert] > 0)
                    room[expert] -= 1
