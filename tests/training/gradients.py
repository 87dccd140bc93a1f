"""Gradients of a small batch, and how far two of them are apart."""

import numpy as np
import torch
from torch import Tensor

from heddle.data.samples import Batch
from heddle.model.decoder import Decoder
from heddle.training.distillation import Teacher
from heddle.training.step import BatchResult, accumulate_gradients
from tests import small

KEY = (5, 7)
ROWS, CONTEXT = 4, 12


def batch(lengths: tuple[tuple[int, ...], ...] = ((CONTEXT,), (5, 7), (1, 1, 10), (3, 9))) -> Batch:
    """Random tokens; a document of a row begins with token 0, the end token here."""
    tokens = np.random.default_rng(1).integers(1, small.VOCABULARY, (ROWS, CONTEXT + 1))
    for row, sizes in enumerate(lengths):
        tokens[row, np.cumsum((0, *sizes))[:-1]] = 0
    return Batch(tokens, lengths, np.arange(20, 20 + ROWS))


def gradients_of(
    model: Decoder, rows: Batch | None = None, parts: int = 1, teacher: Teacher | None = None
) -> tuple[dict[str, Tensor], BatchResult]:
    """The gradients of a batch by name, and what else came of it."""
    model.zero_grad(set_to_none=True)
    result = accumulate_gradients(model, rows or batch(), KEY, parts, teacher=teacher)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}, result


def furthest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Whether all parameters have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
