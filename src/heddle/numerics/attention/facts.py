"""The facts that choose a kernel of softmax attention, and the reasons why a kernel does not support a call."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.attention.score_modifiers import NO_MODIFIERS, LinearBias, ScoreModifiers
from heddle.numerics.attention.sdpa import WIDTH_STEP, compute_dtype
from heddle.numerics.attention.varlen import varlen_parameters
from heddle.numerics.dispatch.libraries import NOT_CUDA
from heddle.numerics.dispatch.operation import device_type, has_triton

MAX_UNMASKED_ROWS = 16  # queries per group up to which two plain products are the fastest way to read all keys
MAX_TRIANGLE_KEYS = 1024  # rows up to this length train faster with plain batched products than with torch's kernel
MAX_PRODUCT_ROWS = 64  # queries of a group whose weights are all in memory, on CUDA
MAX_FLASH_WIDTH = 256  # of the heads that torch's flash kernel takes
MIN_FLEX_WIDTH, MAX_FLEX_WIDTH = 16, 256  # of the heads that FlexAttention takes
_FLASH_CAPABILITY = 8, 0  # of the oldest card that runs torch's flash kernel
NOT_PACKED = "the rows are not packed with known lengths"
NO_SOFTCAP = "torch's fused kernel has no softcap"
NO_BIAS = "torch's fused kernel takes a score bias only as a mask, which is built one tile of queries at a time"


class AttentionFacts(NamedTuple):
    """What decides the kernel: sizes and the static facts of the mask.

    dtype: in which the call is computed. width: the larger of d_k and d_v. fixed_shape: whether calls of the same
    lengths will follow if there are gradients.
    """

    queries: int
    keys: int
    groups: int
    heads: int
    causal: bool
    window: int | None
    contiguous: bool
    all_visible: bool
    packed: bool
    dropout: bool
    gradients: bool
    device: str
    wide: bool
    dtype: torch.dtype
    width: int
    fixed_shape: bool = True
    softcap: bool = False
    sink: bool = False
    score_bias: bool = False
    linear_bias: bool = False


def attention_facts(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: bool, modifiers: ScoreModifiers = NO_MODIFIERS
) -> AttentionFacts:
    """The facts of one call of `attention`."""
    graded = (q, k, v) if modifiers.sink is None else (q, k, v, modifiers.sink)
    return AttentionFacts(
        queries=q.shape[2],
        keys=k.shape[2],
        groups=k.shape[1],
        heads=q.shape[1],
        causal=mask.causal,
        window=mask.window,
        contiguous=mask.contiguous,
        all_visible=mask.all_visible,
        packed=mask.doc_lengths is not None,
        dropout=dropout,
        gradients=torch.is_grad_enabled() and any(x.requires_grad for x in graded),
        device=device_type(q),
        wide=q.dtype in (torch.float32, torch.float64),
        dtype=compute_dtype(q),
        width=max(q.shape[3], v.shape[3]),
        softcap=modifiers.softcap is not None,
        sink=modifiers.sink is not None,
        score_bias=modifiers.score_bias is not None,
        linear_bias=isinstance(modifiers.score_bias, LinearBias),
    )


def without_dropout(unsupported: Callable[[AttentionFacts], str | None]) -> Callable[[AttentionFacts], str | None]:
    """Add to a kernel's check that it does not support dropout of the weights."""

    def unsupported_with_dropout(facts: AttentionFacts) -> str | None:
        if facts.dropout:
            return "dropout of weights is keyed by sample, which fused kernels cannot draw"
        return unsupported(facts)

    return unsupported_with_dropout


def unmasked_unsupported(facts: AttentionFacts) -> str | None:
    rows = facts.queries * facts.heads // facts.groups
    if not facts.all_visible or facts.softcap or facts.sink or rows > MAX_UNMASKED_ROWS:
        return f"it is for up to {MAX_UNMASKED_ROWS} queries of a group that see every key, without softcap and sink"
    wide_on_cpu = facts.device == "cpu" and facts.wide
    return None if wide_on_cpu else "it is for float32 and float64 on the CPU; a narrow product would round the scores"


def folded_unsupported(facts: AttentionFacts) -> str | None:
    if facts.device == "cuda":
        return "torch's fused kernel may plan anew for each number of keys on CUDA"
    if facts.queries > 1 and (facts.softcap or facts.score_bias):
        return NO_SOFTCAP if facts.softcap else NO_BIAS
    return None if facts.all_visible else "some query does not see every key"


def per_document_unsupported(facts: AttentionFacts) -> str | None:
    return None if facts.packed else NOT_PACKED


def _not_contiguous(facts: AttentionFacts) -> str | None:
    if not facts.contiguous or facts.packed:
        return "positions are not consecutive in one document"
    if not facts.causal:
        return "attention is bidirectional"
    if facts.window is not None and (is_compiling() or facts.window < facts.keys):  # traced for keys of any length
        return "a window hides distant keys"
    return None


