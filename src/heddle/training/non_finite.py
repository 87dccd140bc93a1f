"""Where the first number that is not finite arises: a step runs once more, under watch, and nothing is updated."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heddle.distributed.ranks import local_part
from heddle.model.decoder import Decoder
from heddle.training.optimizer import Optimizer
from heddle.training.step_result import BatchResult

# These write -inf where a mask hides a pair, or read it: their infinities are meant.
_MASKS = ("fill", "full", "where", "scalar_tensor", "constant_pad", "copy", "log", "logaddexp", "logcumsumexp")


def first_non_finite(
    model: Decoder, optimizer: Optimizer, compute_gradients: Callable[[], BatchResult] | None
) -> str | None:
    """Say where the first number arises that is not finite, in a step that was skipped. None: all are finite this time.

    compute_gradients: the step's forward and backward pass over the plain model; None: only stored numbers are looked
    at, on this rank. Gradients are discarded afterwards.
    """
    stored = _stored(dict(model.named_parameters()), "weight") or _stored(
        {f"{name}, {key}": value for name, values in optimizer.state.items() for key, value in values.items()},
        "the optimizer's state of",
    )
    if stored is not None or compute_gradients is None:
        return stored
    watch = _Watch()
    try:
        with _module_paths(model, watch), watch:
            batch = compute_gradients()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        losses = {"loss": batch.loss, "auxiliary loss": batch.aux_loss, **batch.distillation}
        return watch.origin or _stored(losses, "the") or _stored(gradients, "gradient of")
    finally:
        optimizer.discard_gradients()
        model.zero_grad(set_to_none=True)


def _stored(tensors: Mapping[str, Tensor], label: str) -> str | None:
    """Name the first of these tensors that holds a number that is not finite."""
    for name, tensor in tensors.items():
        values = local_part(tensor.detach())
        bad = values.numel() - int(values.isfinite().sum())
        if bad:
            return f"{label} {name} holds {_amount(bad, values)}"
    return None


def _amount(bad: int, values: Tensor) -> str:
    count = "a number that is" if bad == 1 else f"{bad:,} numbers that are"
    return f"{count} not finite" + (f" (of {values.numel():,})" if values.numel() > 1 else "")


class _Watch(TorchDispatchMode):
    """Looks at every result of an operation.

    path: the modules that run, from the outside in. backward_path: the last module to whose result the backward pass
    came.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path: list[str] = []
        self.backward_path: str | None = None
        self.origin: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if self.origin is not None or "empty" in name:
            return func(*args, **(kwargs or {}))
        inputs = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        operands = [tensor for tensor in tree_leaves((args, inputs)) if _is_float(tensor)]
        read = _numbers(operands) if func._schema.is_mutable else None  # before it is overwritten
        result = func(*args, **(kwargs or {}))
        results = [tensor for tensor in tree_leaves(result) if _is_float(tensor)]
        written = _numbers(results)
        if not written.are_finite and _is_new(written, read or _numbers(operands), any(m in name for m in _MASKS)):
            self.origin = self._describe(name, next(tensor for tensor in results if not tensor.isfinite().all()))
        return result

    def _describe(self, name: str, tensor: Tensor) -> str:
        bad = tensor.numel() - int(tensor.isfinite().sum())
        return f"{self._location()}, operation {name}: its result {list(tensor.shape)} holds {_amount(bad, tensor)}"

    def _location(self) -> str:
        if self.path:
            return f"in {self.path[-1]}"
        if torch._C._current_graph_task_id() == -1:  # no backward pass runs
            return "in the loss"
        below = "" if self.backward_path is None else f" below the result of {self.backward_path}"
        return f"in the backward pass{below}"


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta


class _Numbers(NamedTuple):
    are_finite: bool
    have_nan: bool


def _numbers(tensors: list[Tensor]) -> _Numbers:
    are_finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
    return _Numbers(are_finite, not are_finite and any(bool(tensor.isnan().any()) for tensor in tensors))


def _is_new(result: _Numbers, read: _Numbers, may_be_infinite: bool) -> bool:
    """Whether an operation made numbers that are not finite from numbers that are, other than for a mask.

    NaN from infinities counts as new: a softmax over a row that a mask hides whole, say.
    """
    return not read.have_nan if result.have_nan else read.are_finite and not may_be_infinite


@contextmanager
def _module_paths(model: nn.Module, watch: _Watch) -> Iterator[None]:
    """Tell the watch which module runs: in the forward pass, and where layers are recomputed."""

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: watch.path.append(name)

    def leave(name: str) -> Callable[..., None]:
        def note(_module: nn.Module, _inputs: Any, result: Any) -> None:
            watch.path.pop()
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: setattr(watch, "backward_path", name))

        return note

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.callback(module.register_forward_pre_hook(enter(name)).remove)
                hooks.callback(module.register_forward_hook(leave(name), always_call=True).remove)
        yield
