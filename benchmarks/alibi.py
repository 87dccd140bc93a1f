"""What does ALiBi's bias cost compared with no bias and with a dense mask?

Attention of one layer, 8 query heads and 2 key heads of width 64, float32. The dense mask, float [1, 8, T, T], is what
a framework without a kernel for ALiBi passes to torch's fused kernel.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import EQUAL, alternate, largest_difference, limit_row, ratio_row, show, write
from benchmarks.machine import THREADS
from heddle.machine import measured_choices
from heddle.numerics.attention.mask import NO_MODIFIERS, AttentionMask, ScoreModifiers
from heddle.numerics.attention.softmax import attention
from heddle.runtime import set_up_runtime

HEADS, GROUPS, WIDTH = 8, 2, 64
QUESTION = "What does ALiBi's bias cost compared with no bias and with a dense mask?"
SLOPES = [2.0**-head for head in range(1, HEADS + 1)]


def heads(queries: int, keys: int) -> list[Tensor]:
    """q, k and v."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, HEADS, queries, WIDTH), (1, GROUPS, keys, WIDTH), (1, GROUPS, keys, WIDTH))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def heddle_attention(modifiers: ScoreModifiers) -> Callable[..., Tensor]:
    """heddle's attention of a text, or of its last queries."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        j = torch.arange(k.shape[2], device=q.device)[None]
        mask = AttentionMask(j[:, -q.shape[2] :], j, contiguous=True, all_visible=q.shape[2] == 1)
        return attention(q, k, v, mask, WIDTH**-0.5, None, modifiers)

    return call


def alibi(offsets: Tensor, /) -> Tensor:
    """ALiBi's bias of each head."""
    return torch.tensor(SLOPES).view(-1, *(1 for _ in offsets.shape)) * -offsets.abs().float()


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's fused kernel with a dense mask."""
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    mask = (-torch.tensor(SLOPES)[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[None].to(q.dtype), enable_gqa=True)


def check_equality() -> None:
    """Raise ValueError unless both forms are equal in float64."""
    inputs, biased = [x.double() for x in heads(300, 300)], heddle_attention(ScoreModifiers(score_bias=alibi))
    values = {name: call(*inputs).flatten()[-64:].tolist() for name, call in (("alibi", biased), ("dense", dense))}
    largest_difference("ALiBi", values, EQUAL)


def forward(call: Callable[..., Tensor], queries: int, keys: int) -> Callable[[], Any]:
    """Without gradients."""
    inputs = heads(queries, keys)
    return torch.no_grad()(lambda: call(*inputs))


def forward_backward(call: Callable[..., Tensor], length: int) -> Callable[[], Any]:
    """Forward and backward."""
    inputs = heads(length, length)
    output_gradient = torch.ones(inputs[0].shape)
    return lambda: torch.autograd.grad(call(*inputs), inputs, output_gradient)


def run(train: int, prompt: int, context: int, rounds: int) -> list[dict[str, Any]]:
    """All rows, for texts of these lengths."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    check_equality()
    biased, plain = heddle_attention(ScoreModifiers(score_bias=alibi)), heddle_attention(NO_MODIFIERS)
    pairs = {
        f"forward and backward, {train}": tuple(forward_backward(call, train) for call in (biased, plain, dense)),
        f"forward, {prompt}": tuple(forward(call, prompt, prompt) for call in (biased, plain, dense)),
        f"one query after {context}": tuple(forward(call, 1, context) for call in (biased, plain)),
    }
    rows: list[dict[str, Any]] = []
    for name, calls in pairs.items():
        seconds = alternate(dict(zip(("alibi", "none", "dense"), calls, strict=False)), rounds)
        cost = statistics.median(a / b for a, b in zip(seconds["alibi"], seconds["none"], strict=True))
        rows.append(limit_row(f"{name}, time over that without a bias", cost, 2.0, "times"))
        if "dense" in seconds:
            ratios = [slow / fast for fast, slow in zip(seconds["alibi"], seconds["dense"], strict=True)]
            rows.append({"case": f"{name}, against a dense mask", **ratio_row(ratios, 1.0)})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--small", action="store_true", help="short texts, once each, and write nothing")
    options = parser.parse_args()
    if options.small:
        show(run(64, 96, 128, rounds=1))
    else:
        rows = run(1024, 4096, 8192, rounds=9)
        show(rows)
        write("benchmarks.alibi", QUESTION, rows)
