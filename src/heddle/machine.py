"""Choose the fastest CPU implementations: measured once per machine, torch build and thread count, and cached on disk.

Several implementations give equal results up to rounding: float32 matmul precisions, weights packed by oneDNN or not,
plain or fused attention. Which one is fastest depends on the CPU's instructions, its caches and torch's build. Each is
timed in alternation with the default, which is kept unless it takes more than `TIE` times as long as the fastest
(matmuls: `PRODUCTS_TIE`).

$HEDDLE_MACHINE overrides the measurements: "default" keeps the defaults, and a path names a file with the choices (the
"choices" of `heddle doctor --json`).
"""

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from math import exp, fsum, inf, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heddle.data.cache import DataCache
from heddle.errors import CheckpointError, ConfigError, MachineError
from heddle.extensions import OutOfTimeError, install, sources_hash, unusable
from heddle.numerics import native
from heddle.numerics.attention import softmax
from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.kernels import kernels
from heddle.numerics.linear import DEFAULT_WAYS, LARGE_ELEMENTS, WayKey, pack_maps, packed_linear, way_name
from heddle.numerics.native.races import RACES
from heddle.progress import print_status
from heddle.runtime import DEFAULT_CHOICES, EARLIER_CHOICES, Choices, Runtime, hardware, medium_is_exact, with_choices
from heddle.session import ALL_NEEDS
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.lock import wait_for_lock
from heddle.storage.run_log import RUN_FILE
from heddle.torch_private import can_pack_weights

VARIABLE = "HEDDLE_MACHINE"
VERSION = 1  # raise it when what is measured, or how, changes
TIE, PRODUCTS_TIE = 1.1, 1.05  # the mean over all products repeats within 2 %
ROUNDS, MIN_ROUNDS = 7, 3
SECONDS = 0.5  # for the rounds of one race, after the first MIN_ROUNDS
LIMIT_SECONDS = 30.0  # of a section: an idle machine takes 2 to 5
BUSY_SECONDS = 3600.0  # for which a section that was not measured within the limit is not tried again
RECORD = "machine.json"  # of a comparison or a ladder
# rows, inputs, outputs: of feed-forwards and a vocabulary, in small, medium and large designs
PRODUCTS = ((512, 128, 352), (512, 128, 4096), (1024, 512, 1408), (1024, 768, 2048))
WEIGHTS = {False: (512, 512), True: (2048, 1024)}  # a small and a large one
READ_BYTES = 2**25 + 2**24  # of weights multiplied in turn: more than a core's cache holds
MEASURED_ROWS = {1: 1, 8: 4, 64: 32}  # row class: rows measured
ROWS, HEADS, HEAD_DIM = 2, 4, 64  # of attention

Facts = dict[str, Any]


