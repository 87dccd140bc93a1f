"""Weight-only quantization: products with weights of 8 or 4 bits, for decoding on a CPU.

```text
8 bits   W ≈ s_o q             q from −127 to 127, one scale s_o for each output
4 bits   W ≈ s_og (q − 8) + m_og   q from 0 to 15, a scale and a middle for each output and group of 32 inputs
```

Scales and middles are bfloat16, and q is the nearest whole number for the rounded scale (Dettmers et al. 2022). With 4
bits the scale and the middle of a group are the candidates with the least squared error, as in llama.cpp's K-quants
(Frantar et al. 2023 round better, with calibration data). torch's kernels read q as it is stored and multiply
activations in bfloat16. One row then takes the time of reading q. With more rows, and in float64, W is dequantized
first.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch import Kernel, Operation, add_flops, device_type
from heddle.torch_private import int4_product, int8_product, pack_int4

BITS = (8, 4)
GROUP = 32  # inputs that share a 4-bit scale. torch's 8-bit kernel reads past the end of a row that is not a multiple
OUTPUT_MULTIPLE = 16  # outputs of the 4-bit kernel are a multiple of it
_SHRINKS = (1.0, 0.9)  # factors of a group's range
_ROWS_AT_ONCE = 2**12  # outputs whose groups are searched together, which bounds the memory
MAX_PACKED_ROWS = 8  # with more rows, torch's kernels are slower than a product with W


class QuantizedMatrix(NamedTuple):
    """A weight [outputs, inputs] of 8 or 4 bits.

    codes: int8 [outputs, inputs], or uint8 [outputs, inputs / 2] with the even inputs in the low bits. scales: bfloat16
    [outputs], or [inputs / 32, outputs, 2] with the scale and the middle. packed: 4-bit codes in the kernel's layout.
    """

    codes: Tensor
    scales: Tensor
    packed: Tensor | None

    @property
    def bits(self) -> int:
        """8 or 4."""
        return 8 if self.packed is None else 4


class QuantizedFacts(NamedTuple):
    """What decides the kernel: rows of x, whether gradients are required, device, dtype."""

    rows: int
    gradients: bool
    device: str
    dtype: torch.dtype


def can_quantize(outputs: int, inputs: int, bits: int) -> bool:
    """Whether a matrix of these sizes can be quantized to `bits`."""
    return inputs % GROUP == 0 and (bits == 8 or outputs % OUTPUT_MULTIPLE == 0)


def quantize(weight: Tensor, bits: int) -> QuantizedMatrix:
    """Quantize weight [outputs, inputs], in any dtype, to 8 or 4 bits. `can_quantize` must hold for its sizes."""
    wide = weight.detach().float()
    if bits == 8:
        scales = _nonzero(wide.abs().amax(1) / 127).bfloat16()
        codes = (wide / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return QuantizedMatrix(codes, scales, None)
    parts = [_round_groups(rows.unflatten(1, (-1, GROUP))) for rows in wide.split(_ROWS_AT_ONCE)]
    codes, steps, middles = (torch.cat(part) for part in zip(*parts, strict=True))
    whole = codes.flatten(1).to(torch.int32)
    packed = pack_int4(whole)
    scales = torch.stack([steps, middles], dim=-1).transpose(0, 1).contiguous()
    pairs = whole.to(torch.uint8).unflatten(1, (-1, 2))
    return QuantizedMatrix(pairs[..., 0] | (pairs[..., 1] << 4), scales, packed)


def _round_groups(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [outputs, groups, 32], steps and middles [outputs, groups] that bring each group near its weights.

    The range of a group is shrunk by each of _SHRINKS, the codes of that range are taken, and a step and a middle are
    fitted to them by least squares; the pair with the least squared error is kept. A range that leaves out one large
    weight often rounds the other 31 better.
    """
    low, high = groups.amin(2), groups.amax(2)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = torch.full_like(low, torch.inf)
    for shrink in _SHRINKS:
        inset = (1 - shrink) / 2 * (high - low)
        steps, middles = _rounded((high - low - 2 * inset) / 15, low + inset)
        codes = _codes(groups, steps, middles)
        for fit in (False, True):
            if fit:
                steps, middles = _rounded(*_least_squares(groups, codes))
                codes = _codes(groups, steps, middles)
            error = ((codes - 8) * steps[..., None] + middles[..., None] - groups).square_().sum(2)
            better = error < least
            least = torch.where(better, error, least)
            if best is None:
                best = codes, steps, middles
            else:
                best = (
                    torch.where(better[..., None], codes, best[0]),
                    torch.where(better, steps, best[1]),
                    torch.where(better, middles, best[2]),
                )
    assert best is not None
    return best[0], best[1].bfloat16(), best[2].bfloat16()


