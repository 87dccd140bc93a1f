"""The memory of tensors: the sum of all storages that are alive at once, as operations make them."""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Within it, `peak` is the largest sum of bytes of storages that tensors made here still use."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Counter[int] = Counter()  # of each storage, by address
        self.bytes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta" and leaf.untyped_storage().nbytes():
                self.add(leaf)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count a tensor until it is freed."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not self.tensors[address]:
            self.bytes[address] = storage.nbytes()
            self.peak = max(self.peak, sum(self.bytes.values()))
        self.tensors[address] += 1
        weakref.finalize(tensor, self.remove, address)

    def remove(self, address: int) -> None:
        """Stop counting one tensor of a storage."""
        self.tensors[address] -= 1
        if not self.tensors[address]:
            del self.bytes[address]
