"""The causal convolution: every form against a loop over tokens, and against torch's own."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from heddle.numerics.dispatch.flop_counter import counting
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent.convolution import Taps, convolution, find_starts, find_taps, flops, next_tail

CHANNELS = 3


def by_hand(x: Tensor, weight: Tensor, tail: Tensor, real: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other, remembering what came."""
    kernel, out, tails = weight.shape[1], torch.zeros_like(x), []
    for row in range(x.shape[0]):
        seen, document = list(tail[row]), 0
        for t in range(x.shape[1]):
            if int(segments[row, t]) != document:
                seen, document = [torch.zeros(CHANNELS, dtype=x.dtype)] * (kernel - 1), int(segments[row, t])
            if real[row, t]:
                seen.append(x[row, t])
                out[row, t] = sum(weight[:, kernel - 1 - back] * seen[-1 - back] for back in range(kernel))
        tails.append(torch.stack(seen[len(seen) - kernel + 1 :]) if kernel > 1 else tail[row])
    return out, torch.stack(tails)


def random(rows: int, length: int, kernel: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((rows, length, CHANNELS), (CHANNELS, kernel), (rows, kernel - 1, CHANNELS))
    x, weight, tail = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, weight, tail


def run(form: str, x: Tensor, weight: Tensor, tail: Tensor | None, taps: Taps | None) -> Tensor:
    with kernels(convolution=form):
        return convolution(x, weight, tail, taps)


@pytest.mark.parametrize("kernel", [1, 2, 4, 9])
@pytest.mark.parametrize("length", [0, 1, 2, 11])
def test_one_document(length: int, kernel: int) -> None:
    x, weight, tail = random(2, length, kernel)
    real = torch.ones(2, length, dtype=torch.bool)
    want, last = by_hand(x, weight, tail, real, real.long() * 0)
    for form in ("shifted", "reference", *(["step"] if length == 1 else [])):
        torch.testing.assert_close(run(form, x, weight, tail, None), want, rtol=0, atol=1e-14)
    assert torch.equal(next_tail(x, tail, None), last)
    if length:
        alone = functional.conv1d(x.mT, weight[:, None], padding=kernel - 1, groups=CHANNELS)[..., :length].mT
        torch.testing.assert_close(convolution(x, weight, None, None), alone, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kernel", [1, 2, 4, 9])
def test_padding_and_documents(kernel: int) -> None:
    real = torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0], [1] * 8 + [0] * 3, [0] * 10 + [1], [0] * 11]).bool()
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [1] * 3 + [2] * 8, [0] * 10 + [1], [0] * 11])
    x, weight, tail = random(4, 11, kernel)
    taps = Taps(find_taps(real, segments, kernel))
    want, last = by_hand(x, weight, tail, real, segments)
    torch.testing.assert_close(convolution(x, weight, tail, taps), want, rtol=0, atol=1e-14)
    assert torch.equal(next_tail(x, tail, taps), last)


@pytest.mark.parametrize("kernel", [1, 2, 4, 9])
def test_packed_documents(kernel: int) -> None:
    pieces = [[1, 2, 6, 3], [4, 8], [12]]
    segments = torch.stack([torch.repeat_interleave(torch.arange(len(p)), torch.tensor(p)) for p in pieces])
    x, weight, tail = random(3, 12, kernel)
    real = torch.ones(3, 12, dtype=torch.bool)
    taps = Taps(find_taps(real, segments, kernel), find_starts(pieces, kernel, x.device))
    want, last = by_hand(x, weight, tail, real, segments)
    for form in ("mended", "reference"):
        torch.testing.assert_close(run(form, x, weight, tail, taps), want, rtol=0, atol=1e-14)
    assert torch.equal(next_tail(x, tail, taps), last)


@pytest.mark.parametrize("form", ["shifted", "mended", "reference"])
def test_gradients(form: str) -> None:
    pieces, kernel = [[2, 1, 6]], 4
    segments = torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 2]])
    taps = Taps(find_taps(segments >= 0, segments, kernel), find_starts(pieces, kernel, segments.device))
    x, weight, _ = (value.requires_grad_() for value in random(1, 9, kernel))
    given = None if form == "shifted" else taps
    torch.autograd.gradcheck(lambda x, weight: run(form, x, weight, None, given), (x, weight))


def test_padding_may_hold_anything() -> None:
    x, weight, tail = random(1, 6, 4)
    real = torch.tensor([[True, False, True, True, False, True]])
    taps = Taps(find_taps(real, real.long() * 0, 4))
    bad = x.masked_fill(~real[..., None], float("nan"))
    assert torch.equal(convolution(bad, weight, tail, taps), convolution(x, weight, tail, taps))
    assert torch.equal(next_tail(bad, tail, taps), next_tail(x, tail, taps))


def test_flops_are_those_that_torch_counts() -> None:
    x, weight, tail = random(2, 9, 4)
    with FlopCounterMode(display=False) as counter:
        functional.conv1d(torch.cat((tail, x), dim=1).mT, weight[:, None], groups=CHANNELS)
    with counting() as tally:
        convolution(x, weight, tail, None)
    assert counter.get_total_flops() == flops(18, CHANNELS, 4) == tally[0]
