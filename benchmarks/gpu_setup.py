"""What the sections of `benchmarks.gpu` share: the device, sizes, and one comparison of calls that alternate."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from benchmarks.harness import ratio_row

ROUNDS, TOY_ROUNDS = 9, 1
Call = Callable[[], object]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Setup:
    """device: a kind. toy: tiny sizes, nothing compiled. deadline: no case starts after it, in monotonic seconds.

    rounds: calls of each side whose median counts.
    """

    device: str
    toy: bool
    deadline: float
    rounds: int = ROUNDS

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, in which everything is measured."""
        return torch.bfloat16

    def has_time(self) -> bool:
        """Whether another case may start."""
        return time.monotonic() < self.deadline

    def compiled(self, function: F, **options: Any) -> F:
        """The function by `torch.compile`; as it is with toy sizes."""
        if self.toy:
            return function
        compiled: Any = torch.compile(function, **options)
        return cast(F, compiled)

    def random(self, *shape: int, gradients: bool = True) -> Tensor:
        """Standard normal numbers."""
        x = torch.randn(*shape, device=self.device).to(self.dtype)
        return x.requires_grad_(gradients)

    def on_gpu(self, module: str) -> bool:
        """Whether a peer can run: its module is installed, and there is a GPU for it."""
        return self.device == "cuda" and find_spec(module.partition(".")[0]) is not None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Call) -> float:
        """The seconds of one call."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start


@dataclass(frozen=True)
class Comparison:
    """One case. `make` returns the calls of its sides, heddle's first; it is called when the case starts.

    goal: the least ratio of the first peer's seconds to heddle's. work: (name, amount) of one call, which is divided by
    heddle's seconds, such as ("tokens per second", 32768).
    """

    case: str
    make: Callable[[], Mapping[str, Call]]
    goal: float | None = None
    work: tuple[str, float] | None = None

    def measure(self, setup: Setup) -> dict[str, Any]:
        """Medians of all sides, and the ratios of the peers' seconds to heddle's; a case that fails says why."""
        row: dict[str, Any] = {"case": self.case}
        try:
            calls = self.make()
            seconds = _alternated(setup, calls)
        except Exception as error:  # a rented card is paid by the minute: a case that fails must not cost the others
            return row | {"left out": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        finally:
            if setup.device == "cuda":
                torch.cuda.empty_cache()
        own = seconds["heddle"]
        row |= {f"{side} seconds": statistics.median(values) for side, values in seconds.items()}
        if self.work is not None:
            row[self.work[0]] = self.work[1] / row["heddle seconds"]
        for index, (side, values) in enumerate(list(seconds.items())[1:]):
            ratios = [peer / ours for peer, ours in zip(values, own, strict=True)]
            summary = ratio_row(ratios, None if index or setup.toy else self.goal)
            row |= {
                f"{key} to {side}" if key in ("ratio", "quartiles") else key: value for key, value in summary.items()
            }
        return row


def _alternated(setup: Setup, calls: Mapping[str, Call]) -> dict[str, list[float]]:
    """Seconds of each side; no side is always the first, and two rounds warm up."""
    rounds, warm_up = (TOY_ROUNDS, 0) if setup.toy else (setup.rounds, 2)
    seconds: dict[str, list[float]] = {side: [] for side in calls}
    sides = list(calls)
    for turn in range(rounds + warm_up):
        for number in range(len(sides)):
            side = sides[(number + turn) % len(sides)]
            elapsed = setup.seconds(calls[side])
            if turn >= warm_up:
                seconds[side].append(elapsed)
    return seconds


def with_backward(forward: Callable[[], Tensor], inputs: list[Tensor]) -> Call:
    """A call and the gradients of its sum."""

    def call() -> None:
        y = forward()
        torch.autograd.grad(y if y.dim() == 0 else y.float().sum(), inputs, allow_unused=True)

    return call
