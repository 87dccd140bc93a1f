"""Sliding-window attention in blocks against the masked reference, over many lengths, windows and directions."""

import pytest
import torch

from heddle.numerics.attention import sliding_window
from heddle.numerics.attention.mask import AttentionMask, visible_pairs
from heddle.numerics.attention.sdpa import sdpa
from heddle.numerics.attention.softmax import reference
from tests.numerics.oracle import contiguous_positions


@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 33, 64])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_blocks(window: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliding_window, "block_size", lambda window: size)
    for causal in (True, False):
        for queries, past in ((1, 0), (2, 0), (9, 0), (40, 0), (75, 0), (1, 30), (17, 5), (33, 64), (50, 7)):
            if past and not causal:
                continue
            q_positions, k_positions = contiguous_positions(1, queries, queries + past)
            mask = AttentionMask(q_positions, k_positions, window=window, causal=causal)
            q, k, v = (torch.randn(1, heads, size, 4, dtype=torch.float64) for heads, size in
                       ((4, queries), (2, queries + past), (2, queries + past)))  # fmt: skip
            band = sliding_window.Band(window, causal)
            attend_block = lambda q, k, v, scale, block, band=band: sdpa(q, k, v, scale, band.mask(block))  # noqa: E731
            actual = sliding_window.blockwise_attention(q, k, v, band, 0.4, attend_block)
            expected = reference(q, k, v, mask, 0.4)
            torch.testing.assert_close(
                actual, expected, rtol=0, atol=1e-12, msg=f"{queries} after {past}, causal {causal}"
            )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 11, 30])
def test_visible_pairs_equals_the_sum_of_the_mask(window: int | None, causal: bool) -> None:
    for queries, keys in ((1, 1), (1, 9), (9, 9), (4, 12), (12, 12), (30, 30)):
        if not causal and queries != keys and window is not None:
            continue
        q_positions, k_positions = contiguous_positions(1, queries, keys)
        mask = AttentionMask(q_positions, k_positions, window=window, causal=causal).materialize()
        assert visible_pairs(queries, keys, window, causal) == int(mask.sum())
