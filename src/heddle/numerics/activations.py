"""What is hidden in a feed-forward: `f(up)`, `f(gate) ⊙ up` (Shazeer 2020), or the clamped SwiGLU of gpt-oss (2025).

clamped:   (clamp(up, −limit, limit) + 1) ⊙ g σ(α g),   g = min(gate, limit)
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Activation(Protocol):
    """up and gate [..., hidden], gate None in a plain MLP -> [..., hidden]; neither is written to."""

    def __call__(self, up: Tensor, gate: Tensor | None = None, /) -> Tensor:
        """Each entry by itself."""


def glu(function: Callable[[Tensor], Tensor]) -> Activation:
    """`function` of the gate times what is gated, or of `up` alone."""

    def hidden(up: Tensor, gate: Tensor | None = None, /) -> Tensor:
        return function(up) if gate is None else function(gate) * up

    return hidden


def clamped(limit: float, alpha: float) -> Activation:
    """The clamped SwiGLU, which needs a gate."""

    def hidden(up: Tensor, gate: Tensor | None = None, /) -> Tensor:
        assert gate is not None
        bounded = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (bounded * (alpha * bounded).sigmoid())

    return hidden
