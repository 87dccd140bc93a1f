"""Noise of dropout and sampling: a pure function of (seed, step, site, sample, cell).

The cell is the index of an element in the whole tensor of its sample. So neither the split of a batch, nor
recomputation, nor the device changes a draw, and a process that holds a slice of a sample draws that slice alone.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.compiler import is_compiling

from heddle.numerics.dispatch import DeviceSize
from heddle.numerics.transfer import to_device

# Random numbers as pure functions: any slice of a stream can be drawn alone, and every device draws the same bits.
#
# Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") maps a counter of four 32-bit words
# and a 64-bit key to four words. Element i of a stream is word `i mod 4` of the block with counter `i // 4`, so no
# earlier element has to be drawn. The quantile function of the normal distribution (Wichura 1988, AS 241) turns one
# word into one normal number. It is computed from sums, products and quotients alone: every machine rounds these alike,
# while math libraries differ in the last bits of their logarithms.


WORD = 0xFFFFFFFF
FACTOR_0, FACTOR_1 = 0xD2511F53, 0xCD9E8D57  # of Philox4x32
CHUNK = 2**16  # elements drawn at once, so that intermediate results stay in a CPU's cache

# Coefficients of AS 241, constant terms first: near the median, and in the tails down to a probability of 1e-11.
MEDIAN_NUMERATOR = (
    3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
    4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
)  # fmt: skip
MEDIAN_DENOMINATOR = (
    1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
    2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3,
)  # fmt: skip
TAIL_NUMERATOR = (
    1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
    1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
)  # fmt: skip
TAIL_DENOMINATOR = (
    1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
    1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9,
)  # fmt: skip


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four counter words (int64, one shape, each from 0 to 2^32 − 1) and a 64-bit key -> four words."""
    x0, x1, x2, x3 = (word.clone() for word in counter)
    high0, high1 = torch.empty_like(x0), torch.empty_like(x0)
    k0, k1 = key & WORD, key >> 32 & WORD
    for _ in range(10):
        # A product of two 32-bit words has 64 bits: int64 may call it negative, but holds every one of them.
        x0.mul_(FACTOR_0)
        x2.mul_(FACTOR_1)
        torch.bitwise_right_shift(x0, 32, out=high0)
        torch.bitwise_right_shift(x2, 32, out=high1)
        high0.bitwise_and_(WORD).bitwise_xor_(x3).bitwise_xor_(k1)
        high1.bitwise_and_(WORD).bitwise_xor_(x1).bitwise_xor_(k0)
        # The upper halves become words 0 and 2, the lower ones 3 and 1; the spent buffers take the next upper halves.
        x0, x1, x2, x3, high0, high1 = high1, x2.bitwise_and_(WORD), high0, x0.bitwise_and_(WORD), x1, x3
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return x0, x1, x2, x3


