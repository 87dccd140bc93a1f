"""A row of the page of evidence: what papers found, the trainings that test it, and what follows from their numbers.

A finding is a claim that a difference, paired by seed, is above a threshold. With n seeds of mean m and standard
deviation s its interval is m ± t(n − 1) · s / √n. The confidence of a row with k findings is 1 − 0.05 / k (Bonferroni),
so that with probability 95 % all intervals of a row hold together.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from heddle.lab.compare.statistics import t_quantile

AGREES, NOT_RESOLVED, DISAGREES = "agrees", "not resolved", "disagrees"
ALPHA = 0.05
SEEDS = (0, 1, 2, 3, 4)
MAX_LOSS = 16.0  # bits per byte; a training that diverged counts as this
Numbers = Mapping[str, float]
Results = Mapping[str, Mapping[int, Numbers]]  # of each training, by seed


@dataclass(frozen=True)
class Training:
    """One design on one text or task, trained once for each seed.

    design: a config as plain data. data: `stdlib`, or a task such as `recall:mqar`. settings: of `Settings`, without
    the seed.
    """

    key: str
    design: Mapping[str, Any]
    data: str
    settings: Mapping[str, Any]
    seeds: Sequence[int] = SEEDS

    @cached_property
    def sha256(self) -> str:
        """Of everything but the seeds: results of another design or other settings are not those of this training."""
        content = {name: value for name, value in asdict(self).items() if name != "seeds"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Finding:
    """A claim: the mean of `differences`, one for each seed, is above `threshold`.

    unit: what a difference is counted in. note: what else to know.
    """

    claim: str
    differences: Sequence[float]
    unit: str = "bits per byte"
    threshold: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Judgment:
    """A finding with its interval. word: agrees, not resolved or disagrees."""

    finding: Finding
    mean: float
    half_width: float

    @property
    def word(self) -> str:
        """Whether the whole interval is above the threshold, or below it."""
        if self.mean - self.half_width > self.finding.threshold:
            return AGREES
        return DISAGREES if self.mean + self.half_width < self.finding.threshold else NOT_RESOLVED


@dataclass(frozen=True)
class Row:
    """A row of the page.

    papers: what each found, in a sentence. findings: of the results of all trainings. measure: what is measured of a
    trained model besides its loss or accuracy, by name. remark: what the numbers do not say.
    """

    title: str
    papers: Sequence[str]
    trainings: Sequence[Training]
    findings: Callable[[Results], Sequence[Finding]]
    measure: Callable[..., Numbers] | None = None
    remark: str = ""

    @cached_property
    def by_key(self) -> Mapping[str, Training]:
        """The trainings by their keys."""
        by_key = {training.key: training for training in self.trainings}
        assert len(by_key) == len(self.trainings), f"{self.title}: two trainings have one key"
        return by_key

    def judge(self, results: Results) -> list[Judgment]:
        """The findings with their simultaneous intervals."""
        findings = self.findings(results)
        return [_judge(finding, 1 - ALPHA / len(findings)) for finding in findings]


def _judge(finding: Finding, confidence: float) -> Judgment:
    values = finding.differences
    deviation = statistics.stdev(values)
    half = t_quantile(confidence, len(values) - 1) * deviation / math.sqrt(len(values))
    return Judgment(finding, statistics.mean(values), half)


def differences(results: Results, first: str, second: str, quantity: str) -> list[float]:
    """A quantity of the first training minus that of the second, for each seed of both."""
    seeds = sorted(set(results[first]) & set(results[second]))
    return [results[first][seed][quantity] - results[second][seed][quantity] for seed in seeds]


def best_rate(results: Results, keys: Sequence[str]) -> str:
    """The training of the lowest mean loss."""
    return min(keys, key=lambda key: statistics.mean(numbers["loss"] for numbers in results[key].values()))


def stack(*mixers: Mapping[str, Any], width: int = 64, hidden: int | None = None, **fields: Any) -> dict[str, Any]:
    """A design with a layer for each mixer. hidden: of its gated feed-forwards; None: it has none."""
    feedforward = None if hidden is None else {"kind": "gated", "hidden": hidden}
    layers = [{"mixer": dict(mixer), "feedforward": feedforward} for mixer in mixers]
    return {"width": width, "layers": layers, "initialization": {"std": width**-0.5}, **fields}


def attention(heads: int = 4, **fields: Any) -> dict[str, Any]:
    """Attention with RoPE."""
    return {"kind": "attention", "heads": heads, "position": {"kind": "rope"}, **fields}