def _rounded(steps: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor]:
    """Steps and middles as bfloat16 holds them, in float32. lowest: what code 0 stands for."""
    steps = _nonzero(steps).bfloat16().float()
    return steps, (lowest + 8 * steps).bfloat16().float()


def _codes(groups: Tensor, steps: Tensor, middles: Tensor) -> Tensor:
    return ((groups - middles[..., None]) / steps[..., None] + 8).round_().clamp_(0, 15)


def _least_squares(groups: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The step and what code 0 stands for that fit a group's weights best for these codes."""
    centered = codes - codes.mean(2, keepdim=True)
    steps = (centered * groups).sum(2) / centered.square().sum(2).clamp(min=1e-8)
    return steps, groups.mean(2) - steps * codes.mean(2)


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """The weight [outputs, inputs] that a matrix represents, in `dtype`."""
    if matrix.bits == 8:
        return matrix.codes.to(dtype) * matrix.scales.to(dtype)[:, None]
    codes = torch.stack([matrix.codes & 15, matrix.codes >> 4], dim=-1).flatten(1)
    steps, middles = matrix.scales.to(dtype).transpose(0, 1).unbind(-1)
    groups = (codes.to(dtype) - 8).unflatten(1, (-1, GROUP)) * steps[..., None] + middles[..., None]
    weight: Tensor = groups.flatten(1)
    return weight


def quantized_linear(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    """x [..., inputs] times the weight that the matrix represents, plus bias [outputs] -> [..., outputs]."""
    rows = x.numel() // max(x.shape[-1], 1)
    add_flops(2 * rows * x.shape[-1] * matrix.codes.shape[0])
    facts = QuantizedFacts(rows, torch.is_grad_enabled() and x.requires_grad, device_type(x), x.dtype)
    y: Tensor = QUANTIZED_LINEAR.choose(facts).run(x, matrix, bias)
    return y


def reference(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """`quantized_linear` with the dequantized weight."""
    return functional.linear(x, dequantize(matrix, x.dtype), bias)


def _packed(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).bfloat16()
    if matrix.packed is None:
        products = int8_product(rows, matrix.codes, matrix.scales)
    else:
        products = int4_product(rows, matrix.packed, GROUP, matrix.scales)
    y: Tensor = products.to(x.dtype).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def _packed_unsupported(facts: QuantizedFacts) -> str | None:
    if facts.device != "cpu":
        return "it runs on the CPU only"
    if facts.gradients:
        return "gradients are required"
    if not 1 <= facts.rows <= MAX_PACKED_ROWS:
        return f"it takes 1 to {MAX_PACKED_ROWS} rows, not {facts.rows}"
    return None if facts.dtype in (torch.float32, torch.bfloat16) else f"it rounds {facts.dtype} to bfloat16"


def _nonzero(scales: Tensor) -> Tensor:
    """Scales above zero, so that a row of zeros stays zero."""
    return scales.clamp(min=1e-8)


QUANTIZED_LINEAR = Operation(
    "quantized_linear",
    (
        Kernel("packed", _packed, _packed_unsupported),
        Kernel("reference", reference, lambda facts: None),
    ),
)
