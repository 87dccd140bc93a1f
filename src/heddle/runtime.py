"""Settings of the whole process: set once by a program that owns it (the command line, a worker), never on import."""

import ctypes
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heddle.errors import ConfigError

DEVICES = ("cuda", "mps", "cpu")  # the first that is available is the default
MAX_THREADS = 4096  # of a process; torch fails for numbers that no machine has
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@dataclass(frozen=True)
class Runtime:
    """The settings: device, threads, precision of float32 matrix products, and whether freed memory is retained.

    matmul: torch's name; on CUDA "high" is TF32. deterministic: torch takes deterministic algorithms, or refuses.
    """

    device: str
    threads: int
    matmul: str
    keeps_memory: bool
    deterministic: bool = False

    def describe(self) -> dict[str, Any]:
        """The settings and the hardware, for run.json and reports."""
        return asdict(self) | hardware()


def set_up_runtime(
    device: str = "auto", threads: int | None = None, tf32: bool = False, deterministic: bool = False
) -> Runtime:
    """Set up this process. Raises ConfigError for a missing device, a bad number of threads, or TF32 on a CPU or MPS.

    tf32: float32 products on CUDA round their inputs to 10 bits of mantissa (TF32). deterministic: equal calls give
    equal bits on CUDA, too, and what has no such algorithm raises an error; kernels choose accordingly.
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
    matmul = _choose_matmul_precision() if kind == "cpu" else "highest"
    if kind == "cuda":
        matmul = _set_up_cuda(resolved, tf32)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        # What finds bugs in deterministic mode costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return Runtime(resolved, torch.get_num_threads(), matmul, keeps_memory, deterministic)


def _set_up_cuda(device: str, tf32: bool) -> str:
    """Make a GPU the current one, and set the precision of float32 products and convolutions; return its name."""
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
    """Resolve `auto` as `resolve_device` does. Another name stays, though this machine may have no such device.

    Raises ConfigError for a name that is none of a device.
    """
    if device == "auto":
        return next(name for name in DEVICES if is_available(name))
    kind, _, index = device.partition(":")
    if device not in DEVICES and not (kind == "cuda" and index.isdecimal()):
        raise ConfigError(f"device {device}: unknown device; choices: auto, cpu, cuda, cuda:N, mps")
    return device


def kind_of_device(device: str) -> str:
    """`cuda` of `cuda:1`."""
    return device.partition(":")[0]


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


def _choose_matmul_precision() -> str:
    """Set float32 matmul precision to "medium" if its error on this CPU is that of float32; return the precision."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 512, generator=generator)
    b = torch.randn(512, 256, generator=generator)
    exact = a.double() @ b.double()
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    error = ((a @ b).double() - exact).norm() / exact.norm()
    if error < 2e-6:
        return "medium"
    torch.set_float32_matmul_precision(previous)
    return previous


def hardware() -> dict[str, Any]:
    """The CPU, its cores, the memory and the GPU of this machine."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "memory_bytes": memory, "gpu": gpu}


def versions() -> dict[str, str]:
    """The versions of the software that decide a result."""
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
