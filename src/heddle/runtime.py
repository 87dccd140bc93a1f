"""Process-wide settings, set once by the program that owns the process (the command line, a worker), not on import."""

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from heddle.errors import ConfigError

DEVICES = ("cuda", "mps", "cpu")  # the first that is available is the default
MAX_THREADS = 4096  # per process; torch fails for numbers that no machine has
MEASUREMENTS = 5  # of which the fastest counts
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


MATMUL_ROUTES = ("highest", "medium")


@dataclass(frozen=True)
class Choices:
    """Which of several CPU implementations to use, equal up to rounding: see `heddle.machine`.

    matmul: torch's float32 matmul precision, "highest" or "medium" (oneDNN). packing: how products of few rows use
    packed weights, in the form of `heddle.numerics.linear.choose_ways`. triangle_lengths: classes of sequence lengths,
    each named by its longest, whose causal attention trains with plain products. native: the C++ operators in use, of
    `heddle.numerics.native.OPERATORS`.
    """

    matmul: str = "highest"
    packing: Mapping[str, str] = field(default_factory=dict)
    triangle_lengths: tuple[int, ...] = (128, 256, 512, 1024)
    native: tuple[str, ...] = ()

    def dump(self) -> dict[str, Any]:
        """As plain data."""
        lists = {"triangle_lengths": list(self.triangle_lengths), "native": list(self.native)}
        return {"matmul": self.matmul, "packing": dict(self.packing), **lists}

    @classmethod
    def read(cls, values: Any, source: str = "choices") -> Self:
        """Read plain data; missing fields keep their defaults. Raises ConfigError that names the source."""
        from heddle.numerics.attention.softmax import LENGTHS
        from heddle.numerics.linear import check_ways
        from heddle.numerics.native import OPERATORS

        names = [each.name for each in fields(cls)]
        if not isinstance(values, dict) or not set(values) <= set(names):
            raise ConfigError(f"{source}: expected a table of {', '.join(names)}")
        choices = cls(**values)
        if choices.matmul not in MATMUL_ROUTES:
            raise ConfigError(f"{source}: matmul {choices.matmul}: must be one of {', '.join(MATMUL_ROUTES)}")
        lengths = choices.triangle_lengths
        if not isinstance(lengths, list | tuple) or not all(length in LENGTHS for length in lengths):
            raise ConfigError(f"{source}: triangle_lengths {lengths}: must be a list of some of {list(LENGTHS)}")
        if not isinstance(choices.packing, dict):
            raise ConfigError(f"{source}: packing: expected a table")
        check_ways(choices.packing)
        if not isinstance(choices.native, list | tuple) or not all(name in OPERATORS for name in choices.native):
            raise ConfigError(f"{source}: native {choices.native}: must be a list of some of {', '.join(OPERATORS)}")
        return replace(choices, triangle_lengths=tuple(lengths), native=tuple(choices.native))


DEFAULT_CHOICES = Choices()
EARLIER_CHOICES = Choices(matmul="medium")  # of runs that recorded none


@dataclass(frozen=True)
class Runtime:
    """The settings: device, threads, float32 matmul precision, and whether freed memory is retained.

    matmul: torch's name; on CUDA "high" is TF32. deterministic: torch uses deterministic algorithms, or raises.
    choices: for this process. worker_choices: for the workers that it starts, by their number of threads.
    """

    device: str
    threads: int
    matmul: str
    keeps_memory: bool
    deterministic: bool = False
    choices: Choices = DEFAULT_CHOICES
    worker_choices: Mapping[int, Choices] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The settings and the hardware, for run.json and reports."""
        settings = asdict(self) | {"choices": self.choices.dump()}
        settings["worker_choices"] = {str(count): each.dump() for count, each in self.worker_choices.items()}
        if not self.worker_choices:
            del settings["worker_choices"]
        return settings | hardware()

    def describe_workers(self, threads: int | None) -> dict[str, Any]:
        """As `describe`, with the kernels of the workers: on a CPU theirs are not this process's."""
        described = self.describe()
        if kind_of_device(self.device) != "cpu":
            return described
        choices = self.choices_of_worker(threads)
        return described | {"choices": choices, "matmul": choices["matmul"]}

    def choices_of_worker(self, threads: int | None) -> dict[str, Any]:
        """The choices for a worker with this many threads (None: as many as this process), as plain data."""
        return self.worker_choices.get(threads or self.threads, DEFAULT_CHOICES).dump()


