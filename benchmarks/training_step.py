"""How long does a training step of 100 M parameters take, compared with transformers' Llama of the same shape?

4 rows of 512 tokens. All sides run the same loop, and all of it is timed: new tokens with an end token after each
document, gradients, gradient clipping at norm 1, a step of torch's fused AdamW. heddle packs: it separates the
documents. The peer runs plain causal rows, which are its default and its cheapest case.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import peers
from benchmarks.harness import Case, Step, main, timed
from heddle.data.samples import Batch, document_lengths
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients

ROWS, LENGTH, DOCUMENTS, END = 4, 512, 3, 0


def fresh_tokens(generator: np.random.Generator) -> np.ndarray:
    """int64 [ROWS, LENGTH + 1]: random tokens, with end tokens at random indices."""
    tokens = generator.integers(1, peers.VOCABULARY, (ROWS, LENGTH + 1))
    for row in tokens:
        row[generator.integers(1, LENGTH, DOCUMENTS - 1)] = END
    return tokens


def training_loop(gradients: Callable[[np.ndarray], None], update: Callable[[], None]) -> Step:
    """The loop that every side runs."""
    generator = np.random.default_rng(0)

    def step() -> None:
        gradients(fresh_tokens(generator))
        update()

    return lambda: timed(step)


def heddle_side(arguments: dict[str, Any]) -> Step:
    """Gradients and an optimizer step of heddle."""
    model = peers.ours().train()
    optimizer = build_optimizer(model, 0.1)
    autocast = torch.bfloat16 if arguments["precision"] == "bf16" else None
    results = []

    def gradients(tokens: np.ndarray) -> None:
        batch = Batch(tokens, document_lengths(tokens, END), np.arange(ROWS))
        results.append(accumulate_gradients(model, batch, (0, 0), autocast=autocast))

    def update() -> None:
        apply_gradients(model, optimizer, results.pop(), 1e-4, 1.0)

    return training_loop(gradients, update)


def transformers_side(tuned: bool, arguments: dict[str, Any]) -> Step:
    """Gradients and an optimizer step of transformers' model."""
    model = peers.llama(tuned=tuned).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments["precision"] == "bf16")

    def gradients(tokens: np.ndarray) -> None:
        inputs = torch.from_numpy(tokens[:, :-1])
        with autocast:
            loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
        loss.backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return training_loop(gradients, update)


if __name__ == "__main__":
    main(
        "benchmarks.training_step",
        "How much faster is a training step than with transformers, at its defaults and tuned?",
        {
            "heddle": heddle_side,
            "transformers": partial(transformers_side, False),
            "transformers tuned": partial(transformers_side, True),
        },
        [
            Case("training fp32", {"precision": "fp32"}, goal=1.6, pairs=7),
            Case("training bf16 autocast", {"precision": "bf16"}, goal=1.25, pairs=9),
        ],
    )
