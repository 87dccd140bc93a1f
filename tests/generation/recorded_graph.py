"""A stand-in for CUDA graphs on the CPU: the operations of a step are recorded once and run again over the same memory.

As in a CUDA graph, recording changes nothing, Python numbers are those of the recording, results are written to the
same tensors at each replay, and what would wait for the device or copy from the host is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
REFUSED = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.lift_fresh.default)


class RecordedGraph(TorchDispatchMode):
    """The operations of a step: (operator, arguments, results)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator in REFUSED:
            raise RuntimeError(f"{operator} is not permitted while a graph is recorded")
        kwargs = kwargs or {}
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._before.append((value, value.clone()))
        results = operator(*args, **kwargs)
        self.calls.append((operator, args, kwargs, results))
        return results

    def undo(self) -> None:
        """Give every tensor that was written to its contents before."""
        for tensor, contents in reversed(self._before):
            tensor.copy_(contents)

    @torch.no_grad()
    def replay(self) -> None:
        """Run all operations again. Results go where those of the recording are."""
        self.replays += 1
        for operator, args, kwargs, recorded in self.calls:
            inputs = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
            for target, result in zip(_tensors(recorded), _tensors(operator(*args, **kwargs)), strict=True):
                if target.untyped_storage().data_ptr() not in inputs:  # else a view, or written in place
                    target.copy_(result)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def record(step: Callable[[], None]) -> RecordedGraph:
    """Record a step as `heddle.generation.decode.capture` does."""
    graph = RecordedGraph()
    try:
        with graph:
            step()
    finally:
        graph.undo()
    return graph
