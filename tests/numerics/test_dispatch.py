"""Counting of operations, and the constants of a module."""

import torch

from heddle.numerics.dispatch import add_flops, count_flops, counts_flops
from heddle.numerics.transfer import Constants


def test_operations_are_counted_within_the_block_only() -> None:
    assert not counts_flops()
    with count_flops() as total:
        assert counts_flops()
        add_flops(3)
        add_flops(4)
    add_flops(5)
    assert not counts_flops()
    assert total == [7]


def test_a_constant_is_made_once() -> None:
    constants, device = Constants(), torch.device("cpu")
    first = constants.tensor((0.5, 2.0), torch.float64, device)
    assert first.tolist() == [0.5, 2.0]
    assert constants.tensor((0.5, 2.0), torch.float64, device) is first
    assert constants.tensor((0.5, 2.0), torch.float32, device).dtype == torch.float32
