"""What a machine reaches: products by dtype and shape, reading and copying memory, and starting a small operation.

The fastest of several measurements counts: a limit is what the machine can do, not what it does while others work.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from heddle.runtime import kind_of_device

MEASUREMENTS = 5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SMALL_OPERATIONS = 200


def measure_limits(device: str) -> dict[str, float]:
    """Bytes per second of a read and of a copy, FLOP/s of square products, seconds of a small operation."""
    size, width = (2**28, 1024) if device == "cpu" else (2**30, 8192)
    source = torch.empty(size, dtype=torch.uint8, device=device).zero_()
    target, little = torch.empty_like(source), torch.zeros(1, device=device)
    words = source.view(torch.float32)
    limits = {
        "read_bytes_per_second": size / fastest_seconds(words.sum, device),
        "copy_bytes_per_second": 2 * size / fastest_seconds(lambda: target.copy_(source), device),
    }
    for name, dtype in DTYPES.items():
        limits[f"{name}_flops_per_second"] = product_rate(dtype, (width, width, width), device)
    limits["launch_seconds"] = (
        fastest_seconds(lambda: [little.add_(1.0) for _ in range(SMALL_OPERATIONS)], device) / SMALL_OPERATIONS
    )
    return limits


def product_rate(dtype: torch.dtype, shape: tuple[int, int, int], device: str = "cpu") -> float:
    """FLOP/s of x Wᵀ with x [rows, inputs] and W [outputs, inputs], for shape (rows, inputs, outputs)."""
    rows, inputs, outputs = shape
    x, weight = (torch.ones(count, inputs, dtype=dtype, device=device) for count in (rows, outputs))
    return 2 * rows * inputs * outputs / fastest_seconds(partial(functional.linear, x, weight), device)


def fastest_seconds(call: Callable[[], object], device: str = "cpu") -> float:
    """Seconds of the fastest of several calls."""
    fastest = float("inf")
    for _ in range(MEASUREMENTS + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def synchronize(device: str) -> None:
    """Wait until an accelerator has done what it was given."""
    kind = kind_of_device(device)
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()
