"""Recurrences with one state matrix per head: random inputs, calls, and the papers' formulas, a token at a time."""

from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heddle.numerics.dispatch import Operation
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent import gated_delta, selective_scan, ssd
from heddle.numerics.recurrent.causal_sums import causal_sums_flops
from heddle.numerics.recurrent.gated_delta import (
    DELTA_RULE,
    DeltaInputs,
    delta_rule_flops,
    gated_delta_rule,
    l2_normalize,
)
from heddle.numerics.recurrent.general_delta import (
    GENERAL_DELTA,
    GeneralDeltaInputs,
    general_delta_flops,
    general_delta_rule,
)
from heddle.numerics.recurrent.recurrence import RecurrenceFacts
from heddle.numerics.recurrent.selective_scan import SELECTIVE_SCAN, ScanInputs
from heddle.numerics.recurrent.ssd import SSD, SSDInputs, state_space_duality

SHAPE = (2, 2, 4, 5, 3)  # rows, key heads, heads, d_k, d_v
Result = tuple[Tensor, Tensor]  # outputs, and the state after the last token
Normal = Callable[..., Tensor]


class Rule(NamedTuple):
    """An operation and its name in `kernels`, a token by the paper's formula, and random inputs.

    chunk: its tokens. quiet: the inputs that are 0 at a token that changes nothing. flops: of two rows of nine tokens.
    atol: of values and of gradients.
    """

    name: str
    operation: Operation[RecurrenceFacts]
    call: Callable[[Any, Tensor], Result]
    token: Callable[[Tensor, Any], Result]
    draw: Callable[[Normal, int, tuple[int, ...]], Any]
    chunk: int
    quiet: tuple[str, ...]
    flops: int
    atol: tuple[float, float] = (1e-12, 1e-11)


def delta_token(s: Tensor, x: Any) -> Result:
    """S_t = S_{t−1} Diag(α_t) (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ, o_t = S_t q_t, S [d_v, d_k].

    Gated DeltaNet's formula where α is a number, and the transpose of Kimi Delta Attention's where it is a vector.
    """
    erase = torch.eye(len(x.k), dtype=x.k.dtype) - x.beta * torch.outer(x.k, x.k)
    s = s @ torch.diag(x.log_decay.exp().expand(len(x.k))) @ erase + x.beta * torch.outer(x.v, x.k)
    return s, s @ x.q


def general_token(s: Tensor, x: Any) -> Result:
    """S_t = S_{t−1} (diag(w) − κ̂ᵀ (a ⊙ κ̂)) + vᵀ k̃ with S [d_v, d_k], as RWKV-7's paper writes it; b and c general."""
    w = x.log_decay.exp()
    s = s @ (torch.diag(w) - torch.outer(x.c * w, x.b)) + torch.outer(x.v, x.k)
    return s, s @ x.q


def ssd_token(s: Tensor, x: Any) -> Result:
    """h_t = a_t h_{t−1} + Δ_t x_t B_tᵀ, y_t = h_t C_t + D x_t, with h [d_v, d_k] as Mamba-2's paper writes it."""
    s = x.log_decay.exp() * s + x.time_step * torch.outer(x.v, x.k)
    return s, s @ x.q + x.skip * x.v


def scan_token(s: Tensor, x: Any) -> Result:
    """h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t x_t B_tᵀ, y_t = h_t C_t + D x_t, h [d_v, d_k] as Mamba's paper writes it."""
    s = torch.exp(x.time_step * x.rate) * s + x.time_step * torch.outer(x.v, x.k)
    return s, s @ x.q + x.skip * x.v


def delta_inputs(normal: Normal, length: int, shape: tuple[int, ...], per_channel: bool) -> DeltaInputs:
    """With one decay per head, or one per channel."""
    rows, groups, heads, d_k, d_v = shape
    log_decay = -normal(rows, heads, length, d_k if per_channel else 1).square()
    q, k = (l2_normalize(normal(rows, groups, length, d_k)) for _ in range(2))
    return DeltaInputs(q, k, normal(rows, heads, length, d_v), log_decay, normal(rows, heads, length).sigmoid())


def general_inputs(normal: Normal, length: int, shape: tuple[int, ...], bounded: bool) -> GeneralDeltaInputs:
    """bounded: decays of at most RWKV-7's rate."""
    rows, _, heads, d_k, d_v = shape
    size = (rows, heads, length, d_k)
    removal, drawn = l2_normalize(normal(*size)), normal(*size)
    log_decay = -0.60653 * drawn.sigmoid() if bounded else -drawn.square()
    b, c = removal * normal(*size).sigmoid(), removal / log_decay.exp() if bounded else removal
    return GeneralDeltaInputs(normal(*size), normal(*size), normal(rows, heads, length, d_v), b, c, log_decay)


