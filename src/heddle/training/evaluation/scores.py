"""Scores as pairs of sums: a numerator and a denominator for each evaluated window or row."""

import math

# (bits, bytes) of each window of text, or (right answers, scored targets) of each row of a task
Scores = list[tuple[float, int]]


def ratio_of_sums(scores: Scores) -> float:
    """Return the sum of the numerators over the sum of the denominators; nan if the denominators are 0."""
    numerator, denominator = sum(score for score, _ in scores), sum(size for _, size in scores)
    return numerator / denominator if denominator else math.nan
