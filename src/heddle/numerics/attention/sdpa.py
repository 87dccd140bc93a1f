"""torch's scaled_dot_product_attention, extended by unequal head widths of keys and values and by attention sinks.

A sink is a logit s_h that is added to the softmax's denominator and has no value (gpt-oss). It is written as one extra
key, which is exact and differentiable: q' = [q, s / scale], the sink's key is one-hot in the last dimension, all other
keys are zero there, and its value is zero. Where a kernel returns its log-sum-exp L and no gradient is needed, nothing
is copied: y' = y · sigmoid(L − s).

On CUDA torch's function chooses by itself among four kernels. cuDNN's builds a new plan for each new length (0.02–1 s),
and gave NaN gradients with a mask (pytorch#196678); the efficient one has no grouped heads; the plain one writes T × S
scores, and takes what no other supports. So torch chooses only in causal training, where shapes repeat. There cuDNN's
kernel is called by name if keys and values differ in width, as in latent attention: it needs no padding. Elsewhere
another kernel's operator is called by name. `sdpa_kernel` cannot do this: it sets process-wide switches, which other
threads see.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.dispatch import compute_dtype, device_type, in_autocast_dtype, is_deterministic
from heddle.torch_private import cpu_flash_attention, cudnn_attention, efficient_attention, flash_attention

WIDTH_STEP = 8  # CUDA's fused kernels take head dimensions that are multiples of it
_CUDNN_WIDTH = 256  # the widest heads of cuDNN's kernel on a Hopper GPU, forward and backward
BIAS_STEP = 16  # the efficient kernel needs rows of a bias aligned to it


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    sink: Tensor | None = None,
) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v].

    mask: bool (True where a key is visible) or float (added to the scores), broadcast to [B, H, T, S].
    causal: aligned to the top left, needs T = S. sink: [B, H, T, 1].
    """
    if sink is None:
        return _torch_sdpa(q, k, v, scale, mask, causal)
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, sink))
    if not needs_gradients and device_type(q) == "cpu" and q.shape[2] and k.shape[2]:  # torch divides by their number
        return _sdpa_then_sink(q, k, v, scale, mask, causal, sink)
    q = torch.cat((q, (sink / scale).to(q.dtype)), dim=-1)
    if causal:  # an extra first query, dropped below, aligns the others with the keys after the sink's key
        q = functional.pad(q, (0, 0, 1, 0))
    k = functional.pad(k, (0, 1, 1, 0))
    one_hot = torch.zeros_like(k)
    one_hot[:, :, 0, -1] = 1.0
    if mask is not None:
        mask = functional.pad(mask, (1, 0), value=mask.dtype == torch.bool)  # the sink is visible and has no bias
    y = _torch_sdpa(q, k + one_hot, functional.pad(v, (0, 0, 1, 0)), scale, mask, causal)
    return y[:, :, 1:] if causal else y


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, sink: Tensor | None = None) -> Tensor:
    """torch's flash kernel for CUDA, by name: new lengths need no new plan. Arguments as in `sdpa`, no mask."""
    d_v = v.shape[-1]
    q, k, v = pad_to_equal_widths(*in_autocast_dtype(q, k, v))
    y, logsumexp = flash_attention(q, k, v, causal, scale)
    y = y[..., :d_v]
    return y if sink is None else with_sink(y, logsumexp, sink)


