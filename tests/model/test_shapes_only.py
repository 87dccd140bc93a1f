"""ShapesOnly: an operation that it answers has the shape, dtype and memory order that torch's meta kernel gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heddle.model.shapes_only import ShapesOnly


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


x, row, integers = meta(3, 4), meta(4), meta(3, 4, dtype=torch.int64)
OPERATIONS: dict[str, Callable[[], Any]] = {
    "add": lambda: x + row,
    "add a number": lambda: integers + 1.5,
    "compare": lambda: integers < 2,
    "where": lambda: torch.where(x > 0, x, 0.0),
    "transposed": lambda: x.T * 2,
    "arange": lambda: torch.arange(2, 9, 3, device="meta"),
    "eye": lambda: torch.eye(3, 5, device="meta", dtype=torch.float64),
    "zeros_like": lambda: torch.zeros_like(x.T, dtype=torch.int32),
    "addmm": lambda: torch.addmm(row, meta(3, 5), meta(5, 4), beta=0.5, alpha=2.0),
    "baddbmm": lambda: torch.baddbmm(x, meta(2, 3, 5), meta(2, 5, 4), beta=0.5),
    "bmm": lambda: torch.bmm(meta(2, 3, 5), meta(2, 5, 4)),
    "mm": lambda: meta(3, 5) @ meta(5, 4),
    "amax": lambda: x.amax(-1, keepdim=True),
    "any": lambda: (x > 0).any(0),
    "argmax": lambda: x.argmax(-1),
    "logsumexp": lambda: x.logsumexp(-1),
    "mean": lambda: x.mean((0, 1)),
    "sum": lambda: x.sum(0),
    "sum in another dtype": lambda: x.sum(0, dtype=torch.float64),
    "sum of integers": lambda: integers.sum(0),
    "cumsum": lambda: integers.cumsum(1),
    "cumsum of numbers": lambda: x.cumsum(0),
    "index": lambda: x[:, meta(2, dtype=torch.int64)],
    "index of the first dimension": lambda: x[meta(5, dtype=torch.int64)],
    "index_select": lambda: x.index_select(1, meta(2, dtype=torch.int64)),
    "cat": lambda: torch.cat((x, x), dim=-1),
    "stack": lambda: torch.stack((x, x), dim=-1),
    "pad": lambda: functional.pad(x.T, (1, 2)),
    "repeat": lambda: row.repeat(2, 3),
    "flip": lambda: x.T.flip(0),
    "tril": lambda: x.tril(-1),
    "triu": lambda: x.triu(1),
    "softmax": lambda: x.softmax(-1),
    "logsigmoid": lambda: functional.logsigmoid(x),
    "embedding": lambda: functional.embedding(meta(2, 3, dtype=torch.int64), x),
    "gather": lambda: x.gather(1, meta(3, 2, dtype=torch.int64)),
    "scatter": lambda: x.scatter(1, meta(3, 2, dtype=torch.int64), x[:, :2]),
    "scatter with reduce": lambda: x.scatter(1, meta(3, 2, dtype=torch.int64), 2.0, reduce="add"),
    "sort": lambda: x.sort(-1, descending=True),
    "stable sort": lambda: x.sort(dim=0, descending=True, stable=True),
    "layer norm": lambda: torch.native_layer_norm(x, [4], None, None, 1e-5),
}


def described(result: Any) -> list[tuple[Any, ...]]:
    tensors = [result] if isinstance(result, Tensor) else list(result)
    return [(tensor.shape, tensor.dtype, tensor.device.type, tensor.stride()) for tensor in tensors]


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_torch(name: str) -> None:
    with ShapesOnly():
        result = OPERATIONS[name]()
    assert described(result) == described(OPERATIONS[name]())
