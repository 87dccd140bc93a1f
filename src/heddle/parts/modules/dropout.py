"""Dropout (Srivastava et al. 2014) and stochastic depth (Huang et al. 2016), off in eval, keyed by sample.

Masks are a function of (seed, step, sample, site), so they are the same for any split of a batch and any recomputation.
"""

from torch import Tensor, nn

from heddle.numerics.random import uniform


class Dropout(nn.Module):
    """In training, zero each element with probability `rate` and divide the others by 1 − rate.

    per_sample: drop the whole tensor of a sample at once (stochastic depth). site: a number that the model sets,
    different for each instance.
    """

    def __init__(self, rate: float, per_sample: bool = False) -> None:
        super().__init__()
        self.rate = rate
        self.per_sample = per_sample
        self.site = 0

    @property
    def active(self) -> bool:
        """Whether a call changes its input."""
        return self.training and self.rate > 0.0

    def draw(self, x: Tensor) -> Tensor | None:
        """Which elements of x the next call keeps: bool, of x's shape or [B, 1, ...]. None: all."""
        if not self.active:
            return None
        shape = (x.shape[0], *(1 for _ in x.shape[1:])) if self.per_sample else tuple(x.shape)
        return uniform(shape, self.site, x.device) >= self.rate

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """x [B, ...] -> the same shape. keep: what `draw` returned; None: it is drawn here."""
        keep = self.draw(x) if keep is None else keep
        return x if keep is None else x * keep.to(x.dtype) / (1.0 - self.rate)

    def extra_repr(self) -> str:
        """The rate, and whether whole samples are dropped."""
        return f"{self.rate}{', per_sample' if self.per_sample else ''}"


class BranchDropout(nn.Module):
    """Dropout of a branch's output: first of single elements, then of a sample's whole output."""

    def __init__(self, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.elements = Dropout(dropout)
        self.path = Dropout(drop_path, per_sample=True)

    def draw_path(self, y: Tensor) -> Tensor | None:
        """Which samples keep the branch: bool [B, 1, ...]. None: all."""
        return self.path.draw(y)

    def forward(self, y: Tensor, keep: Tensor | None = None) -> Tensor:
        """y [B, ...] -> the same shape. keep: what `draw_path` returned; None: it is drawn here."""
        if keep is None and not (self.elements.active or self.path.active):  # skips the cost of two calls
            return y
        dropped: Tensor = self.path(self.elements(y), keep)
        return dropped