class _Clock:
    """Time for each section, and for all of them. seconds: for all; None: no limit."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds, self.section_end = seconds, inf
        self.end = inf if seconds is None else time.perf_counter() + seconds

    def begin_section(self) -> None:
        self.section_end = time.perf_counter() + LIMIT_SECONDS

    def check(self) -> None:
        """Raise OutOfTimeError at the end of the time."""
        if time.perf_counter() > self.section_end:
            raise OutOfTimeError(f"not measured within {LIMIT_SECONDS:.0f} seconds, because the machine is busy")
        if time.perf_counter() >= self.end:
            raise OutOfTimeError(f"not measured within the {self.seconds:.0f} seconds that the budget leaves for it")


_clock: ContextVar[_Clock] = ContextVar("clock", default=_Clock())  # noqa: B039 - without limits it never changes


def measured_choices(
    threads: int | None = None, needs: Collection[str] = ALL_NEEDS, seconds: float | None = None
) -> Choices:
    """The choices for `threads` (None: torch's thread count). What is needed and not cached is measured.

    needs: a subset of ALL_NEEDS. seconds: after which the rest keeps the defaults; None: no limit. Returns the defaults
    if no cache folder is writable. Raises ConfigError if $HEDDLE_MACHINE names no file of choices.
    """
    asked = os.environ.get(VARIABLE)
    if asked == "default":
        return DEFAULT_CHOICES
    if asked:
        return _choices_of_file(Path(asked))
    try:
        return choices_from(measured_facts(threads, needs, seconds=seconds))
    except (ConfigError, MachineError):  # no home, or a full disk
        return DEFAULT_CHOICES


def with_measured_choices(
    runtime: Runtime, threads: int | None, needs: Collection[str], seconds: float | None = None
) -> Runtime:
    """Use the fastest kernels of this CPU, measured now unless they are known: up to minutes, once per machine.

    Called when a verb has checked its input. needs: the measurements that it needs. GPUs and deterministic runs keep
    the defaults. seconds: in which it must end; None: no limit.
    """
    if runtime.device != "cpu" or runtime.deterministic:
        return runtime
    return with_choices(runtime, measured_choices(threads, needs, seconds))


def _choices_of_file(path: Path) -> Choices:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        reason = "is not a file of choices; set it to default, or to a file with the choices of `heddle doctor --json`"
        raise ConfigError(f"{VARIABLE} {path}: {reason}") from None
    return Choices.read(values, f"{VARIABLE} {path}")


def choices_from(facts: Mapping[str, Any]) -> Choices:
    """The choices that follow from the measurements; sections that were not measured keep their defaults."""
    products, packing, attention, native_speed = (facts.get(section, {}) for section in ALL_NEEDS)
    return Choices(
        matmul=products.get("matmul", DEFAULT_CHOICES.matmul),
        packing={name: row["way"] for name, row in packing.items()},
        triangle_lengths=tuple(attention.get("triangle_lengths", DEFAULT_CHOICES.triangle_lengths)),
        native=tuple(name for name in native_speed.get("faster", ()) if name in native.OPERATORS),
    )


def measured_facts(
    threads: int | None = None, needs: Collection[str] = ALL_NEEDS, anew: bool = False, seconds: float | None = None
) -> Facts:
    """The measurements by section, from the cache where it has them. anew: measure everything again.

    A section that takes over `LIMIT_SECONDS`, because the machine is busy, is tried again after `BUSY_SECONDS`; what
    does not end within `seconds`, which include building operators and waiting for another process, by the next call.
    Raises ConfigError or MachineError without a writable cache folder.
    """
    count = torch.get_num_threads() if threads is None else threads
    path, clock, measured = _facts_file(count), _Clock(seconds), False
    busy_path = _facts_file(count, "machine-busy")

    def is_known() -> bool:
        known = {*_known(path), *_left_out(busy_path)}
        return time.perf_counter() >= clock.end or (not anew and set(needs) <= known)

    with wait_for_lock(path, is_known):  # two processes that measure at once would disturb each other
        facts, left_out = _known(path), {} if anew else _left_out(busy_path)
        missing = [section for section in needs if anew or section not in {*facts, *left_out}]
        if missing:
            name = f"{count} thread{'s' if count > 1 else ''}"
            most = min(LIMIT_SECONDS * len(missing), inf if seconds is None else seconds)
            takes = f"about {4 * len(missing)} seconds, at most {most:.0f} where other programs run"
            print_status(f"measuring the fastest CPU kernels with {name}, once per machine: {takes}")
            token = _clock.set(clock)
            try:
                with _threads(count):
                    for section in missing:
                        clock.begin_section()
                        try:
                            clock.check()
                            facts[section], measured = MEASURES[section](), True
                        except OutOfTimeError as error:
                            used, again = "what was measured before, or torch's default, is used", ""
                            if time.perf_counter() < clock.end:
                                left_out[section] = time.time()
                                again = " for an hour; `heddle doctor --measure` measures at once"
                            print_status(f"{section}: {error}; {used}{again}")
            finally:
                _clock.reset(token)
            if left_out:
                write_json_file(busy_path, left_out)
            if measured:
                write_json_file(path, facts)
    return facts


def _facts_file(threads: int, kind: str = "machine") -> Path:
    """The cache file of the measurements. Raises ConfigError or MachineError without a cache folder."""
    return DataCache(None).path("json", kind, VERSION, _key(threads))


def _left_out(path: Path) -> Facts:
    """The sections that a busy machine did not end lately, and when that was."""
    now = time.time()
    with suppress(CheckpointError):
        times = read_json_file(path).items()
        return {name: at for name, at in times if name in ALL_NEEDS and 0 <= now - at < BUSY_SECONDS}
    return {}


def _known(path: Path) -> Facts:
    """The measurements of a file, without those of C++ operators with other sources."""
    with suppress(CheckpointError):
        facts = read_json_file(path)
        if facts.get("native", {}).get("sources") != sources_hash():
            facts.pop("native", None)
        return facts
    return {}


def _key(threads: int) -> Facts:
    """What the measurements depend on."""
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
    machine = hardware()
    return {
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "environment": {name: os.environ.get(name) for name in names},
    }


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def race(ways: Mapping[str, Callable[[], None]], rounds: int = ROUNDS, seconds: float = SECONDS) -> dict[str, float]:
    """Time each way, in seconds: the lower quartile over rounds that run every way once.

    Raises OutOfTimeError at the end of the time for a section.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():  # warm up: oneDNN prepares for new shapes
        run()
        _clock.get().check()
    began = time.perf_counter()
    for number in range(rounds):
        if number >= MIN_ROUNDS and time.perf_counter() - began > seconds:
            break
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
            _clock.get().check()
    return {name: sorted(each)[len(each) // 4] for name, each in times.items()}


def fastest(seconds: Mapping[str, float], default: str, tie: float = TIE) -> str:
    """The fastest way, or the default if it takes at most `tie` times as long."""
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[default] > tie * seconds[best] else default


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(dtype)


def _products() -> Facts:
    """The fastest float32 matmul precision, and the speed of matmuls in float32 and bfloat16."""

    def step(rows: int, inputs: int, outputs: int) -> Callable[[], None]:
        x, weight, gradient = _random(rows, inputs), _random(outputs, inputs), _random(rows, outputs)

        def run() -> None:
            functional.linear(x, weight)
            gradient.T @ x
            gradient @ weight

        return run

    def on(route: str, run: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            torch.set_float32_matmul_precision(route)
            run()

        return call

    routes = ("highest", "medium") if medium_is_exact() else ("highest",)
    before = torch.get_float32_matmul_precision()
    try:
        with torch.no_grad():
            seconds = [race({route: on(route, step(*shape)) for route in routes}) for shape in PRODUCTS]
    finally:
        torch.set_float32_matmul_precision(before)
    total = {route: exp(fsum(log(each[route]) for each in seconds) / len(seconds)) for route in routes}
    rows, inputs, outputs = PRODUCTS[-1]
    a, b = _random(rows, inputs, dtype=torch.bfloat16), _random(outputs, inputs, dtype=torch.bfloat16)
    bf16 = race({"bf16": lambda: _run(functional.linear(a, b))})["bf16"]
    route = fastest(total, "highest", PRODUCTS_TIE)
    return {
        "matmul": route,
        "speedups": {name: total["highest"] / value for name, value in total.items()},
        "fp32_flops_per_second": 6 * rows * inputs * outputs / seconds[-1][route],
        "bf16_flops_per_second": 2 * rows * inputs * outputs / bf16,
    }


def _run(_: Tensor) -> None:
    """Discard the result of a timed call."""


def _packing() -> Facts:
    """By class of few-row products: the fastest way, and each way's speedup over the default."""
    rows: Facts = {}
    for key, default in DEFAULT_WAYS.items():
        ways = {way: run for way, run in _ways(key).items() if run is not None}
        if default not in ways:
            rows[way_name(key)] = {"way": "plain", "speedups": {}}
            continue
        with torch.no_grad():
            seconds = race(ways, ROUNDS, SECONDS / 4)
        rows[way_name(key)] = {
            "way": fastest(seconds, default),
            "speedups": {way: seconds[default] / value for way, value in seconds.items()},
        }
    return rows


def _ways(key: WayKey) -> dict[str, Callable[[], None] | None]:
    dtype, is_large, row_class = key
    outputs, inputs = WEIGHTS[is_large]
    assert (outputs * inputs >= LARGE_ELEMENTS) is is_large
    count = -(-READ_BYTES // (outputs * inputs * dtype.itemsize))
    weights = [_random(outputs, inputs, dtype=dtype) for _ in range(count)]
    x = _random(MEASURED_ROWS[row_class], inputs, dtype=dtype)

    def plain() -> None:
        for weight in weights:
            functional.linear(x, weight)

    if not can_pack_weights(dtype):
        return {"plain": plain}
    packed = [pack_maps([(weight, None)]) for weight in weights]

    def multiply(pads: bool) -> Callable[[], None]:
        maps = [each._replace(pad_to_four_rows=pads) for each in packed]

        def run() -> None:
            for each in maps:
                packed_linear(x, each)

        return run

    return {"plain": plain, "packed": multiply(False), "four": multiply(True) if row_class == 1 else None}


def _attention() -> Facts:
    """The sequence lengths at which causal attention trains faster with plain products than with torch's fused kernel.

    speedups: of plain products over the fused kernel.
    """
    lengths, speedups, before = [], {}, softmax.triangle_lengths
    softmax.triangle_lengths = softmax.LENGTHS
    try:
        for length in softmax.LENGTHS:
            seconds = race(
                {name: _attention_step(name, length) for name in ("triangle", "causal")}, ROUNDS, SECONDS / 2
            )
            speedups[str(length)] = seconds["causal"] / seconds["triangle"]
            if fastest(seconds, "triangle" if length in softmax.TRIANGLE_LENGTHS else "causal") == "triangle":
                lengths.append(length)
    finally:
        softmax.triangle_lengths = before
    return {"triangle_lengths": lengths, "speedups": speedups}


def _attention_step(kernel: str, length: int) -> Callable[[], None]:
    q, k, v = (_random(ROWS, HEADS, length, HEAD_DIM).requires_grad_() for _ in range(3))
    positions = torch.arange(length, dtype=torch.int32)[None]

    def run() -> None:
        mask = AttentionMask(positions, positions, contiguous=True)
        with torch.enable_grad(), kernels(attention=kernel):
            y = softmax.attention(q, k, v, mask, HEAD_DIM**-0.5)
        torch.autograd.grad(y, (q, k, v), torch.ones_like(y))

    return run


def _native() -> Facts:
    """The C++ operators that are faster than the plain way.

    speedups: of each operator over the plain way. unusable: why none can be built here. sources: their hash.
    """
    reason, before = unusable(), native.in_use
    if reason is not None:
        return {"faster": [], "speedups": {}, "unusable": reason, "sources": sources_hash()}

    def on(operators: frozenset[str], run: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            native.in_use = operators
            run()

        return call

    speedups, faster = {}, []
    try:
        built = install(native.OPERATORS, _clock.get().end)
        _clock.get().begin_section()  # building is no measurement
        for name in built:
            run = RACES[name]()
            seconds = race({"plain": on(before - {name}, run), "native": on(before | {name}, run)}, ROUNDS, SECONDS / 2)
            speedups[name] = seconds["plain"] / seconds["native"]
            if fastest(seconds, "plain") == "native":
                faster.append(name)
    finally:
        native.in_use = before
    return {"faster": faster, "speedups": speedups, "sources": sources_hash()}


MEASURES: Mapping[str, Callable[[], Facts]] = {
    "products": _products,
    "packing": _packing,
    "attention": _attention,
    "native": _native,
}


# A run, comparison or ladder that has started keeps its recorded choices, whatever the cache says later.


def recorded_choices(run: Path) -> Choices | None:
    """The choices recorded by the run in a folder; None if there is no readable record."""
    try:
        runtime = read_json_file(run / RUN_FILE).get("runtime", {})
        if "choices" in runtime:
            return Choices.read(runtime["choices"], str(run / RUN_FILE))
        return Choices(matmul=runtime["matmul"]) if runtime.get("matmul") in ("highest", "medium") else EARLIER_CHOICES
    except (CheckpointError, ConfigError, AttributeError):
        return None


def with_worker_choices(
    runtime: Runtime,
    folder: Path,
    plan_file: str,
    needs: Mapping[int, Collection[str]],
    seconds: float | None = None,
) -> Runtime:
    """Add the choices of workers, for the work in a folder, to the runtime. Nothing else may run meanwhile.

    needs: a worker's needs, by its number of threads. Work that has started keeps its recorded choices, or the defaults
    of versions that recorded none. seconds: in which all measurements must end; None: no limit.
    """
    end = inf if seconds is None else time.perf_counter() + seconds
    if runtime.device != "cpu":
        return runtime
    saved, usual = _worker_choices_of(folder), None
    if runtime.deterministic or saved:
        usual = DEFAULT_CHOICES
    elif (folder / plan_file).is_file():
        usual = EARLIER_CHOICES

    def measured(count: int, each: Collection[str]) -> Choices:
        return measured_choices(count, each, None if seconds is None else max(0.0, end - time.perf_counter()))

    choices = {count: saved.get(count) or usual or measured(count, each) for count, each in needs.items()}
    return replace(runtime, worker_choices={**saved, **choices})


def record_worker_choices(runtime: Runtime, folder: Path) -> Runtime:
    """Write the workers' choices into the folder, or take those that another process has written there."""
    saved = _worker_choices_of(folder)
    if not saved and runtime.worker_choices:
        record = {str(count): each.dump() for count, each in runtime.worker_choices.items()}
        write_json_file(folder / RECORD, record)
    return replace(runtime, worker_choices={**runtime.worker_choices, **saved})


def _worker_choices_of(folder: Path) -> dict[int, Choices]:
    record = folder / RECORD
    saved = read_json_file(record) if record.is_file() else {}
    return {int(count): Choices.read(values, str(record)) for count, values in saved.items()}


def slow_precision(threads: int | None = None) -> str | None:
    """A warning if bfloat16 matmuls are slower than float32 on this CPU; None if they are not, or not measured yet.

    Reads cached measurements only.
    """
    if os.environ.get(VARIABLE) == "default":
        return None
    with suppress(ConfigError, MachineError):
        products = _known(_facts_file(threads or torch.get_num_threads())).get("products", {})
        if products:
            ratio = products["fp32_flops_per_second"] / products["bf16_flops_per_second"]
            if ratio > TIE:
                return f"bf16: matmuls take {ratio:.1f} times as long as in fp32 on this CPU; use --precision fp32"
    return None