def causal_unsupported(facts: AttentionFacts) -> str | None:
    if facts.device == "cuda" and not (facts.gradients and facts.fixed_shape):
        return "torch's fused kernel may plan anew for each length on CUDA"
    if facts.device == "cuda" and _flash_unsupported(facts) is not None:  # torch's function would write T × S scores
        return _flash_unsupported(facts)
    if facts.queries != facts.keys:
        return "keys of a state precede the queries, and the kernel's causal mask is aligned to the top left"
    if facts.softcap or facts.score_bias:
        return NO_SOFTCAP if facts.softcap else NO_BIAS
    return _not_contiguous(facts)


def triangle_unsupported(facts: AttentionFacts) -> str | None:
    if facts.device != "cpu":
        return "it is for the CPU"
    sdpa_supports_it = facts.queries == facts.keys and not facts.softcap and not facts.score_bias
    if sdpa_supports_it and (facts.keys > MAX_TRIANGLE_KEYS or not facts.gradients):
        return f"the fused kernel is faster for more than {MAX_TRIANGLE_KEYS} tokens, and without gradients"
    return _not_contiguous(facts)


def blocks_unsupported(facts: AttentionFacts) -> str | None:
    if facts.window is None:
        return "there is no window"
    if not facts.contiguous or facts.packed:
        return "positions are not consecutive in one document"
    if facts.keys < 2 * facts.window:
        return "the window covers most keys"
    if not facts.causal and facts.queries != facts.keys:
        return "bidirectional blocks need all queries at once"
    return None


def products_unsupported(facts: AttentionFacts) -> str | None:
    """Of plain products on CUDA."""
    if facts.device != "cuda":
        return NOT_CUDA
    if facts.gradients:
        return "plain products keep every weight for the backward pass"
    if facts.queries > 1 and facts.queries * facts.heads > MAX_PRODUCT_ROWS * facts.groups:
        return f"it is for up to {MAX_PRODUCT_ROWS} queries of a group, as it writes all their weights"
    return None


@cache
def _card_runs_flash() -> bool:
    """Whether this machine's card runs torch's flash kernel. True without a card: the device is assumed."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= _FLASH_CAPABILITY


def _flash_unsupported(facts: AttentionFacts) -> str | None:
    """Why torch's flash kernel for CUDA does not serve, whatever the mask."""
    if facts.dtype not in (torch.bfloat16, torch.float16):
        return "torch's flash kernel is for bfloat16 and float16"
    if not _card_runs_flash():
        return "the card does not run torch's flash kernel, which needs compute capability 8.0"
    if facts.width % WIDTH_STEP or facts.width > MAX_FLASH_WIDTH:
        return f"the width of heads is no multiple of {WIDTH_STEP}, or above {MAX_FLASH_WIDTH}"
    if facts.softcap or facts.score_bias:
        return "torch's flash kernel has no softcap and no score bias"
    if facts.sink and facts.gradients:
        return "the log-sum-exp of torch's flash kernel, which a sink needs, has no gradient"
    return None


def flash_unsupported(facts: AttentionFacts) -> str | None:
    """Of the flash kernel, called by name."""
    if facts.device != "cuda":
        return NOT_CUDA
    if not facts.all_visible and (facts.queries != facts.keys or _not_contiguous(facts) is not None):
        return "queries see neither every key, nor every earlier token of the call"
    if not facts.all_visible and causal_unsupported(facts) is None:
        return "torch chooses the fastest of its kernels for causal rows of a fixed shape"
    return _flash_unsupported(facts)


def varlen_unsupported(facts: AttentionFacts) -> str | None:
    """Of the flash kernel for packed documents."""
    if facts.device != "cuda":
        return NOT_CUDA
    if facts.window is not None and "window_size" not in varlen_parameters():
        return "this torch's varlen_attn has no window"
    if not facts.packed:
        return NOT_PACKED
    return _flash_unsupported(facts)


def flex_unsupported(facts: AttentionFacts) -> str | None:
    """Of FlexAttention, compiled."""
    if facts.device != "cuda":
        return NOT_CUDA
    if not has_triton():
        return "Triton is not installed"
    if facts.dtype == torch.float64:
        return "FlexAttention computes in float32"
    if not MIN_FLEX_WIDTH <= facts.width <= MAX_FLEX_WIDTH:
        return f"the width of heads is not from {MIN_FLEX_WIDTH} to {MAX_FLEX_WIDTH}"
    if is_compiling() and facts.gradients and facts.score_bias and not facts.linear_bias:
        return "torch loses the gradient of a score bias that is computed in the same graph"
    return None if facts.queries and facts.keys else "there are no tokens"


def flex_nondeterministic(facts: AttentionFacts) -> str | None:
    """Why equal calls of FlexAttention may differ in bits: queries, keys and values are summed in a fixed order."""
    learned = facts.gradients and facts.score_bias and not facts.linear_bias
    return "atomic additions sum the gradient of a score bias" if learned else None
