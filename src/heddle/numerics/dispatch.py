"""An operation has several kernels. The first one that supports a call runs, unless the user forces another."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heddle.errors import ConfigError, choices_hint

Facts = TypeVar("Facts")

_forced: ContextVar[Mapping[str, str] | None] = ContextVar("forced", default=None)
_recorded: ContextVar[list["KernelChoice"] | None] = ContextVar("recorded", default=None)
_calls: ContextVar[list["KernelCall"] | None] = ContextVar("calls", default=None)
_assumed_device: ContextVar[str | None] = ContextVar("assumed_device", default=None)
_assumed_deterministic: ContextVar[bool] = ContextVar("assumed_deterministic", default=False)


def device_type(tensor: Tensor) -> str:
    """The tensor's device type, such as "cpu". Within `record_choices`, the device that meta tensors stand for."""
    return (None if is_compiling() else _assumed_device.get()) or tensor.device.type


@cache
def has_triton() -> bool:
    """Whether torch can compile for this machine's GPU. True without a GPU: choices are then only reported."""
    return not torch.cuda.is_available() or find_spec("triton") is not None


def is_deterministic() -> bool:
    """Whether results must be bitwise reproducible: deterministic algorithms are enforced, not just warned about."""
    if is_compiling():  # a graph reads only this flag, and is retraced when it changes
        return torch.are_deterministic_algorithms_enabled()
    asked = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return asked or _assumed_deterministic.get()


def optional_nondeterministic(facts: Any) -> str:
    """Why a library's kernel may not be bitwise reproducible: it does not follow torch's flag."""
    return "its library does not guarantee bitwise reproducible results"


@dataclass(frozen=True)
class Kernel(Generic[Facts]):
    """One way to compute an operation. `unsupported(facts)` returns why it cannot run, or None if it can.

    traceable: whether `torch.compile` and `torch.export` can trace it, which rules out loops over lengths.
    nondeterministic: returns why equal calls may differ in bits although torch enforces deterministic algorithms, or
    None. Left out for a kernel that follows torch's flag.
    """

    name: str
    run: Callable[..., Any]
    unsupported: Callable[[Facts], str | None]
    traceable: bool = True
    nondeterministic: Callable[[Facts], str | None] | None = None

    def rejected(self, facts: Facts) -> str | None:
        """Why the kernel cannot run a call, or None: it is unsupported, or its results must be reproducible."""
        reason = self.unsupported(facts)
        if reason is not None or self.nondeterministic is None or not is_deterministic():
            return reason
        cause = self.nondeterministic(facts)
        return None if cause is None else f"deterministic algorithms are required, but {cause}"


class KernelChoice(NamedTuple):
    """The kernel chosen for one call, and the kernels rejected before it as (name, reason)."""

    operation: str
    kernel: str
    rejected: tuple[tuple[str, str], ...]


class KernelCall(NamedTuple):
    """One call: the facts that chose a kernel, and the arguments that were passed, `kernel.run(*arguments, **options)`.

    gradients: whether they were enabled.
    """

    operation: str
    facts: Any
    gradients: bool
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Operation(Generic[Facts]):
    """An operation and its kernels, best first. The last one, the reference, supports every call."""

    name: str
    kernels: tuple[Kernel[Facts], ...]

    def choose(self, facts: Facts) -> Kernel[Facts]:
        """Choose a kernel by facts alone (shapes, dtypes, layout). No tensor value is read from a device.

        Raises ConfigError, with the reason, if the forced kernel does not support the call.
        """
        if is_compiling():  # a traced graph cannot read the context variables set around a call
            return self.first_supported(facts)
        all_forced = _forced.get()
        forced = None if all_forced is None else all_forced.get(self.name)
        rejected: list[tuple[str, str]] = []
        for kernel in self.kernels:
            if forced is not None and kernel.name != forced:
                continue
            reason = kernel.unsupported(facts)
            if reason is None and kernel.nondeterministic is not None:
                reason = kernel.rejected(facts)
            if reason is None:
                recorded = _recorded.get()
                if recorded is not None:
                    recorded.append(KernelChoice(self.name, kernel.name, tuple(rejected)))
                calls = _calls.get()
                return kernel if calls is None else self._recording(kernel, facts, calls)
            if forced is not None:
                raise ConfigError(f"kernel {self.name}={forced}: cannot serve here, because {reason}")
            rejected.append((kernel.name, reason))
        raise AssertionError(f"no kernel of {self.name} supports {facts}")

    def _recording(self, kernel: Kernel[Facts], facts: Facts, calls: list[KernelCall]) -> Kernel[Facts]:
        def run(*arguments: Any, **options: Any) -> Any:
            calls.append(KernelCall(self.name, facts, torch.is_grad_enabled(), arguments, options))
            return kernel.run(*arguments, **options)

        return replace(kernel, run=run)

    def can_use(self, name: str, facts: Facts) -> bool:
        """Whether the kernel of this name supports the facts and no other kernel is forced."""
        forced = None if is_compiling() else (_forced.get() or {}).get(self.name)
        (kernel,) = (kernel for kernel in self.kernels if kernel.name == name)
        return forced in (None, name) and kernel.rejected(facts) is None

    def first_supported(self, facts: Facts) -> Kernel[Facts]:
        """The first kernel that supports the facts, ignoring `force_kernels`. Kernels use it for their inner calls."""
        kernels = [kernel for kernel in self.kernels if kernel.traceable] if is_compiling() else self.kernels
        return next(kernel for kernel in kernels if kernel.rejected(facts) is None)


