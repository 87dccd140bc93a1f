"""What a mixer with causal sums remembers, and where its tokens stand: one matrix a head, however long the text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.numerics.norms import at_least_float32
from heddle.numerics.recurrent.chunked_sums import Places
from heddle.parts.context.layout import Layout
from heddle.parts.context.mixer_state import MixerState


@dataclass(frozen=True, eq=False)
class Sums(MixerState):
    """sums [B, H, d_k, d_v], in at least float32."""

    sums: Tensor

    @staticmethod
    def empty(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str) -> "Sums":
        """No token seen yet; shape is (batch, heads, key width, value width)."""
        return Sums(at_least_float32(torch.zeros(shape, dtype=dtype, device=device)))


def places(layout: Layout) -> Places:
    """Real tokens so far and documents, made once for all layers."""

    def make() -> Places:
        arrived = None if layout.padding is None else (~layout.padding).cumsum(1)
        return Places(arrived, layout.segments)

    return layout.once("places", make)


def without_padding(x: Tensor, layout: Layout) -> Tensor:
    """Heads x [B, H, T, d], zero at padding."""
    return x if layout.padding is None else x.masked_fill(layout.padding[:, None, :, None], 0.0)
