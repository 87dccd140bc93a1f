"""Muon over stacks of matrices: torch's numbers in few launches."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from heddle.numerics.dispatch import DeviceSize
from heddle.training import optimizer as muon
from heddle.training.optimizer import StackedMuon

# Square, wide and tall matrices; each shape several times, in turn, as in a model's layers.
SHAPES = ((6, 6), (4, 10), (10, 4), (6, 6), (4, 10), (10, 4), (6, 6), (3, 6))


def matrices(shapes: Sequence[tuple[int, int]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def optimizer_of(kind: type[torch.optim.Muon], weights: list[nn.Parameter]) -> torch.optim.Muon:
    groups = [{"params": weights[::2], "weight_decay": 0.1}, {"params": weights[1::2], "weight_decay": 0.0}]
    return kind(groups, lr=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw")


def draw_gradients(weights: list[nn.Parameter], seed: int) -> None:
    """Gradients of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    for index, weight in enumerate(weights):
        gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 10.0 ** (index % 4 - 2)
        weight.grad = gradient.to(weight.dtype)


def furthest_from_torch(steps: int = 3) -> float:
    """The largest difference of weights and momenta to torch's Muon after some steps, in the dtype that is iterated."""
    both = [matrices(), matrices()]
    optimizers = [
        optimizer_of(kind, weights) for kind, weights in zip((torch.optim.Muon, StackedMuon), both, strict=True)
    ]
    for seed in range(steps):
        for weights, optimizer in zip(both, optimizers, strict=True):
            draw_gradients(weights, seed)
            optimizer.step()
    differences = [a.detach() - b.detach() for a, b in zip(*both, strict=True)]
    differences += [
        optimizers[0].state[a]["momentum_buffer"] - optimizers[1].state[b]["momentum_buffer"]
        for a, b in zip(*both, strict=True)
    ]
    return max(float(difference.abs().max()) for difference in differences)


def without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon iterates in the dtype of its weights: torch's rounds by `bfloat16()`, from 2.15 on by `to`."""
    to = Tensor.to
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    monkeypatch.setattr(Tensor, "to", lambda x, *a, **b: x.clone() if b.get("copy") else to(x, *a, **b))


@pytest.mark.parametrize("elements", [1, 36, 10**6])
def test_stacks_of_any_size_have_the_numbers_of_torch(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, without the rounding to bfloat16 that torch iterates in, and with it."""
    monkeypatch.setattr(muon, "STACK_ELEMENTS", DeviceSize(elements, elements))
    assert furthest_from_torch() <= 1e-3
    without_bfloat16(monkeypatch)
    assert furthest_from_torch() <= 1e-10


@pytest.mark.parametrize("planted", ["norm", "scale", "momentum"])
def test_a_mistake_over_a_stack_is_caught(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_bfloat16(monkeypatch)
    if planted == "norm":  # of the whole stack, instead of each matrix
        right = Tensor.norm
        monkeypatch.setattr(Tensor, "norm", lambda x, **_: right(x))
    if planted == "scale":  # of the number of matrices, not of their sides
        monkeypatch.setattr(muon, "_adjusted", lambda rate, group, shape: rate * 0.2 * math.sqrt(min(shape)))
    if planted == "momentum":  # of one matrix for all of its shape
        monkeypatch.setattr(Tensor, "unbind", lambda stack: (stack[0],) * len(stack))
    assert furthest_from_torch() > 1e-6


class _Launches(TorchDispatchMode):
    """Counts the calls that a device would have to start."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not operator.is_view
        return operator(*args, **(kwargs or {}))


def launches(kind: type[torch.optim.Muon], count: int) -> int:
    """Of a step over `count` matrices of one shape, with every momentum there."""
    weights = matrices([(8, 8)] * count, torch.float32)
    optimizer = kind(weights, lr=0.02, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        draw_gradients(weights, 0)
        with _Launches() as counted:
            optimizer.step()
    return counted.count


def test_the_launches_of_a_step_do_not_grow_with_the_number_of_matrices() -> None:
    assert launches(StackedMuon, 3) == launches(StackedMuon, 48) <= 40
    assert launches(torch.optim.Muon, 48) > 15 * launches(torch.optim.Muon, 3)