def ssd_inputs(normal: Normal, length: int, shape: tuple[int, ...]) -> SSDInputs:
    rows, groups, heads, d_k, d_v = shape
    q, k = (normal(rows, groups, length, d_k) for _ in range(2))
    log_decay, time_step = -normal(rows, heads, length, 1).square(), normal(rows, heads, length, 1).square()
    return SSDInputs(q, k, normal(rows, heads, length, d_v), log_decay, time_step, normal(heads))


def scan_inputs(normal: Normal, length: int, shape: tuple[int, ...]) -> ScanInputs:
    rows, groups, heads, d_k, d_v = shape
    q, k = (normal(rows, groups, length, d_k) for _ in range(2))
    time_step, rate = normal(rows, heads, length, 1).square(), -normal(heads, d_k).square()
    return ScanInputs(q, k, normal(rows, heads, length, d_v), time_step, rate, normal(heads))


DELTA, CHANNEL_DELTA = (
    Rule(
        "delta", DELTA_RULE, gated_delta_rule, delta_token, partial(delta_inputs, per_channel=per_channel),
        gated_delta.CHUNK_TOKENS, ("beta", "log_decay"), delta_rule_flops(2 * 9, 4, 5, 3),
    )
    for per_channel in (False, True)
)  # fmt: skip
GENERAL, UNBOUNDED = (
    Rule(
        "general_delta", GENERAL_DELTA, general_delta_rule, general_token, partial(general_inputs, bounded=bounded),
        gated_delta.CHUNK_TOKENS, ("b", "k", "log_decay"), general_delta_flops(2 * 9, 4, 5, 3), (1e-11, 1e-9),
    )
    for bounded in (True, False)
)  # fmt: skip
STATE_SPACE = Rule(
    "ssd", SSD, state_space_duality, ssd_token, ssd_inputs,
    ssd.CHUNK_TOKENS, ("k", "log_decay"), causal_sums_flops(9, 2, 4, (5, 3)),
)  # fmt: skip
SELECTIVE = Rule(
    "selective_scan", SELECTIVE_SCAN, selective_scan.selective_scan, scan_token, scan_inputs,
    16, ("time_step",), causal_sums_flops(9, 2, 4, (5, 3)),
)  # fmt: skip


def random(rule: Rule, length: int, packed: bool = False, shape: tuple[int, ...] = SHAPE) -> tuple[Any, Tensor]:
    """Inputs and a state in float64."""
    rows, _, heads, d_k, d_v = shape
    generator = torch.Generator().manual_seed(length)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    inputs = rule.draw(normal, length, shape)
    ids = (normal(rows, length) > 1.3).cumsum(1) if packed else None
    return inputs._replace(call_segment_ids=ids), normal(rows, heads, d_k, d_v)


def tensors_of(inputs: Any) -> dict[str, Tensor]:
    """The tensors of numbers, by name."""
    return {name: x for name, x in inputs._asdict().items() if isinstance(x, Tensor) and x.is_floating_point()}


def narrowed(inputs: Any) -> Any:
    return inputs._replace(**{name: x.float() for name, x in tensors_of(inputs).items()})


def run(rule: Rule, kernel: str, inputs: Any, state: Tensor) -> Result:
    with kernels(**{rule.name: kernel}):
        return rule.call(inputs, state.clone())


def formula(rule: Rule, inputs: Any, state: Tensor) -> Result:
    """The paper's recurrence, one row, head and token at a time."""
    out, last, ids = torch.zeros_like(inputs.v), state.clone(), inputs.call_segment_ids
    rows, heads, length, _ = inputs.v.shape
    for row, head in product(range(rows), range(heads)):
        s, document = state[row, head].t(), 0
        for t in range(length):
            if ids is not None and int(ids[row, t]) != document:
                s, document = torch.zeros_like(s), int(ids[row, t])
            token = {
                name: x[head] if x.ndim < 3 else x[row, head // (heads // x.shape[1]), t]
                for name, x in tensors_of(inputs).items()
            }
            s, out[row, head, t] = rule.token(s, SimpleNamespace(**token))
        last[row, head] = s.t()
    return out, last


def assert_close(actual: Result, expected: Result, atol: float) -> None:
    for actual_part, expected_part in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_part.double(), expected_part, rtol=0, atol=atol)
