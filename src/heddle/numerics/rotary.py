"""Rotary position embedding (Su et al. 2021): pair i at position m turns by `m·θ_i`, `θ_i = base^(-2i/d)`.

Two layouts of the pairs, one function up to a permutation: `half` pairs dims (i, i + d/2), `interleaved`
pairs (2i, 2i + 1). Angles are computed in float32 (float64 for float64 inputs), never in a model's bfloat16.
"""

import torch
from torch import Tensor


def frequencies(dim: int, base: float) -> list[float]:
    """`θ_i = base^(-2i/dim)` for i in 0 … dim/2 − 1, in Python's float64."""
    return [base ** (-2 * i / dim) for i in range(dim // 2)]


def periods(dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """`1/θ_i = base^(2i/dim)` [dim/2], on the CPU, computed in `dtype`.

    Models are trained with the frequencies that float32 arithmetic gives, and served with these by transformers: one
    ulp more or less would turn a fast pair by a thousandth at position 30,000.
    """
    return base ** (torch.arange(0, dim, 2, dtype=dtype, device="cpu") / dim)


def table(positions: Tensor, thetas: list[float], dtype: torch.dtype, amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Positions [B, T] -> `amplitude` times cosine and sine [B, 1, T, pairs], in `dtype`, to rotate [B, H, T, d].

    Coordinates along several axes, [B, T, axes] and of any sign, give [B, 1, T, axes, pairs]. As in transformers,
    the frequency is rounded to float32 before it is multiplied, and the table is cast to a narrower dtype only
    after the cosine. Padding (position −1) is rotated like position 0: nobody sees it.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    theta = torch.tensor(thetas, dtype=wide, device=positions.device)
    known = positions.clamp(min=0) if positions.dim() == 2 else positions
    angle = known.to(wide)[:, None, ..., None] * theta
    return (angle.cos() * amplitude).to(dtype), (angle.sin() * amplitude).to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, layout: str) -> Tensor:
    """Rotate the first 2·pairs dims of heads x [B, H, T, d] by a table; the other dims pass unchanged.

    `layout` is "half" or "interleaved" and must be the one the weights were trained with.
    """
    dim = 2 * cosine.shape[-1]
    turned, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    if layout == "half":
        first, second = turned.chunk(2, dim=-1)
        y = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=-1).flatten(-2)
    return y if rest is None else torch.cat((y, rest), dim=-1)


def sinusoid(positions: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Sinusoidal positions (Vaswani et al. 2017): positions [B, T] -> [B, T, dim].

    `PE[p, 2i] = sin(p / 10000^(2i/dim))`, `PE[p, 2i+1] = cos(…)`: `PE[p + k]` is one fixed rotation of `PE[p]`.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    theta = torch.tensor(frequencies(dim, 10000.0), dtype=wide, device=positions.device)
    angle = positions.clamp(min=0).to(wide)[..., None] * theta
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2).to(dtype)
