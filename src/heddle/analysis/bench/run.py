"""Measure sides in rounds: each design by heddle, and by transformers at its defaults and tuned where it is the peer.

Each side is a process, because settings of a process (the allocator, how products are computed) must not reach another.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from heddle.analysis.bench.rounds import Calibration, Quartiles, measure_in_rounds, quartiles_of, ratio_of
from heddle.analysis.bench.workload import DEFAULTS, HEDDLE, TUNED, Workload, least_cost
from heddle.errors import ConfigError, HeddleError, MachineError
from heddle.model.config import ModelConfig

WORKER_MODULE = "heddle.cli.bench_worker"
_TOLERANCES = {"fp32": 0.02, "bf16": 0.1}  # relative; transformers' loss leaves out the last token of each text
PEER_PROCESSES = {None: (HEDDLE,), "transformers": (HEDDLE, DEFAULTS, TUNED)}  # by the name of a peer


@dataclass(frozen=True)
class Bench:
    """What is measured.

    designs: by name. peer: None, or "transformers". device: resolved. threads: of each process. rounds: of each of
    the workloads `measured`.
    """

    designs: Mapping[str, ModelConfig]
    measured: Sequence[Workload]
    rounds: int
    precision: str = "fp32"
    peer: str | None = None
    device: str = "cpu"
    threads: int = 1
    part_files: Sequence[str] = ()


class Measurement(NamedTuple):
    """One side's seconds of some workload, and their ratio to the first design's by heddle, round by round.

    limit_share: the least seconds at this machine's limit over the median.
    """

    design: str
    side: str
    seconds: Quartiles
    tokens_per_second: float
    limit_share: float
    ratio: Quartiles


class MeasuredWorkload(NamedTuple):
    """The measurements of one workload. repeated: rounds during which the machine was slow. is_noisy: too many."""

    workload: Workload
    measurements: list[Measurement]
    repeated: int
    is_noisy: bool


class SideProcess:
    """The worker process of one side of a design, which answers requests."""

    def __init__(self, label: str, request: dict[str, Any]) -> None:
        self.label, self.request = label, request
        command = [sys.executable, "-m", WORKER_MODULE]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises HeddleError if the worker refuses it or ends."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise MachineError(f"{self.label}: its process ended with code {self.process.wait()}; choose smaller sizes")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = MachineError if answer["exit_code"] == MachineError.exit_code else ConfigError
            raise kind(f"{self.label}: {answer['error']}")
        return answer

    def prepare(self, workload: Workload) -> list[float]:
        """Let the worker build and warm up what some workload needs. Returns its values."""
        values: list[float] = self.call(self.request | {"workload": list(workload)})["values"]
        return values

    def seconds(self) -> float:
        """Let it do the workload once."""
        return float(self.call({})["seconds"])

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def run_bench(
    bench: Bench, limits: Mapping[str, float], report: Callable[[MeasuredWorkload], None] = lambda _: None
) -> list[MeasuredWorkload]:
    """Measure every workload of every side. limits: of `measure_limits`. report: gets each when it is measured.

    What a design cannot do (a prompt longer than its learned positions) is refused with its reason: HeddleError.
    """
    calibration = Calibration(bench.threads)
    results = []
    with ExitStack() as stack:
        sides = {
            (name, side): _start(bench, name, side) for name in bench.designs for side in PEER_PROCESSES[bench.peer]
        }
        for process in sides.values():
            stack.callback(process.close)
        for workload in bench.measured:
            values = {key: process.prepare(workload) for key, process in sides.items()}
            for (name, side), computed in values.items():
                check_values(f"{name}, {side}", values[name, HEDDLE], computed, bench.precision)
            steps = {name: partial(SideProcess.seconds, process) for name, process in sides.items()}
            results.append(_measure(bench, workload, limits, steps, calibration))
            report(results[-1])
    return results


def check_values(label: str, reference: Sequence[float], values: Sequence[float], precision: str) -> None:
    """Raise MachineError where a side's values differ from heddle's by more than rounding and the last target may."""
    size = max(map(abs, reference))
    difference = max(abs(a - b) for a, b in zip(reference, values, strict=True)) / size
    limit = _TOLERANCES["fp32" if precision == "fp32" else "bf16"]
    if not difference <= limit:
        raise MachineError(
            f"{label}: computes other numbers than heddle, {100 * difference:.2g} % apart; their times say nothing"
        )


def _start(bench: Bench, name: str, side: str) -> SideProcess:
    request = {
        "design": bench.designs[name].dump(),
        "side": side,
        "precision": bench.precision,
        "device": bench.device,
        "threads": bench.threads,
        "part_files": list(bench.part_files),
    }
    return SideProcess(name if side == HEDDLE else f"{name}, {side}", request)


def _measure(
    bench: Bench,
    workload: Workload,
    limits: Mapping[str, float],
    steps: Mapping[tuple[str, str], Callable[[], float]],
    calibration: Calibration,
) -> MeasuredWorkload:
    """Take the rounds of one workload. Names in `measure_in_rounds` are the sides' own."""
    names = {f"{design}, {side}": (design, side) for design, side in steps}
    rounds = measure_in_rounds({name: steps[key] for name, key in names.items()}, bench.rounds, calibration)
    first = rounds.seconds[next(iter(names))]
    measurements = []
    for name, (design, side) in names.items():
        seconds = quartiles_of(rounds.seconds[name])
        limit, amount = least_cost(bench.designs[design], workload, bench.precision)
        share = amount / limits[limit] / seconds.median
        ratio = ratio_of(rounds.seconds[name], first)
        measurements.append(Measurement(design, side, seconds, workload.tokens / seconds.median, share, ratio))
    return MeasuredWorkload(workload, measurements, rounds.repeated, rounds.is_noisy)


def check_peer(peer: str | None, designs: Mapping[str, ModelConfig]) -> None:
    """Raise ConfigError for a peer that is unknown or not installed, or that cannot compute one of the designs."""
    if peer is None:
        return
    if peer not in PEER_PROCESSES:
        raise ConfigError(f"--peer {peer}: unknown; the choice is transformers")
    if find_spec(peer) is None:
        raise ConfigError("--peer transformers: is not installed; pip install 'heddle-lm[hf]'")
    from heddle.exchange.family_match import HEDDLE as OWN
    from heddle.exchange.family_match import best_match

    for name, config in designs.items():
        try:
            model_type = best_match(config, None).family.model_type
        except HeddleError as error:
            raise ConfigError(f"--peer transformers: {name}: {error}") from error
        if model_type == OWN:
            raise ConfigError(
                f"--peer transformers: {name} fits no family, `heddle show` names the nearest; leave --peer out"
            )
