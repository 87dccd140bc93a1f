"""A pretended accelerator: tensors that say `pretend:0` and hold CPU values.

Each operation runs on the CPU values. What would make the host wait for a device (a value that is read, a shape that
depends on values, a copy from or to pageable memory) is logged with the lines of heddle that asked for it, and tensors
of different devices raise an error, as CUDA's do. Kernels are chosen as on CUDA. A kernel that needs a CUDA device is
replaced by a stand-in: see `OPERATOR_STAND_INS` and `FUNCTION_STAND_INS`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from heddle.numerics.dispatch import record_choices
from tests.accelerator import attention_stand_ins, autocast
from tests.accelerator.waits import NAME, READS, WRITES, Log, log_waits

_setup_privateuseone_for_python_backend(NAME)
getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
# `torch.random.fork_rng` keeps the generator of every device, and this one has none.
getattr(torch, NAME).get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
getattr(torch, NAME).set_rng_state = lambda state, device=None: None
Model = TypeVar("Model", bound=nn.Module)

DEVICE = torch.device(NAME, 0)
AUTOCAST = autocast.register()

# Operators that have no kernel for a CPU, such as `torch.ops.torch_attn._varlen_attn.default`: each maps to a function
# of the same signature, which gets CPU tensors.
OPERATOR_STAND_INS: dict[OpOverload, Callable[..., Any]] = {**attention_stand_ins.operators()}
# Python functions that need a CUDA device, by module and name, and what replaces each while `pretending` runs: it gets
# pretended tensors.
FUNCTION_STAND_INS: dict[tuple[ModuleType, str], Any] = {**attention_stand_ins.FUNCTIONS}

aten = torch.ops.aten
_logs = [Log()]  # of the blocks of `pretending` that are open, the innermost last


class Pretended(Tensor):
    """A tensor on the pretended device. `cpu_values` is the CPU tensor behind it."""

    cpu_values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "Pretended":
        """Wrap a CPU tensor, without a copy."""
        assert not isinstance(values, Pretended)
        assert values.device.type == "cpu", values.device
        tensor: Pretended = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=DEVICE,
        )
        tensor.cpu_values = values
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.cpu_values!r})"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.tolist:
            _logs[-1].note(_logs[-1].waits, "tolist")
            return args[0].cpu_values.tolist()
        if function is Tensor.numpy:
            raise TypeError("a tensor of the pretended device cannot become an array; copy it to the CPU first")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(operator, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees the calls without a pretended argument too: those that make or copy tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what guards each call from the compiler takes as long as the call

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(operator, args, kwargs or {})


@contextmanager
def pretending() -> Iterator[Log]:
    """Within the block, tensors can live on `DEVICE`, and kernels are chosen as on CUDA. Yield the log of the block."""
    lifts = torch._C._only_lift_cpu_tensors()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    _logs.append(Log())
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(…, device=DEVICE) is seen as the copy that it is
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with ExitStack() as stack:
            for (module, name), replacement in {(torch, "Event"): _Event, **FUNCTION_STAND_INS}.items():
                stack.enter_context(patch.object(module, name, replacement))
            stack.enter_context(record_choices("cuda"))
            stack.enter_context(_Mode())
            yield _logs[-1]
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        _logs.pop()


def on_device(tensor: Tensor) -> Tensor:
    """A copy of a CPU tensor on the pretended device; not logged."""
    return Pretended(tensor.detach().clone())


def values_of(tree: Any) -> Any:
    """The same lists, tuples and dicts with the CPU values of pretended tensors; not logged."""
    if isinstance(tree, Pretended):
        return tree.cpu_values
    if isinstance(tree, list | tuple):
        return type(tree)([values_of(leaf) for leaf in tree])
    return {key: values_of(leaf) for key, leaf in tree.items()} if isinstance(tree, dict) else tree


def moved(model: Model) -> Model:
    """The model itself, with copies of its parameters and buffers on the pretended device; shared ones stay shared."""
    copies: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not isinstance(parameter, Pretended):
                if id(parameter) not in copies:
                    copies[id(parameter)] = nn.Parameter(on_device(parameter), parameter.requires_grad)
                module._parameters[name] = copies[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and not isinstance(buffer, Pretended):
                module._buffers[name] = on_device(buffer)
    return model


class _Event:
    """An event of the pretended device: the wait for it is logged."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.device = device

    def record(self, stream: Any = None) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        """Log the wait."""
        _logs[-1].note(_logs[-1].waits, "event")


def _run(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operator, on CPU values; the result is wrapped if the call is on the pretended device."""
    tensors: list[Tensor] = []
    _collect(args, tensors)
    _collect(kwargs.values(), tensors)
    on_pretend = any(isinstance(tensor, Pretended) for tensor in tensors)
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if operator is aten.is_pinned.default and not on_pretend:
        return _logs[-1].is_pinned(args[0])
    if operator is aten._pin_memory.default and not on_pretend:
        return _logs[-1].pin(args[0])
    if not on_pretend and target != NAME:
        return operator(*args, **kwargs)
    if target == "meta":  # no values are copied
        return operator(*values_of(args), **kwargs)
    _logs[-1].operators[operator] += 1
    log_waits(_logs[-1], operator, args, kwargs)
    _check_devices(operator, args, tensors, target)
    cpu_args, cpu_kwargs = values_of((args, kwargs))
    if target is not None:
        cpu_kwargs["device"] = torch.device("cpu")
    if cpu_kwargs.get("pin_memory"):
        cpu_kwargs["pin_memory"] = False
    out = OPERATOR_STAND_INS.get(operator, operator)(*cpu_args, **cpu_kwargs)
    if on_pretend and target == "cpu":
        return out
    wrapped = _wrapped(out)
    if not on_pretend or not _aliases(operator):
        return wrapped
    return return_and_correct_aliasing(operator, args, kwargs, wrapped)


def _collect(tree: Iterable[Any], tensors: list[Tensor]) -> None:
    """Add the tensors among some arguments, which may be lists, to `tensors`."""
    for leaf in tree:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, list | tuple):
            _collect(leaf, tensors)


def _wrapped(out: Any) -> Any:
    if isinstance(out, Tensor):
        return Pretended(out.resolve_conj())  # the wrapper does not know a lazy conjugate
    return type(out)([_wrapped(item) for item in out]) if isinstance(out, list | tuple) else out


@cache
def _aliases(operator: OpOverload) -> bool:
    """Whether a result of an operator shares memory with an argument."""
    return any(result.alias_info is not None for result in operator._schema.returns)


def _check_devices(operator: OpOverload, args: tuple[Any, ...], tensors: list[Tensor], target: str | None) -> None:
    """Raise RuntimeError where CUDA would: tensors of more than one element on different devices."""
    copies = operator is aten.copy_.default or target is not None
    if copies or ((operator in READS or operator in WRITES) and isinstance(args[0], Pretended)):
        return
    if any(tensor.dim() and not isinstance(tensor, Pretended) for tensor in tensors):
        shapes = ", ".join(f"{list(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise RuntimeError(f"{operator}: tensors on different devices: {shapes}")
