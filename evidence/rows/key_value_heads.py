"""MHA, GQA and MQA: what fewer key/value heads cost, and how many seeds would resolve it."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from evidence.row import Finding, Results, Row, Training, attention, differences, stack

KV_HEADS = (8, 4, 2, 1)
EXPECTED = 0.003  # bits per byte for each halving
SETTINGS = {"steps": 500, "batch_size": 8, "sequence_length": 96, "learning_rate": 5e-3}


def seeds_to_resolve(values: Sequence[float], effect: float) -> int:
    """Pairs of seeds for which a two-sided 5 % test of this effect has a power of 80 % (normal approximation)."""
    return max(2, math.ceil(((1.96 + 0.84) * statistics.stdev(values) / effect) ** 2))


def findings(results: Results) -> Sequence[Finding]:
    """Losses against twice as many heads, and all halvings together."""
    claims = [Finding("1 key/value head (MQA) loses against 8 (MHA)", differences(results, "1", "8", "loss"))]
    for many, few in pairwise(KV_HEADS):
        values = differences(results, str(few), str(many), "loss")
        note = f"{EXPECTED} would need {seeds_to_resolve(values, EXPECTED)} seeds"
        claims.append(Finding(f"{few} key/value heads lose against {many}", values, note=note))
    return claims


ROW = Row(
    title="MHA, GQA, MQA",
    papers=[
        "Shazeer 2019 (MQA): perplexity 30.2 against 29.9 on the billion-word benchmark.",
        "Ainslie et al. 2023 (GQA): mean score of T5-XXL 47.2 with 64 key/value heads, 47.1 with 8, 46.6 with one.",
    ],
    trainings=[
        Training(str(count), stack(*[attention(8, kv_heads=count)] * 2, hidden=176), "stdlib", SETTINGS)
        for count in KV_HEADS
    ],
    findings=findings,
    remark="Parameters fall with the heads; feed-forwards are not widened in return.",
)
