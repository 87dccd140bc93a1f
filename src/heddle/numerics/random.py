"""Noise of dropout and sampling: a pure function of (seed, step, site, sample, cell).

The cell is the index of an element in the whole tensor of its sample. So neither the split of a batch, nor
recomputation, nor the device changes a draw, and a process that holds a slice of a sample draws that slice alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heddle.numerics.dispatch.transfer import to_device
from heddle.numerics.philox import CHUNK, WORD, RandomStream, philox


class RandomKey(NamedTuple):
    """Names a training step: seed and step, and the global index of each row's sample, int64 [B]."""

    seed: int
    step: int
    sample_indices: Tensor


class TensorSlice(NamedTuple):
    """The slice of a larger tensor that a call holds, batch dimension aside: the larger shape, and where it starts."""

    full_shape: tuple[int, ...]
    start: tuple[int, ...]


_key: ContextVar[RandomKey | None] = ContextVar("key", default=None)


@contextmanager
def use_random_key(key: RandomKey) -> Iterator[None]:
    """Within the block, `uniform` draws under this key."""
    token = _key.set(key)
    try:
        yield
    finally:
        _key.reset(token)


def uniform(shape: tuple[int, ...], site: int, device: torch.device, tensor_slice: TensorSlice | None = None) -> Tensor:
    """Numbers in [0, 1), float32, of `shape` [B, ...]; `site` tells apart the modules of a model that draw.

    With a `tensor_slice`, `shape[1:]` is that slice of each sample's tensor. Without a key in force, one is drawn from
    torch's global generator. A compiled graph calls this as one opaque operator, so that the key is read when it runs.
    """
    if is_compiling():
        full_shape, start = ((), ()) if tensor_slice is None else tensor_slice
        drawn: Tensor = _uniform_operator(torch.empty(0, device=device), shape, site, full_shape, start)
        return drawn
    key = _key.get()
    if key is None:
        key = RandomKey(int(torch.randint(2**62, (), device="cpu").item()), 0, torch.arange(shape[0], device=device))
    samples = to_device(key.sample_indices, device).to(torch.int64)
    stream_key = RandomStream.of(key.seed, key.step, site).key
    if tensor_slice is None:
        words = _words_of_all_cells(samples, torch.Size(shape[1:]).numel(), stream_key)
    else:
        words = _words_of_cells(samples, _cells(shape[1:], tensor_slice, device), stream_key)
    return words.view(shape)


@torch.library.custom_op("heddle::uniform", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _uniform_operator(
    device_of: Tensor, shape: Sequence[int], site: int, full_shape: Sequence[int], start: Sequence[int]
) -> Tensor:
    """`uniform`. The tag keeps two equal calls apart, and a backward pass from drawing again."""
    tensor_slice = TensorSlice(tuple(full_shape), tuple(start)) if full_shape else None
    return uniform(tuple(shape), site, device_of.device, tensor_slice)


@_uniform_operator.register_fake
def _(device_of: Tensor, shape: Sequence[int], site: int, full_shape: Sequence[int], start: Sequence[int]) -> Tensor:
    return torch.empty(shape, device=device_of.device)


def uniform_double(stream: RandomStream, samples: Tensor) -> Tensor:
    """Numbers in [0, 1), float64 of all 53 bits, one for each of `samples` int64 [N], which index what is drawn for."""
    zero = torch.zeros_like(samples)
    high, low, _, _ = philox((zero, zero, samples & WORD, samples >> 32 & WORD), stream.key)
    return ((high >> 5).double() * 2.0**26 + (low >> 6).double()) * 2.0**-53


def _words_of_all_cells(samples: Tensor, cells: int, key: int) -> Tensor:
    """float32 [B, cells]: the upper 24 bits of the words of cells 0, 1, …"""
    result = torch.empty(len(samples), cells, device=samples.device)
    step = max(4, CHUNK // max(1, len(samples)) // 4 * 4)
    for first in range(0, cells, step):
        stop = min(first + step, cells)
        block = torch.arange(first // 4, -(-stop // 4), device=samples.device)
        words = torch.stack(_blocks(samples, block, key), dim=-1).flatten(1)
        result[:, first:stop] = _fraction(words[:, : stop - first])
    return result


def _words_of_cells(samples: Tensor, cells: Tensor, key: int) -> Tensor:
    """float32 [B, N] of the cells named, int64 [N]."""
    words = torch.stack(_blocks(samples, cells // 4, key), dim=-1)
    lane = (cells % 4).expand(len(samples), -1)[..., None]
    return _fraction(words.gather(-1, lane)[..., 0])


def _blocks(samples: Tensor, block: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The words of blocks int64 [N] of each sample [B]: four of [B, N]."""
    counter = torch.broadcast_tensors(block & WORD, block >> 32, samples[:, None] & WORD, samples[:, None] >> 32 & WORD)
    return philox((counter[0], counter[1], counter[2], counter[3]), key)


def _fraction(words: Tensor) -> Tensor:
    """float32 in [0, 1): the upper 24 bits, which float32 holds exactly."""
    return (words >> 8).to(torch.float32) * 2.0**-24


def _cells(shape: tuple[int, ...], tensor_slice: TensorSlice, device: torch.device) -> Tensor:
    """The places of a slice's elements in the whole tensor, int64 [N]."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, full in zip(shape, tensor_slice.start, tensor_slice.full_shape, strict=True):
        index = index[..., None] * full + torch.arange(start, start + size, device=device)
    return index.flatten()
