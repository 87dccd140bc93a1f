"""torch's scaled_dot_product_attention, extended by unequal head widths of keys and values and by attention sinks.

A sink is a logit s_h that is added to the softmax's denominator and has no value (gpt-oss). It is written as one extra
key, which is exact and differentiable: q' = [q, s / scale], the sink's key is one-hot in the last dimension, all other
keys are zero there, and its value is zero. On a CPU without gradients the kernel returns its log-sum-exp L, and nothing
is copied: y' = y · sigmoid(L − s).
"""

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch.operation import device_type


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
    if not needs_gradients and device_type(q) == "cpu" and q.shape[2]:
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


def _torch_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    d_v = v.shape[-1]
    q, k, v = _pad_to_equal_widths(q, k, v)
    y = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y[..., :d_v] if d_v < y.shape[-1] else y


def _sdpa_then_sink(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool, sink: Tensor
) -> Tensor:
    """Attend without the sink, then scale the output by the sink's share of the softmax (CPU, no gradients)."""
    d_v = v.shape[-1]
    q, k, v = _pad_to_equal_widths(q, k, v)
    bias = mask
    if mask is not None and mask.dtype == torch.bool:
        bias = q.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    y: Tensor
    log_sum_exp: Tensor
    y, log_sum_exp = kernel(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    output_share = (log_sum_exp[..., None] - sink.to(log_sum_exp.dtype)).sigmoid()
    return (y[..., :d_v] * output_share).to(q.dtype)


def _pad_to_equal_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad keys or values with zeros to the same width, as torch's kernel requires."""
    d_k, d_v = q.shape[-1], v.shape[-1]
    if d_k < d_v:
        return functional.pad(q, (0, d_v - d_k)), functional.pad(k, (0, d_v - d_k)), v
    return q, k, functional.pad(v, (0, d_k - d_v)) if d_v < d_k else v
