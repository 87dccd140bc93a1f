"""Recurrences with one state matrix per head: the kernels of such an operation, and one call of it.

A kernel maps (inputs, state S [B, H, d_k, d_v]) to (output [B, H, T, d_v], the state after the last token).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from heddle.numerics import native
from heddle.numerics.dispatch import Kernel, Operation, device_type, optional_nondeterministic
from heddle.numerics.norms import without_autocast
from heddle.numerics.recurrent import fla

RecurrenceKernel = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


class RecurrenceFacts(NamedTuple):
    """What decides the kernel of a recurrence.

    gradients: whether they are required. dtype: of the projections that computed the inputs. key_width: d_k.
    has_documents: whether a row may hold several. has_cu_seqlens: whether their ends are known to the host.
    decay_per_token: whether the decay is one number per token and head, not one per head or per channel.
    separate_read: whether another key reads the state than the one that writes it.
    native: whether the operation's C++ operator serves these tensors.
    """

    tokens: int
    gradients: bool
    has_state: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    key_width: int = 1
    has_documents: bool = False
    has_cu_seqlens: bool = False
    decay_per_token: bool = False
    separate_read: bool = False
    native: bool = False


class RecurrenceInputs(Protocol):
    """A named tuple with keys k [B, G, T, d_k], values v [B, H, T, d_v] and log_decay [B, H, T, 1|d_k]."""

    @property
    def k(self) -> Tensor: ...

    @property
    def v(self) -> Tensor: ...

    @property
    def log_decay(self) -> Tensor: ...

    @property
    def call_segment_ids(self) -> Tensor | None: ...

    @property
    def cu_seqlens(self) -> fla.CuSeqlens | None: ...

    @property
    def dtype(self) -> torch.dtype | None: ...

    def __iter__(self) -> Iterator[Any]: ...


def _step_unsupported(facts: RecurrenceFacts) -> str | None:
    if facts.tokens != 1:
        return f"it takes one token, not {facts.tokens}"
    return "gradients are required" if facts.gradients else None


def loop_unsupported(facts: RecurrenceFacts) -> str | None:
    """Why a kernel with a loop over chunks or tokens cannot run."""
    return None if facts.device == "cpu" else "each iteration of its loop takes several launches on an accelerator"


def _chunked_unsupported(facts: RecurrenceFacts) -> str | None:
    if not facts.tokens:
        return "the call has no tokens"
    return loop_unsupported(facts)


def _native_unsupported(facts: RecurrenceFacts) -> str | None:
    return _batched_unsupported(facts) if facts.native else native.NOT_IN_USE


def _batched_unsupported(facts: RecurrenceFacts) -> str | None:
    return None if facts.tokens else "the call has no tokens"


class RecurrenceKernels(NamedTuple):
    """The kernels of a recurrence.

    step: one token without gradients. chunked: chunk by chunk, for a CPU. fla: the library's, for a GPU, or None.
    batched: all chunks in few launches. reference: token by token. native: as `chunked`, in C++, or None.
    """

    step: RecurrenceKernel
    chunked: RecurrenceKernel
    fla: RecurrenceKernel | None
    batched: RecurrenceKernel
    reference: RecurrenceKernel
    native: RecurrenceKernel | None = None


def recurrence_operation(name: str, kernels: RecurrenceKernels) -> Operation[RecurrenceFacts]:
    """The operation with these kernels, in order of preference."""
    operator: tuple[Kernel[RecurrenceFacts], ...] = ()
    library: tuple[Kernel[RecurrenceFacts], ...] = ()
    if kernels.native is not None:
        operator = (Kernel("native", kernels.native, _native_unsupported, traceable=False),)
    if kernels.fla is not None:
        library = (Kernel("fla", kernels.fla, fla.fla_unsupported, nondeterministic=optional_nondeterministic),)
    return Operation(
        name,
        (
            Kernel("step", kernels.step, _step_unsupported),
            *operator,
            Kernel("chunked", kernels.chunked, _chunked_unsupported),
            *library,
            Kernel("batched", kernels.batched, _batched_unsupported),
            Kernel("reference", kernels.reference, lambda facts: None),
        ),
    )


def run_recurrence(
    operation: Operation[RecurrenceFacts], inputs: RecurrenceInputs, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """state S [B, H, d_k, d_v] (None: zeros) -> (output [B, H, T, d_v], the state after the last token).

    Inputs in half precision give an output and a state in float32, under autocast too. May update the state in place.
    """
    v = inputs.v
    gradients = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    separate_read = getattr(inputs, "read", None) is not None
    facts = RecurrenceFacts(
        v.shape[2],
        gradients,
        state is not None,
        device_type(v),
        inputs.dtype or v.dtype,
        inputs.k.shape[3],
        inputs.call_segment_ids is not None,
        inputs.cu_seqlens is not None,
        inputs.log_decay.shape[3] == 1,
        separate_read,
        not separate_read and native.serves(operation.name, v, inputs.k, state),
    )
    kernel = operation.choose(facts)
    if state is None:
        wide = torch.promote_types(v.dtype, torch.float32)
        state = v.new_zeros(*v.shape[:2], inputs.k.shape[3], v.shape[3], dtype=wide)
    with without_autocast(v):
        result: tuple[Tensor, Tensor] = kernel.run(inputs, state)
    return result


def run_operator(
    name: str, tensors: Sequence[Tensor], beta: Tensor | None, call_segment_ids: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The kernel `native`, of `native/recurrent.cpp`: chunks of 16 tokens, a head's state in its core's cache.

    tensors: q, k, v and log_decay. beta: of the delta rule, else None.
    """
    starts = None
    if call_segment_ids is not None:
        before = call_segment_ids.new_zeros(len(call_segment_ids), 1)
        starts = (call_segment_ids.diff(dim=1, prepend=before) != 0)[:, None, :, None]
    wide = [x.to(state.dtype) for x in tensors]
    y, after = getattr(torch.ops.heddle, name)(*wide, None if beta is None else beta.to(state.dtype), starts, state)
    return y, after
