"""Routing (Shazeer et al. 2017; Fedus et al. 2021; DeepSeek-V2 and V3): the experts of each token, and their gates.

Let l be the router's logits and s the scores: softmax(l), sigmoid(l) or l itself. A token selects the k experts with
the largest s + b. The balancing bias b is used for selection only. Of equal scores the lowest index wins, on every
device: `torch.topk` guarantees no order, a stable sort does. With groups, the best groups are selected first, and then
experts of these groups. The gates are the scores s of the selected experts, or renormalized to sum to 1, computed as

    softmax over the selected experts, l_i − log Σ_selected exp(l_j)      (for the sigmoid, with log sigmoid(l) for l)

which never divides zero by zero. Everything is computed in at least float32.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch.flop_counter import add_flops
from heddle.numerics.norms import at_least_float32, without_autocast

Routing = Literal["softmax_topk", "topk_softmax", "sigmoid", "softmax_group_max"]


class RoutingConfig(NamedTuple):
    """How experts are selected. groups: number of equal groups of adjacent experts; the best `top_groups` are used.

    A group's score is the sum of its two best experts with `sigmoid` (DeepSeek-V3), else its best one (DeepSeek-V2).
    """

    routing: Routing
    top_k: int
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


class Route(NamedTuple):
    """expert_indices int64 [..., k], best first, their gates [..., k], and all experts' probabilities [..., experts].

    Probabilities sum to 1: the softmax, or the sigmoid scores divided by their sum. Load-balancing losses use them.
    """

    expert_indices: Tensor
    gates: Tensor
    probabilities: Tensor


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., width], weight [experts, width], bias [experts] -> [..., experts], in at least float32.

    Autocast is disabled: rounded logits could be equal where exact ones differ, and select other experts.
    """
    add_flops(2 * x.numel() * weight.shape[0])
    with without_autocast(x):
        wide = None if bias is None else at_least_float32(bias)
        return functional.linear(at_least_float32(x), at_least_float32(weight), wide)


def route(logits: Tensor, balancing_bias: Tensor | None, config: RoutingConfig) -> Route:
    """logits [..., experts], balancing_bias [experts] (added for selection only) -> the route.

    Gates and probabilities are differentiable, expert indices are not.
    """
    with without_autocast(logits):
        log_scores = functional.logsigmoid(logits) if config.routing == "sigmoid" else logits
        probabilities = log_scores.softmax(-1)
        score_functions = {"sigmoid": logits.sigmoid, "topk_softmax": lambda: logits}
        scores = score_functions.get(config.routing, lambda: probabilities)()
        with torch.no_grad():
            biased = scores if balancing_bias is None else scores + balancing_bias.to(scores.dtype)
            expert_indices = select_experts(biased, config)
        if config.renormalize or config.routing == "topk_softmax":
            gates = log_scores.gather(-1, expert_indices).softmax(-1)
        else:
            gates = scores.gather(-1, expert_indices)
        return Route(expert_indices, gates if config.scale == 1.0 else gates * config.scale, probabilities)


def select_experts(scores: Tensor, config: RoutingConfig) -> Tensor:
    """scores [..., experts] -> the selected experts, int64 [..., k], best first."""
    if config.groups > 1:
        grouped = scores.unflatten(-1, (config.groups, -1))
        group_scores = grouped.sort(-1, descending=True).values[..., : 2 if config.routing == "sigmoid" else 1].sum(-1)
        best_groups = stable_topk(group_scores, config.top_groups)
        selected_groups = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best_groups, True)
        scores = grouped.masked_fill(~selected_groups[..., None], float("-inf")).flatten(-2)
    return stable_topk(scores, config.top_k)


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest of scores [..., n], int64 [..., k], highest first; equal scores in order of index.

    NaN counts as highest. One launch for any k: a launch per selected expert would be most of a decoded token's.
    """
    if k == 1:
        return scores.argmax(-1, keepdim=True)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def within_capacity(
    expert_indices: Tensor, is_token: Tensor | None, num_experts: int, capacity_factor: float
) -> Tensor:
    """expert_indices int64 [B, T, k], is_token bool [B, T] -> bool [B, T, k]: True where the expert has capacity left.

    In each row the capacity of an expert is ⌈capacity_factor · k · tokens / num_experts⌉. Earlier tokens come first.
    """
    batch, length, top_k = expert_indices.shape
    assigned = torch.zeros(batch, length, num_experts, dtype=torch.int64, device=expert_indices.device)
    assigned.scatter_(-1, expert_indices, 1)
    tokens = torch.full((batch,), length, device=expert_indices.device)
    if is_token is not None:
        assigned, tokens = assigned * is_token[..., None], is_token.sum(1)
    capacity = (tokens.double() * (capacity_factor * top_k / num_experts)).ceil()
    return assigned.cumsum(1).gather(-1, expert_indices) <= capacity[:, None, None]
