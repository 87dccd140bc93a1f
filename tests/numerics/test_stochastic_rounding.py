"""Stochastic rounding to bfloat16: only the two neighbours, without bias, the same bits however it is cut up."""

import pytest
import torch
from torch import Tensor

from heddle.numerics import random
from heddle.numerics.dispatch import DeviceSize
from heddle.numerics.random import RandomStream, stochastic_round

COUNT = 4096


def numbers() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(COUNT, generator=generator) * 10.0 ** torch.randint(-30, 30, (COUNT,), generator=generator)


def neighbours(values: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers next to each value, towards zero and away from it, as float32."""
    towards_zero = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return towards_zero, (towards_zero.view(torch.int32) + 0x10000).view(torch.float32)


def test_every_result_is_one_of_two_neighbours() -> None:
    values = numbers()
    rounded = stochastic_round(values, RandomStream.of(0)).float()
    near, far = neighbours(values)
    assert bool(((rounded == near) | (rounded == far)).all())
    assert 0.4 < float((rounded == near).float().mean()) < 0.6


def bias(values: Tensor, draws: int = 256) -> float:
    """How far the mean of many roundings is from the values, in units of the distance of the neighbours."""
    near, far = neighbours(values)
    total = torch.zeros_like(values, dtype=torch.float64)
    for seed in range(draws):
        total += stochastic_round(values, RandomStream.of(seed)).double()
    share = (total / draws - values.double()) / (far.double() - near.double())
    return float(share.mean().abs()) + float(share.abs().max()) / 4  # a single one is within 4 standard deviations


def test_the_mean_is_the_number_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    values = numbers()[:512]
    assert bias(values) < 0.05
    half = random._draws
    monkeypatch.setattr(random, "_draws", lambda blocks, key: half(blocks, key) // 2)
    assert bias(values) > 0.15  # planted: too rarely away from zero


def test_what_bfloat16_has_stays() -> None:
    exact = numbers().bfloat16().float()
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1.0, -2.5])
    for values in (exact, special):
        rounded = stochastic_round(values, RandomStream.of(1)).float()
        assert torch.equal(rounded, values)
        assert torch.equal(rounded.signbit(), values.signbit())
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)  # NaN of every kind
    assert bool(stochastic_round(bits.view(torch.float32), RandomStream.of(1)).isnan().all())


def test_the_stream_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    values = numbers()
    whole = stochastic_round(values, RandomStream.of(5))
    assert torch.equal(whole, stochastic_round(values.view(64, 64), RandomStream.of(5)).flatten())
    assert not torch.equal(whole, stochastic_round(values, RandomStream.of(6)))
    monkeypatch.setattr(random, "BLOCKS", DeviceSize(7, 7))
    assert torch.equal(whole, stochastic_round(values, RandomStream.of(5)))
    assert torch.equal(whole[:100], stochastic_round(values[:100], RandomStream.of(5)))
