"""How much faster is a training step of `preset:gqa-tiny` than plain PyTorch written by hand, eager or compiled?

4 rows of 128 tokens of a vocabulary of 4,096, float32, from equal weights: gradients, clipping at norm 1, AdamW. The
peer (`benchmarks/plain_gqa.py`) has the process settings of heddle; the faster of its two forms counts, as does the
faster of heddle's: eager, or all layers as one graph (`heddle train --compile` on a CPU). Each time is that of 10
steps.
"""

import copy
import sys
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Case, Measured, main, timed
from benchmarks.machine import THREADS
from benchmarks.peers import adamw
from benchmarks.plain_gqa import PlainModel
from heddle.data.samples import Batch
from heddle.machine import measured_choices
from heddle.model.copies import compiled
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.model.size import size
from heddle.runtime import set_up_runtime
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients

ROWS, LENGTH, VOCABULARY, STEPS = 4, 128, 4096, 10
DESIGN = load_config("preset:gqa-tiny", [f"vocab_size={VOCABULARY}"])


def ours(precision: str) -> Decoder:
    """heddle's model, in a process set up like the command line."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    return build(DESIGN).to(torch.float64 if precision == "fp64" else torch.float32).train()


def batches() -> list[np.ndarray]:
    """The tokens of the steps, int64 [ROWS, LENGTH + 1] each."""
    generator = np.random.default_rng(0)
    return [generator.integers(1, VOCABULARY, (ROWS, LENGTH + 1)) for _ in range(STEPS)]


def heddle_side(arguments: dict[str, Any]) -> Measured:
    """Steps as in heddle's training loop, eager or compiled: what is faster here, which a line says."""
    model = ours(arguments["precision"])
    ways = {"eager": heddle_steps(copy.deepcopy(model), False), "compiled": heddle_steps(model, True)}
    rounds = [{way: measured.step() for way, measured in ways.items()} for _ in range(3)]
    seconds = {way: median(each[way] for each in rounds) for way in ways}
    fastest = min(ways, key=lambda way: seconds[way])
    times = ", ".join(f"{way} {1000 * each:.1f} ms" for way, each in seconds.items())
    print(f"heddle's steps in {arguments['precision']}: {fastest} ({times})", file=sys.stderr)
    return ways[fastest]


def heddle_steps(model: Decoder, is_compiled: bool) -> Measured:
    """Steps of heddle in one of the two ways."""
    run = compiled(model, whole=True) if is_compiled else model
    optimizer = build_optimizer(model, 0.1)
    losses: list[float] = []

    def steps() -> None:
        for tokens in batches():
            result = accumulate_gradients(run, Batch(tokens, ((LENGTH,),) * ROWS, np.arange(ROWS)), (0, 0))
            apply_gradients(model, optimizer, result, 1e-4, 1.0)
            losses.append(float(result.loss))

    steps()
    first_losses = losses.copy()
    return Measured(lambda: timed(steps) / STEPS, lambda: first_losses)


def plain_side(compiled: bool, arguments: dict[str, Any]) -> Measured:
    """Steps of plain PyTorch."""
    model = PlainModel(ours(arguments["precision"]), LENGTH)
    optimizer = adamw(model)
    run = torch.compile(model) if compiled else model
    losses: list[float] = []

    def steps() -> None:
        for tokens in batches():
            rows = torch.from_numpy(tokens)
            loss = run(rows[:, :-1], rows[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))

    steps()
    first_losses = losses.copy()
    return Measured(lambda: timed(steps) / STEPS, lambda: first_losses)


if __name__ == "__main__":
    main(
        "benchmarks.tiny_training",
        "How much faster is a training step of gqa-tiny than plain PyTorch, eager or compiled?",
        {"heddle": heddle_side, "plain": partial(plain_side, False), "plain, compiled": partial(plain_side, True)},
        [
            Case(
                "training gqa-tiny fp32",
                {"precision": "fp32"},
                goal=1.6,
                pairs=25,
                against=("plain", "plain, compiled"),
                figure="tiny training",
                work=("fp32 products", 3 * ROWS * LENGTH * size(DESIGN, LENGTH).flops_per_token),
            )
        ],
    )
