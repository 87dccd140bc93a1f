"""How long does decoding a token take in one layer of grouped-query attention, compared with transformers?

12 query heads and 4 key heads of width 64, one row, 8 layers, so that their caches do not fit the CPU's caches. The
peer does what transformers' Llama does within a layer: `DynamicCache.update`, then its function for torch's fused
kernel. Projections, norms and rotary embeddings are left out on both sides. The position table that heddle's layers
share is counted.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Case, Measured, main, timed
from benchmarks.machine import THREADS
from benchmarks.peers import DTYPES
from heddle.machine import measured_choices
from heddle.numerics.attention.softmax import attention
from heddle.parts.layout import Layout
from heddle.parts.position_table import PositionTable
from heddle.parts.states import KVCache, StateSpec
from heddle.runtime import set_up_runtime

HEADS, GROUPS, WIDTH, LAYERS = 12, 4, 64, 8
STEPS = 4  # tokens of one measurement
MAX_NEW_TOKENS = 1024  # of all measurements together


def token(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, heads, length, 64]."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(1, heads, length, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def heddle_side(arguments: dict[str, Any]) -> Measured:
    """heddle's position table and caches, and the choice of a kernel in every layer."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    dtype, context = DTYPES[arguments["precision"]], arguments["context"]
    table = PositionTable.empty(1, None, context + MAX_NEW_TOKENS, "cpu")
    table, layout = table.extend(Layout.causal(1, context))
    caches = []
    for _ in range(LAYERS):
        cache = KVCache.empty((1, GROUPS, WIDTH, WIDTH), None, StateSpec(1, context + MAX_NEW_TOKENS, dtype, "cpu"))
        caches.append(cache.extend(*token(context, dtype)[1:], layout, None)[3])
    q, k, v = token(1, dtype)

    def work() -> None:
        nonlocal table
        for _ in range(STEPS):
            table, layout = table.extend(table.next_layout(1))
            for index, cache in enumerate(caches):
                keys, values, mask, caches[index] = cache.extend(k, v, layout, None)
                outputs.append(attention(q, keys, values, mask, WIDTH**-0.5)[0, -1, 0, :8])
            del outputs[1:]

    outputs: list[Tensor] = []
    return Measured(torch.no_grad()(lambda: timed(work) / (STEPS * LAYERS)), lambda: [float(x) for x in outputs[0]])


def transformers_side(arguments: dict[str, Any]) -> Measured:
    """transformers' cache and attention function."""
    from transformers import DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    torch.set_num_threads(THREADS)
    dtype, context = DTYPES[arguments["precision"]], arguments["context"]
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, is_causal=True, training=False)
    cache = DynamicCache()
    for index in range(LAYERS):
        cache.update(*token(context, dtype)[1:], index)
    q, k, v = token(1, dtype)

    def work() -> None:
        for _ in range(STEPS):
            for index in range(LAYERS):
                keys, values = cache.update(k, v, index)
                y, _ = sdpa_attention_forward(module, q, keys, values, None, dropout=0.0, scaling=WIDTH**-0.5)
                outputs.append(y[0, 0, -1, :8])
            del outputs[1:]

    outputs: list[Tensor] = []
    return Measured(torch.no_grad()(lambda: timed(work) / (STEPS * LAYERS)), lambda: [float(x) for x in outputs[0]])


def case(precision: str, context: int, goal: float | None) -> Case:
    """One precision at one context."""
    return Case(f"one layer, {precision} after {context}", {"precision": precision, "context": context}, goal)


if __name__ == "__main__":
    main(
        "benchmarks.decode_layer",
        "How much faster is decoding a token in one layer of full attention than with transformers?",
        {"heddle": heddle_side, "transformers": transformers_side},
        [
            case("fp32", 8192, 4.0),
            case("bf16", 8192, 6.0),
            case("fp32", 1024, None),
            case("bf16", 1024, None),
        ],
    )
