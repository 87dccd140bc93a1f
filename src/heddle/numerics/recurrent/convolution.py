"""Causal depthwise convolution: `y_t = Σ_s w_s ⊙ x_{t−s}` over the last `kernel_size` tokens of t's document.

Padding is skipped, and inputs before the first token of a document are zeros. The convolution state, which later tokens
need, is the inputs of the last kernel_size − 1 tokens, oldest first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from heddle.numerics.dispatch import (
    NOT_CUDA,
    Kernel,
    Operation,
    add_flops,
    device_type,
    optional_module,
    optional_nondeterministic,
)
from heddle.numerics.norms import at_least_float32, without_autocast
from heddle.numerics.recurrent.library_calls import LIBRARY_CALLS, LibraryCall, call_library
from heddle.numerics.transfer import to_device
from heddle.torch_private import mark_constant

# Adapter to causal-conv1d (`causal_conv1d`): CUDA kernels of the short convolution, for 2 to 4 tokens.
#
# Its tensors are [B, C, T], here views of heddle's [B, T, C], and so is its state [B, C, kernel_size − 1]. `seq_idx`
# keeps the documents of a row apart. Signatures follow version 1.6.1.


MODULE = "causal_conv1d"
FUNCTION = "causal_conv1d_fn"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KERNEL_SIZES = range(2, 5)
ALIGNMENT = 8  # of channels


@mark_constant
def conv_installed() -> bool:
    """Whether the library's functions are available."""
    return optional_module(MODULE) is not None


def conv_unsupported(facts: "ConvolutionFacts") -> str | None:
    """Why the library cannot compute a call, or None."""
    if facts.device != "cuda":
        return NOT_CUDA
    if facts.dtype not in DTYPES:
        return f"it supports dtypes up to float32, not {facts.dtype}"
    if facts.kernel_size not in KERNEL_SIZES or facts.channels % ALIGNMENT:
        return f"it needs kernel size 2 to 4 and a multiple of 8 channels, not {facts.kernel_size} and {facts.channels}"
    if facts.taps and (facts.has_state or not facts.packed):
        return "it does not combine packed documents with a state or padding"
    return None if conv_installed() else "causal-conv1d is not installed"


def run_conv(x: Tensor, weight: Tensor, conv_state: Tensor | None, segment_ids: Tensor | None) -> Tensor:
    """x [B, T, C], weight [C, kernel_size], a state [B, kernel_size − 1, C] or None -> [B, T, C] in x's dtype.

    segment_ids: int64 [B, T], each token's document, or None if a row is one document.
    """
    if x.is_meta:  # `heddle show` on a machine that has the library
        return x.new_empty(x.shape)
    tensors = {"x": x, "weight": weight}
    if segment_ids is not None:
        tensors["seq_idx"] = segment_ids.int()
    if conv_state is not None:
        tensors["initial_states"] = conv_state.to(x.dtype)
    return call_library(FUNCTION, tensors)[0]


def _call(tensors: dict[str, Tensor]) -> tuple[Tensor]:
    library = optional_module(MODULE)
    assert library is not None
    states = tensors.get("initial_states")
    y: Tensor = library.causal_conv1d_fn(
        tensors["x"].contiguous().mT,
        tensors["weight"],
        seq_idx=tensors.get("seq_idx"),
        initial_states=None if states is None else states.contiguous().mT,
    )
    return (y.mT,)


LIBRARY_CALLS[FUNCTION] = LibraryCall(_call, lambda tensors: (tensors["x"].new_empty(tensors["x"].shape),))


_LIBRARY = "causal_conv1d"  # the name of its kernel


class Taps(NamedTuple):
    """The inputs of each token, for calls with padding or several documents.

    input_indices: int64 [B, T + 1, kernel_size], indices into [conv_state ; x], oldest first, −1 for a zero. The last
    entry is for the token that follows the call.
    near_starts: int64 [2, N], row and position of every token that has fewer than kernel_size − 1 earlier tokens of its
    document in this call. None if that is unknown or there is padding.
    segment_ids: int64 [B, T], each token's document. None if there is padding.
    """

    input_indices: Tensor
    near_starts: Tensor | None = None
    segment_ids: Tensor | None = None


class ConvolutionFacts(NamedTuple):
    """What decides the kernel.

    taps: whether there is padding or several documents. near_starts: whether the tokens near document starts are known.
    packed: whether each token's document is known and there is no padding. compiled: whether a graph is being traced.
    """

    tokens: int
    gradients: bool
    taps: bool
    near_starts: bool
    packed: bool = False
    has_state: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    channels: int = 1
    kernel_size: int = 4
    compiled: bool = False


def convolution_flops(tokens: int, channels: int, kernel_size: int) -> int:
    """FLOPs of one call: a multiply and an add per tap."""
    return 2 * tokens * channels * kernel_size


