"""Rotary and sinusoidal embeddings against Python's floats, up to position 2^20 and in every dtype."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from heddle.numerics.rotary import apply_rotary, inverse_frequencies, rotary_table, sinusoidal_embedding
from tests.laws.planting import condition

# π to 50 digits: angles of up to a million radians are reduced exactly before their cosine is taken.
PI = Fraction(314159265358979323846264338327950288419716939937510, 10**50)
POSITIONS = [0, 1, 2, 257, 4096, 8191, 65535, 2**20 - 1, 2**20]


def exact(position: int, theta: float) -> tuple[float, float]:
    """Cosine and sine of position · theta, without rounding theta."""
    angle = Fraction(theta) * position
    reduced = float(angle - 2 * PI * round(angle / (2 * PI)))
    return math.cos(reduced), math.sin(reduced)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_tables_at_large_positions(base: float) -> None:
    inv_freq = inverse_frequencies(16, base)
    cos, sin = rotary_table(torch.tensor([POSITIONS]), inv_freq, torch.float64)
    for index, position in enumerate(POSITIONS):
        for pair, theta in enumerate(inv_freq):
            expected = exact(position, theta)
            assert abs(float(cos[0, 0, index, pair]) - expected[0]) <= 2**-20
            assert abs(float(sin[0, 0, index, pair]) - expected[1]) <= 2**-20


def test_float32_tables_use_the_rounded_frequency() -> None:
    """The frequency and the angle are rounded to float32, as in transformers, and nothing else is."""
    inv_freq = inverse_frequencies(16, 10000.0)
    cos, _ = rotary_table(torch.tensor([POSITIONS]), inv_freq, torch.float32)
    for index, position in enumerate(POSITIONS):
        for pair, theta in enumerate(torch.tensor(inv_freq, dtype=torch.float32).tolist()):
            angle = float(torch.tensor(position * theta, dtype=torch.float32))
            assert abs(float(cos[0, 0, index, pair]) - exact(1, angle)[0]) <= 2**-20


def test_narrow_tables_are_cast_after_the_cosine() -> None:
    inv_freq, positions = inverse_frequencies(16, 10000.0), torch.tensor([POSITIONS])
    for dtype in (torch.bfloat16, torch.float16):
        for narrow, wide in zip(
            rotary_table(positions, inv_freq, dtype), rotary_table(positions, inv_freq, torch.float32), strict=True
        ):
            assert torch.equal(narrow, wide.to(dtype))


def rotate_loop(x: list[float], position: int, inv_freq: list[float], layout: str) -> list[float]:
    y = list(x)
    pairs = len(inv_freq)
    for i, theta in enumerate(inv_freq):
        a, b = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        cos, sin = math.cos(position * theta), math.sin(position * theta)
        y[a], y[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return y


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("width", "dim"), [(8, 8), (8, 6), (7, 2)])
def test_rotation(layout: str, width: int, dim: int) -> None:
    x, positions = torch.randn(2, 3, 4, width, dtype=torch.float64), torch.tensor([[0, 1, 5, 9], [3, 2, 100, 0]])
    inv_freq = inverse_frequencies(dim, 10000.0)
    y = apply_rotary(x, *rotary_table(positions, inv_freq, torch.float64), layout)
    for b in range(2):
        for h in range(3):
            for t in range(4):
                expected = rotate_loop(x[b, h, t].tolist(), int(positions[b, t]), inv_freq, layout)
                torch.testing.assert_close(y[b, h, t], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_layouts_differ_by_a_permutation() -> None:
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    angles = rotary_table(torch.arange(5)[None], inverse_frequencies(8, 10000.0), torch.float64)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # half -> interleaved
    torch.testing.assert_close(
        apply_rotary(x[..., order], *angles, "interleaved"), apply_rotary(x, *angles, "half")[..., order]
    )


def test_sinusoid() -> None:
    embedding = sinusoidal_embedding(torch.tensor([POSITIONS[:6]]), 6, torch.float64)
    for index, position in enumerate(POSITIONS[:6]):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert abs(float(embedding[0, index, 2 * i]) - math.sin(angle)) <= 1e-10
            assert abs(float(embedding[0, index, 2 * i + 1]) - math.cos(angle)) <= 1e-10


def halves_error() -> float:
    """The largest difference of fairseq's layout and exponents from plain floats."""
    embedding = sinusoidal_embedding(torch.tensor([POSITIONS[:6]]), 8, torch.float64, halves=True, endpoint=True)
    angles = [[position / 10000 ** (i / 3) for i in range(4)] for position in POSITIONS[:6]]
    expected = [[math.sin(angle) for angle in row] + [math.cos(angle) for angle in row] for row in angles]
    return float((embedding[0] - torch.tensor(expected, dtype=torch.float64)).abs().max())


def test_sinusoid_in_halves_up_to_its_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert halves_error() <= 1e-10
    for field in ("halves", "endpoint"):
        with monkeypatch.context() as patch:
            condition(sinusoidal_embedding, field, False)(patch)
            assert halves_error() > 1e-3


def rotate_sinusoid(x: Tensor, by: int, dim: int) -> Tensor:
    """The fixed rotation of each (sine, cosine) pair that shifts a sinusoidal embedding by `by` positions."""
    angle = torch.tensor(inverse_frequencies(dim, 10000.0), dtype=torch.float64) * by
    sin, cos = x[..., 0::2], x[..., 1::2]
    moved = (sin * angle.cos() + cos * angle.sin(), cos * angle.cos() - sin * angle.sin())
    return torch.stack(moved, dim=-1).flatten(-2)


@pytest.mark.parametrize("by", [1, 17, 1000])
def test_a_shift_of_the_sinusoid_is_one_fixed_rotation(by: int) -> None:
    positions = torch.arange(50)[None]
    original, shifted = (sinusoidal_embedding(p, 12, torch.float64) for p in (positions, positions + by))
    torch.testing.assert_close(shifted, rotate_sinusoid(original, by, 12), rtol=0, atol=1e-10)
