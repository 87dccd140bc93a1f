"""The causal convolution: every kernel against a loop over tokens, and against torch's convolution."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from heddle.numerics.dispatch import count_flops
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent.convolution import (
    Taps,
    causal_conv1d,
    convolution_flops,
    find_input_indices,
    find_tokens_near_starts,
    next_conv_state,
)

CHANNELS = 3


def by_hand(
    x: Tensor, weight: Tensor, conv_state: Tensor, is_token: Tensor, call_segment_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """One token after the other, with a list of the earlier inputs."""
    kernel_size, out, next_states = weight.shape[1], torch.zeros_like(x), []
    for row in range(x.shape[0]):
        recent, current_segment = list(conv_state[row]), 0
        for t in range(x.shape[1]):
            if int(call_segment_ids[row, t]) != current_segment:
                recent, current_segment = (
                    [torch.zeros(CHANNELS, dtype=x.dtype)] * (kernel_size - 1),
                    int(call_segment_ids[row, t]),
                )
            if is_token[row, t]:
                recent.append(x[row, t])
                out[row, t] = sum(weight[:, kernel_size - 1 - back] * recent[-1 - back] for back in range(kernel_size))
        next_states.append(torch.stack(recent[len(recent) - kernel_size + 1 :]) if kernel_size > 1 else conv_state[row])
    return out, torch.stack(next_states)


def random(rows: int, length: int, kernel_size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((rows, length, CHANNELS), (CHANNELS, kernel_size), (rows, kernel_size - 1, CHANNELS))
    x, weight, conv_state = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, weight, conv_state


def run(kernel: str, x: Tensor, weight: Tensor, conv_state: Tensor | None, taps: Taps | None) -> Tensor:
    with kernels(convolution=kernel):
        return causal_conv1d(x, weight, conv_state, taps)


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 9])
@pytest.mark.parametrize("length", [0, 1, 2, 11])
def test_one_document(length: int, kernel_size: int) -> None:
    x, weight, conv_state = random(2, length, kernel_size)
    is_token = torch.ones(2, length, dtype=torch.bool)
    expected, next_state = by_hand(x, weight, conv_state, is_token, is_token.long() * 0)
    for kernel in ("shifted", "reference", *(["step"] if length == 1 else []), *(["grouped"] if length else [])):
        torch.testing.assert_close(run(kernel, x, weight, conv_state, None), expected, rtol=0, atol=1e-14)
    assert torch.equal(next_conv_state(x, conv_state, None), next_state)
    if length:
        torch_output = functional.conv1d(x.mT, weight[:, None], padding=kernel_size - 1, groups=CHANNELS)[
            ..., :length
        ].mT
        torch.testing.assert_close(causal_conv1d(x, weight, None, None), torch_output, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 9])
def test_padding_and_documents(kernel_size: int) -> None:
    is_token = torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0], [1] * 8 + [0] * 3, [0] * 10 + [1], [0] * 11]).bool()
    call_segment_ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [1] * 3 + [2] * 8, [0] * 10 + [1], [0] * 11])
    x, weight, conv_state = random(4, 11, kernel_size)
    taps = Taps(find_input_indices(is_token, call_segment_ids, kernel_size))
    expected, next_state = by_hand(x, weight, conv_state, is_token, call_segment_ids)
    torch.testing.assert_close(causal_conv1d(x, weight, conv_state, taps), expected, rtol=0, atol=1e-14)
    assert torch.equal(next_conv_state(x, conv_state, taps), next_state)


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 9])
def test_packed_documents(kernel_size: int) -> None:
    doc_lengths = [[1, 2, 6, 3], [4, 8], [12]]
    call_segment_ids = torch.stack(
        [torch.repeat_interleave(torch.arange(len(p)), torch.tensor(p)) for p in doc_lengths]
    )
    x, weight, conv_state = random(3, 12, kernel_size)
    is_token = torch.ones(3, 12, dtype=torch.bool)
    taps = Taps(
        find_input_indices(is_token, call_segment_ids, kernel_size),
        find_tokens_near_starts(doc_lengths, kernel_size, x.device),
    )
    expected, next_state = by_hand(x, weight, conv_state, is_token, call_segment_ids)
    for kernel in ("patched", "grouped", "reference"):
        torch.testing.assert_close(run(kernel, x, weight, conv_state, taps), expected, rtol=0, atol=1e-14)
    assert torch.equal(next_conv_state(x, conv_state, taps), next_state)


@pytest.mark.parametrize("kernel", ["shifted", "patched", "grouped", "reference"])
def test_gradients(kernel: str) -> None:
    doc_lengths, kernel_size = [[2, 1, 6]], 4
    call_segment_ids = torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 2]])
    taps = Taps(
        find_input_indices(call_segment_ids >= 0, call_segment_ids, kernel_size),
        find_tokens_near_starts(doc_lengths, kernel_size, call_segment_ids.device),
    )
    x, weight, _ = (value.requires_grad_() for value in random(1, 9, kernel_size))
    kernel_taps = None if kernel == "shifted" else taps
    torch.autograd.gradcheck(lambda x, weight: run(kernel, x, weight, None, kernel_taps), (x, weight))


def test_padding_may_hold_anything() -> None:
    x, weight, conv_state = random(1, 6, 4)
    is_token = torch.tensor([[True, False, True, True, False, True]])
    taps = Taps(find_input_indices(is_token, is_token.long() * 0, 4))
    poisoned = x.masked_fill(~is_token[..., None], float("nan"))
    assert torch.equal(causal_conv1d(poisoned, weight, conv_state, taps), causal_conv1d(x, weight, conv_state, taps))
    assert torch.equal(next_conv_state(poisoned, conv_state, taps), next_conv_state(x, conv_state, taps))


def test_flops_are_those_that_torch_counts() -> None:
    x, weight, conv_state = random(2, 9, 4)
    with FlopCounterMode(display=False) as counter:
        functional.conv1d(torch.cat((conv_state, x), dim=1).mT, weight[:, None], groups=CHANNELS)
    with count_flops() as flops:
        causal_conv1d(x, weight, conv_state, None)
    assert counter.get_total_flops() == convolution_flops(18, CHANNELS, 4) == flops[0]
