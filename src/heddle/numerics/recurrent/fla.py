"""Adapter to flash-linear-attention (`fla`): Triton kernels of recurrences for a GPU, in half precision.

Its tensors are [B, T, H, d] where heddle's are [B, H, T, d]. In both a state is [B, H, d_k, d_v] and decays are
logarithms. Queries are scaled before the call, so fla's own scale is 1. Documents are concatenated into one row, with
`cu_seqlens` on the host, too: fla plans its chunks there, and would wait for the device otherwise. Signatures follow
version 0.5.2.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heddle.numerics.dispatch import NOT_CUDA, optional_module
from heddle.numerics.norms import at_least_float32
from heddle.numerics.recurrent.chunked_sums import CallLayout, token_log_decays
from heddle.numerics.recurrent.library_calls import LIBRARY_CALLS, LibraryCall, call_library
from heddle.torch_private import mark_constant

if TYPE_CHECKING:
    from heddle.numerics.recurrent.gated_delta import DeltaInputs
    from heddle.numerics.recurrent.recurrence import RecurrenceFacts
    from heddle.numerics.recurrent.ssd import SSDInputs

DTYPES = (torch.float16, torch.bfloat16)
MAX_KEY_WIDTH = 256
FUNCTIONS = {
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "chunk_simple_gla": "fla.ops.simple_gla",
}

CuSeqlens = tuple[Tensor, Tensor]  # the ends of all documents, from 0 on, int64 [N + 1]: on the device, on the host


def functions() -> dict[str, Callable[..., Any]] | None:
    """fla's functions by name. None if it is not installed, or finds no GPU for its kernels."""
    modules = {name: optional_module(module) for name, module in FUNCTIONS.items()}
    return None if None in modules.values() else {name: getattr(module, name) for name, module in modules.items()}


@mark_constant
def fla_installed() -> bool:
    """Whether fla's functions are available."""
    return functions() is not None


@mark_constant
def gradients_miscompiled() -> bool:
    """Whether this machine's Triton compiles the gradients of a decay per token and head wrongly (fla, issue 640)."""
    triton = optional_module("triton")
    if triton is None or not torch.cuda.is_available() or find_spec("tilelang") is not None:
        return False
    return miscompiles(triton.__version__, torch.cuda.get_device_capability())


def miscompiles(triton: str, capability: tuple[int, int]) -> bool:
    """Whether a Triton version (3.4.0 to 3.7.0) miscompiles these gradients on a GPU of this capability (Hopper)."""
    major, minor, patch = (int("".join(c for c in part if c.isdigit())) for part in f"{triton}.0.0".split(".")[:3])
    return capability[0] == 9 and (3, 4, 0) <= (major, minor, patch) < (3, 7, 1)


def fla_unsupported(facts: "RecurrenceFacts") -> str | None:
    """Why fla cannot compute a call, or None."""
    if facts.device != "cuda":
        return NOT_CUDA
    if facts.tokens < 2:
        return "one token is one step of the recurrence"
    if facts.dtype not in DTYPES:
        return f"it computes in half precision, but the projections are in {facts.dtype}"
    if facts.key_width > MAX_KEY_WIDTH:
        return f"keys are {facts.key_width} wide, more than {MAX_KEY_WIDTH}"
    if facts.separate_read:
        return "it reads and writes the state with one key"
    if facts.has_documents and (facts.has_state or not facts.has_cu_seqlens):
        return "it does not combine packed documents with a state or padding"
    if facts.gradients and facts.decay_per_token and gradients_miscompiled():
        return "this Triton miscompiles its gradients on Hopper; install Triton 3.7.1 or newer, or tilelang"
    return None if fla_installed() else "flash-linear-attention is not installed"


