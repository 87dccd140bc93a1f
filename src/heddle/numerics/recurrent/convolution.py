"""Causal depthwise convolution along a text: `y_t = Σ_s w_s ⊙ x_{t−s}` over the last `kernel` tokens of t's document.

Padding is no token, and before the first token of a document stand zeros. What later tokens may need of a text is its
tail, the inputs of its last kernel − 1 tokens, oldest first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.dispatch.operation import Form, Operation
from heddle.numerics.norms import without_autocast


class Taps(NamedTuple):
    """Where each token's inputs stand, when not simply before it.

    slots: int64 [B, T + 1, kernel], indices into [tail ; x], oldest first, −1 for a zero; the last token is the one
    that is next to come. starts: int64 [2, N], row and place of every token before which fewer than kernel − 1 of its
    document stand in this call, if that is known and there is no padding.
    """

    slots: Tensor
    starts: Tensor | None = None


class Facts(NamedTuple):
    """What decides the form: tokens, whether gradients are wanted, whether taps are given, and their starts."""

    length: int
    gradients: bool
    taps: bool
    starts: bool


def flops(tokens: int, channels: int, kernel: int) -> int:
    """Operations of one call: a multiply and an add for each tap."""
    return 2 * tokens * channels * kernel


def find_taps(real: Tensor, segments: Tensor, kernel: int) -> Tensor:
    """The slots of `Taps` from real bool [B, T] and segments [B, T], in which 0 goes on with the tail's document."""
    (batch, length), behind, device = real.shape, kernel - 1, real.device
    now = segments[:, -1:] if length else segments.new_zeros(batch, 1)  # the next token goes on where the call ends
    segments, real = torch.cat((segments, now), dim=1), torch.cat((real, real.new_ones(batch, 1)), dim=1)
    number = behind + real.cumsum(1) - 1  # of each real token, counted from the oldest of the tail
    slots = torch.arange(behind + length + 1, device=device).repeat(batch, 1)
    by_number = torch.cat((slots, slots[:, :1]), dim=1)  # padding is written to one place more than there are numbers
    by_number.scatter_(1, torch.where(real, number, behind + length + 1), slots[:, behind:])
    wanted = (number[..., None] - torch.arange(behind, -1, -1, device=device)).clamp(min=0).flatten(1)
    index = by_number.gather(1, wanted)
    document = torch.cat((segments.new_zeros(batch, behind), segments), dim=1)
    same = document.gather(1, index).view(batch, -1, kernel) == segments[..., None]
    return torch.where(same & real[..., None], index.view(batch, -1, kernel), -1)


def find_starts(pieces: Sequence[Sequence[int]], kernel: int, device: torch.device) -> Tensor:
    """The starts of `Taps` for rows of documents of these lengths."""
    found = []
    for row, lengths in enumerate(pieces):
        first = 0
        for size in lengths:
            found += [(row, first + place) for place in range(min(size, kernel - 1))]
            first += size
    return torch.tensor(found, dtype=torch.int64, device="cpu").view(-1, 2).t().to(device)


def reference(x: Tensor, weight: Tensor, tail: Tensor | None, taps: Taps | None) -> Tensor:
    """x [B, T, C], weight [C, kernel] (the last for the token itself), tail [B, kernel − 1, C] -> [B, T, C]."""
    if taps is None:
        everywhere = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        taps = Taps(find_taps(everywhere, torch.zeros_like(everywhere, dtype=torch.int64), weight.shape[1]))
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return _gathered(_inputs(x, weight, tail), weight, rows, taps.slots[:, :-1])


def _inputs(x: Tensor, weight: Tensor, tail: Tensor | None) -> Tensor:
    """[tail ; x], a tail of zeros where there is none."""
    tail = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2]) if tail is None else tail
    return torch.cat((tail, x), dim=1)


