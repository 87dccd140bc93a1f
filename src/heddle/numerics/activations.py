"""Activations of feed-forward layers: `f(up)`, `f(gate) ⊙ up` (Shazeer 2020), and the clamped SwiGLU of gpt-oss (2025).

clamped SwiGLU:   (clamp(up, −limit, limit) + 1) ⊙ g σ(α g),   g = min(gate, limit)
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Activation(Protocol):
    """up and gate [..., hidden] -> [..., hidden]. gate is None in a plain MLP. The inputs are not modified."""

    def __call__(self, up: Tensor, gate: Tensor | None = None, /) -> Tensor:
        """Apply the activation elementwise."""


def glu(function: Callable[[Tensor], Tensor]) -> Activation:
    """`function(gate) * up`, or `function(up)` without a gate."""

    def activation(up: Tensor, gate: Tensor | None = None, /) -> Tensor:
        return function(up) if gate is None else function(gate) * up

    return activation


def clamped_swiglu(limit: float, alpha: float) -> Activation:
    """The clamped SwiGLU of gpt-oss. It needs a gate."""

    def activation(up: Tensor, gate: Tensor | None = None, /) -> Tensor:
        assert gate is not None
        clamped_gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (clamped_gate * (alpha * clamped_gate).sigmoid())

    return activation
