"""Recurrences in C++: the same values and gradients as token by token and as the plain chunks, for random shapes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.laws import LawViolation
from heddle.laws.kernels import kernel_equivalence
from heddle.numerics.dispatch import record_choices
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent import recurrence
from heddle.numerics.recurrent.gated_delta import DeltaInputs, gated_delta_rule, l2_normalize
from heddle.numerics.recurrent.ssd import SSDInputs, state_space_duality
from heddle.runtime import DEFAULT_CHOICES, install
from tests.cases import case

Call = tuple[str, list[Tensor], Tensor | None]  # operation, its inputs and the state before, the tokens' documents


@pytest.fixture(autouse=True)
def _in_use() -> Iterator[None]:
    install(replace(DEFAULT_CHOICES, native=("delta", "ssd")))
    yield
    install(DEFAULT_CHOICES)


def random(seed: int) -> Call:
    """A call of random shapes; decays near 1, near 0, and of very different strength from token to token."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    rows, groups, repeats, d_k, d_v = number(1, 3), number(1, 3), number(1, 3), number(1, 40), number(1, 70)
    length, heads = number(2, 20) if seed % 2 else number(20, 150), groups * repeats
    operation = "ssd" if seed % 3 == 0 else "delta"
    log_decay = -normal(rows, heads, length, d_k if seed % 3 == 1 else 1).abs() * 10.0 ** number(-3, 3)
    if seed % 5 == 0:
        log_decay[:, :, ::3] *= 1e4
    q, k = (l2_normalize(normal(rows, length, groups, d_k)).transpose(1, 2) for _ in range(2))  # not contiguous
    v, gate = normal(rows, heads, d_v, length).mT, 2 * normal(rows, heads, length).sigmoid()
    ids = (normal(rows, length) > 1.0).cumsum(1) if seed % 4 == 1 else None
    gates = [log_decay, gate] if operation == "delta" else [log_decay, gate[..., None], normal(heads)]
    return operation, [q, k, v, *gates, normal(rows, heads, d_k, d_v)], ids


def outcome(kernel: str, call: Call, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Outputs, the state after the last token, and the gradients of all inputs."""
    operation, tensors, ids = call
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    *inputs, state = leaves
    with kernels(**{operation: kernel}):
        if operation == "delta":
            q, k, v, log_decay, beta = inputs
            y, after = gated_delta_rule(DeltaInputs(q, k, v, log_decay, beta, ids), state.clone())
        else:
            q, k, v, log_decay, time_step, skip = inputs
            y, after = state_space_duality(SSDInputs(q, k, v, log_decay, time_step, skip, ids), state.clone())
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype) for x in (y, after)]
    return [y.detach(), after.detach(), *torch.autograd.grad([y, after], leaves, weights)]


def difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest, relative to the largest element of each tensor."""
    pairs = zip(actual, expected, strict=True)
    return max(float((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-30)) for x, y in pairs)


@pytest.mark.parametrize("seed", range(30))
def test_values_and_gradients_equal_the_plain_kernels(seed: int) -> None:
    call = random(seed)
    actual, expected = outcome("native", call), outcome("reference", call)
    assert all(bool(x.isfinite().all()) for x in actual)
    assert difference(actual, expected) <= 1e-11
    assert difference(actual, outcome("chunked", call)) <= 1e-11
    assert difference(outcome("native", call, torch.float32), expected) <= 1e-4


def test_a_strong_decay_costs_the_others_no_precision() -> None:
    _, (q, k, v, log_decay, beta, state), _ = random(8)
    log_decay = torch.full_like(log_decay, -1e-3)
    log_decay[:, :, 5::11] = -3e4
    call: Call = ("delta", [q, k, v, log_decay, beta, state], None)
    assert difference(outcome("native", call, torch.float32), outcome("reference", call)) <= 1e-5


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    alone = outcome("native", random(2), torch.float32)
    torch.set_num_threads(2)
    assert all(torch.equal(x, y) for x, y in zip(alone, outcome("native", random(2), torch.float32), strict=True))


@pytest.mark.parametrize(
    "name",
    [
        "delta-key-heads",
        "kda-own-widths",
        "mamba2-groups",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("delta", "delta-steps")),
    ],
)
def test_designs_keep_the_law_of_kernels_and_a_planted_bug_breaks_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = case(name)
    with record_choices("cpu") as choices:
        kernel_equivalence(config)
    assert "native" in {choice.kernel for choice in choices if choice.operation in ("delta", "ssd")}
    plain = recurrence.run_operator

    def forgetful(name: str, tensors: Any, beta: Tensor | None, ids: Tensor | None, state: Tensor) -> Any:
        return plain(name, tensors, beta, None, state)

    for module in ("gated_delta", "ssd"):
        monkeypatch.setattr(f"heddle.numerics.recurrent.{module}.run_operator", forgetful)
    with pytest.raises(LawViolation, match="packed documents"):
        kernel_equivalence(config)


def test_second_derivatives_are_refused() -> None:
    _, (q, k, v, log_decay, beta, state), ids = random(2)
    v.requires_grad_()
    y, _ = gated_delta_rule(DeltaInputs(q, k, v, log_decay, beta, ids), state)
    with pytest.raises(RuntimeError, match=r"no second derivatives; set HEDDLE_MACHINE=default"):
        torch.autograd.grad(y.sum(), v, create_graph=True)
