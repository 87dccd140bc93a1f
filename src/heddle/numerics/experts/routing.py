"""Routing (Shazeer et al. 2017; Fedus et al. 2021; DeepSeek-V2 and V3): which experts a token meets, and its gates.

With the router's numbers l, and the scores s = softmax(l), sigmoid(l) or l itself, a token takes the k experts with
the largest s + b, where b, the balancing bias, only selects. Equal ones go to the lowest index, on every device:
`torch.topk` promises no order, `torch.argmax` does. With groups, the best groups come first, and only their experts
are left. The gates are those scores as they are, or divided by their sum:

    softmax of the experts taken, l_i − log Σ_taken exp(l_j)          (softmax; the sigmoid with log sigmoid(l) for l)

which is never a quotient of zeros. Everything is computed in at least float32.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.norms import at_least_float32, without_autocast

Routing = Literal["softmax_topk", "topk_softmax", "sigmoid", "softmax_group_max"]


class Rule(NamedTuple):
    """How experts are chosen. groups: equal neighbours, of which the best `top_groups` are kept; 1: no groups.

    A group is as good as its two best experts together with `sigmoid` (DeepSeek-V3), else as its best (DeepSeek-V2).
    """

    routing: Routing
    top_k: int
    renormalise: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


class Route(NamedTuple):
    """choices int64 [..., k], best first; their gates [..., k] and every expert's probability [..., experts].

    Probabilities sum to 1: those of the softmax, or the sigmoid's scores divided by their sum. They balance the load.
    """

    choices: Tensor
    gates: Tensor
    probabilities: Tensor


def logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., width], weight [experts, width], bias [experts] -> [..., experts], in at least float32.

    Also under autocast: rounded numbers are equal where the exact ones differ, and others would be chosen.
    """
    count(2 * x.numel() * weight.shape[0])
    with without_autocast(x):
        wide = None if bias is None else at_least_float32(bias)
        return functional.linear(at_least_float32(x), at_least_float32(weight), wide)


def route(numbers: Tensor, balance: Tensor | None, rule: Rule) -> Route:
    """numbers [..., experts] of the router, balance [experts] added where experts are chosen -> the route.

    Choices carry no gradient; gates and probabilities do.
    """
    with without_autocast(numbers):
        logs = functional.logsigmoid(numbers) if rule.routing == "sigmoid" else numbers
        probabilities = logs.softmax(-1)
        scores = {"sigmoid": numbers.sigmoid, "topk_softmax": lambda: numbers}.get(
            rule.routing, lambda: probabilities
        )()
        with torch.no_grad():
            chosen = choose(scores if balance is None else scores + balance.to(scores.dtype), rule)
        if rule.renormalise or rule.routing == "topk_softmax":
            gates = logs.gather(-1, chosen).softmax(-1)
        else:
            gates = scores.gather(-1, chosen)
        return Route(chosen, gates if rule.scale == 1.0 else gates * rule.scale, probabilities)


def choose(scores: Tensor, rule: Rule) -> Tensor:
    """scores [..., experts] -> the experts taken, int64 [..., k], best first."""
    if rule.groups > 1:
        inside = scores.unflatten(-1, (rule.groups, -1))
        best = inside.sort(-1, descending=True).values[..., : 2 if rule.routing == "sigmoid" else 1].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, highest(best, rule.top_groups), True)
        scores = inside.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    return highest(scores, rule.top_k)


def highest(scores: Tensor, number: int) -> Tensor:
    """The places of the `number` highest of scores [..., n], int64 [..., number]; of equal ones the first."""
    left, found = scores, list[Tensor]()
    for turn in range(number):
        if turn:
            left = left.scatter(-1, found[-1], float("-inf"))
        found.append(left.argmax(-1, keepdim=True))
    return torch.cat(found, dim=-1)


def within_capacity(choices: Tensor, real: Tensor | None, experts: int, factor: float) -> Tensor:
    """choices int64 [B, T, k], real bool [B, T] -> bool [B, T, k]: which an expert still has room for.

    In each row an expert has room for ⌈factor · k · real tokens / experts⌉; earlier tokens come first.
    """
    batch, length, top_k = choices.shape
    met = torch.zeros(batch, length, experts, dtype=torch.int64, device=choices.device).scatter_(-1, choices, 1)
    tokens = torch.full((batch,), length, device=choices.device)
    if real is not None:
        met, tokens = met * real[..., None], real.sum(1)
    room = (tokens.double() * (factor * top_k / experts)).ceil()
    return met.cumsum(1).gather(-1, choices) <= room[:, None, None]
