"""What does a window of 256 cost in time, memory and state, compared with a dense mask?

Attention of one layer, 8 heads of width 64, float32. The dense mask, bool [T, T], is what a framework without a kernel
for windows passes to torch's fused kernel.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import (
    EQUAL,
    alternate,
    largest_difference,
    limit_row,
    peak_memory,
    ratio_row,
    show,
    write,
)
from benchmarks.machine import ROOT, THREADS
from heddle.machine import measured_choices
from heddle.model.load_config import load_config
from heddle.model.size import state_bytes
from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.attention.softmax import attention
from heddle.runtime import set_up_runtime

HEADS, WIDTH, WINDOW = 8, 64, 256
QUESTION = "Is attention with a window linear in the text's length, and how much faster than with a dense mask?"


def heads(length: int) -> list[Tensor]:
    """q, k and v, [1, 8, length, 64]."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, WIDTH)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """heddle's attention with a window."""
    length = q.shape[2]
    positions = torch.arange(length, device=q.device)[None]
    return attention(q, k, v, AttentionMask(positions, positions, window=WINDOW, contiguous=True), WIDTH**-0.5)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's fused kernel with a dense mask."""
    positions = torch.arange(q.shape[2])
    distance = positions[:, None] - positions[None, :]
    mask = (distance >= 0) & (distance < WINDOW)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def check_equality() -> None:
    """Raise ValueError unless both forms are equal in float64."""
    inputs = [x.double() for x in heads(700)]
    values = {name: call(*inputs).flatten()[-64:].tolist() for name, call in (("local", local), ("dense", dense))}
    largest_difference("window", values, EQUAL)


def forward(call: Callable[..., Tensor], length: int) -> Callable[[], Any]:
    """Without gradients."""
    q, k, v = heads(length)
    return torch.no_grad()(lambda: call(q, k, v))


def forward_backward(call: Callable[..., Tensor], length: int) -> Callable[[], Any]:
    """Forward and backward."""
    q, k, v = heads(length)
    output_gradient = torch.ones(q.shape)
    return lambda: torch.autograd.grad(call(q, k, v), (q, k, v), output_gradient)


def measure_peak(length: int) -> float:
    """Peak memory in MB of a fresh process that runs forward and backward once at `length`."""
    command = [sys.executable, "-m", "benchmarks.window", "--peak", str(length)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout)


def peak(length: int) -> None:
    """Print the MB that attention adds to those of torch and its inputs. Runs in a separate process."""
    torch.set_num_threads(THREADS)
    work = forward_backward(local, length)
    before = peak_memory()
    work()
    print(peak_memory() - before)


def run() -> list[dict[str, Any]]:
    """All rows."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    check_equality()
    rows: list[dict[str, Any]] = []
    seconds_of = alternate({"8k": forward(local, 8192), "32k": forward(local, 32768)}, rounds=9)
    growth = [long / short for short, long in zip(seconds_of["8k"], seconds_of["32k"], strict=True)]
    rows.append(limit_row("forward, time of 32k over 8k", statistics.median(growth), 4.4, "times"))
    seconds_of = alternate({"local": forward_backward(local, 8192), "dense": forward_backward(dense, 8192)}, rounds=7)
    ratios = [slow / fast for fast, slow in zip(seconds_of["local"], seconds_of["dense"], strict=True)]
    seconds = {f"{name} seconds": statistics.median(values) for name, values in seconds_of.items()}
    rows.append({"case": "forward and backward, 8k, against a dense mask", **seconds, **ratio_row(ratios, 12.0)})
    memory = {length: measure_peak(length) for length in (16384, 32768, 65536)}
    for shorter, longer in ((16384, 32768), (32768, 65536)):
        name = f"forward and backward, memory of {longer} over {shorter}"
        rows.append(limit_row(name, memory[longer] / memory[shorter], 2.2, "times"))
    design = load_config("preset:mha-tiny", ["vocab_size=512", f"layers.*.mixer.window={WINDOW}"])
    sizes = [state_bytes(design, context) for context in (1024, 65536)]
    rows.append(limit_row("state of 65536 tokens over that of 1024", sizes[1] / sizes[0], 1.0, "times"))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak(options.peak)
    else:
        rows = run()
        show(rows)
        write("benchmarks.window", QUESTION, rows)
