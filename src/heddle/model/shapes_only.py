"""Run a model on the meta device without torch's meta kernels that are written in Python.

The first call of such a kernel imports torch's compiler and sympy: a second of CPU time and 100 MiB. `ShapesOnly`
answers the common ones itself, by shape and dtype alone, and leaves all others to torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heddle.torch_private import LightDispatchMode, is_mutable, operator_name

COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite", "isinf", "logical_not", "logical_and"}
INTEGER_RESULTS = {
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "clamp", "floor_divide", "masked_fill",
    "maximum", "minimum", "mul", "neg", "remainder", "rsub", "sub", "where", "__rshift__",
}  # fmt: skip
POINTWISE_OPTIONS = {"alpha", "approximate", "value"}  # they change values, not shapes
IN_PLACE = {"addcmul_", "baddbmm_", "masked_fill_", "scatter_", "tril_", "triu_"}  # besides the pointwise ones


class ShapesOnly(LightDispatchMode):
    """Within `with ShapesOnly():` operations on meta tensors return meta tensors of the right shape and dtype."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the result of one operation, or leave it to torch."""
        kwargs = kwargs or {}
        name = operator_name(function).removeprefix("aten::")
        is_pointwise = torch.Tag.pointwise in function.tags and kwargs.keys() <= POINTWISE_OPTIONS
        result = None
        if is_mutable(function):
            if (name in IN_PLACE or (is_pointwise and name.endswith("_"))) and args[0].is_meta:
                result = args[0]
        elif name in _SHAPES:
            result = _SHAPES[name](*args, **kwargs)
        elif is_pointwise:
            result = _pointwise(name, args)
        return function(*args, **kwargs) if result is None else result


def _pointwise(name: str, args: tuple[Any, ...]) -> Tensor | None:
    tensors = [value for value in args if isinstance(value, Tensor)]
    if not tensors or not all(tensor.is_meta or tensor.dim() == 0 for tensor in tensors):
        return None
    values = tensors[1:] if name == "where" else tensors[:1] if name == "masked_fill" else tensors
    if name in COMPARISONS:
        dtype = torch.bool
    elif (not all(tensor.is_floating_point() for tensor in values) and name not in INTEGER_RESULTS) or (
        name == "where" and len(values) < 2
    ):
        return None
    else:
        numbers = [value for value in args if isinstance(value, int | float) and not isinstance(value, bool)]
        dtype = _result_dtype(values, numbers)
    return _like(tensors, _broadcast(tensors), dtype)


def _broadcast(tensors: list[Tensor]) -> tuple[int, ...]:
    """As torch.broadcast_shapes, which imports sympy."""
    shape = [1] * max(tensor.dim() for tensor in tensors)
    for tensor in tensors:
        for index, length in enumerate(reversed(tensor.shape), start=1):
            if length != 1:
                shape[-index] = length
    return tuple(shape)


def _result_dtype(tensors: list[Tensor], numbers: list[int | float]) -> torch.dtype:
    """torch's type promotion, one operand after the other."""
    with_dimensions = [tensor for tensor in tensors if tensor.dim()]
    dtype = (with_dimensions or tensors)[0].dtype
    for tensor in with_dimensions or tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if not dtype.is_floating_point and (
        any(isinstance(number, float) for number in numbers) or any(tensor.is_floating_point() for tensor in tensors)
    ):
        return torch.get_default_dtype()
    if dtype == torch.bool and numbers:
        return torch.int64
    return dtype


