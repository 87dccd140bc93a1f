"""Random numbers that are a pure function of (seed, step, sample, site, index): the same for any split of a batch.

Dropout and stochastic depth draw here, so gradients do not depend on how a batch is cut into pieces, on
recomputation, or on the device. The mixing function is the finaliser of SplitMix64 (Steele et al. 2014).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor


class Key(NamedTuple):
    """Names a training step: seed and step, and the global index of each row's sample, int64 [B]."""

    seed: int
    step: int
    samples: Tensor


_key: ContextVar[Key | None] = ContextVar("key", default=None)


@contextmanager
def keyed(key: Key) -> Iterator[None]:
    """Within the block, `uniform` draws under this key."""
    token = _key.set(key)
    try:
        yield
    finally:
        _key.reset(token)


def mix(x: Tensor) -> Tensor:
    """A bijection of int64 that scatters neighbouring numbers (arithmetic wraps modulo 2^64)."""
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic, so the copied sign bits are cleared."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(shape: tuple[int, ...], site: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1), float32, of `shape` [B, ...]; `site` tells apart the places of a model that draw.

    Without a key in force, one is drawn from torch's global generator.
    """
    key = _key.get()
    if key is None:
        seed = int(torch.randint(2**62, ()).item())
        key = Key(seed, 0, torch.arange(shape[0]))
    golden = -7046029254386353131
    row = torch.tensor([key.seed, key.step, site], dtype=torch.int64, device=device)
    salt = mix(mix(mix(row[0] + golden) + row[1]) + row[2])
    rows = mix(key.samples.to(device=device, dtype=torch.int64) * golden + salt)
    cells = 1
    for size in shape[1:]:
        cells *= size
    index = mix(torch.arange(cells, dtype=torch.int64, device=device))
    bits = mix(rows[:, None] + index[None, :])
    return (_shift(bits, 40).to(torch.float32) * 2.0**-24).view(shape)
