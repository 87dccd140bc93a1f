"""Copies between host and device that do not block the host, and numbers of modules as tensors on a device.

A copy from or to pageable memory blocks the host until the device has finished its queued work. Here copies go through
pinned memory. CPU, MPS and meta tensors are copied as usual.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

UNPINNED = ("cpu", "mps", "meta")  # device types that need no pinned memory
MAX_CONSTANTS = 64  # tensors that a module stores


def to_device(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    """The tensor on `device` (None: the default device). The host does not wait for the copy of a CPU tensor."""
    target = torch.get_default_device() if device is None else torch.device(device)
    if tensor.device.type != "cpu" or target.type in UNPINNED or is_compiling():
        return tensor.to(target)
    return tensor.pin_memory().to(target, non_blocking=True)


def tensor_of(values: Sequence[float] | Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """`torch.tensor(values, dtype, device)` without blocking the host."""
    return to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)


class HostCopy:
    """An asynchronous copy of a tensor to the host; only `read` waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        self._copy = tensor.detach()
        if tensor.device.type not in UNPINNED:
            self._copy = self._copy.to("cpu", non_blocking=True)  # torch allocates pinned memory for it
            self._event = torch.Event(device=tensor.device)
            self._event.record()

    def read(self) -> Tensor:
        """The copy, on the CPU. Waits only for work that was queued on the device before the copy."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy.cpu()


class Constants:
    """The numbers of a module as tensors, made once for each dtype and device.

    A module keeps its numbers as floats, so that a change of its dtype does not round them; stored tensors need no copy
    to the device in a call that a CUDA graph captures.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[tuple[float, ...], torch.dtype, torch.device], Tensor] = {}

    def tensor(self, values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """`torch.tensor(values, dtype, device)`, stored: do not modify it in place."""
        key = (values, dtype, device)
        tensor = self._tensors.get(key)
        if tensor is not None:
            return tensor
        if is_compiling():  # a tensor of a traced graph must not be stored outside it
            return tensor_of(values, dtype, device)
        with torch.inference_mode(False):  # a model used in inference may be trained afterwards
            tensor = tensor_of(values, dtype, device)
        if len(self._tensors) >= MAX_CONSTANTS:
            self._tensors.clear()
        self._tensors[key] = tensor
        return tensor
