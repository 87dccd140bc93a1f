"""Feature maps of linear attention, and its sums over whole documents (bidirectional).

Feature maps: elu + 1 (Katharopoulos et al. 2020), relu, the learned `[softmax(W x) ; softmax(−W x)]` of Hedgehog (Zhang
et al. 2024), and the softmax over the tokens of a document (Shen et al. 2018). All are computed in at least float32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from heddle.numerics.dispatch import Kernel, Operation, add_flops
from heddle.numerics.norms import at_least_float32, without_autocast
from heddle.numerics.recurrent.causal_sums import CAUSAL_SUMS, causal_sum_facts, causal_sums_flops, zero_state
from heddle.numerics.recurrent.chunked_sums import CallLayout


class DocumentSumFacts(NamedTuple):
    """What decides the kernel."""

    several_documents: bool


def elu_features(x: Tensor) -> Tensor:
    """`elu(x) + 1`: x + 1 above zero, exp(x) below. Computing exp(x) − 1 + 1 would round small values to zero."""
    y: Tensor = _EluPlusOne.apply(x)
    return y


class _EluPlusOne(torch.autograd.Function):
    """The derivative is y below zero and 1 above, that is min(y, 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        y = wide.clamp(max=0.0).exp_().add_(wide.relu())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return y.clamp(max=1.0).mul_(gradients[0])


def relu_features(x: Tensor) -> Tensor:
    """`max(x, 0)`."""
    return at_least_float32(x).relu()


MIN_FEATURE = 1e-12  # lower bound of a Hedgehog feature


def hedgehog_features(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, H, T, d], weight [H, d, d] -> `[softmax(W x) ; softmax(−W x)]` [B, H, T, 2d], at least 1e-12.

    The lower bound is the authors'. It keeps q·k above zero for a query and a key without a common feature. If
    rotary positions rotate the numerator only, dividing by a vanishing sum of weights would be unbounded.
    """
    add_flops(2 * x.numel() * weight.shape[1])
    scores = at_least_float32(x @ weight.mT)
    return torch.cat((scores.softmax(-1), (-scores).softmax(-1)), dim=-1).clamp(min=MIN_FEATURE)


def softmax_over_tokens(k: Tensor, padding: Tensor | None, call_segment_ids: Tensor | None) -> Tensor:
    """Softmax of k [B, H, T, d] over the tokens of each document, for each channel separately. It is zero at padding.

    padding: bool [B, T] or None. call_segment_ids: int64 [B, T], each token's document, from 0; None: one per row.
    """
    k = at_least_float32(k)
    if padding is not None:
        k = k.masked_fill(padding[:, None, :, None], torch.finfo(k.dtype).min)
    if call_segment_ids is None:
        weights = k.softmax(2)
    else:
        token_index = call_segment_ids[:, None, :, None].expand_as(k)
        # Segment ids index the token dimension, as there are at most as many documents as tokens.
        max_score = torch.zeros_like(k).scatter_reduce(2, token_index, k.detach(), "amax", include_self=False)
        exponentials = (k - max_score.gather(2, token_index)).exp()
        weights = exponentials / torch.zeros_like(k).scatter_add(2, token_index, exponentials).gather(2, token_index)
    return weights if padding is None else weights.masked_fill(padding[:, None, :, None], 0.0)


def reference(q: Tensor, k: Tensor, v: Tensor, call_segment_ids: Tensor | None) -> Tensor:
    """Quadratic in T: `y_i = Σ_j (q_i·k_j) v_j` over every pair of tokens of a document."""
    scores = torch.einsum("bhtd,bhsd->bhts", q, k)
    if call_segment_ids is not None:
        scores = scores * (call_segment_ids[:, None, :, None] == call_segment_ids[:, None, None, :])
    return torch.einsum("bhts,bhsd->bhtd", scores, v)


def _product(q: Tensor, k: Tensor, v: Tensor, call_segment_ids: Tensor | None) -> Tensor:
    return q @ (k.mT @ v)


def _both_directions(q: Tensor, k: Tensor, v: Tensor, call_segment_ids: Tensor | None) -> Tensor:
    """The sum up to each token plus the sum from it on, minus its own term. Linear in T for any number of documents."""
    assert call_segment_ids is not None
    state = zero_state(q, v.shape[3])
    layout = CallLayout(None, call_segment_ids)
    kernel = CAUSAL_SUMS.first_supported(causal_sum_facts(q, k, v, None, layout, None))
    up_to_token: Tensor
    from_token: Tensor
    up_to_token, _ = kernel.run(q, k, v, None, layout, state)
    reversed_inputs = [x.flip(2) for x in (q, k, v)]
    from_token, _ = kernel.run(*reversed_inputs, None, CallLayout(None, call_segment_ids.flip(1)), state)
    return up_to_token + from_token.flip(2) - (q * k).sum(-1, keepdim=True) * v


def _product_unsupported(facts: DocumentSumFacts) -> str | None:
    return "a row contains several documents" if facts.several_documents else None


def _both_directions_unsupported(facts: DocumentSumFacts) -> str | None:
    return None if facts.several_documents else "a row is one document"


DOCUMENT_SUMS = Operation(
    "document_sums",
    (
        Kernel("product", _product, _product_unsupported),
        Kernel("both_directions", _both_directions, _both_directions_unsupported),
        Kernel("reference", reference, lambda facts: None),
    ),
)


def document_sums(q: Tensor, k: Tensor, v: Tensor, call_segment_ids: Tensor | None) -> Tensor:
    """`y_i = Σ_j (q_i·k_j) v_j` over every token j of i's document, earlier or later.

    q, k [B, H, T, d_k], v [B, H, T, d_v], call_segment_ids int64 [B, T] or None (one document per row) ->
    [B, H, T, d_v], in at least float32. k must be zero at padding.
    """
    add_flops(causal_sums_flops(q.shape[2], q.shape[0], q.shape[1], (q.shape[3], v.shape[3])))
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    kernel = DOCUMENT_SUMS.choose(DocumentSumFacts(call_segment_ids is not None))
    with without_autocast(q):
        y: Tensor = kernel.run(q, k, v, call_segment_ids)
    return y
