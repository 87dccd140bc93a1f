"""Sinusoidal positions (Vaswani et al. 2017), added at the embedding: no length limit, no parameter.

`PE[p, 2i] = sin(p / 10000^(2i/width))`, `PE[p, 2i+1] = cos(…)`; scale the embedding with them (`scale: true`).
"""

from torch import Tensor

from heddle.config import DesignError
from heddle.numerics.rotary import sinusoid
from heddle.parts.context.layout import Layout
from heddle.parts.positions import Additive, AdditiveConfig


class SinusoidalConfig(AdditiveConfig):
    """No fields."""

    def build(self, width: int) -> "Sinusoidal":
        """Make the module. Raises DesignError for an odd width."""
        if width % 2:
            raise DesignError("", f"sinusoidal positions pair the dims, and width = {width} is odd; give an even width")
        return Sinusoidal()


class Sinusoidal(Additive):
    """The module."""

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> x + PE[positions]."""
        return x + sinusoid(layout.positions, x.shape[-1], x.dtype)
