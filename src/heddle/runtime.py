"""Settings of the whole process: set once by a program that owns it (the command line, a worker), never on import."""

import ctypes
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heddle.errors import ConfigError

MAX_THREADS = 4096  # of a process; torch fails for numbers that no machine has
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@dataclass(frozen=True)
class Runtime:
    """The settings: device, threads, precision of float32 matrix products, and whether freed memory is retained."""

    device: str
    threads: int
    matmul: str
    keeps_memory: bool

    def describe(self) -> dict[str, Any]:
        """The settings and the hardware, for run.json and reports."""
        return asdict(self) | hardware()


def set_up_runtime(device: str = "auto", threads: int | None = None) -> Runtime:
    """Set up this process. Raises ConfigError for a missing device or a bad number of threads."""
    import torch

    if threads is not None:
        if not 1 <= threads <= MAX_THREADS:
            raise ConfigError(f"threads {threads}: must be {'at least 1' if threads < 1 else f'at most {MAX_THREADS}'}")
        torch.set_num_threads(threads)
    resolved = resolve_device(device)
    keeps_memory = _keep_freed_memory() if resolved == "cpu" else False
    matmul = _choose_matmul_precision() if resolved == "cpu" else "highest"
    return Runtime(resolved, torch.get_num_threads(), matmul, keeps_memory)


def resolve_device(device: str) -> str:
    """Resolve `auto` to cuda, else mps, else cpu. Raises ConfigError for a device that this machine or torch lacks."""
    import torch

    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        return next(name for name in ("cuda", "mps", "cpu") if available[name])
    if device not in available:
        raise ConfigError(f"device {device}: unknown device; choices: auto, cpu, cuda, mps")
    if not available[device]:
        raise ConfigError(f"device {device}: torch finds none on this machine; use device cpu")
    return device


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
