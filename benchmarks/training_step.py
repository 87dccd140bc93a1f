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
WIDTH = load_config(peers.DESIGN).width
TUNED, COMPILED = "transformers tuned", "transformers tuned, compiled"


def weight_dtype(precision: str) -> torch.dtype:
    """Weights are float32, but for the check of equality."""
    return torch.float64 if precision == "fp64" else torch.float32


def fresh_tokens(generator: np.random.Generator) -> np.ndarray:
    """int64 [ROWS, LENGTH + 1]: random tokens, with end tokens at random indices."""
    tokens = generator.integers(1, peers.VOCABULARY, (ROWS, LENGTH + 1))
    for row in tokens:
        row[generator.integers(1, LENGTH, DOCUMENTS - 1)] = END
    return tokens


def training_loop(
    gradients: Callable[[np.ndarray], float], update: Callable[[], None], model: torch.nn.Module
) -> Measured:
    """The loop that every side runs. The values are a loss of rows without end tokens, and of its gradients the norm
    and some numbers of the embedding, before any update.
    """
    generator = np.random.default_rng(0)
    whole = np.random.default_rng(1).integers(1, peers.VOCABULARY, (ROWS, LENGTH + 1))
    values = [gradients(whole)]
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    (embedding,) = [gradient for gradient in found if gradient.shape == (peers.VOCABULARY, WIDTH)]
    values += [float(torch.stack([gradient.norm() for gradient in found]).norm())]
    values += embedding[int(whole[0, 0]), :8].tolist()
    update()

    def step() -> None:
        gradients(fresh_tokens(generator))
        update()

    return Measured(lambda: timed(step), lambda: values)


def heddle_side(arguments: dict[str, Any]) -> Measured:
    """Gradients and an optimizer step of heddle."""
    model = peers.ours(dtype=weight_dtype(arguments["precision"])).train()
    optimizer = build_optimizer(model, 0.1)
    autocast = torch.bfloat16 if arguments["precision"] == "bf16" else None
    results = []

    def gradients(tokens: np.ndarray) -> float:
        batch = Batch(tokens, document_lengths(tokens, END), np.arange(ROWS))
        results.append(accumulate_gradients(model, batch, (0, 0), autocast=autocast))
        return float(results[-1].loss)

    def update() -> None:
        apply_gradients(model, optimizer, results.pop(), 1e-4, 1.0)

    return training_loop(gradients, update, model)


def transformers_side(tuned: bool, compiled: bool, arguments: dict[str, Any]) -> Measured:
    """Gradients and an optimizer step of transformers' model."""
    model = peers.llama(weight_dtype(arguments["precision"]), tuned).train()
    optimizer = peers.adamw(model)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments["precision"] == "bf16")
    run = torch.compile(model) if compiled and not arguments.get("exact") else model  # it cannot with that float64

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

    return training_loop(gradients, update, model)


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
