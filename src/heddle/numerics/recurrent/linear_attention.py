"""What linear attention is made of besides causal sums: feature maps, and sums over whole documents.

Maps: elu + 1 (Katharopoulos et al. 2020), relu, and the learned `[softmax(W x) ; softmax(−W x)]` (Hedgehog, Zhang et
al. 2024); `softmax_n` over the tokens of a document (Shen et al. 2018). All are computed in at least float32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.dispatch.operation import Form, Operation
from heddle.numerics.norms import at_least_float32, without_autocast
from heddle.numerics.recurrent.causal_sums import CAUSAL_SUMS, SumFacts, flops, nothing_summed
from heddle.numerics.recurrent.chunked_sums import Places


class DocumentFacts(NamedTuple):
    """What decides the form."""

    documents: bool


def elu(x: Tensor) -> Tensor:
    """`elu(x) + 1`: x + 1 above zero, exp(x) below, where adding 1 to exp(x) − 1 would round it away."""
    y: Tensor = _Elu.apply(x)
    return y


class _Elu(torch.autograd.Function):
    """Its slope is the answer itself below zero, and 1 above: the smaller of the two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        y = wide.clamp(max=0.0).exp_().add_(wide.relu())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return ctx.saved_tensors[0].clamp(max=1.0).mul_(gradients[0])


def relu(x: Tensor) -> Tensor:
    """`max(x, 0)`."""
    return at_least_float32(x).relu()


LEAST = 1e-12  # of a learned feature


def learned(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, H, T, d], weight [H, d, d] -> `[softmax(W x) ; softmax(−W x)]` [B, H, T, 2d], at least 1e-12.

    That bound is its authors'. So a query and a key of which each has what the other lacks still meet: where a rotation
    turns the numerator alone, something over next to nothing would know no bounds.
    """
    count(2 * x.numel() * weight.shape[1])
    scores = at_least_float32(x @ weight.mT)
    return torch.cat((scores.softmax(-1), (-scores).softmax(-1)), dim=-1).clamp(min=LEAST)


def softmax_over_tokens(k: Tensor, padding: Tensor | None, segments: Tensor | None) -> Tensor:
    """Softmax of k [B, H, T, d] over the tokens of each document, a channel at a time; zero at padding.

    padding: bool [B, T] or None. segments: int64 [B, T], each token's document from 0 on; None: one a row.
    """
    k = at_least_float32(k)
    if padding is not None:
        k = k.masked_fill(padding[:, None, :, None], torch.finfo(k.dtype).min)
    if segments is None:
        weights = k.softmax(2)
    else:
        index = segments[:, None, :, None].expand_as(k)
        # There are at most as many documents as tokens.
        top = torch.zeros_like(k).scatter_reduce(2, index, k.detach(), "amax", include_self=False)
        raised = (k - top.gather(2, index)).exp()
        weights = raised / torch.zeros_like(k).scatter_add(2, index, raised).gather(2, index)
    return weights if padding is None else weights.masked_fill(padding[:, None, :, None], 0.0)


def reference(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    """Every pair of tokens of a document: `y_i = Σ_j (q_i·k_j) v_j`."""
    scores = torch.einsum("bhtd,bhsd->bhts", q, k)
    if segments is not None:
        scores = scores * (segments[:, None, :, None] == segments[:, None, None, :])
    return torch.einsum("bhts,bhsd->bhtd", scores, v)


def _product(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    return q @ (k.mT @ v)


def _both_ways(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    """The sum up to each token and the sum from it on, less its own term: linear, however many documents."""
    assert segments is not None
    state = nothing_summed(q, v.shape[3])
    form = CAUSAL_SUMS.first(SumFacts(q.shape[2], gradients=True, carried=False))
    ahead, _ = form.run(q, k, v, None, Places(None, segments), state)
    turned = [x.flip(2) for x in (q, k, v)]
    back, _ = form.run(*turned, None, Places(None, segments.flip(1)), state)
    return ahead + back.flip(2) - (q * k).sum(-1, keepdim=True) * v


def _no_product(facts: DocumentFacts) -> str | None:
    return "a row holds several documents" if facts.documents else None


def _no_both_ways(facts: DocumentFacts) -> str | None:
    return None if facts.documents else "a row is one document"


DOCUMENT_SUMS = Operation(
    "document_sums",
    (
        Form("product", _product, _no_product),
        Form("both_ways", _both_ways, _no_both_ways),
        Form("reference", reference, lambda facts: None),
    ),
)


def document_sums(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    """`y_i = Σ_j (q_i·k_j) v_j` over every token j of i's document, earlier or later.

    q, k [B, H, T, d_k], v [B, H, T, d_v], segments int64 [B, T] or None (one document a row) -> [B, H, T, d_v], in at
    least float32. k is zero at padding.
    """
    count(flops(q.shape[2], q.shape[0], q.shape[1], (q.shape[3], v.shape[3])))
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    form = DOCUMENT_SUMS.choose(DocumentFacts(segments is not None))
    with without_autocast(q):
        y: Tensor = form.run(q, k, v, segments)
    return y
