"""The generator against its authors' known answers, any slice against the whole, normal numbers against scipy."""

import hashlib

import numpy as np
import pytest
import torch
from scipy import special, stats

from heddle.numerics import random as module
from heddle.numerics.random import RandomStream, normal_quantile, philox

# Of Random123's kat_vectors: counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    tensors = tuple(torch.tensor([word, word]) for word in counter)
    answer = philox(tensors, key[1] << 32 | key[0])  # type: ignore[arg-type]
    assert [int(word[1]) for word in answer] == list(words)
    assert [int(tensor[0]) for tensor in tensors] == list(counter), "the counter is left as it was"


def test_any_slice_of_a_stream_can_be_drawn_alone() -> None:
    stream = RandomStream.of(3, "layers.0.mixer.q.weight")
    whole = stream.words(0, 1000)
    for start, stop in [(0, 1), (1, 2), (3, 9), (7, 7), (250, 999), (996, 1000)]:
        assert np.array_equal(stream.words(start, stop), whole[start:stop])
        assert np.array_equal(stream.normal(start, stop), normal_quantile(whole[start:stop]))
    far = 2**34 + 5
    assert np.array_equal(stream.words(far, far + 9)[4:], stream.words(far + 4, far + 9))


def test_chunks_are_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 10)
    stream = RandomStream.of(1)
    chunks = list(stream.normal_chunks(5, 38))
    assert [first for first, _ in chunks] == [5, 15, 25, 35]
    assert torch.equal(torch.cat([numbers for _, numbers in chunks]), stream.normal(5, 38))


def test_words_do_not_depend_on_the_upper_half_of_a_counter_being_small() -> None:
    assert not np.array_equal(RandomStream(7).words(0, 4), RandomStream(7).words(2**34, 2**34 + 4))
    assert not np.array_equal(RandomStream(7).words(0, 4), RandomStream(7 + 2**32).words(0, 4))


def test_words_are_those_of_philox() -> None:
    for key, start in ((7, 0), (2**63 + 2**40 + 9, 2**34 - 8), (2**64 - 1, 2**35)):
        block = torch.arange(start // 4, start // 4 + 5)
        zero = torch.zeros_like(block)
        want = torch.stack(philox((block & module.WORD, block >> 32, zero, zero), key), dim=-1).flatten()
        assert RandomStream(key).words(start, start + 20).tolist() == want.tolist()


def test_normal_numbers_are_quantiles() -> None:
    edges = np.array([1, 2**31 - 1, 2**31, 2**32 - 1], dtype=np.uint64)
    words = np.concatenate([np.arange(0, 2**32, 2**32 // 30011, dtype=np.uint64), edges])
    expected = special.ndtri((words + 0.5) / 2**32)
    assert np.abs(normal_quantile(words) / expected - 1).max() < 1e-14


def test_numbers_are_normal_and_independent() -> None:
    numbers = RandomStream.of(11, "embed.weight").normal(0, 200_000)
    assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-3
    assert abs(float(numbers[:-1] @ numbers[1:]) / 200_000) < 0.01
    other = RandomStream.of(11, "head.weight").normal(0, 200_000)
    assert abs(float(numbers @ other) / 200_000) < 0.01
    uniform = RandomStream.of(12).uniform(0, 200_000)
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-3


def test_draws_never_change() -> None:
    """The bits of a slice, on every machine: names, seeds and the way to numbers are settled."""
    numbers = RandomStream.of(0, "layers.1.feedforward.up.weight").normal(12_345, 22_345)
    digest = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
    assert digest == "48c6f7c3ca65caca3037db75f26e6a03fe2431c5990c66ab4522c3b55068db31"
    rounded = hashlib.sha256(numbers.float().numpy().tobytes()).hexdigest()
    assert rounded == "570d6574fa0e481d760d557d76b83d64dff09d409fc251b68f9cc543a86daee8"
