"""Settings of a whole process, made once by a program that owns it (the command line, a worker), never on import.

Each is kept only after its effect was checked on this machine.
"""

import ctypes
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heddle.errors import ConfigError

if TYPE_CHECKING:
    pass

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@dataclass(frozen=True)
class Runtime:
    """What was set: device, threads, the route of float32 products, and whether freed memory is kept."""

    device: str
    threads: int
    matmul: str
    keeps_memory: bool

    def describe(self) -> dict[str, Any]:
        """For run.json and reports."""
        return asdict(self) | hardware()


def prepare(device: str = "auto", threads: int | None = None) -> Runtime:
    """Set up this process. Raises ConfigError for a device that is not here or a bad number of threads."""
    import torch

    if threads is not None:
        if threads < 1:
            raise ConfigError(f"--threads {threads}: must be at least 1")
        torch.set_num_threads(threads)
    chosen = resolve_device(device)
    keeps = _keep_memory() if chosen == "cpu" else False
    matmul = _fast_matmul() if chosen == "cpu" else "highest"
    return Runtime(chosen, torch.get_num_threads(), matmul, keeps)


def resolve_device(device: str) -> str:
    """`auto` is cuda, else mps, else cpu. Raises ConfigError for one that this machine or torch lacks."""
    import torch

    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        return next(name for name in ("cuda", "mps", "cpu") if here[name])
    if device not in here:
        raise ConfigError(f"--device {device}: unknown device; choices: auto, cpu, cuda, mps")
    if not here[device]:
        raise ConfigError(f"--device {device}: torch finds none on this machine; use --device cpu")
    return device


def _keep_memory() -> bool:
    """Keep freed memory in the process: large temporaries then cost no page faults. Only glibc knows how."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def _fast_matmul() -> str:
    """The faster route of float32 products, if its error on this CPU is that of float32."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 512, generator=generator)
    b = torch.randn(512, 256, generator=generator)
    exact = a.double() @ b.double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    error = ((a @ b).double() - exact).norm() / exact.norm()
    if error < 2e-6:
        return "medium"
    torch.set_float32_matmul_precision(before)
    return before


def hardware() -> dict[str, Any]:
    """The machine, in words and numbers."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "memory_bytes": memory, "gpu": gpu}


def versions() -> dict[str, str]:
    """Versions that decide a result."""
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