def find_input_indices(is_token: Tensor, call_segment_ids: Tensor, kernel_size: int) -> Tensor:
    """The `input_indices` of `Taps`. is_token: bool [B, T]. call_segment_ids: [B, T]; 0 is the state's document."""
    (batch, length), state_tokens, device = is_token.shape, kernel_size - 1, is_token.device
    # One more token is appended: the one after the call, in the last token's document.
    next_segment_ids = call_segment_ids[:, -1:] if length else call_segment_ids.new_zeros(batch, 1)
    call_segment_ids = torch.cat((call_segment_ids, next_segment_ids), dim=1)
    is_token = torch.cat((is_token, is_token.new_ones(batch, 1)), dim=1)
    token_number = state_tokens + is_token.cumsum(1) - 1  # counted from the oldest token of the state, no padding
    positions = torch.arange(state_tokens + length + 1, device=device).repeat(batch, 1)
    position_of_number = torch.cat((positions, positions[:, :1]), dim=1)  # the extra last column is for padding
    number_or_last = torch.where(is_token, token_number, state_tokens + length + 1)
    position_of_number.scatter_(1, number_or_last, positions[:, state_tokens:])
    offsets = torch.arange(state_tokens, -1, -1, device=device)
    input_numbers = (token_number[..., None] - offsets).clamp(min=0).flatten(1)
    index = position_of_number.gather(1, input_numbers)
    segment_ids = torch.cat((call_segment_ids.new_zeros(batch, state_tokens), call_segment_ids), dim=1)
    same_document = segment_ids.gather(1, index).view(batch, -1, kernel_size) == call_segment_ids[..., None]
    return torch.where(same_document & is_token[..., None], index.view(batch, -1, kernel_size), -1)


def find_tokens_near_starts(doc_lengths: Sequence[Sequence[int]], kernel_size: int, device: torch.device) -> Tensor:
    """The `near_starts` of `Taps`, from the document lengths of each row."""
    indices = []
    for row, row_lengths in enumerate(doc_lengths):
        doc_start = 0
        for doc_length in row_lengths:
            indices += [(row, doc_start + position) for position in range(min(doc_length, kernel_size - 1))]
            doc_start += doc_length
    return to_device(torch.tensor(indices, dtype=torch.int64, device="cpu").view(-1, 2).t(), device)


def reference(x: Tensor, weight: Tensor, conv_state: Tensor | None, taps: Taps | None) -> Tensor:
    """Gather the inputs of every token, then multiply by the weight. Shapes as in `causal_conv1d`."""
    if taps is None:
        all_tokens = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        taps = Taps(find_input_indices(all_tokens, torch.zeros_like(all_tokens, dtype=torch.int64), weight.shape[1]))
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return _convolve_gathered(_with_conv_state(x, weight, conv_state), weight, rows, taps.input_indices[:, :-1])


def _with_conv_state(x: Tensor, weight: Tensor, conv_state: Tensor | None) -> Tensor:
    """[conv_state ; x], with a state of zeros if there is none."""
    conv_state = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2]) if conv_state is None else conv_state
    return torch.cat((conv_state, x), dim=1)


