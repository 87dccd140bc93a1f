"""Temperatures that fall with the position (Llama 4, Ministral 3): queries far into a long text get sharper scores.

    t(p) = 1 + β ln(1 + ⌊p / length⌋)

A query at position p is multiplied by t(p), which is 1 for the first `length` tokens.
"""

import torch
from torch import Tensor

from heddle.parts.context.layout import Layout


def query_temperature(layout: Layout, length: int, beta: float, dtype: torch.dtype) -> Tensor:
    """t of each token, [B, 1, T, 1] in `dtype`, computed in at least float32; 1 at padding. Stored for all layers."""
    wide = torch.promote_types(dtype, torch.float32)

    def temperatures() -> Tensor:
        steps = layout.positions.clamp(min=0).div(length, rounding_mode="floor")
        return (1.0 + beta * (1.0 + steps.to(wide)).log()).to(dtype)[:, None, :, None]

    return layout.cached(("query temperature", length, beta, dtype), temperatures)
