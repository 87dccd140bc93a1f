"""The interface for softmax attention that another program computes, such as a serving engine with its own kernels."""

from typing import Protocol

from torch import Tensor, nn

from heddle.numerics.attention.mask import AttentionMask, ScoreModifiers
from heddle.numerics.attention.softmax import WeightDropout


class AttentionFunction(Protocol):
    """A function with the arguments and the result of `heddle.numerics.attention.softmax.attention`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        scale: float,
        dropout: WeightDropout | None,
        modifiers: ScoreModifiers,
    ) -> Tensor:
        """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]."""
        ...


class AttentionBackend(Protocol):
    """Chooses the attention function of each layer, in the calls whose layout carries the backend.

    A function may read keys and values of earlier tokens from a cache of its own. It raises ConfigError for a dropout
    or a modifier that it cannot apply.
    """

    def __call__(self, layer: nn.Module) -> AttentionFunction:
        """The function that computes the attention of the mixer `layer`."""
        ...