def set_up_runtime(
    device: str = "auto",
    threads: int | None = None,
    tf32: bool = False,
    deterministic: bool = False,
    choices: Choices = DEFAULT_CHOICES,
) -> Runtime:
    """Set up this process. Raises ConfigError for a missing device, a bad number of threads, or TF32 on a CPU or MPS.

    tf32: float32 matmuls on CUDA round their inputs to 10 mantissa bits (TF32). deterministic: results are bitwise
    reproducible on CUDA, too; operations without a deterministic algorithm raise an error, and kernels are chosen
    accordingly. choices: for a CPU; "medium" matmuls fall back to "highest" where they are less accurate than float32.
    """
    import torch

    if threads is not None:
        if not 1 <= threads <= MAX_THREADS:
            raise ConfigError(f"threads {threads}: must be {'at least 1' if threads < 1 else f'at most {MAX_THREADS}'}")
        torch.set_num_threads(threads)
    resolved = resolve_device(device)
    kind = resolved.partition(":")[0]
    if tf32 and kind != "cuda":
        raise ConfigError(f"tf32: is a format of NVIDIA GPUs, and the device is {resolved}; leave tf32 out")
    keeps_memory = _keep_freed_memory() if kind == "cpu" else False
    matmul = install(choices) if kind == "cpu" else "highest"
    if kind == "cuda":
        matmul = _set_up_cuda(resolved, tf32)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        # Deterministic mode also fills uninitialized memory, to expose bugs; that costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    choices = replace(choices, matmul=matmul) if kind == "cpu" else DEFAULT_CHOICES
    return Runtime(resolved, torch.get_num_threads(), matmul, keeps_memory, deterministic, choices)


def with_choices(runtime: Runtime, choices: Choices) -> Runtime:
    """Apply other choices to this process's CPU kernels."""
    matmul = install(choices)
    return replace(runtime, matmul=matmul, choices=replace(choices, matmul=matmul))


def _set_up_cuda(device: str, tf32: bool) -> str:
    """Make a GPU current, and set the precision of float32 matmuls and convolutions; return torch's name of it."""
    import torch

    torch.cuda.set_device(torch.device(device if ":" in device else f"{device}:0"))
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32  # torch's default is True
    return "high" if tf32 else "highest"


def resolve_device(device: str) -> str:
    """Resolve `auto` to cuda, else mps, else cpu. Raises ConfigError for a device that this machine or torch lacks."""
    name = device_name(device)
    if not is_available(name):
        raise ConfigError(f"device {device}: torch finds none on this machine; use device {_alternative(name)}")
    return name


def device_name(device: str) -> str:
    """Resolve `auto` as `resolve_device` does. Other names are returned even if this machine has no such device.

    Raises ConfigError for an unknown device name.
    """
    if device == "auto":
        return next(name for name in DEVICES if is_available(name))
    kind, _, index = device.partition(":")
    if device not in DEVICES and not (kind == "cuda" and index.isdecimal()):
        raise ConfigError(f"device {device}: unknown device; choices: auto, cpu, cuda, cuda:N, mps")
    return device


def kind_of_device(device: str) -> str:
    """The device without its index: `cuda` for `cuda:1`."""
    return device.partition(":")[0]


def synchronize(device: str) -> None:
    """Wait until an accelerator has finished all queued work."""
    import torch

    kind = kind_of_device(device)
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


def fastest_seconds(call: Callable[[], object], device: str = "cpu") -> float:
    """Seconds of the fastest of several calls."""
    fastest = float("inf")
    for _ in range(MEASUREMENTS + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def is_available(device: str) -> bool:
    """Whether torch finds such a device on this machine: `cuda`, `cuda:1`, `mps` or `cpu`."""
    import torch

    kind, _, index = device.partition(":")
    if kind == "cuda":
        return torch.cuda.is_available() and (not index or int(index) < torch.cuda.device_count())
    return kind != "mps" or torch.backends.mps.is_available()


def _alternative(device: str) -> str:
    return "cuda" if device.startswith("cuda:") and is_available("cuda") else "cpu"


def _keep_freed_memory() -> bool:
    """Keep freed memory in the process, so that large temporaries cost no page faults. Needs glibc."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def install(choices: Choices) -> str:
    """Apply these choices to this process's CPU kernels; return the float32 matmul precision in use."""
    import torch

    from heddle.extensions import install as install_operators
    from heddle.numerics.attention import softmax
    from heddle.numerics.linear import choose_ways

    choose_ways(choices.packing)
    softmax.triangle_lengths = choices.triangle_lengths
    install_operators(choices.native)
    matmul = choices.matmul if choices.matmul != "medium" or medium_is_exact() else "highest"
    torch.set_float32_matmul_precision(matmul)
    return matmul


def medium_is_exact() -> bool:
    """Whether float32 matmuls of precision "medium" are as accurate as float32 on this CPU."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 512, generator=generator)
    b = torch.randn(512, 256, generator=generator)
    exact = a.double() @ b.double()
    previous = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        error = ((a @ b).double() - exact).norm() / exact.norm()
    finally:
        torch.set_float32_matmul_precision(previous)
    return bool(error < 2e-6)


def hardware() -> dict[str, Any]:
    """The CPU, its cores, the memory and the GPU of this machine."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "memory_bytes": memory, "gpu": gpu}


def versions() -> dict[str, str]:
    """The versions of the software that results depend on."""
    import numpy
    import torch

    from heddle import __version__

    python = platform.python_version()
    return {"heddle": __version__, "torch": torch.__version__, "numpy": numpy.__version__, "python": python}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