def _like(tensors: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty result with the memory order of dimensions of the first operand that has its shape."""
    result = torch.empty(shape, dtype=dtype, device="meta")
    operand = next((tensor for tensor in tensors if tensor.shape == shape), None)
    if operand is None or operand.is_contiguous() or 0 in operand.stride():
        return result
    order = sorted(range(len(shape)), key=operand.stride, reverse=True)
    inverse = sorted(range(len(shape)), key=order.__getitem__)
    return result.new_empty([shape[dim] for dim in order]).permute(inverse)


def _empty_like(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor | None:
    return _like([x], tuple(x.shape), dtype or x.dtype) if x.is_meta else None


def _repeat(x: Tensor, repeats: list[int]) -> Tensor | None:
    if not x.is_meta:
        return None
    shape = [1] * (len(repeats) - x.dim()) + list(x.shape)
    return x.new_empty([length * count for length, count in zip(shape, repeats, strict=True)])


def _reduction(result_dtype: torch.dtype | None = None, integers: bool = False) -> Callable[..., Tensor | None]:
    def reduced(
        x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        if not x.is_meta or dims is None or dims == [] or dtype is not None:
            return None
        if result_dtype is None and not integers and not x.is_floating_point():
            return None
        removed = {dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
        lengths = [1 if dim in removed else length for dim, length in enumerate(x.shape)]
        shape = [length for dim, length in enumerate(lengths) if keepdim or dim not in removed]
        return x.new_empty(shape, dtype=result_dtype or x.dtype)

    return reduced


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if any(not tensor.is_meta or tensor.dtype != first.dtype or tensor.dim() != first.dim() for tensor in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return first.new_empty(shape)


def _arange(
    *bounds: int, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor | None:
    if device is None or torch.device(device).type != "meta" or not all(isinstance(bound, int) for bound in bounds):
        return None
    return torch.empty(len(range(*bounds)), dtype=dtype or torch.int64, device="meta")


def _same_shape(x: Tensor, *_: Any) -> Tensor | None:
    return x.new_empty(x.shape) if x.is_meta else None


def _same_layout(x: Tensor, *_: Any) -> Tensor | None:
    return _like([x], tuple(x.shape), x.dtype) if x.is_meta else None


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor] | None:
    return (x.new_empty(x.shape), x.new_empty(0)) if x.is_meta else None


def _eye(
    rows: int,
    columns: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor | None:
    if device is None or torch.device(device).type != "meta":
        return None
    return torch.empty(rows, rows if columns is None else columns, dtype=dtype, device="meta")


def _safe_softmax(x: Tensor, _dim: int, dtype: torch.dtype | None = None) -> Tensor | None:
    return x.new_empty(x.shape) if x.is_meta and x.is_floating_point() and dtype is None else None


def _softmax(x: Tensor, _dim: int, half_to_float: bool) -> Tensor | None:
    return x.new_empty(x.shape) if x.is_meta and not half_to_float else None


def _stack(tensors: list[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if any(not tensor.is_meta or tensor.dtype != first.dtype for tensor in tensors):
        return None
    shape = list(first.shape)
    shape.insert(dim % (first.dim() + 1), len(tensors))
    return first.new_empty(shape)


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor | None:
    return weight.new_empty([*indices.shape, weight.shape[1]]) if weight.is_meta else None


def _index(x: Tensor, indices: list[Tensor | None]) -> Tensor | None:
    """One tensor of numbers in one dimension."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    index = indices[dims[0]]
    if not x.is_meta or len(dims) > 1 or index is None or index.dtype == torch.bool:
        return None
    return x.new_empty([*x.shape[: dims[0]], *index.shape, *x.shape[dims[0] + 1 :]])


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor | None:
    lengths = list(x.shape)
    lengths[dim] = index.numel()
    return x.new_empty(lengths) if x.is_meta else None


def _pad(x: Tensor, padding: list[int], _value: float = 0.0) -> Tensor | None:
    if not x.is_meta:
        return None
    shape = list(x.shape)
    for index, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        shape[-1 - index] += before + after
    return x.new_empty(shape)


def _product(x: Tensor, left: Tensor, right: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor | None:
    return left.new_empty([*left.shape[:-1], right.shape[-1]]) if x.is_meta and left.is_meta else None


def _matmul(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None) -> Tensor | None:
    if not left.is_meta or not right.is_meta:
        return None
    return left.new_empty([*left.shape[:-1], right.shape[-1]], dtype=out_dtype or left.dtype)


def _layer_norm(x: Tensor, shape: list[int], *_: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    if not x.is_meta or x.dtype not in (torch.float32, torch.float64):
        return None
    statistics = [*x.shape[: x.dim() - len(shape)], *([1] * len(shape))]
    return x.new_empty(x.shape), x.new_empty(statistics), x.new_empty(statistics)


def _sort(
    x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Tensor, Tensor] | None:
    return (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)) if x.is_meta else None


def _scatter(
    x: Tensor, _dim: int, index: Tensor, source: Tensor | float, *, reduce: str | None = None
) -> Tensor | None:
    return x.new_empty(x.shape) if x.is_meta else None


def _gather(x: Tensor, _dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor | None:
    return x.new_empty(index.shape) if x.is_meta else None


def _cumulative(x: Tensor, _dim: int, dtype: torch.dtype | None = None) -> Tensor | None:
    default = x.dtype if x.is_floating_point() else torch.int64
    return x.new_empty(x.shape, dtype=dtype or default) if x.is_meta else None


# The parameters of a function in this table have the names of the operation's, because torch passes them by keyword.
_SHAPES: dict[str, Callable[..., Any]] = {
    "_safe_softmax": _safe_softmax,
    "_softmax": _softmax,
    "addmm": _product,
    "amax": _reduction(integers=True),
    "any": _reduction(torch.bool),
    "arange": _arange,
    "argmax": _reduction(torch.int64),
    "baddbmm": _product,
    "bmm": _matmul,
    "cat": _cat,
    "constant_pad_nd": _pad,
    "cumsum": _cumulative,
    "embedding": _embedding,
    "empty_like": _empty_like,
    "eye": _eye,
    "flip": _same_layout,
    "index": _index,
    "index_select": _index_select,
    "log_sigmoid_forward": _log_sigmoid,
    "gather": _gather,
    "logsumexp": _reduction(),
    "mean": _reduction(),
    "mm": _matmul,
    "native_layer_norm": _layer_norm,
    "ones_like": _empty_like,
    "repeat": _repeat,
    "scatter": _scatter,
    "sort": _sort,
    "stack": _stack,
    "sum": _reduction(),
    "tril": _same_shape,
    "triu": _same_shape,
    "zeros_like": _empty_like,
}
