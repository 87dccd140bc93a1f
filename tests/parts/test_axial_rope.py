"""Axial rotary embeddings against complex numbers, and coordinates recovered from rotated vectors."""

import cmath
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.config import DesignError, parse_config
from heddle.laws.harness import (
    assert_close,
    forward_no_grad,
    forward_with_state,
    model_under_test,
    new_state,
    random_tokens,
)
from heddle.model.config import ModelConfig
from heddle.parts.layout import Layout
from heddle.parts.positions.axial_rope import AxialRope, AxialRopeConfig
from tests.cases import alone, attention, case, design, layer
from tests.parts.recovered_coordinates import recover_coordinates

COORDINATES: list[list[list[float]]] = [[[0, 0], [3, 1], [2.5, -7], [-40, 11]], [[5, 5], [0, -1], [900, 2], [1, 0.25]]]
LAYOUTS = ("half", "interleaved")


def built(head_dim: int = 16, **fields: Any) -> AxialRope:
    return AxialRopeConfig(**fields).build(head_dim)


def rotated(rotation: AxialRope, x: Tensor, coordinates: Tensor) -> Tensor:
    return rotation(x, Layout.causal(*coordinates.shape[:2]).with_coordinates(coordinates))


def loop(x: list[float], coordinate: list[float], dim: int, base: float, layout: str) -> list[float]:
    """One head by complex numbers: x rotates the pairs in the first half of `dim`, y those in the second."""
    y, half = list(x), dim // 2
    for axis in (0, 1):
        for i in range(half // 2):
            a, b = (i, i + half // 2) if layout == "half" else (2 * i, 2 * i + 1)
            a, b = a + axis * half, b + axis * half
            rotation_factor = cmath.exp(1j * coordinate[axis] * base ** (-2 * i / half))
            pair = complex(x[a], x[b]) * rotation_factor
            y[a], y[b] = pair.real, pair.imag
    return y


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("head_dim", "dim"), [(16, None), (4, None), (11, 8)])
def test_heads_are_rotated_like_complex_numbers(layout: str, head_dim: int, dim: int | None) -> None:
    rotation = built(head_dim, rotary_dim=dim, layout=layout, base=300.0)
    x, coordinates = torch.randn(2, 3, 4, head_dim, dtype=torch.float64), torch.tensor(COORDINATES, dtype=torch.float64)
    y = rotated(rotation, x, coordinates)
    for b in range(2):
        for h in range(3):
            for t in range(4):
                want = loop(x[b, h, t].tolist(), COORDINATES[b][t], dim or head_dim, 300.0, layout)
                torch.testing.assert_close(y[b, h, t], torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_depend_on_differences_of_both_axes_only(layout: str) -> None:
    rotation = built(layout=layout)
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64) for _ in range(2))

    def score(query: list[float], key: list[float]) -> float:
        query_coordinates, key_coordinates = (
            torch.tensor([[coordinate]], dtype=torch.float64) for coordinate in (query, key)
        )
        return float((rotated(rotation, q, query_coordinates) * rotated(rotation, k, key_coordinates)).sum())

    start = score([3, 5], [1, 9])
    for shift in ((1, 0), (0, 1), (250, -3), (-0.5, 64)):
        assert abs(score([3 + shift[0], 5 + shift[1]], [1 + shift[0], 9 + shift[1]]) - start) <= 1e-10
    assert abs(score([4, 5], [1, 9]) - start) > 1e-6
    assert abs(score([3, 6], [1, 9]) - start) > 1e-6


def test_without_coordinates_both_halves_are_rotated_like_rope() -> None:
    tokens = random_tokens(case("axial-mha"), 2, 9)
    twice = {"kind": "rope", "layout": "interleaved", "inv_freq": [1.0, 10000**-0.5, 1.0, 10000**-0.5]}
    flat = parse_config(ModelConfig, alone(head_dim=8, position={"kind": "axial_rope", "layout": "interleaved"}))
    plain = model_under_test(parse_config(ModelConfig, alone(head_dim=8, position=twice)))
    assert_close(forward_no_grad(model_under_test(flat), tokens), forward_no_grad(plain, tokens), "without coordinates")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float64, 16), (torch.float32, 16), (torch.float64, 8)])