def fla_delta_rule(inputs: "DeltaInputs", state: Tensor) -> tuple[Tensor, Tensor]:
    """`gated_delta.gated_delta_rule` by fla: with a decay per head, or per channel (Kimi Delta Attention)."""
    per_head = inputs.log_decay.shape[3] == 1
    log_decay = inputs.log_decay.squeeze(3) if per_head else inputs.log_decay
    return _run(
        "chunk_gated_delta_rule" if per_head else "chunk_kda",
        {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": log_decay, "beta": inputs.beta},
        inputs.dtype or inputs.v.dtype,
        inputs.cu_seqlens,
        state,
    )


def fla_ssd(inputs: "SSDInputs", state: Tensor) -> tuple[Tensor, Tensor]:
    """`ssd.state_space_duality` by fla, without the skip connection. Each head gets a copy of its group's q and k."""
    repeats = inputs.v.shape[1] // inputs.k.shape[1]
    q, k = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (inputs.q, inputs.k))
    tensors = {"q": q, "k": k, "v": inputs.v * inputs.time_step, "g": inputs.log_decay.squeeze(3)}
    return _run("chunk_simple_gla", tensors, inputs.dtype or inputs.v.dtype, inputs.cu_seqlens, state)


def fla_causal_sums(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, layout: CallLayout, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`causal_sums.causal_sums` by fla. Constant decays are one number per head, unless learned or with padding."""
    tensors = {"q": q, "k": k, "v": v}
    if log_decay is not None and is_per_token(log_decay, layout):
        tensors["g"] = token_log_decays(log_decay, layout, q.shape[2]).squeeze(3).expand(q.shape[:3])
    elif log_decay is not None:
        tensors["g_gamma"] = log_decay
    return _run("chunk_simple_gla", tensors, v.dtype, layout.cu_seqlens, state)


def is_per_token(log_decay: Tensor, layout: CallLayout) -> bool:
    """Whether constant decays [H] are passed to fla per token: they are learned, or must skip padding."""
    return log_decay.requires_grad or layout.cumulative_tokens is not None


def _run(
    name: str, tensors: dict[str, Tensor], dtype: torch.dtype, cu_seqlens: CuSeqlens | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Call a function of fla. `tensors` are [B, H, T, ...], or [H] for "g_gamma"; q, k and v are rounded to `dtype`."""
    batch, _, length, _ = tensors["v"].shape
    arguments: dict[str, Tensor] = {}
    for key, x in tensors.items():
        narrow = x.to(dtype) if key in ("q", "k", "v") else at_least_float32(x)
        rows = narrow if key == "g_gamma" else narrow.transpose(1, 2)
        arguments[key] = rows if cu_seqlens is None or key == "g_gamma" else rows.flatten(0, 1)[None]
    if cu_seqlens is None:
        arguments["initial_state"] = at_least_float32(state)
    else:
        arguments["cu_seqlens"], arguments["cu_seqlens_cpu"] = cu_seqlens
    if tensors["v"].is_meta:  # `heddle show` on a machine that has fla
        y, last = _shapes(arguments)
    else:
        y, last = call_library(name, arguments)
    if cu_seqlens is not None:
        row_ends = torch.arange(length, batch * length + 1, length, device=y.device)
        last = last[torch.searchsorted(cu_seqlens[0], row_ends) - 1]
        y = y.view(batch, length, *y.shape[2:])
    return y.transpose(1, 2).to(state.dtype), last.to(state.dtype)


def _call(name: str, arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    library = functions()
    assert library is not None
    results: tuple[Tensor, Tensor] = library[name](**arguments, scale=1.0, output_final_state=True)
    return results


def _shapes(arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Empty tensors of the shapes of fla's results: [rows, T, H, d_v] and, for each row or document, [H, d_k, d_v]."""
    k, v, bounds = arguments["k"], arguments["v"], arguments.get("cu_seqlens")
    states = v.shape[0] if bounds is None else bounds.shape[0] - 1
    wide = torch.promote_types(v.dtype, torch.float32)
    return v.new_empty(v.shape), v.new_empty(states, v.shape[2], k.shape[3], v.shape[3], dtype=wide)


for _name in FUNCTIONS:
    LIBRARY_CALLS[_name] = LibraryCall(partial(_call, _name), _shapes)