@contextmanager
def force_kernels(kernel_names: Mapping[str, str], operations: Mapping[str, Operation[Any]]) -> Iterator[None]:
    """Within the block, use the given kernel for each named operation."""
    for name, kernel_name in kernel_names.items():
        if name not in operations:
            raise ConfigError(f"kernel: unknown operation '{name}'; {choices_hint(name, sorted(operations))}")
        available = [kernel.name for kernel in operations[name].kernels]
        if kernel_name not in available:
            raise ConfigError(f"kernel {name}: unknown kernel '{kernel_name}'; {choices_hint(kernel_name, available)}")
    token = _forced.set({**(_forced.get() or {}), **kernel_names})
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def choose_deterministic() -> Iterator[None]:
    """Within the block, choose kernels as if torch enforced deterministic algorithms. torch's flag is unchanged."""
    token = _assumed_deterministic.set(True)
    try:
        yield
    finally:
        _assumed_deterministic.reset(token)


@contextmanager
def record_choices(device: str) -> Iterator[list[KernelChoice]]:
    """Yield a list that collects every kernel choice in the block. Meta tensors stand for tensors on `device`.

    device: a name such as "cuda" or "cuda:1".
    """
    choices: list[KernelChoice] = []
    token, device_token = _recorded.set(choices), _assumed_device.set(device.partition(":")[0])
    try:
        yield choices
    finally:
        _recorded.reset(token)
        _assumed_device.reset(device_token)


@contextmanager
def record_calls() -> Iterator[list[KernelCall]]:
    """Yield a list that collects the calls of kernels in the block. Kernels that other kernels call are left out."""
    calls: list[KernelCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


# Libraries that a kernel may need: none is a dependency of heddle.


NOT_CUDA = "it runs on CUDA only"  # why most library kernels reject a call


_modules: dict[str, ModuleType | None] = {}


def optional_module(name: str) -> ModuleType | None:
    """A module of an optional library. None if it is not installed, or if its import finds no GPU."""
    if name not in _modules:
        _modules[name] = _imported(name)
    return _modules[name]


def _imported(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except (ImportError, RuntimeError):
        return None


# Counts the floating-point operations of matrix products as they run, on any device including meta.


_total: ContextVar[list[int] | None] = ContextVar("total", default=None)


def counts_flops() -> bool:
    """Whether the call is within `count_flops` (and not being compiled)."""
    return not is_compiling() and _total.get() is not None


def add_flops(flops: int) -> None:
    """Add the FLOPs of one call (a multiply-add is two) to the enclosing `count_flops`, if there is one."""
    total = None if is_compiling() else _total.get()
    if total is not None:
        total[0] += flops


@contextmanager
def count_flops() -> Iterator[list[int]]:
    """Yield a list whose only element is the number of FLOPs counted in the block so far."""
    total = [0]
    token = _total.set(total)
    try:
        yield total
    finally:
        _total.reset(token)


# How much an operation computes at once, by device type.


class DeviceSize(NamedTuple):
    """A size, in the unit of its constant. `cpu` fits a CPU's cache; `accelerator` keeps launches few."""

    cpu: int
    accelerator: int

    def on(self, tensor: Tensor) -> int:
        """The size for the device of a tensor. Within `record_choices`, for the device that the tensor stands for."""
        return self.cpu if device_type(tensor) == "cpu" else self.accelerator


def in_autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype that autocast gives torch's own attention. Operators called by name do not cast."""
    dtype = compute_dtype(q)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def compute_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which attention to q is computed: autocast's where it is enabled, else q's own."""
    device = q.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device) or not _casts(q):
        return q.dtype
    return torch.get_autocast_dtype(device)


def _casts(q: Tensor) -> bool:
    """Whether autocast changes the dtype: it leaves float64 alone."""
    return q.dtype in (torch.float32, torch.float16, torch.bfloat16)