class RandomStream(NamedTuple):
    """An endless sequence of 32-bit words. `RandomStream.of` derives its 64-bit key from what the numbers are for."""

    key: int

    @staticmethod
    def of(*purpose: int | str) -> "RandomStream":
        """The stream of a purpose, such as a seed and a parameter's name."""
        digest = hashlib.sha256("/".join(map(str, purpose)).encode()).digest()
        return RandomStream(int.from_bytes(digest[:8], "little"))

    def words(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Elements `start` to `stop`: [stop − start], each from 0 to 2^32 − 1.

        As `philox` with counters `block, block >> 32, 0, 0`, in numpy: its calls on the few elements of a small
        parameter are several times shorter.
        """
        block = np.arange(start // 4, -(-stop // 4), dtype=np.uint64)
        word, half = np.uint64(WORD), np.uint64(32)
        x0, x1, k0, k1 = block & word, block >> half, self.key & WORD, self.key >> 32 & WORD
        x2 = x3 = np.zeros_like(block)
        for _ in range(10):
            first, second = x0 * np.uint64(FACTOR_0), x2 * np.uint64(FACTOR_1)
            x0, x1 = second >> half ^ x1 ^ np.uint64(k0), second & word
            x2, x3 = first >> half ^ x3 ^ np.uint64(k1), first & word
            k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
        return np.stack((x0, x1, x2, x3), axis=-1).ravel()[start % 4 : start % 4 + stop - start]

    def normal(self, start: int, stop: int) -> Tensor:
        """Standard normal numbers, float64 [stop − start] on the CPU; the largest possible is 6.4."""
        return torch.from_numpy(normal_quantile(self.words(start, stop)))

    def uniform(self, start: int, stop: int) -> Tensor:
        """Numbers strictly between 0 and 1, float64 [stop − start] on the CPU."""
        return torch.from_numpy((self.words(start, stop) + 0.5) * 2.0**-32)

    def normal_chunks(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """The same numbers as `normal` in pieces of at most CHUNK: (first element, float64)."""
        for first in range(start, stop, CHUNK):
            yield first, self.normal(first, min(first + CHUNK, stop))


class ParameterDraws(NamedTuple):
    """The random streams of a module's parameters. The seed and each parameter's full name decide its numbers."""

    seed: int
    module: str

    def __call__(self, parameter: str) -> RandomStream:
        """The stream of `module.parameter`."""
        return RandomStream.of(self.seed, f"{self.module}.{parameter}" if self.module else parameter)


def normal_quantile(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Words [N] from 0 to 2^32 − 1 -> the normal quantile at (word + ½) / 2^32, to a relative 1e-15."""
    from_median = (words + (0.5 - 2.0**31)) * 2.0**-32  # the probability less ½: exact
    square = 0.180625 - from_median * from_median
    result = polynomial(square, MEDIAN_NUMERATOR) / polynomial(square, MEDIAN_DENOMINATOR) * from_median
    tail = np.flatnonzero(np.abs(from_median) > 0.425)
    probability = from_median[tail]
    distance = np.sqrt(-logarithm(0.5 - np.abs(probability))) - 1.6  # numpy's root is the processor's: exactly rounded
    quantile = polynomial(distance, TAIL_NUMERATOR) / polynomial(distance, TAIL_DENOMINATOR)
    result[tail] = quantile * np.sign(probability)
    return result


def polynomial(x: NDArray[np.float64], coefficients: tuple[float, ...]) -> NDArray[np.float64]:
    """Σ c_i x^i by Horner's rule, constant term first."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total *= x
        total += coefficient
    return total


LOGARITHM = tuple(2.0 / power for power in range(1, 27, 2))


def logarithm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(x) of float64 from 1e-300 to 0.1, to a relative 1e-15."""
    mantissa, exponent = np.frexp(x)  # mantissa from ½ to 1
    ratio = (mantissa - 0.75) / (mantissa + 0.75)  # log(m / ¾) = 2 atanh(ratio), |ratio| <= 1/5
    return polynomial(ratio * ratio, LOGARITHM) * ratio + exponent * 0.6931471805599453 - 0.2876820724517809


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
    """Numbers in [0, 1), float32, of `shape` [B, ...]; `site` identifies the module that draws.

    With a `tensor_slice`, `shape[1:]` is that slice of each sample's tensor. Outside `use_random_key`, a key is drawn
    from torch's global generator. A compiled graph calls this as one opaque operator, which reads the key when it runs.
    """
    if is_compiling():
        full_shape, start = ((), ()) if tensor_slice is None else tensor_slice
        drawn: Tensor = _uniform_operator(torch.empty(0, device=device), shape, site, full_shape, start)
        return drawn
    key = _key.get()
    if key is None:
        key = RandomKey(int(torch.randint(2**62, (), device="cpu").item()), 0, torch.arange(shape[0], device=device))
    samples = to_device(key.sample_indices, device).to(torch.int64)
    if samples.is_meta:  # without values: the ten rounds took most of the time of measuring a design with dropout
        return torch.empty(shape, dtype=torch.float32, device=device)
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
    """Numbers in [0, 1), float64 with all 53 bits, one for each sample index in `samples` int64 [N]."""
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


# Stochastic rounding to bfloat16 (Gupta et al. 2015): to one of the two neighbors, more likely to the nearer one.
#
# The expected value is the number itself, so updates far below the spacing of bfloat16 are not lost.


BLOCKS = DeviceSize(cpu=2**13, accelerator=2**22)  # blocks of random words drawn at once
_DRAWS = 8  # 16-bit draws of a block
_LOW = 0xFFFF  # the bits of float32 that bfloat16 drops


def stochastic_round(values: Tensor, stream: RandomStream, start: int = 0) -> Tensor:
    """Round float32 values to bfloat16 of the same shape.

    Element i takes draw `start + i` of 16 bits of the stream, so the result does not depend on the device, nor on how a
    tensor is split. Numbers that bfloat16 represents exactly, infinities and NaN are unchanged.
    """
    flat, result = values.reshape(-1), torch.empty(values.numel(), dtype=torch.bfloat16, device=values.device)
    elements = _DRAWS * BLOCKS.on(values)
    for first in range(0, len(flat), elements):
        part = flat[first : first + elements]
        first_block, skipped = divmod(start + first, _DRAWS)
        blocks = torch.arange(first_block, -(-(start + first + len(part)) // _DRAWS), device=values.device)
        bits = part.view(torch.int32) + _draws(blocks, stream.key)[skipped : skipped + len(part)]
        rounded = bits.bitwise_and_(~_LOW).view(torch.float32)
        result[first : first + len(part)] = torch.where(part.isfinite(), rounded, part)
    return result.view(values.shape)


def _draws(blocks: Tensor, key: int) -> Tensor:
    """int32 [8 N] from 0 to 2^16 − 1, of the blocks int64 [N]."""
    zero = torch.zeros_like(blocks)
    words = torch.stack(philox((blocks & WORD, blocks >> 32, zero, zero), key), dim=-1)
    return torch.stack((words & _LOW, words >> 16), dim=-1).flatten().to(torch.int32)
