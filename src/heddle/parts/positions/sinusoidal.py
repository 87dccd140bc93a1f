"""Sinusoidal positions (Vaswani et al. 2017), added to the embedding: no length limit, no parameters.

`PE[p, 2i] = sin(p / 10000^(2i/width))`, `PE[p, 2i+1] = cos(…)`; use a scaled embedding with them (`scale: true`).
"""

from torch import Tensor

from heddle.config import DesignError
from heddle.numerics.rotary import sinusoidal_embedding
from heddle.numerics.transfer import Constants
from heddle.parts.layout import Layout
from heddle.parts.positions import AdditivePosition, AdditivePositionConfig


class SinusoidalConfig(AdditivePositionConfig):
    """No fields."""

    def build(self, width: int) -> "Sinusoidal":
        """Build the module. Raises DesignError for an odd width."""
        if width % 2:
            raise DesignError("", f"sinusoidal positions pair the dims, and width = {width} is odd; give an even width")
        return Sinusoidal()


class Sinusoidal(AdditivePosition):
    def __init__(self) -> None:
        super().__init__()
        self._constants = Constants()

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> x + PE[positions]."""
        return x + sinusoidal_embedding(layout.positions, x.shape[-1], x.dtype, self._constants)
