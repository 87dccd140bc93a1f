"""Random numbers as a pure function of (seed, step, sample, site, index): the same for any split of a batch.

Dropout and stochastic depth draw here. Their gradients therefore do not depend on gradient accumulation, activation
recomputation or the device. The hash is the finalizer of SplitMix64 (Steele et al. 2014).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor


class RandomKey(NamedTuple):
    """Identifies a training step: seed, step, and the global index of each row's sample, int64 [B]."""

    seed: int
    step: int
    sample_indices: Tensor


_key: ContextVar[RandomKey | None] = ContextVar("key", default=None)


@contextmanager
def use_random_key(key: RandomKey) -> Iterator[None]:
    """Within the block, `uniform` draws with this key."""
    token = _key.set(key)
    try:
        yield
    finally:
        _key.reset(token)


def splitmix64(x: Tensor) -> Tensor:
    """Hash int64 numbers by a bijection, elementwise. The arithmetic wraps modulo 2^64."""
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift. torch's shift is arithmetic, so the copied sign bits are cleared."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(shape: tuple[int, ...], site: int, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1), float32, of `shape` [B, ...]. `site` is a different number for each drawing module.

    Outside `use_random_key`, the seed is drawn from torch's global generator.
    """
    key = _key.get()
    if key is None:
        seed = int(torch.randint(2**62, ()).item())
        key = RandomKey(seed, 0, torch.arange(shape[0]))
    golden = -7046029254386353131
    key_parts = torch.tensor([key.seed, key.step, site], dtype=torch.int64, device=device)
    salt = splitmix64(splitmix64(splitmix64(key_parts[0] + golden) + key_parts[1]) + key_parts[2])
    row_states = splitmix64(key.sample_indices.to(device=device, dtype=torch.int64) * golden + salt)
    elements_per_row = 1
    for size in shape[1:]:
        elements_per_row *= size
    element_states = splitmix64(torch.arange(elements_per_row, dtype=torch.int64, device=device))
    bits = splitmix64(row_states[:, None] + element_states[None, :])
    return (_shift(bits, 40).to(torch.float32) * 2.0**-24).view(shape)
