"""NTK-aware scaling (bloc97 2023; Peng et al. 2023, §3.1): a larger base, which slows slow pairs most.

    base' = base · s^(dim/(dim − 2)),  so θ'_i = θ_i · s^(−2i/(dim − 2)): the first pair is kept, the last turns 1/s

s is `factor`, or, where `original_length` is given, it grows with the text (dynamic NTK, emozilla 2023):
s = 1 + factor · (max(length, original_length) / original_length − 1), which is 1 up to the original length.
"""

import torch

from heddle.config import Count, DesignError
from heddle.numerics.rotary import periods
from heddle.parts.scalings import Longer, ScalingConfig, Stretched


class NtkConfig(ScalingConfig):
    """Fields of `ntk`."""

    factor: Longer  # how many times slower the slowest pair turns
    original_length: Count | None = None  # tokens that were trained for; given: pairs slow down with the text's length

    @property
    def by_length(self) -> bool:
        """Whether it is the dynamic one."""
        return self.original_length is not None

    def stretch(self, dim: int, base: float, length: int, dtype: torch.dtype) -> Stretched:
        """Each frequency by its own share. Raises DesignError for a single pair, which has nothing to share."""
        if dim == 2:
            raise DesignError("", "a single pair keeps its frequency under ntk; turn more dims, or scale by linear")
        times = self.factor
        if self.original_length is not None:
            times = 1.0 + self.factor * max(0.0, length / self.original_length - 1.0)
        share = torch.arange(0, dim, 2, dtype=dtype, device="cpu") / (dim - 2)
        return Stretched(tuple((times**-share / periods(dim, base, dtype)).tolist()))
