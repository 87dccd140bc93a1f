"""How long does decoding a token take after 128 and 2,000 tokens, compared with transformers' Llama?

All sides run the same greedy loop from a cache of the earlier tokens: model, logits of the last position, argmax. The
prefill is not timed. (`benchmarks/huggingface.py` measures the same through transformers' `generate`.)
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Case, Step, main, timed
from heddle.numerics.linear import packed_weights

STEPS = 8


def decode_loop(step: Callable[[Tensor, Any], tuple[Tensor, Any]], start: Any, rows: int) -> Step:
    """The loop of every side: seconds per token, each time from a copy of the same state."""
    state, token = copy.deepcopy(start), peers.tokens(rows, 1)

    def loop() -> None:
        nonlocal state, token
        for _ in range(STEPS):
            logits, state = step(token, state)
            token = logits.argmax(-1)

    @torch.no_grad()
    def seconds() -> float:
        nonlocal state, token
        state, token = copy.deepcopy(start), peers.tokens(rows, 1)
        return timed(loop) / STEPS

    return seconds


def heddle_side(arguments: dict[str, Any]) -> Step:
    """heddle's model and state."""
    model = peers.ours(dtype=peers.DTYPES[arguments["precision"]]).eval()
    context, rows = arguments["context"], arguments["rows"]
    with torch.no_grad():
        _, start = model(peers.tokens(rows, context), None, model.init_state(rows, context + STEPS))

    def step(token: Tensor, state: Any) -> tuple[Tensor, Any]:
        hidden, state = model(token, None, state)
        return model.head(hidden[:, -1:]), state

    seconds = decode_loop(step, start, rows)

    def packed() -> float:
        with packed_weights():
            seconds()  # packs the weights, which a generation does once
            return seconds()

    return packed


def transformers_side(tuned: bool, arguments: dict[str, Any]) -> Step:
    """transformers' model and dynamic cache."""
    model = peers.llama(peers.DTYPES[arguments["precision"]], tuned).eval()
    context, rows = arguments["context"], arguments["rows"]
    with torch.no_grad():
        start = model(input_ids=peers.tokens(rows, context), use_cache=True, logits_to_keep=1).past_key_values

    def step(token: Tensor, cache: Any) -> tuple[Tensor, Any]:
        output = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits, output.past_key_values

    return decode_loop(step, start, rows)


def case(precision: str, context: int, goal: float | None, rows: int = 1) -> Case:
    """One precision at one context."""
    name = f"decode {precision} after {context}" + (f", {rows} rows" if rows > 1 else "")
    return Case(name, {"precision": precision, "context": context, "rows": rows}, goal, pairs=15)


if __name__ == "__main__":
    main(
        "benchmarks.decode",
        "How much faster is decoding a token than with transformers, at its defaults and tuned?",
        {
            "heddle": heddle_side,
            "transformers": partial(transformers_side, False),
            "transformers tuned": partial(transformers_side, True),
        },
        [
            case("fp32", 128, 1.1),
            case("fp32", 2000, 1.1),
            case("bf16", 128, 1.3),
            case("bf16", 2000, 2.0),
            case("fp32", 128, None, rows=8),
            case("bf16", 128, None, rows=8),
        ],
    )
