"""What makes the host wait for a device, and the log of it."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

NAME = "pretend"  # the kind of the pretended device
FRAMES = 3  # lines of heddle that a wait is logged with

aten = torch.ops.aten
VALUE_READS = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.equal.default: "equal",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique_consecutive",
    aten.unique_dim.default: "unique_dim",
    aten.repeat_interleave.Tensor: "repeat_interleave",
    aten.bincount.default: "bincount",
}
READS = {aten.index.Tensor, aten._unsafe_index.Tensor}
WRITES = {
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
}


class Wait(NamedTuple):
    """What the host waited for, and the innermost lines of heddle that asked for it."""

    what: str
    lines: str


@dataclass
class Log:
    """What happened within a block of `pretending`.

    waits: each would make the host wait for a GPU. uploads, downloads: copies from and to pinned memory, which do not.
    operators: how often each ran.
    """

    waits: list[Wait] = field(default_factory=list)
    uploads: list[Wait] = field(default_factory=list)
    downloads: list[Wait] = field(default_factory=list)
    operators: Counter[OpOverload] = field(default_factory=Counter)
    pinned: dict[int, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget what happened so far."""
        for entries in (self.waits, self.uploads, self.downloads, self.operators):
            entries.clear()

    @property
    def report(self) -> list[str]:
        """The waits, equal ones together, for the message of a failing test: "2 × item at …"."""
        return [f"{count} × {wait.what} at {wait.lines}" for wait, count in Counter(self.waits).items()]

    def note(self, entries: list[Wait], what: str) -> None:
        """Add an entry with the lines of heddle that are running."""
        lines: list[str] = []
        frame = sys._getframe()
        while frame.f_back is not None and len(lines) < FRAMES:
            frame = frame.f_back
            name = frame.f_code.co_filename.replace("\\", "/")
            if "/src/heddle/" in name:
                lines.append(f"{name.rpartition('/src/heddle/')[2]}:{frame.f_lineno}")
        entries.append(Wait(what, " < ".join(lines) or "outside of heddle"))

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a CPU tensor was returned by `pin`."""
        return tensor.untyped_storage().data_ptr() in self.pinned

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in pretended pinned memory."""
        copy = tensor.clone()
        self.pinned[copy.untyped_storage().data_ptr()] = copy  # stays alive, so that its address stays its own
        return copy


def log_waits(log: Log, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Log what a call on the device, or a copy to or from it, would wait for, and copies that would not wait."""
    if operator is aten._to_copy.default or operator is aten.copy_.default:
        _log_copy(log, operator, args, kwargs)
    elif operator in VALUE_READS:
        if operator is not aten.repeat_interleave.Tensor or kwargs.get("output_size") is None:
            log.note(log.waits, VALUE_READS[operator])
    elif operator in READS or operator in WRITES:
        fills = operator in WRITES and args[2].numel() == 1  # a masked fill, which does not count its mask
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and not fills:
                log.note(log.waits, "boolean index")
            if isinstance(index, Tensor) and index.device.type != NAME:
                log.note(log.waits, "index from the host")
    elif operator is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        log.note(log.waits, f"grouped product of {args[0].dtype}")


def _log_copy(log: Log, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if operator is aten.copy_.default:
        (to, source), from_kind = args[:2], args[1].device.type
        to_kind, host = to.device.type, source if from_kind == "cpu" else to
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    else:  # torch allocates pinned memory for a copy to the host that does not block
        host, from_kind, non_blocking = args[0], args[0].device.type, kwargs.get("non_blocking", False)
        to_kind = from_kind if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if from_kind == to_kind:
        return
    is_pinned = (operator is aten._to_copy.default and to_kind == "cpu") or log.is_pinned(host)
    entries, what = (
        (log.uploads, "copy from pageable memory") if to_kind == NAME else (log.downloads, "copy to the host")
    )
    log.note(entries if non_blocking and is_pinned else log.waits, what)
