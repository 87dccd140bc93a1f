"""Stand-ins for the attention kernels of CUDA: the same signatures, computed densely on CPU values.

The signatures are torch's own (2.13): aten's flash and efficient attention with their backward operators, `bmm` with a
wider result, `torch_attn::_varlen_attn`, and FlexAttention, for which
`heddle.numerics.attention.flex.compiled_kernel` stands.
Each refuses what the real one refuses. The gradients are those of the softmax, from the saved log-sum-exp.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.attention.varlen
from torch import Tensor
from torch._ops import OpOverload

from heddle.numerics.attention import flex
from heddle.numerics.norms import at_least_float32

aten = torch.ops.aten


def _scores(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = at_least_float32(q) @ at_least_float32(k).mT * scale
    return scores if bias is None else scores + bias


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp [B, H, T] of attention with a bias that is added to the scores."""
    scores = _scores(q, k, scale, bias)
    log_sum_exp = scores.logsumexp(-1)
    weights = (scores - log_sum_exp.masked_fill(log_sum_exp == -torch.inf, 0.0)[..., None]).exp()
    y = weights @ at_least_float32(v).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return y.to(q.dtype), log_sum_exp


def _backward(
    gradient: Tensor, qkv: tuple[Tensor, Tensor, Tensor], y: Tensor, log_sum_exp: Tensor, scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and the scores."""
    q, k, v = (at_least_float32(x) for x in qkv)
    groups, repeats = k.shape[1], q.shape[1] // k.shape[1]
    finite = log_sum_exp.masked_fill(log_sum_exp == -torch.inf, 0.0)[..., : q.shape[2], None]
    weights = (_scores(q, k, scale, bias) - finite).exp()
    gradient = at_least_float32(gradient)
    grad_weights = gradient @ v.repeat_interleave(repeats, 1).mT
    grad_scores = weights * (grad_weights - (gradient * y).sum(-1, keepdim=True))
    grad_q = grad_scores @ k.repeat_interleave(repeats, 1) * scale
    grad_k, grad_v = grad_scores.mT @ q * scale, weights.mT @ gradient
    grad_k, grad_v = (x.unflatten(1, (groups, repeats)).sum(2) for x in (grad_k, grad_v))
    return *(x.to(like.dtype) for x, like in zip((grad_q, grad_k, grad_v), qkv, strict=True)), grad_scores


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"the kernel refuses {what}")


def _causal_bias(q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
    if not causal:
        return None
    _require(q.shape[2] == k.shape[2], "a causal mask of unequal lengths")
    return torch.full((q.shape[2], k.shape[2]), -torch.inf, dtype=torch.float64).triu_(1).to(at_least_float32(q).dtype)


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *, scale: float
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention."""
    _require(q.dtype == k.dtype == v.dtype and q.dtype != torch.float32, f"{q.dtype}, {k.dtype}, {v.dtype}")
    _require(q.shape[-1] == k.shape[-1] == v.shape[-1], "unequal widths")
    _require(dropout == 0.0, "dropout")
    y, log_sum_exp = _forward(q, k, v, scale, _causal_bias(q, k, causal))
    empty = q.new_empty(0)
    return y, log_sum_exp, empty, empty, q.shape[2], k.shape[2], empty, empty, empty


def flash_backward(*arguments: Any, scale: float) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward."""
    gradient, q, k, v, y, log_sum_exp, *_, causal, _, _ = arguments
    return _backward(gradient, (q, k, v), y, log_sum_exp, scale, _causal_bias(q, k, causal))[:3]


def cudnn(*arguments: Any, scale: float) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_cudnn_attention."""
    q, k, v, bias, _, *rest = arguments  # dropout and causal, if they are not False
    _require(q.dtype == k.dtype == v.dtype and q.dtype not in (torch.float32, torch.float64), f"{q.dtype}, {v.dtype}")
    _require(bias is None, "a bias, whose gradients were wrong")
    _require(all(x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 for x in (q, v)), "such widths")
    y, log_sum_exp = _forward(q, k, v, scale, _causal_bias(q, k, bool(rest and rest[-1])))
    empty = q.new_empty(0)
    return y, log_sum_exp, empty, empty, q.shape[2], k.shape[2], empty, empty, empty


def cudnn_backward(*arguments: Any, scale: float) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_cudnn_attention_backward."""
    gradient, q, k, v, y, log_sum_exp, *_, causal = arguments
    return _backward(gradient, (q, k, v), y, log_sum_exp, scale, _causal_bias(q, k, causal))[:3]


def efficient(*arguments: Any, scale: float) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_efficient_attention."""
    q, k, v, bias, with_log_sum_exp, *rest = arguments  # dropout and causal, if they are not False
    causal = bool(rest and rest[-1])
    _require(q.dtype == k.dtype == v.dtype and q.dtype != torch.float64, f"{q.dtype}, {k.dtype}, {v.dtype}")
    _require(q.shape[1] == k.shape[1], "grouped heads")
    _require(all(x.shape[-1] % 8 == 0 for x in (q, k, v)), "widths that are no multiple of 8")
    if bias is not None:
        _require(bias.dtype == q.dtype, f"a bias of {bias.dtype} for queries of {q.dtype}")
        _require(bias.stride(-1) == 1 and bias.stride(-2) % 8 == 0, "a bias whose rows are not aligned")
        _require(bias.shape == (*q.shape[:3], k.shape[2]), "a bias of another shape")
    y, log_sum_exp = _forward(q, k, v, scale, bias if bias is not None else _causal_bias(q, k, causal))
    empty = torch.zeros((), dtype=torch.int64)
    return y, log_sum_exp if with_log_sum_exp else log_sum_exp[..., :0], empty, empty


def efficient_backward(*arguments: Any, scale: float) -> tuple[Tensor | None, ...]:
    """aten::_scaled_dot_product_efficient_attention_backward."""
    gradient, q, k, v, bias, y, log_sum_exp, _, _, _, needed, *causal = arguments
    _require(log_sum_exp.shape[-1] == q.shape[2], "a backward pass without the log-sum-exp")
    added = bias if bias is not None else _causal_bias(q, k, bool(causal))
    *grads, grad_scores = _backward(gradient, (q, k, v), y, log_sum_exp, scale, added)
    return *grads, grad_scores.to(q.dtype) if bias is not None and needed[3] else None


def _varlen_bias(cu_seqlens: Tensor, longest: int, window: list[int], dtype: torch.dtype) -> Tensor:
    """0 where token i of all rows sees token j, else −∞. window: tokens before and after, −1 for all of them."""
    _require(cu_seqlens.dtype == torch.int32, f"cu_seqlens of {cu_seqlens.dtype}")
    lengths = cu_seqlens.diff()
    _require(max(lengths.tolist(), default=0) <= longest, "a longer document")
    index = torch.arange(int(cu_seqlens[-1]))
    document = torch.searchsorted(cu_seqlens[1:].long(), index, right=True)
    offset = index[:, None] - index
    visible = document[:, None] == document
    before, after = window
    if before >= 0:
        visible &= offset <= before
    if after >= 0:
        visible &= -offset <= after
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)


