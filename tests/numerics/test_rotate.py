"""Rotations and sinusoids against Python's own floats, to positions of a million and in every dtype."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from heddle.numerics.rotary import frequencies, rotate, sinusoid, table

# π to 50 digits: angles of a million turns are reduced exactly before their cosine is taken.
PI = Fraction(314159265358979323846264338327950288419716939937510, 10**50)
POSITIONS = [0, 1, 2, 257, 4096, 8191, 65535, 2**20 - 1, 2**20]


def exact(position: int, theta: float) -> tuple[float, float]:
    """Cosine and sine of position · theta, theta taken as it is."""
    angle = Fraction(theta) * position
    reduced = float(angle - 2 * PI * round(angle / (2 * PI)))
    return math.cos(reduced), math.sin(reduced)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_tables_at_large_positions(base: float) -> None:
    thetas = frequencies(16, base)
    cosine, sine = table(torch.tensor([POSITIONS]), thetas, torch.float64)
    for index, position in enumerate(POSITIONS):
        for pair, theta in enumerate(thetas):
            want = exact(position, theta)
            assert abs(float(cosine[0, 0, index, pair]) - want[0]) <= 2**-20
            assert abs(float(sine[0, 0, index, pair]) - want[1]) <= 2**-20


def test_float32_tables_take_the_rounded_frequency() -> None:
    """The frequency and the angle are rounded to float32, as in transformers; nothing else is lost."""
    thetas = frequencies(16, 10000.0)
    cosine, _ = table(torch.tensor([POSITIONS]), thetas, torch.float32)
    for index, position in enumerate(POSITIONS):
        for pair, theta in enumerate(torch.tensor(thetas, dtype=torch.float32).tolist()):
            angle = float(torch.tensor(position * theta, dtype=torch.float32))
            assert abs(float(cosine[0, 0, index, pair]) - exact(1, angle)[0]) <= 2**-20


def test_narrow_tables_are_cast_after_the_cosine() -> None:
    thetas, positions = frequencies(16, 10000.0), torch.tensor([POSITIONS])
    for dtype in (torch.bfloat16, torch.float16):
        for narrow, wide in zip(table(positions, thetas, dtype), table(positions, thetas, torch.float32), strict=True):
            assert torch.equal(narrow, wide.to(dtype))


def rotate_loop(x: list[float], position: int, thetas: list[float], layout: str) -> list[float]:
    y = list(x)
    pairs = len(thetas)
    for i, theta in enumerate(thetas):
        a, b = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        cosine, sine = math.cos(position * theta), math.sin(position * theta)
        y[a], y[b] = x[a] * cosine - x[b] * sine, x[b] * cosine + x[a] * sine
    return y


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("width", "dim"), [(8, 8), (8, 6), (7, 2)])
def test_rotation(layout: str, width: int, dim: int) -> None:
    x, positions = torch.randn(2, 3, 4, width, dtype=torch.float64), torch.tensor([[0, 1, 5, 9], [3, 2, 100, 0]])
    thetas = frequencies(dim, 10000.0)
    y = rotate(x, *table(positions, thetas, torch.float64), layout)
    for b in range(2):
        for h in range(3):
            for t in range(4):
                want = rotate_loop(x[b, h, t].tolist(), int(positions[b, t]), thetas, layout)
                torch.testing.assert_close(y[b, h, t], torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_layouts_are_one_function_up_to_a_permutation() -> None:
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    angles = table(torch.arange(5)[None], frequencies(8, 10000.0), torch.float64)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # half -> interleaved
    torch.testing.assert_close(rotate(x[..., order], *angles, "interleaved"), rotate(x, *angles, "half")[..., order])


def test_sinusoid() -> None:
    table_of = sinusoid(torch.tensor([POSITIONS[:6]]), 6, torch.float64)
    for index, position in enumerate(POSITIONS[:6]):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert abs(float(table_of[0, index, 2 * i]) - math.sin(angle)) <= 1e-10
            assert abs(float(table_of[0, index, 2 * i + 1]) - math.cos(angle)) <= 1e-10


def turned(x: Tensor, by: int, dim: int) -> Tensor:
    """The fixed rotation of each (sine, cosine) pair that moves a sinusoid `by` positions on."""
    angle = torch.tensor(frequencies(dim, 10000.0), dtype=torch.float64) * by
    sine, cosine = x[..., 0::2], x[..., 1::2]
    moved = (sine * angle.cos() + cosine * angle.sin(), cosine * angle.cos() - sine * angle.sin())
    return torch.stack(moved, dim=-1).flatten(-2)


@pytest.mark.parametrize("by", [1, 17, 1000])
def test_a_shift_of_the_sinusoid_is_one_fixed_rotation(by: int) -> None:
    positions = torch.arange(50)[None]
    here, there = (sinusoid(p, 12, torch.float64) for p in (positions, positions + by))
    torch.testing.assert_close(there, turned(here, by, 12), rtol=0, atol=1e-10)
