"""Scores as pairs of sums: a numerator and a denominator for each evaluated window or row."""

import math
from collections.abc import Iterable

import numpy as np

# (bits, bytes) of each window of text, or (right answers, scored targets) of each row of a task
Scores = list[tuple[float, int]]
# the same as JSON has it: None where the model gave no finite number
FiniteScores = list[tuple[float | None, int]]


def ratio_of_sums(scores: Scores) -> float:
    """Return the sum of the numerators over the sum of the denominators; nan if the denominators are 0."""
    numerator, denominator = sum(score for score, _ in scores), sum(size for _, size in scores)
    return numerator / denominator if denominator else math.nan


def finite_ratio(scores: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the ratio of sums, or None without scores, or where a number is not finite."""
    pairs = list(scores)
    denominator = sum(size for _, size in pairs)
    if not denominator or any(score is None for score, _ in pairs):
        return None
    return sum(score for score, _ in pairs if score is not None) / denominator


def finite_scores(scores: Scores) -> FiniteScores:
    """Return the scores with None for what JSON cannot express."""
    return [(score if math.isfinite(score) else None, size) for score, size in scores]


def row_sums(values: np.ndarray, sizes: np.ndarray) -> Scores:
    """Return the score of each row of float64 and int64 [B, T]."""
    return list(zip(values.sum(1).tolist(), sizes.sum(1).tolist(), strict=True))
