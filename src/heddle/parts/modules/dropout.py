"""Dropout (Srivastava et al. 2014) and stochastic depth (Huang et al. 2016), off in eval, keyed by sample.

Masks are a function of (seed, step, sample, site): any split of a batch and any recomputation draws the same.
"""

from torch import Tensor, nn

from heddle.numerics.random import uniform
from heddle.parts.modules.eager import eager


class Dropout(nn.Module):
    """Zero each element with probability `rate` in training and divide the others by 1 − rate.

    `whole` drops a sample's whole tensor at once (stochastic depth). The model gives every instance its `site`.
    """

    def __init__(self, rate: float, whole: bool = False) -> None:
        super().__init__()
        self.rate = rate
        self.whole = whole
        self.site = 0

    @property
    def active(self) -> bool:
        """Whether a call changes its input."""
        return self.training and self.rate > 0.0

    def forward(self, x: Tensor) -> Tensor:
        """x [B, ...] -> the same shape."""
        if not self.active:
            return x
        return self._dropped(x)

    @eager
    def _dropped(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], *(1 for _ in x.shape[1:])) if self.whole else tuple(x.shape)
        keep = uniform(shape, self.site, x.device) >= self.rate
        return x * keep.to(x.dtype) / (1.0 - self.rate)

    def extra_repr(self) -> str:
        """The rate."""
        return f"{self.rate}{', whole' if self.whole else ''}"


class Drop(nn.Module):
    """What training drops of one branch: some elements of what it adds, then, by sample, all of it."""

    def __init__(self, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.elements = Dropout(dropout)
        self.path = Dropout(drop_path, whole=True)

    def forward(self, y: Tensor) -> Tensor:
        """y [B, ...] -> the same shape."""
        dropped: Tensor = self.path(self.elements(y))
        return dropped
