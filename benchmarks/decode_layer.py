"""How long one more token takes in one layer of full attention, GQA, against transformers' update and attend.

12 query heads on 4 of keys and values, 64 wide, one row, 8 layers, so that their caches come from memory. The peer is
what its Llama does within a layer: `DynamicCache.update`, then its function for torch's fused kernel. Projections,
norms and rotations are left out on both sides; the table of positions that our layers share is counted.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import THREADS, Case, Step, main, timed
from benchmarks.peers import DTYPES
from heddle.numerics.attention.softmax import attention
from heddle.parts.context.kv_cache import KVCache
from heddle.parts.context.layout import Layout
from heddle.parts.context.mixer_state import StateSpec
from heddle.parts.context.position_table import PositionTable
from heddle.runtime import set_up_runtime

HEADS, GROUPS, WIDTH, LAYERS = 12, 4, 64, 8
STEPS = 4  # tokens of one measurement
ROOM = 1024  # tokens that all measurements together may add


def token(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, heads, length, 64]."""
    made = [torch.randn(1, heads, length, WIDTH, dtype=dtype) for heads in (HEADS, GROUPS, GROUPS)]
    return made[0], made[1], made[2]


def heddle_side(arguments: dict[str, Any]) -> Step:
    """A state's table and caches, and the choice of a form in every layer."""
    set_up_runtime("cpu", THREADS)
    dtype, context = DTYPES[arguments["precision"]], arguments["context"]
    table = PositionTable.empty(1, None, context + ROOM, "cpu")
    table, layout = table.extend(Layout.causal(1, context))
    caches = []
    for _ in range(LAYERS):
        cache = KVCache.empty((1, GROUPS, WIDTH, WIDTH), None, StateSpec(1, context + ROOM, dtype, "cpu"))
        caches.append(cache.extend(*token(context, dtype)[1:], layout, None)[3])
    q, k, v = token(1, dtype)

    def work() -> None:
        nonlocal table
        for _ in range(STEPS):
            table, layout = table.extend(table.next_layout(1))
            for index, cache in enumerate(caches):
                keys, values, seen, caches[index] = cache.extend(k, v, layout, None)
                attention(q, keys, values, seen, WIDTH**-0.5)

    return torch.no_grad()(lambda: timed(work) / (STEPS * LAYERS))


def transformers_side(arguments: dict[str, Any]) -> Step:
    """The same numbers through its cache and its attention function."""
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
                sdpa_attention_forward(module, q, keys, values, None, dropout=0.0, scaling=WIDTH**-0.5)

    return torch.no_grad()(lambda: timed(work) / (STEPS * LAYERS))


def case(precision: str, context: int, goal: float | None) -> Case:
    """One precision at one context."""
    return Case(f"one layer, {precision} after {context}", {"precision": precision, "context": context}, goal)


if __name__ == "__main__":
    main(
        "benchmarks.decode_layer",
        "How much faster is one more token in one layer of full attention than transformers' update and attend?",
        {"heddle": heddle_side, "transformers": transformers_side},
        [
            case("fp32", 8192, 4.0),
            case("bf16", 8192, 6.0),
            case("fp32", 1024, None),
            case("bf16", 1024, None),
        ],
    )