def _gathered(inputs: Tensor, weight: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """inputs [B, S, C], index [..., kernel] into its rows [...] -> [..., C]."""
    found = inputs[rows[..., None], index.clamp(min=0)].masked_fill((index < 0)[..., None], 0.0)
    return torch.einsum("...kc,ck->...c", found, weight)


def _step(x: Tensor, weight: Tensor, tail: Tensor | None, taps: Taps | None) -> Tensor:
    """One token that goes on."""
    return (_inputs(x, weight, tail) * weight.t()).sum(1, keepdim=True)


def _shifted(x: Tensor, weight: Tensor, tail: Tensor | None, taps: Taps | None) -> Tensor:
    """One document, no padding: a token's inputs stand before it."""
    y: Tensor = _Shifted.apply(x if tail is None else torch.cat((tail, x), dim=1), weight)
    return y[:, y.shape[1] - x.shape[1] :]


def _mended(x: Tensor, weight: Tensor, tail: Tensor | None, taps: Taps | None) -> Tensor:
    """As if each row were one document; then the few tokens near the start of one are made anew."""
    assert taps is not None
    assert taps.starts is not None
    rows, places = taps.starts
    anew = _gathered(_inputs(x, weight, tail), weight, rows, taps.slots[rows, places])
    return _shifted(x, weight, tail, None).index_put((rows, places), anew)


class _Shifted(torch.autograd.Function):
    """The sum over shifted copies; torch's grouped convolution and its gradient take four times as long on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        taps = weight.t().flip(0).contiguous()
        y = x * taps[0]
        for back in range(1, min(len(taps), x.shape[1])):
            y[:, back:].addcmul_(x[:, :-back], taps[back])
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        taps = weight.t().flip(0).contiguous()
        to_x, to_taps = gradient * taps[0], torch.zeros_like(taps)
        to_taps[0] = (gradient * x).sum((0, 1))
        for back in range(1, min(len(taps), x.shape[1])):
            to_x[:, :-back].addcmul_(gradient[:, back:], taps[back])
            to_taps[back] = (gradient[:, back:] * x[:, :-back]).sum((0, 1))
        return to_x, to_taps.flip(0).t()


def _no_step(facts: Facts) -> str | None:
    if facts.length != 1:
        return f"it takes one token, here are {facts.length}"
    return "gradients are wanted" if facts.gradients else _no_shifted(facts)


def _no_shifted(facts: Facts) -> str | None:
    return "documents begin or padding stands between the tokens" if facts.taps else None


def _no_mended(facts: Facts) -> str | None:
    return None if facts.starts else "it is not known where documents begin, or there is padding"


CONVOLUTION = Operation(
    "convolution",
    (
        Form("step", _step, _no_step),
        Form("shifted", _shifted, _no_shifted),
        Form("mended", _mended, _no_mended),
        Form("reference", reference, lambda facts: None),
    ),
)


def convolution(x: Tensor, weight: Tensor, tail: Tensor | None, taps: Taps | None) -> Tensor:
    """x [B, T, C], weight [C, kernel] (the last for the token itself), tail [B, kernel − 1, C] or None -> [B, T, C].

    Padding, where `taps` tell of it, yields zeros.
    """
    count(flops(x.shape[0] * x.shape[1], *weight.shape))
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    facts = Facts(x.shape[1], gradients, taps is not None, taps is not None and taps.starts is not None)
    form = CONVOLUTION.choose(facts)
    with without_autocast(x):
        y: Tensor = form.run(x, weight, tail, taps)
    return y


def next_tail(x: Tensor, tail: Tensor, taps: Taps | None) -> Tensor:
    """The tail [B, kernel − 1, C] after a call's inputs x [B, T, C]; zeros where the last document is younger."""
    behind = tail.shape[1]
    if taps is None:  # no view of x, which a state would keep alive
        recent = torch.cat((tail, x[:, max(0, x.shape[1] - behind) :]), dim=1)
        return recent[:, recent.shape[1] - behind :]
    slots, inputs = taps.slots[:, -1, :behind], torch.cat((tail, x), dim=1)
    kept = inputs.gather(1, slots.clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))
    return kept.masked_fill((slots < 0)[..., None], 0.0)
