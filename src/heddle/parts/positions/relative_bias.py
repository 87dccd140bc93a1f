"""T5's relative bias (Raffel et al. 2020): each head adds a learned number to the score, one per bucket of offsets.

    score_h(i, j) + b_h[bucket(i − j)],   bucket(d) = d                                                 below e = n / 2
                                          bucket(d) = e + ⌊(n − e) · log(d/e) / log(max_distance/e)⌋    from e on

with n buckets, and the last bucket from max_distance on. In a bidirectional mixer half of the buckets are for later
keys. A layer has a table of its own, as in UMT5 (Chung et al. 2023), or with `shared` that of the last earlier layer
that has its own: T5 and MPNet (Song et al. 2020) have one table for all layers. T5's scores are not scaled
(`scale: 1`).
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from heddle.config import DesignError, Width
from heddle.numerics.attention.mask import ScoreBiasFunction
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.numerics.transfer import Constants
from heddle.parts.layout import Layout
from heddle.parts.modules.linear import SelfInitialized, fill_normal
from heddle.parts.positions import ScoreBias, ScoreBiasConfig

MAX_DISTANCE = 2**16  # the table has an entry for each offset


class RelativeBiasConfig(ScoreBiasConfig):
    """Fields of `relative_bias`: n, and the distance from which all keys share the last bucket."""

    later_fields = ("shared",)

    buckets: Width = 32
    max_distance: Width = 128
    shared: bool = False  # reads the table of the last earlier layer that has its own

    @property
    def shares_table(self) -> bool:
        """Whether `shared` is set."""
        return self.shared

    def build(self, heads: int, causal: bool) -> "RelativeBias":
        """Build the module. Raises DesignError for too few buckets, or if they reach beyond max_distance."""
        if self.max_distance > MAX_DISTANCE:
            raise DesignError("max_distance", f"{self.max_distance} is beyond {MAX_DISTANCE}; lower it")
        per_direction = self.buckets if causal else self.buckets // 2
        if per_direction < 2 or (self.buckets % 2 and not causal):
            least = "at least 2" if causal else "an even number of at least 4, half of it for later keys"
            raise DesignError("buckets", f"{self.buckets} are too few or cannot be halved; give {least}")
        if self.max_distance <= per_direction // 2:
            reason = f"{self.max_distance} is within the {per_direction // 2} buckets of single distances"
            raise DesignError("max_distance", f"{reason}; raise it, or give fewer buckets")
        return RelativeBias(heads, self, causal)


@cache
def buckets_by_offset(buckets: int, max_distance: int, causal: bool) -> tuple[int, ...]:
    """The bucket of each offset i − j from −max_distance to max_distance. `buckets`: of one direction.

    Computed in float32, as T5 was trained: some distances are at the border of two buckets.
    """
    exact = buckets // 2
    distance = torch.arange(max_distance + 1, device="cpu")
    steps = torch.log(distance.float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    large = (exact + steps.clamp(min=0).long()).clamp(max=buckets - 1)
    past = torch.where(distance < exact, distance, large).tolist()
    future = [0] * max_distance if causal else [buckets + bucket for bucket in past[:0:-1]]
    return (*future, *past)


class RelativeBias(SelfInitialized, ScoreBias):
    """The module: weight [heads, buckets]; None with `shared`."""

    matrix_parameters = ()

    def __init__(self, heads: int, config: RelativeBiasConfig, causal: bool) -> None:
        super().__init__()
        self.heads, self.buckets, self.max_distance, self.causal = heads, config.buckets, config.max_distance, causal
        self.key = (config.buckets if causal else config.buckets // 2, config.max_distance, causal)
        self.by_offset = buckets_by_offset(*self.key)  # here, because a traced graph could not compute them
        self._constants = Constants()
        self.weight = None if config.shared else nn.Parameter(torch.empty(heads, config.buckets))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal biases."""
        if self.weight is not None:
            fill_normal(self.weight, std, draws("weight"))

    @property
    def table_fields(self) -> Mapping[str, Any]:
        """The shape of the table and its buckets."""
        of_position = {"position.buckets": self.buckets, "position.max_distance": self.max_distance}
        return {"heads": self.heads, "causal": self.causal} | of_position

    def forward(self, layout: Layout, dtype: torch.dtype) -> ScoreBiasFunction:
        """b_h[bucket(i − j)], in the dtype of the weight, or float32 if that is wider. Not called with `shared`."""
        assert self.weight is not None
        buckets = self._constants.tensor(self.by_offset, torch.int64, layout.positions.device)
        limit = self.max_distance
        by_offset = at_least_float32(self.weight)[:, buckets]

        def bias(offsets: Tensor, /) -> Tensor:
            return by_offset[:, offsets.clamp(-limit, limit) + limit]

        return bias
