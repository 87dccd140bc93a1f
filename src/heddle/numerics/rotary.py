"""Rotary position embedding (Su et al. 2021): pair i at position m is rotated by `m·θ_i`, `θ_i = base^(-2i/d)`.

θ is called inv_freq here, as in transformers. The two layouts differ by a permutation of the dimensions: `half` pairs
(i, i + d/2), `interleaved` pairs (2i, 2i + 1). Angles are computed in float32 (float64 for float64 inputs).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_exporting

from heddle.numerics import native
from heddle.numerics.dispatch import Kernel, Operation
from heddle.numerics.transfer import Constants, tensor_of


def inverse_frequencies(dim: int, base: float) -> list[float]:
    """`θ_i = base^(-2i/dim)` for i in 0 … dim/2 − 1, in Python's float64."""
    return [base ** (-2 * i / dim) for i in range(dim // 2)]


def pos_freqs(dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """`1/θ_i = base^(2i/dim)` [dim/2], on the CPU, computed in `dtype`.

    The frequencies are rounded as in transformers, by float32 arithmetic: a difference of one ulp would rotate a fast
    pair by an extra thousandth at position 30,000. transformers calls this value `pos_freqs`.
    """
    return base ** (torch.arange(0, dim, 2, dtype=dtype, device="cpu") / dim)


def angle_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which angles are computed for a table of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rotary_table(
    positions: Tensor, inv_freq: list[float] | Tensor, dtype: torch.dtype, attention_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Positions [B, T] -> `attention_factor` times cosine and sine [B, 1, T, pairs], in `dtype`, for x [B, H, T, d].

    inv_freq: shared by all tokens (a list, or [pairs]), or per token, [B, T or 1, pairs]. Coordinates on several axes,
    [B, T, axes] and of any sign, give [B, 1, T, axes, pairs]. As in transformers, inv_freq is rounded to float32 before
    it is multiplied, and the table is cast to a narrower dtype only after the cosine. Padding (position −1) is rotated
    like position 0; its result is never used.
    """
    wide = angle_dtype(dtype)
    if isinstance(inv_freq, Tensor):
        frequency = inv_freq.to(wide) if inv_freq.dim() == 1 else inv_freq.to(wide)[:, None]
    else:
        frequency = tensor_of(inv_freq, wide, positions.device)
    clamped = positions.clamp(min=0) if positions.dim() == 2 else positions
    angle = clamped.to(wide)[:, None, ..., None] * frequency
    table = (angle.cos() * attention_factor).to(dtype), (angle.sin() * attention_factor).to(dtype)
    if is_compiling() and positions.device.type == "cpu" and not is_exporting() and not angle.requires_grad:
        return torch.ops.heddle.computed_once(table[0]), torch.ops.heddle.computed_once(table[1])
    return table


# In a graph, Inductor would compute cosines and sines again in the kernels of every layer, forward and backward.
_library = torch.library.Library("heddle", "FRAGMENT")
_library.define("computed_once(Tensor x) -> Tensor")
_library.impl("computed_once", torch.clone, "CPU")
_library.impl("computed_once", torch.empty_like, "Meta")


class RotaryFacts(NamedTuple):
    """What decides the kernel of a rotation. native: whether its C++ operator serves these tensors."""

    dtype: torch.dtype
    shared: bool  # one table for all heads, without gradients, in the dtype of x
    native: bool


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate the first 2·pairs dimensions of heads x [B, H, T, d] by a table. The other dimensions are unchanged.

    `layout` is "half" or "interleaved", and must be the one the weights were trained with.
    """
    serves = native.serves("rotary", x, cos, sin)
    shared = serves and x.dim() == cos.dim() == 4 and cos.dtype == x.dtype and not cos.requires_grad
    shared = shared and cos.shape[0] in (1, x.shape[0]) and cos.shape[1:3] == (1, x.shape[2])
    y: Tensor = ROTARY.choose(RotaryFacts(x.dtype, shared, serves)).run(x, cos, sin, layout)
    return y


def _native(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    y: Tensor = torch.ops.heddle.rotary(x, cos, sin, layout == "half")
    return y


def _native_unsupported(facts: RotaryFacts) -> str | None:
    if not facts.native:
        return native.NOT_IN_USE
    if not facts.shared:
        return "heads have tables of their own, or the table differs in dtype"
    return native.unsupported_dtype(facts.dtype)


def reference(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """The rotation, elementwise. The arguments are described in `apply_rotary`."""
    rotary_dim = 2 * cos.shape[-1]
    rotated_dims, unrotated = (x, None) if rotary_dim == x.shape[-1] else (x[..., :rotary_dim], x[..., rotary_dim:])
    if layout == "half":
        first, second = rotated_dims.chunk(2, dim=-1)
        y = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = rotated_dims[..., 0::2], rotated_dims[..., 1::2]
        y = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return y if unrotated is None else torch.cat((y, unrotated), dim=-1)


ROTARY: Operation[RotaryFacts] = Operation(
    "rotary",
    (
        Kernel("native", _native, _native_unsupported, traceable=False),
        Kernel("reference", reference, lambda facts: None),
    ),
)


def sinusoidal_embedding(
    positions: Tensor,
    dim: int,
    dtype: torch.dtype,
    constants: Constants | None = None,
    *,
    halves: bool = False,
    endpoint: bool = False,
) -> Tensor:
    """Sinusoidal position embedding (Vaswani et al. 2017): positions [B, T] -> [B, T, dim].

    `PE[p, 2i] = sin(p / 10000^(2i/dim))`, `PE[p, 2i+1] = cos(…)`. `PE[p + k]` is a fixed rotation of `PE[p]`.
    constants: store the frequencies from one call to the next. halves: all sines, then all cosines. endpoint: the
    exponents are i / (dim/2 − 1), so that the last is 1.
    """
    wide = angle_dtype(dtype)
    last = max(1, dim // 2 - 1)
    by_endpoint = (10000.0 ** (-index / last) for index in range(dim // 2))
    frequencies = tuple(by_endpoint if endpoint else inverse_frequencies(dim, 10000.0))
    frequency = (constants or Constants()).tensor(frequencies, wide, positions.device)
    angle = positions.clamp(min=0).to(wide)[..., None] * frequency
    if halves:
        return torch.cat((angle.sin(), angle.cos()), dim=-1).to(dtype)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2).to(dtype)
