"""What does a training step cost for the check that all weights and moments are finite?

The step of `benchmarks.training_step` (100 M parameters, 4 rows of 512 tokens), with the check and without it.
"""

from typing import Any

import torch

from benchmarks.harness import Case, Measured, main
from benchmarks.training_step import heddle_side
from heddle.training.optimizer import Optimizer


def unchecked_side(arguments: dict[str, Any]) -> Measured:
    """The same step, in which every number counts as finite."""
    Optimizer.is_finite = lambda self: torch.tensor(True)  # type: ignore[method-assign]  # in this process only
    return heddle_side(arguments)


if __name__ == "__main__":
    main(
        "benchmarks.finite_check",
        "What does the check of weights and moments cost a training step?",
        {"heddle": heddle_side, "without the check": unchecked_side},
        [
            Case(
                "check of weights and moments, fp32",
                {"precision": "fp32"},
                goal=0.99,
                pairs=30,
                figure="finite check",
            )
        ],
    )
