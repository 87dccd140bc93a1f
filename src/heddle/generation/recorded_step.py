"""A step as one compiled graph with packed weights, for a CPU.

torch.compile traces a step without running it, so it finds no packed weight, and guards each of its tensors. Here one
real step is recorded, with the kernels that it chooses, and the record is compiled without guards: the tensors that a
pinned state reads and writes stay the same.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from heddle.generation.capture import Step
from heddle.numerics.packed_product import ProductTable

_Graph = Callable[..., tuple[()]]
_HOST_READS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__")
}
_VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _NoHostReads(TorchFunctionMode):
    """Refuse to read a tensor's values: a record of a real step would hold them for every step."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _HOST_READS:
            raise RuntimeError(f"{function.__name__} of a tensor reads its values")
        return function(*args, **(kwargs or {}))


def record_step(step: Step, tensors: Sequence[Tensor]) -> Step:
    """Record `step`, which reads and writes `tensors` at each call, and return its compiled form.

    tensors: all that change from call to call, each once; they hold the same values afterwards. The step must have run
    once, so that its weights are packed. Raises RuntimeError for a step that reads values, or whose shapes depend on
    them. The compiler runs at the first call.
    """
    values, table = [tensor.clone() for tensor in tensors], ProductTable()
    try:
        with torch.no_grad(), table.recording():
            graph = _graph(step, tensors)
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    compiled_graph = torch.compile(graph, fullgraph=True, dynamic=False, options=options)
    return partial(_replay, compiled_graph, tensors, table)


def _graph(step: Step, tensors: Sequence[Tensor]) -> GraphModule:
    def recorded_step(*_: Tensor) -> tuple[()]:
        with _NoHostReads():
            step()
        return ()

    graph = make_fx(recorded_step)(*tensors)
    for node in graph.graph.nodes:
        if _VALUE_DEPENDENT & set(getattr(node.target, "tags", ())) and not _takes_indices(node):
            raise RuntimeError(f"the shape of {node.target} depends on values")
    return graph


def _takes_indices(node: Node) -> bool:
    """Whether the node is x[i, j] with integers: torch tags it for its other use, x[bool]."""
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    indices = [index.meta["val"] for index in node.args[1] if index is not None]  # type: ignore[union-attr]
    return all(index.dtype in (torch.int32, torch.int64) for index in indices)


@torch.no_grad()
def _replay(graph: _Graph, tensors: Sequence[Tensor], table: ProductTable) -> None:
    """Run the graph. Its calls find their weights in the table, which lives as long as the caller's step."""
    graph(*tensors)
