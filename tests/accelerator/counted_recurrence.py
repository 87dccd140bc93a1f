"""The recurrent kernels of flash-linear-attention as `LaunchCounter` counts them, and what torch.compile gets on CUDA.

Launches are those of fla 0.5's chunked forms, whatever the length: cumulative decays, the states of chunks and the
outputs; for delta rules the pairs, their triangular solve and the corrected keys and values too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.accelerator.launches import BANDWIDTH, MIN_KERNEL, RATES, LaunchCounter, tensor_bytes

CHUNK = 64  # tokens, fla's
# Launches of the forward and of the backward pass, and passes over the tensors in each launch's reads and writes.
LAUNCHES = {"chunk_simple_gla": (3, 6), "chunk_gated_delta_rule": (6, 11), "chunk_kda": (8, 15)}


class _Recurrence(torch.autograd.Function):
    """Shapes only; the counter gets the launches."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, state: Tensor, count: Callable[[bool], None], *others: Tensor | None) -> Any:
        ctx.save_for_backward(v, state, *others)
        ctx.count = count
        count(False)
        return torch.empty_like(v), torch.empty_like(state)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        v, state, *others = ctx.saved_tensors
        ctx.count(True)
        first = torch.empty_like(v), torch.empty_like(state), None
        return *first, *(None if x is None else torch.empty_like(x) for x in others)


def functions(counter: LaunchCounter) -> dict[str, Callable[..., Any]]:
    """What `heddle.numerics.recurrent.fla.functions` returns."""
    return {name: lambda name=name, **arguments: _run(counter, name, arguments) for name in LAUNCHES}


def _run(counter: LaunchCounter, name: str, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, d_k], v [B, T, H, d_v] -> o [B, T, H, d_v] and the last state [N, H, d_k, d_v]."""
    q, v = arguments["q"], arguments["v"]
    bounds, (batch, length, heads, d_k), d_v = arguments.get("cu_seqlens"), q.shape, v.shape[3]
    rows = batch if bounds is None else bounds.shape[0] - 1
    state = arguments.get("initial_state")
    if state is None:
        state = torch.empty(rows, heads, d_k, d_v, dtype=torch.float32, device=q.device)
    tensors = [
        x for key, x in arguments.items() if isinstance(x, Tensor) and key != "cu_seqlens" and x.device == q.device
    ]
    moved = sum(map(tensor_bytes, tensors)) + tensor_bytes(v)
    pairs = 2 if name == "chunk_simple_gla" else 4  # products of a chunk's tokens with one another
    flops = 2 * batch * length * heads * (2 * d_k * d_v + pairs * CHUNK * (d_k + d_v) // 2)

    def count(backward: bool) -> None:
        launches, factor = LAUNCHES[name][backward], 2.5 if backward else 1.0
        counter.end_segment()
        # Half of the launches read and write all tensors; the others are of chunks' pairs and decays.
        seconds = max(factor * flops / RATES[torch.bfloat16], launches / 2 * moved / BANDWIDTH, launches * MIN_KERNEL)
        counter.add(launches, launches * moved // 2, round(factor * flops), seconds)
        counter.total.operations[name] += 1

    others = [x for x in tensors if x is not v and x is not arguments.get("initial_state")]
    y: tuple[Tensor, Tensor] = _Recurrence.apply(v, state, count, *others)
    return y
