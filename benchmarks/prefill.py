"""How long does the prefill of 2,048 tokens take, with logits of the last token only, compared with transformers?"""

from functools import partial
from typing import Any

import torch

from benchmarks import peers
from benchmarks.harness import Case, Measured, main, timed
from heddle.model.load_config import load_config
from heddle.model.size import size

LENGTH = 2048


def heddle_side(arguments: dict[str, Any]) -> Measured:
    """heddle, with a new state."""
    model = peers.ours(dtype=peers.DTYPES[arguments["precision"]]).eval()
    prompt = peers.tokens(1, LENGTH)

    @torch.no_grad()
    def work() -> None:
        hidden, _ = model(prompt, None, model.init_state(1, LENGTH + 128))
        values[:] = model.head(hidden[:, -1])[0, :8].tolist()

    values: list[float] = []
    work()
    return Measured(lambda: timed(work), lambda: values)


def transformers_side(tuned: bool, arguments: dict[str, Any]) -> Measured:
    """transformers, with a new dynamic cache."""
    model = peers.llama(peers.DTYPES[arguments["precision"]], tuned).eval()
    prompt = peers.tokens(1, LENGTH)

    @torch.no_grad()
    def work() -> None:
        values[:] = model(input_ids=prompt, use_cache=True, logits_to_keep=1).logits[0, -1, :8].tolist()

    values: list[float] = []
    work()
    return Measured(lambda: timed(work), lambda: values)


def case(precision: str, goal: float) -> Case:
    """One precision."""
    flops = LENGTH * size(load_config("preset:gqa-medium"), LENGTH).flops_per_token
    return Case(
        f"prefill {precision}",
        {"precision": precision},
        goal,
        pairs=11,
        against=("transformers tuned",),
        figure="prefill" if precision == "bf16" else "",
        work=(f"{precision} products", flops),
    )


if __name__ == "__main__":
    main(
        "benchmarks.prefill",
        "How much faster is the prefill of 2,048 tokens than with transformers, at its defaults and tuned?",
        {
            "heddle": heddle_side,
            "transformers": partial(transformers_side, False),
            "transformers tuned": partial(transformers_side, True),
        },
        [case("fp32", 1.25), case("bf16", 1.3)],
    )
