"""Weight-only quantization: products with weights of 8 or 4 bits, for decoding on a CPU.

```text
8 bits   W ≈ s_o q             q from −127 to 127, one scale s_o for each output
4 bits   W ≈ s_og (q − 8) + m_og   q from 0 to 15, a scale and a middle for each output and group of 32 inputs
```

Scales and middles are bfloat16, and q is the nearest whole number for the rounded scale (Dettmers et al. 2022; Frantar
et al. 2023 round better, with a text). torch's kernels read q as it is stored and multiply activations in bfloat16. One
row then takes the time of reading q. With more rows, and in float64, W is made again and multiplied.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch import Kernel, Operation, add_flops, device_type
from heddle.torch_private import int4_product, int8_product, pack_int4

BITS = (8, 4)
GROUP = 32  # inputs that share a scale with 4 bits. torch's kernel of 8 bits reads beyond a row that is no multiple
OUTPUT_MULTIPLE = 16  # of the kernel of 4 bits
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
    """Whether a matrix of these sizes has a form of so many bits."""
    return inputs % GROUP == 0 and (bits == 8 or outputs % OUTPUT_MULTIPLE == 0)


def quantize(weight: Tensor, bits: int) -> QuantizedMatrix:
    """weight [outputs, inputs], in any dtype, to 8 or 4 bits. Sizes as `can_quantize` says."""
    wide = weight.detach().float()
    if bits == 8:
        scales = _nonzero(wide.abs().amax(1) / 127).bfloat16()
        codes = (wide / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return QuantizedMatrix(codes, scales, None)
    groups = wide.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    steps = _nonzero((high - low) / 15).bfloat16()
    middles = (low + 8 * steps.float()).bfloat16()
    codes = ((groups - middles.float()[..., None]) / steps.float()[..., None] + 8).round_().clamp_(0, 15)
    whole = codes.flatten(1).to(torch.int32)
    packed = pack_int4(whole)
    scales = torch.stack([steps, middles], dim=-1).transpose(0, 1).contiguous()
    pairs = whole.to(torch.uint8).unflatten(1, (-1, 2))
    return QuantizedMatrix(pairs[..., 0] | (pairs[..., 1] << 4), scales, packed)


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """The weight [outputs, inputs] that a matrix stands for."""
    if matrix.bits == 8:
        return matrix.codes.to(dtype) * matrix.scales.to(dtype)[:, None]
    codes = torch.stack([matrix.codes & 15, matrix.codes >> 4], dim=-1).flatten(1)
    steps, middles = matrix.scales.to(dtype).transpose(0, 1).unbind(-1)
    groups = (codes.to(dtype) - 8).unflatten(1, (-1, GROUP)) * steps[..., None] + middles[..., None]
    weight: Tensor = groups.flatten(1)
    return weight


def quantized_linear(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    """x [..., inputs] times the weight that the matrix stands for, plus bias [outputs] -> [..., outputs]."""
    rows = x.numel() // max(x.shape[-1], 1)
    add_flops(2 * rows * x.shape[-1] * matrix.codes.shape[0])
    facts = QuantizedFacts(rows, torch.is_grad_enabled() and x.requires_grad, device_type(x), x.dtype)
    y: Tensor = QUANTIZED_LINEAR.choose(facts).run(x, matrix, bias)
    return y


def reference(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """`quantized_linear` with the weight made again."""
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
        return "it is for the CPU"
    if facts.gradients:
        return "gradients are wanted"
    if not 1 <= facts.rows <= MAX_PACKED_ROWS:
        return f"it multiplies 1 to {MAX_PACKED_ROWS} rows, here are {facts.rows}"
    return None if facts.dtype in (torch.float32, torch.bfloat16) else f"it rounds {facts.dtype} to bfloat16"


def _nonzero(scales: Tensor) -> Tensor:
    """Scales of which none is zero, so that a row of zeros stays one."""
    return scales.clamp(min=1e-8)


QUANTIZED_LINEAR = Operation(
    "quantized_linear",
    (
        Kernel("packed", _packed, _packed_unsupported),
        Kernel("reference", reference, lambda facts: None),
    ),
)