def _convolve_gathered(inputs: Tensor, weight: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """inputs [B, S, C], rows [...] and index [..., kernel_size] into them -> [..., C]."""
    gathered = inputs[rows[..., None], index.clamp(min=0)].masked_fill((index < 0)[..., None], 0.0)
    return torch.einsum("...kc,ck->...c", gathered, weight)


def _step(x: Tensor, weight: Tensor, conv_state: Tensor | None, taps: Taps | None) -> Tensor:
    """One token that continues the state's document."""
    return (_with_conv_state(x, weight, conv_state) * weight.t()).sum(1, keepdim=True)


def _shifted(x: Tensor, weight: Tensor, conv_state: Tensor | None, taps: Taps | None) -> Tensor:
    """One document per row, without padding: the inputs of a token are directly before it."""
    y: Tensor = _ShiftedSum.apply(x if conv_state is None else torch.cat((conv_state, x), dim=1), weight)
    return y[:, y.shape[1] - x.shape[1] :]


def _patched(x: Tensor, weight: Tensor, conv_state: Tensor | None, taps: Taps | None) -> Tensor:
    """Compute each row as one document, then recompute the few tokens near the start of a document."""
    assert taps is not None
    return _with_starts(_shifted(x, weight, conv_state, None), x, weight, conv_state, taps)


def _with_starts(y: Tensor, x: Tensor, weight: Tensor, conv_state: Tensor | None, taps: Taps) -> Tensor:
    """y of rows computed as one document, with the tokens near the start of a document recomputed."""
    assert taps.near_starts is not None
    rows, positions = taps.near_starts
    inputs = _with_conv_state(x, weight, conv_state)
    corrected = _convolve_gathered(inputs, weight, rows, taps.input_indices[rows, positions])
    return y.index_put((rows, positions), corrected)


def _grouped(x: Tensor, weight: Tensor, conv_state: Tensor | None, taps: Taps | None) -> Tensor:
    """torch's convolution with a group for each channel, in few launches.

    The copy with tokens last keeps it from kernels that round float32 to TF32.
    """
    inputs = (x if conv_state is None else torch.cat((conv_state, x), dim=1)).mT.contiguous()
    padding = weight.shape[1] - 1 if conv_state is None else 0
    y = functional.conv1d(inputs, weight[:, None], padding=padding, groups=x.shape[2])[..., : x.shape[1]].mT
    return y if taps is None else _with_starts(y, x, weight, conv_state, taps)


def _library(x: Tensor, weight: Tensor, conv_state: Tensor | None, taps: Taps | None) -> Tensor:
    return at_least_float32(run_conv(x, weight, conv_state, taps and taps.segment_ids))


class _ShiftedSum(torch.autograd.Function):
    """A weighted sum of shifted copies: four times as fast as torch's grouped convolution and its gradient on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        tap_weights = weight.t().flip(0).contiguous()
        y = x * tap_weights[0]
        for shift in range(1, min(len(tap_weights), x.shape[1])):
            y[:, shift:].addcmul_(x[:, :-shift], tap_weights[shift])
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        tap_weights = weight.t().flip(0).contiguous()
        grad_x, grad_taps = gradient * tap_weights[0], torch.zeros_like(tap_weights)
        grad_taps[0] = (gradient * x).sum((0, 1))
        for shift in range(1, min(len(tap_weights), x.shape[1])):
            grad_x[:, :-shift].addcmul_(gradient[:, shift:], tap_weights[shift])
            grad_taps[shift] = (gradient[:, shift:] * x[:, :-shift]).sum((0, 1))
        return grad_x, grad_taps.flip(0).t()


def _step_unsupported(facts: ConvolutionFacts) -> str | None:
    if facts.tokens != 1:
        return f"it takes one token, not {facts.tokens}"
    return "gradients are required" if facts.gradients else _documents_unsupported(facts)


def _documents_unsupported(facts: ConvolutionFacts) -> str | None:
    return "there are several documents or padding" if facts.taps else None


def _shifted_unsupported(facts: ConvolutionFacts) -> str | None:
    if facts.device != "cpu" and not facts.compiled:
        return "each tap is a separate launch on an accelerator"
    return _documents_unsupported(facts)


def _patched_unsupported(facts: ConvolutionFacts) -> str | None:
    if facts.device != "cpu" and not facts.compiled:
        return "each tap is a separate launch on an accelerator"
    return None if facts.near_starts else "document lengths are unknown, or there is padding"


def _grouped_unsupported(facts: ConvolutionFacts) -> str | None:
    if facts.taps and not facts.near_starts:
        return "document lengths are unknown, or there is padding"
    return None if facts.tokens else "the call has no tokens"


CONVOLUTION = Operation(
    "convolution",
    (
        Kernel("step", _step, _step_unsupported),
        Kernel(
            _LIBRARY,
            _library,
            conv_unsupported,
            nondeterministic=optional_nondeterministic,
        ),
        Kernel("shifted", _shifted, _shifted_unsupported),
        Kernel("patched", _patched, _patched_unsupported),
        Kernel("grouped", _grouped, _grouped_unsupported),
        Kernel("reference", reference, lambda facts: None),
    ),
)


def causal_conv1d(x: Tensor, weight: Tensor, conv_state: Tensor | None, taps: Taps | None) -> Tensor:
    """x [B, T, C], weight [C, kernel_size], conv_state [B, kernel_size − 1, C] or None (zeros) -> [B, T, C].

    The last column of the weight is for the token itself. `taps` are required for padding or several documents. Padding
    yields zeros. The result is in at least float32.
    """
    add_flops(convolution_flops(x.shape[0] * x.shape[1], *weight.shape))
    facts = ConvolutionFacts(
        x.shape[1],
        torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad),
        taps is not None,
        taps is not None and taps.near_starts is not None,
        taps is not None and taps.segment_ids is not None,
        conv_state is not None,
        device_type(x),
        x.dtype,
        weight.shape[0],
        weight.shape[1],
        is_compiling(),
    )
    kernel = CONVOLUTION.choose(facts)
    if kernel.name != _LIBRARY:  # the library computes in float32 whatever it reads
        x = at_least_float32(x)
        weight, conv_state = weight.to(x.dtype), None if conv_state is None else conv_state.to(x.dtype)
    with without_autocast(x):
        y: Tensor = kernel.run(x, weight, conv_state, taps)
    return y


def next_conv_state(x: Tensor, conv_state: Tensor, taps: Taps | None) -> Tensor:
    """The state [B, kernel_size − 1, C] after a call with inputs x [B, T, C]: zero before the last document's start."""
    state_tokens = conv_state.shape[1]
    if taps is None:  # the result is a copy: a view would keep x in memory
        recent = torch.cat((conv_state, x[:, max(0, x.shape[1] - state_tokens) :]), dim=1)
        return recent[:, recent.shape[1] - state_tokens :]
    indices, inputs = taps.input_indices[:, -1, :state_tokens], torch.cat((conv_state, x), dim=1)
    recent_inputs = inputs.gather(1, indices.clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))
    return recent_inputs.masked_fill((indices < 0)[..., None], 0.0)
