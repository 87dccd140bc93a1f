"""What a window of 256 costs: time and memory over the length, against a dense mask, and the state.

8 heads of 64, float32, one row. The dense mask is what a plain call with a T×T mask does.
"""

import json
import resource
import statistics
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import ROOT, THREADS, alternate, bounded, judged, show, write
from heddle.model.load import load_config
from heddle.model.size import size
from heddle.numerics.attention import attention
from heddle.numerics.visibility import Visibility, ordered
from heddle.runtime import prepare

WINDOW, HEADS, WIDTH, SCALE = 256, 8, 64, 0.125


def drawn(length: int, gradients: bool) -> list[Tensor]:
    """Queries, keys and values [1, heads, length, width]."""
    shape = (1, HEADS, length, WIDTH)
    return [torch.randn(shape, requires_grad=gradients) for _ in range(3)]


def seen(length: int) -> Visibility:
    """The window over consecutive positions."""
    i, j = ordered(1, length, length, torch.device("cpu"))
    return Visibility(i, j, window=WINDOW, ordered=True)


def forward(length: int) -> None:
    """One call without gradients."""
    q, k, v = drawn(length, False)
    attention(q, k, v, seen(length), SCALE)


def lengths() -> dict[str, Any]:
    """Seconds at 32k over seconds at 8k, forward."""
    inputs = {length: drawn(length, False) for length in (8192, 32768)}

    def call(length: int) -> Tensor:
        q, k, v = inputs[length]
        return attention(q, k, v, seen(length), SCALE)

    seconds = alternate({"8k": lambda: call(8192), "32k": lambda: call(32768)}, 11)
    ratios = [long / short for short, long in zip(seconds["8k"], seconds["32k"], strict=True)]
    return bounded("forward at 32k over forward at 8k", statistics.median(ratios), 4.4, "times")


def dense() -> dict[str, Any]:
    """Forward and backward at 8k against a dense mask."""
    q, k, v = drawn(8192, True)
    visible = seen(8192)
    mask = visible.mask()[:, None]

    def ours() -> None:
        attention(q, k, v, visible, SCALE).sum().backward()

    def theirs() -> None:
        functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE).sum().backward()

    seconds = alternate({"heddle": ours, "dense mask": theirs}, 5)
    ratios = [b / a for a, b in zip(seconds["heddle"], seconds["dense mask"], strict=True)]
    medians = {f"{name} seconds": statistics.median(values) for name, values in seconds.items()}
    return {"case": "forward and backward at 8k", **medians, **judged(ratios, 12)}


def memory() -> dict[str, Any]:
    """Peak memory added at 64k over that at 16k, forward, each in a fresh process; linear is 4."""
    added = []
    for length in (16384, 65536):
        command = [sys.executable, "-m", "benchmarks.window", str(length)]
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        added.append(json.loads(out))
    return bounded("memory at 64k over memory at 16k", added[1] / added[0], 4.4, "times")


def added_memory(length: int) -> int:
    """KiB that a forward adds to the peak of this process."""
    forward(WINDOW * 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forward(length)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def state() -> dict[str, Any]:
    """Bytes of the state of a design of windows at 128k over that at 8k."""
    overrides = ["layers.0.layers.1.mixer.window=256"]
    config = load_config("preset:local_global-medium", overrides)
    ratio = size(config, 131072).state_bytes / size(config, 8192).state_bytes
    return bounded("state at 128k over state at 8k", ratio, 1.0, "times")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        torch.set_num_threads(THREADS)
        print(added_memory(int(sys.argv[1])))
        sys.exit()
    prepare("cpu", THREADS)
    rows = [state(), memory(), lengths(), dense()]
    show(rows)
    write("benchmarks.window", "What does a window cost?", rows)
