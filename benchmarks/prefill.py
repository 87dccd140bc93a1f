"""How long does the prefill of 2,048 tokens take, with logits of the last token only, compared with transformers?"""

from functools import partial
from typing import Any

import torch

from benchmarks import peers
from benchmarks.harness import Case, Step, main, timed

LENGTH = 2048


def heddle_side(arguments: dict[str, Any]) -> Step:
    """heddle, with a new state."""
    model = peers.ours(dtype=peers.DTYPES[arguments["precision"]]).eval()
    prompt = peers.tokens(1, LENGTH)

    @torch.no_grad()
    def work() -> None:
        hidden, _ = model(prompt, None, model.init_state(1, LENGTH + 128))
        model.head(hidden[:, -1:])

    return lambda: timed(work)


def transformers_side(tuned: bool, arguments: dict[str, Any]) -> Step:
    """transformers, with a new dynamic cache."""
    model = peers.llama(peers.DTYPES[arguments["precision"]], tuned).eval()
    prompt = peers.tokens(1, LENGTH)

    @torch.no_grad()
    def work() -> None:
        model(input_ids=prompt, use_cache=True, logits_to_keep=1)

    return lambda: timed(work)


if __name__ == "__main__":
    main(
        "benchmarks.prefill",
        "How much faster is the prefill of 2,048 tokens than with transformers, at its defaults and tuned?",
        {
            "heddle": heddle_side,
            "transformers": partial(transformers_side, False),
            "transformers tuned": partial(transformers_side, True),
        },
        [
            Case("prefill fp32", {"precision": "fp32"}, goal=1.7, pairs=11),
            Case("prefill bf16", {"precision": "bf16"}, goal=None, pairs=11),
        ],
    )