def test_integer_coordinates_are_recovered(layout: str, dtype: torch.dtype, head_dim: int) -> None:
    rotation = built(head_dim + 3, rotary_dim=head_dim, layout=layout, base=100.0)
    most = math.floor(math.pi / min(rotation.inv_freq))
    line = torch.arange(-most, most + 1)
    coordinates = torch.stack((line, line.flip(0)), dim=-1)[None]
    x = torch.randn(1, 2, len(line), head_dim + 3, dtype=dtype)
    recovered = recover_coordinates(rotation, x, rotated(rotation, x, coordinates))
    assert torch.equal(recovered.round().long(), coordinates)
    assert (recovered - coordinates).abs().max() < (1e-9 if dtype == torch.float64 else 1e-3)


def test_coordinates_are_recovered_up_to_the_slowest_period() -> None:
    rotation = built(16, inv_freq=(1.0, 0.5, 0.25, 0.125))
    period = 2 * math.pi / 0.125
    x = torch.randn(1, 1, 2, 16, dtype=torch.float64)
    coordinates = torch.tensor([[[period + 3, 4.0], [-period - 2.5, 3 * period - 20.75]]], dtype=torch.float64)
    want = torch.tensor([[[3, 4.0], [-2.5, -20.75]]], dtype=torch.float64)
    torch.testing.assert_close(
        recover_coordinates(rotation, x, rotated(rotation, x, coordinates)), want, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(
    ("head_dim", "fields", "message"),
    [
        (6, {}, "rotary_dim: 6 dims"),
        (
            8,
            {"rotary_dim": 12},
            "rotary_dim: 12 dims",
        ),
        (8, {"inv_freq": (1.0,)}, r"inv_freq: 1 given.*rotary_dim"),
    ],
)
def test_invalid_fields_raise(head_dim: int, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DesignError, match=f"^{message}"):
        built(head_dim, **fields)


def test_an_error_names_the_path() -> None:
    config = parse_config(ModelConfig, design(layer(attention(3, head_dim=6, position={"kind": "axial_rope"}))))
    with pytest.raises(DesignError, match=r"^layers\[0\]\.mixer\.position\.rotary_dim: 6 dims"):
        model_under_test(config)


def test_each_call_with_a_state_has_its_own_coordinates() -> None:
    config = case("axial-mha")
    model, tokens = model_under_test(config), random_tokens(config, 2, 6)
    coordinates = torch.randint(-20, 20, (2, 6, 2))
    whole = forward_no_grad(model, tokens, Layout.causal(2, 6).with_coordinates(coordinates))
    state, outputs = new_state(model, 2), []
    for start in range(6):
        layout = state.table.next_layout(1).with_coordinates(coordinates[:, start : start + 1])
        hidden, state = forward_with_state(model, state, tokens[:, start : start + 1], layout)
        outputs.append(hidden)
    assert_close(torch.cat(outputs, dim=1), whole, "token by token")
    without_coordinates, _ = forward_with_state(model, new_state(model, 2), tokens)
    assert not torch.equal(without_coordinates, whole)


def test_float64_angles() -> None:
    """At large coordinates in a float32 model, a mixer without softmax gets float64 angles."""
    rotation, coordinates = built(8), torch.full((1, 1, 2), 100003)
    x = torch.randn(1, 1, 1, 8)
    float32_angles, float64_angles = rotated(rotation, x, coordinates), rotated(rotation, x.double(), coordinates)
    rotation.float64_angles = True
    assert (
        (rotated(rotation, x, coordinates) - float64_angles).abs().max()
        < 1e-6
        < (float32_angles - float64_angles).abs().max()
    )
