"""The facts that choose a kernel of softmax attention, and the reasons why a kernel does not support a call."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from heddle.numerics.dispatch.operation import device_type

MAX_UNMASKED_ROWS = 16  # queries per group up to which two plain products are the fastest way to read all keys
MAX_TRIANGLE_KEYS = 1024  # rows up to this length train faster with plain batched products than with torch's kernel
NO_SOFTCAP = "torch's fused kernel has no softcap"
NO_BIAS = "torch's fused kernel takes a score bias only as a mask, which is built one tile of queries at a time"


@dataclass(frozen=True)
class AttentionFacts:
    """What decides the kernel: sizes and the static facts of the mask."""

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
    softcap: bool = False
    sink: bool = False
    score_bias: bool = False


def attention_facts(
    q: Tensor, k: Tensor, mask: AttentionMask, dropout: bool, modifiers: ScoreModifiers = NO_MODIFIERS
) -> AttentionFacts:
    """The facts of one call of `attention`."""
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
        gradients=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad),
        device=device_type(q),
        wide=q.dtype in (torch.float32, torch.float64),
        softcap=modifiers.softcap is not None,
        sink=modifiers.sink is not None,
        score_bias=modifiers.score_bias is not None,
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
    if facts.queries > 1 and (facts.softcap or facts.score_bias):
        return NO_SOFTCAP if facts.softcap else NO_BIAS
    return None if facts.all_visible else "some query does not see every key"


def per_document_unsupported(facts: AttentionFacts) -> str | None:
    return None if facts.packed else "the rows are not packed with known lengths"


def _not_contiguous(facts: AttentionFacts) -> str | None:
    if not facts.contiguous or facts.packed:
        return "positions are not consecutive in one document"
    if not facts.causal:
        return "attention is bidirectional"
    if facts.window is not None and (is_compiling() or facts.window < facts.keys):  # traced for keys of any length
        return "a window hides distant keys"
    return None


def causal_unsupported(facts: AttentionFacts) -> str | None:
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
