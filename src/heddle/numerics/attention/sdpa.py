"""torch's fused attention: unequal head widths, and a sink, which it does not know, as one key more.

A sink is a logit s_h that joins the softmax's denominator, with a value of zero (gpt-oss). As a key it is exact, with
gradients: q' = [q, s / scale], its key is one-hot in the last place, the other keys are zero there. Without gradients
on a CPU, where the kernel tells its log-sum-exp L, nothing is copied: y' = y · sigmoid(L − s).
"""

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch.operation import device_of


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    sink: Tensor | None = None,
) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v].

    mask: what is seen, bool, or what is added to scores, broadcast to [B, H, T, S]; causal: aligned to the top left,
    T = S; sink: [B, H, T, 1].
    """
    if sink is None:
        return _sdpa(q, k, v, scale, mask, causal)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, sink))
    if not wanted and device_of(q) == "cpu" and q.shape[2]:
        return _rescaled(q, k, v, scale, mask, causal, sink)
    q = torch.cat((q, (sink / scale).to(q.dtype)), dim=-1)
    if causal:  # a first query that is thrown away, so that the others are aligned behind the sink's key
        q = functional.pad(q, (0, 0, 1, 0))
    k = functional.pad(k, (0, 1, 1, 0))
    one_hot = torch.zeros_like(k)
    one_hot[:, :, 0, -1] = 1.0
    if mask is not None:
        mask = functional.pad(mask, (1, 0), value=mask.dtype == torch.bool)  # the sink is seen, and nothing is added
    y = _sdpa(q, k + one_hot, functional.pad(v, (0, 0, 1, 0)), scale, mask, causal)
    return y[:, :, 1:] if causal else y


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    d_v = v.shape[-1]
    q, k, v = _widened(q, k, v)
    y = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y[..., :d_v] if d_v < y.shape[-1] else y


def _rescaled(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool, sink: Tensor) -> Tensor:
    d_v = v.shape[-1]
    q, k, v = _widened(q, k, v)
    bias = mask
    if mask is not None and mask.dtype == torch.bool:
        bias = q.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    y, total = kernel(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    kept = (total[..., None] - sink.to(total.dtype)).sigmoid()
    return (y[..., :d_v] * kept).to(q.dtype)


def _widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros make the widths of keys and values equal, which the kernel wants."""
    d_k, d_v = q.shape[-1], v.shape[-1]
    if d_k < d_v:
        return functional.pad(q, (0, d_v - d_k)), functional.pad(k, (0, d_v - d_k)), v
    return q, k, functional.pad(v, (0, d_k - d_v)) if d_v < d_k else v