def _efficient(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """torch's efficient kernel for CUDA, by name. Keys and values are repeated for the heads of a group."""
    repeats, d_v = q.shape[1] // k.shape[1], v.shape[-1]
    q, k, v = (functional.pad(x, (0, -x.shape[-1] % WIDTH_STEP)) for x in in_autocast_dtype(q, k, v))
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    if mask is not None:
        keys = mask.shape[-1]
        if mask.dtype == torch.bool:
            mask = q.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
        bias = functional.pad(mask.to(q.dtype), (0, -keys % BIAS_STEP))
        mask = bias[..., :keys].expand(*q.shape[:3], keys)
    return efficient_attention(q, k, v, mask, torch.is_grad_enabled(), causal, scale)[..., :d_v]


def _torch_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    d_v = v.shape[-1]
    torch_chooses = causal and compute_dtype(q) != torch.float32
    if device_type(q) == "cuda" and q.dtype != torch.float64 and not torch_chooses:
        return _efficient(q, k, v, scale, mask, causal)
    if device_type(q) == "cuda" and torch_chooses and v.shape[-1] != q.shape[-1] and _cudnn_serves(q, v):
        return _cudnn(q, k, v, scale)
    if mask is not None and mask.is_floating_point() and device_type(q) != "cpu":
        mask = mask.to(q.dtype)  # a CPU's kernel reads a float32 bias as such; others refuse it, or misread it
    q, k, v = pad_to_equal_widths(q, k, v)
    y = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y[..., :d_v] if d_v < y.shape[-1] else y


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """cuDNN's kernel by name, for causal rows."""
    return cudnn_attention(*in_autocast_dtype(q, k, v), torch.is_grad_enabled(), scale)


def _cudnn_serves(q: Tensor, v: Tensor) -> bool:
    """Whether cuDNN's kernel takes queries and values of these widths. Its backward pass varies in the last bits."""
    widths = q.shape[-1], v.shape[-1]
    fits = max(widths) <= _CUDNN_WIDTH and not any(width % WIDTH_STEP for width in widths)
    narrow = compute_dtype(q) in (torch.bfloat16, torch.float16)
    return fits and narrow and not is_deterministic() and _cudnn_takes_unequal_widths()


@cache
def _cudnn_takes_unequal_widths() -> bool:
    """torch's own condition: Hopper with cuDNN 9.10 or newer. True without a GPU: choices are then only reported."""
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability() == (9, 0) and (torch.backends.cudnn.version() or 0) >= 91000


def _sdpa_then_sink(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool, sink: Tensor
) -> Tensor:
    """Attend without the sink, then scale the output by the sink's share of the softmax (CPU, no gradients)."""
    d_v = v.shape[-1]
    q, k, v = pad_to_equal_widths(q, k, v)
    bias = mask
    if mask is not None and mask.dtype == torch.bool:
        bias = q.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    y, logsumexp = cpu_flash_attention(q, k, v, bias, causal, scale)
    return with_sink(y[..., :d_v], logsumexp, sink)


def with_sink(y: Tensor, logsumexp: Tensor, sink: Tensor) -> Tensor:
    """Scale attention's output without a sink by the share of the softmax that the sink [B, H, T, 1] leaves."""
    output_share = (logsumexp[..., : y.shape[2], None] - sink.to(logsumexp.dtype)).sigmoid()
    return (y * output_share).to(y.dtype)


def pad_to_equal_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad keys or values with zeros to the same width, as torch's kernel requires."""
    d_k, d_v = q.shape[-1], v.shape[-1]
    if d_k < d_v:
        return functional.pad(q, (0, d_v - d_k)), functional.pad(k, (0, d_v - d_k)), v
    return q, k, functional.pad(v, (0, d_k - d_v)) if d_v < d_k else v


# Softmax attention to packed documents in one call: torch's `varlen_attn`, a flash kernel over a list of documents.
#
# The tokens of all rows are concatenated, and `cu_seqlens` says where each document starts. It is computed once for all
# layers, on the device, so that the host does not wait.


@cache
def varlen_parameters() -> frozenset[str]:
    """The parameters of this torch's `varlen_attn`. They differ from release to release."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def cu_seqlens(mask: AttentionMask) -> Tensor:
    """Number of tokens before each packed document, then of all: int32 [documents + 1], on the mask's device."""
    assert mask.doc_lengths is not None
    rows, length = mask.q_positions.shape
    documents, device = sum(map(len, mask.doc_lengths)), mask.q_positions.device
    is_start = torch.ones(rows, length, dtype=torch.bool, device=device)
    if mask.q_segment_ids is not None and length:
        is_start[:, 1:] = mask.q_segment_ids[:, 1:] != mask.q_segment_ids[:, :-1]
    elif length:
        is_start[:, 1:] = False  # `fill_`, which copies nothing from the host
    lengths = torch.zeros(documents + 1, dtype=torch.int32, device=device)
    numbers = is_start.flatten().cumsum(0)  # of the document of each token, from 1 on
    return lengths.scatter_add_(0, numbers, torch.ones_like(numbers, dtype=torch.int32)).cumsum(0, dtype=torch.int32)


def longest_document(mask: AttentionMask) -> int:
    """An upper bound of document lengths, which sizes the kernel's grid. A power of two, so that few values occur."""
    assert mask.doc_lengths is not None
    most = max((size for row in mask.doc_lengths for size in row), default=1)
    return 1 << (most - 1).bit_length()


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, sink: Tensor | None) -> Tensor:
    """q [B, H, T, d_k], k [B, G, T, d_k], v [B, G, T, d_v] -> [B, H, T, d_v]. sink: [B, H, T, 1], without gradients."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    rows, d_v = q.shape[0], v.shape[3]
    q, k, v = pad_to_equal_widths(*in_autocast_dtype(q, k, v))
    starts = mask.cached("cu_seqlens", lambda: cu_seqlens(mask))
    most = longest_document(mask)
    if mask.causal:
        window = (-1 if mask.window is None else mask.window - 1, 0)
    else:
        window = (-1, -1) if mask.window is None else (mask.window, mask.window)
    options: dict[str, Any] = {"return_aux": AuxRequest(lse=True), "scale": scale, "window_size": window}
    if "enable_gqa" in varlen_parameters():
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    result: Any = varlen_attn(q, k, v, starts, starts, most, most, **options)
    y: Tensor = result[0].unflatten(0, (rows, -1)).transpose(1, 2)[..., :d_v]
    if sink is None:
        return y
    return with_sink(y, result[1].unflatten(1, (rows, -1)).transpose(0, 1), sink)
