"""How long one more token takes, one row, after 128 and after 2,000, against transformers' `generate`.

Per token, the prompt's reading left out. The peer's steps are timed inside its own `generate`, greedy, with its
default dynamic cache.
"""

import copy
from typing import Any

import torch

from benchmarks import peers
from benchmarks.harness import Case, Step, main, timed
from heddle.numerics.linear import packing

STEPS = 8


def heddle_side(arguments: dict[str, Any]) -> Step:
    """Greedy steps: model, head of the last position, argmax."""
    model = peers.ours(dtype=peers.DTYPES[arguments["precision"]]).eval()
    context, rows = arguments["context"], arguments["rows"]
    with torch.no_grad():
        _, start = model(peers.tokens(rows, context), None, model.init_state(rows, context + STEPS))

    @torch.no_grad()
    def step() -> float:
        state, token = copy.deepcopy(start), peers.tokens(rows, 1)

        def work() -> None:
            nonlocal state, token
            for _ in range(STEPS):
                hidden, state = model(token, None, state)
                token = model.head(hidden[:, -1:]).argmax(-1)

        with packing():
            work()  # packs, which a longer generation does once
            state, token = copy.deepcopy(start), peers.tokens(rows, 1)
            return timed(work) / STEPS

    return step


def transformers_side(arguments: dict[str, Any]) -> Step:
    """The median time between two calls of a logits processor within `generate`."""

    model = peers.llama(peers.DTYPES[arguments["precision"]]).eval()
    prompt = peers.tokens(arguments["rows"], arguments["context"] + 1)
    with torch.no_grad():
        start = model(input_ids=prompt[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    return peers.generating(model, prompt, start, STEPS)


def case(precision: str, context: int, goal: float | None, rows: int = 1) -> Case:
    """One precision at one context."""
    name = f"decode {precision} after {context}" + (f", {rows} rows" if rows > 1 else "")
    return Case(name, {"precision": precision, "context": context, "rows": rows}, goal, pairs=15)


if __name__ == "__main__":
    main(
        "benchmarks.decode",
        "How much faster is one more token than with transformers' generate?",
        {"heddle": heddle_side, "transformers": transformers_side},
        [
            case("fp32", 128, 1.1),
            case("fp32", 2000, 1.1),
            case("bf16", 128, 1.3),
            case("bf16", 2000, 2.0),
            case("fp32", 128, None, rows=8),
            case("bf16", 128, None, rows=8),
        ],
    )
