"""States of recurrent mixers: one matrix for each head, whatever the length of the text."""

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heddle.numerics.dispatch.operation import device_type
from heddle.numerics.dispatch.transfer import to_device
from heddle.numerics.norms import at_least_float32
from heddle.numerics.recurrent import fla
from heddle.numerics.recurrent.chunked_sums import CallLayout
from heddle.parts.context.layout import Layout
from heddle.parts.context.mixer_state import MixerState, StateSpec


@dataclass(frozen=True, eq=False)
class RecurrentState(MixerState):
    """kv_sums [B, H, d_k, d_v]: the (decayed) sums of the outer products k vᵀ, in at least float32."""

    kv_sums: Tensor

    @staticmethod
    def empty(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str) -> "RecurrentState":
        """The state before the first token; shape is (batch, heads, key width, value width)."""
        return RecurrentState(at_least_float32(torch.zeros(shape, dtype=dtype, device=device)))


@dataclass(frozen=True, eq=False)
class ConvRecurrentState(MixerState):
    """The state of a recurrence behind a short convolution.

    recurrent_state [B, heads, d_k, d_v], in at least float32. conv_state [B, conv_kernel − 1, channels]: the last
    inputs of the convolution.
    """

    recurrent_state: Tensor
    conv_state: Tensor

    @staticmethod
    def empty(spec: StateSpec, shape: tuple[int, int, int], conv_shape: tuple[int, int]) -> "ConvRecurrentState":
        """The state before the first token; the shapes are those above without the batch."""
        recurrent_state, conv_state = (
            torch.zeros((spec.batch, *inner), dtype=spec.dtype, device=spec.device) for inner in (shape, conv_shape)
        )
        return ConvRecurrentState(at_least_float32(recurrent_state), conv_state)


def call_layout(layout: Layout) -> CallLayout:
    """The layout as the recurrent operations read it, computed once for all layers."""

    def make() -> CallLayout:
        cumulative_tokens = None if layout.padding is None else (~layout.padding).cumsum(1)
        return CallLayout(cumulative_tokens, layout.call_segment_ids, call_cu_seqlens(layout))

    return layout.cached("call layout", make)


def call_cu_seqlens(layout: Layout) -> tuple[Tensor, Tensor] | None:
    """Where the documents of all rows end, from 0 on, int64 [N + 1]: on the device and on the host.

    None if a row is one document, if the host does not know the lengths, or if no library on the device reads them.
    """
    if is_compiling() or device_type(layout.positions) != "cuda" or fla.functions() is None:
        return None
    lengths = layout.packed_lengths
    if lengths is None or layout.call_segment_ids is None:
        return None

    def make() -> tuple[Tensor, Tensor]:
        ends = torch.tensor([0, *accumulate(chain.from_iterable(lengths))], device="cpu")
        return to_device(ends, layout.positions.device), ends

    return layout.cached("cu_seqlens", make)


def without_padding(x: Tensor, layout: Layout) -> Tensor:
    """Heads x [B, H, T, d], zero at padding."""
    return x if layout.padding is None else x.masked_fill(layout.padding[:, None, :, None], 0.0)
