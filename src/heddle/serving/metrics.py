"""What /metrics tells, in the text form that Prometheus reads."""

import threading
from bisect import bisect_left
from collections.abc import Mapping

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds


class Histogram:
    """How many durations were at most each bucket's seconds. Safe from several threads."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        with self._lock:
            self._counts[bisect_left(BUCKETS, seconds)] += 1
            self._total += seconds

    @property
    def mean(self) -> float:
        """The mean in seconds; 0 before the first duration."""
        with self._lock:
            return self._total / max(1, sum(self._counts))

    def lines(self, name: str) -> list[str]:
        """The metric of this name, in seconds."""
        with self._lock:
            counts, total = list(self._counts), self._total
        bounds = [*map(str, BUCKETS), "+Inf"]
        lines = [f"# TYPE heddle_{name} histogram"]
        lines += [f'heddle_{name}_bucket{{le="{le}"}} {sum(counts[: i + 1])}' for i, le in enumerate(bounds)]
        return [*lines, f"heddle_{name}_sum {total:.6f}", f"heddle_{name}_count {sum(counts)}"]


class EngineMetrics:
    """What the engine counts since it began.

    queue_seconds: of a request before it is started. first_token_seconds: from its arrival. token_seconds: from one of
    its tokens to the next. running_seconds: from its start to its end.
    """

    def __init__(self) -> None:
        self.prompt_tokens = self.new_tokens = self.finished = self.cancelled = 0
        self.queue_seconds, self.first_token_seconds = Histogram(), Histogram()
        self.token_seconds, self.running_seconds = Histogram(), Histogram()

    def lines(self) -> list[str]:
        """All of them."""
        lines: list[str] = []
        for name in ("prompt_tokens", "new_tokens", "finished", "cancelled"):
            lines += [f"# TYPE heddle_{name}_total counter", f"heddle_{name}_total {getattr(self, name)}"]
        for name in ("queue_seconds", "first_token_seconds", "token_seconds", "running_seconds"):
            lines += getattr(self, name).lines(name)
        return lines


def gauge_lines(values: Mapping[str, int]) -> list[str]:
    """Gauges by name."""
    return [
        line for name, value in values.items() for line in (f"# TYPE heddle_{name} gauge", f"heddle_{name} {value}")
    ]


def answer_lines(answers: Mapping[int, int]) -> list[str]:
    """How many answers there were of each status."""
    lines = [f'heddle_answers_total{{status="{status}"}} {count}' for status, count in sorted(answers.items())]
    return ["# TYPE heddle_answers_total counter", *lines]