def varlen(*arguments: Any) -> tuple[Tensor, ...]:
    """torch_attn::_varlen_attn: q [tokens, H, d], the log-sum-exp [H, tokens]."""
    q, k, v, cu_q, _, max_q, max_k, _, scale, window, *_ = arguments
    _require(q.dtype == k.dtype == v.dtype and q.dtype != torch.float32, f"{q.dtype}, {k.dtype}, {v.dtype}")
    _require(q.shape[-1] == k.shape[-1] == v.shape[-1], "unequal widths")
    bias = _varlen_bias(cu_q, min(max_q, max_k), window, at_least_float32(q).dtype)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    y, log_sum_exp = _forward(q, k, v, scale, bias)
    return y[0].transpose(0, 1).contiguous(), log_sum_exp[0], torch.zeros(2, dtype=torch.uint64)


def varlen_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """torch_attn::_varlen_attn_backward."""
    gradient, q, k, v, y, log_sum_exp, cu_q, _, max_q, max_k, _, _, scale, window = arguments
    bias = _varlen_bias(cu_q, min(max_q, max_k), window, at_least_float32(q).dtype)
    gradient, q, k, v, y = (x.transpose(0, 1)[None] for x in (gradient, q, k, v, y))
    grads = _backward(gradient, (q, k, v), y, log_sum_exp[None], scale, bias)[:3]
    return tuple(x[0].transpose(0, 1).contiguous() for x in grads)


def wide_bmm(x: Tensor, y: Tensor, out_dtype: torch.dtype) -> Tensor:
    """aten::bmm.dtype."""
    return torch.bmm(x.to(out_dtype), y.to(out_dtype))


def compiled_flex(kind: flex.FlexKind) -> Callable[..., Tensor]:
    """heddle.numerics.attention.flex.compiled_kernel: the same scores and mask, in T × S memory, with gradients."""
    return attend_densely


def attend_densely(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, tensors: flex.FlexTensors, kind: flex.FlexKind
) -> Tensor:
    """`flex.flex_with_sink` by plain operators: its functions of one pair are called with all pairs at one time."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    make = lambda count, dims: torch.arange(count, device=q.device).view(-1, *[1] * dims)  # noqa: E731
    index = make(batch, 3), make(heads, 2), make(queries, 1), make(keys, 0)
    wide_k, wide_v = (at_least_float32(x).repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    scores = at_least_float32(q) @ wide_k.mT * kind.scale
    scores = flex.score_mod(tensors, kind)(scores, *index)
    masked, unmasked = _listed_pairs(block_mask, queries, keys)
    hidden = ~(unmasked | (masked & block_mask.mask_mod(*index)))
    empty = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden & ~empty, -torch.inf)
    y = (scores.softmax(-1) @ wide_v).masked_fill(empty, 0.0)
    if tensors.sink is not None:
        log_sum_exp = scores.logsumexp(-1, keepdim=True).masked_fill(empty, -torch.inf)
        y = y * (log_sum_exp - at_least_float32(tensors.sink)[:, None, None]).sigmoid()
    return y.to(q.dtype)


def _listed_pairs(block_mask: Any, queries: int, keys: int) -> list[Tensor]:
    """The pairs of masked blocks and of the others that are listed, bool [B or 1, 1, T, S]."""
    pairs = []
    for count, indices in (
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        listed = indices.argsort(-1) < count[..., None]  # the rank of each block is among the first
        wide = listed.repeat_interleave(flex.BLOCK, -1).repeat_interleave(flex.BLOCK, -2)
        pairs.append(wide[..., :queries, :keys])
    return pairs


def operators() -> dict[OpOverload, Callable[..., Any]]:
    """The stand-in of each operator."""
    return {
        aten._scaled_dot_product_flash_attention.default: flash,
        aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
        aten._scaled_dot_product_cudnn_attention.default: cudnn,
        aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
        aten._scaled_dot_product_efficient_attention.default: efficient,
        aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
        aten.bmm.dtype: wide_bmm,
        torch.ops.torch_attn._varlen_attn.default: varlen,
        torch.ops.torch_attn._varlen_attn_backward.default: varlen_backward,
    }


FUNCTIONS: dict[tuple[ModuleType, str], Any] = {(flex, "compiled_kernel"): compiled_flex}
