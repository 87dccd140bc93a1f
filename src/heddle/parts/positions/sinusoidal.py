"""Sinusoidal positions (Vaswani et al. 2017), added to the embedding: no length limit, no parameters.

`PE[p, 2i] = sin(p / 10000^(2i/width))`, `PE[p, 2i+1] = cos(…)`; use a scaled embedding with them (`scale: true`).
With `layout: halves` all sines come first (CTRL, 2019). fairseq's have this layout, an `offset` o of 2, which reads
PE[p + o], and an `endpoint`: the exponents are i / (width/2 − 1), so that the last is 1 (XGLM, 2021).
"""

from typing import Literal

from torch import Tensor

from heddle.config import DesignError, PositiveInt
from heddle.numerics.rotary import sinusoidal_embedding
from heddle.numerics.transfer import Constants
from heddle.parts.layout import Layout
from heddle.parts.positions import AdditivePosition, AdditivePositionConfig


class SinusoidalConfig(AdditivePositionConfig):
    """Fields of `sinusoidal`."""

    later_fields = ("layout", "offset", "endpoint")

    layout: Literal["interleaved", "halves"] = "interleaved"
    offset: PositiveInt | None = None  # default: 0
    endpoint: bool = False  # whether the last exponent is 1

    def build(self, width: int) -> "Sinusoidal":
        """Build the module. Raises DesignError for an odd width."""
        if width % 2:
            raise DesignError("", f"sinusoidal positions pair the dims, and width = {width} is odd; give an even width")
        return Sinusoidal(self)


class Sinusoidal(AdditivePosition):
    def __init__(self, config: SinusoidalConfig) -> None:
        super().__init__()
        self.offset, self.endpoint, self.halves = config.offset or 0, config.endpoint, config.layout == "halves"
        self._constants = Constants()

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> x + PE[positions + offset]."""
        positions = layout.positions.clamp(min=0) + self.offset
        own = {"halves": self.halves, "endpoint": self.endpoint}
        return x + sinusoidal_embedding(positions, x.shape[-1], x.dtype, self._constants, **own)
