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
from benchmarks.harness import Case, Measured, main, timed
from heddle.data.samples import Batch, document_lengths
from heddle.model.load_config import load_config
from heddle.model.size import size
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients

ROWS, LENGTH, DOCUMENTS, END = 4, 512, 3, 0
TUNED, COMPILED = "transformers tuned", "transformers tuned, compiled"


def fresh_tokens(generator: np.random.Generator) -> np.ndarray:
    """int64 [ROWS, LENGTH + 1]: random tokens, with end tokens at random indices."""
    tokens = generator.integers(1, peers.VOCABULARY, (ROWS, LENGTH + 1))
    for row in tokens:
        row[generator.integers(1, LENGTH, DOCUMENTS - 1)] = END
    return tokens


def training_loop(gradients: Callable[[np.ndarray], float], update: Callable[[], None]) -> Measured:
    """The loop that every side runs. The value is the loss of one row without an end token, before any update."""
    generator = np.random.default_rng(0)
    whole = np.random.default_rng(1).integers(1, peers.VOCABULARY, (ROWS, LENGTH + 1))
    first_loss = gradients(whole)
    update()

    def step() -> None:
        gradients(fresh_tokens(generator))
        update()

    return Measured(lambda: timed(step), lambda: [first_loss])


def heddle_side(arguments: dict[str, Any]) -> Measured:
    """Gradients and an optimizer step of heddle."""
    model = peers.ours().train()
    optimizer = build_optimizer(model, 0.1)
    autocast = torch.bfloat16 if arguments["precision"] == "bf16" else None
    results = []

    def gradients(tokens: np.ndarray) -> float:
        batch = Batch(tokens, document_lengths(tokens, END), np.arange(ROWS))
        results.append(accumulate_gradients(model, batch, (0, 0), autocast=autocast))
        return float(results[-1].loss)

    def update() -> None:
        apply_gradients(model, optimizer, results.pop(), 1e-4, 1.0)

    return training_loop(gradients, update)


def transformers_side(tuned: bool, compiled: bool, arguments: dict[str, Any]) -> Measured:
    """Gradients and an optimizer step of transformers' model."""
    model = peers.llama(tuned=tuned).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments["precision"] == "bf16")
    run = torch.compile(model) if compiled else model

    def gradients(tokens: np.ndarray) -> float:
        rows = torch.from_numpy(tokens)
        with autocast:  # labels that are shifted already: it scores the same targets as heddle
            loss = run(input_ids=rows[:, :-1], shift_labels=rows[:, 1:].contiguous(), labels=rows, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return training_loop(gradients, update)


def case(precision: str, goal: float, against: str, pairs: int) -> Case:
    """One precision."""
    flops = 3 * ROWS * LENGTH * size(load_config("preset:gqa-medium"), LENGTH).flops_per_token
    sides = ("heddle", "transformers", TUNED, COMPILED) if precision == "bf16" else ("heddle", "transformers", TUNED)
    return Case(
        f"training {precision}" + (" autocast" if precision == "bf16" else ""),
        {"precision": precision},
        goal,
        pairs,
        sides,
        (against,),
        f"training {precision}",
        (f"{precision} products", flops),
        1e-3,
    )


if __name__ == "__main__":
    main(
        "benchmarks.training_step",
        "How much faster is a training step than with transformers, at its defaults, tuned and compiled?",
        {
            "heddle": heddle_side,
            "transformers": partial(transformers_side, False, False),
            TUNED: partial(transformers_side, True, False),
            COMPILED: partial(transformers_side, True, True),
        },
        [case("fp32", 1.25, TUNED, 7), case("bf16", 1.4, COMPILED, 9)],
    )
