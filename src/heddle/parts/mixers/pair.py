"""Two mixers side by side in one layer: `y = first(x) + second(x)`, as in hybrid-head models (Hymba, Dong et al. 2024).

A plain sum: any factor or gate a channel could be moved into the projections `out`, and a second mixer whose `out` is
zero leaves the first exactly as it was, so that a trained model can be given one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from heddle.config import DesignError, build_under
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.context.mixer_state import MixerState
from heddle.parts.context.position_table import PositionTable
from heddle.parts.mixers import Mixer, MixerConfig, Place


class PairConfig(MixerConfig):
    """Any two mixers, a pair among them: both causal, or both bidirectional."""

    first: MixerConfig
    second: MixerConfig

    def resolved(self, place: Place) -> Self:
        """Both written out."""
        return self.replace(first=self.first.resolved(place), second=self.second.resolved(place))

    def build(self, place: Place) -> "Pair":
        """Make the module. Raises DesignError where one refuses the place, or they do not fit each other."""
        first = build_under("first", self.first.build, place)
        second = build_under("second", self.second.build, place)
        if first.causal != second.causal:
            raise DesignError("second", "one mixer of a pair hides later tokens, the other does not; make both alike")
        if None not in (first.memory_width, second.memory_width) and first.memory_width != second.memory_width:
            widths = f"{second.memory_width} wide, first one {first.memory_width} wide"
            raise DesignError("second", f"reads a memory {widths}; give both the same memory_width")
        return Pair(first, second)


@dataclass(frozen=True, eq=False)
class PairState(MixerState):
    """The states of both."""

    first: MixerState
    second: MixerState

    def goes_back(self, tokens: int, table: PositionTable) -> bool:
        """Where both do."""
        return self.first.goes_back(tokens, table) and self.second.goes_back(tokens, table)

    def rewound(self, table: PositionTable, gone: Callable[[int], Tensor]) -> "PairState":
        """Both without the tokens taken back."""
        return replace(self, first=self.first.rewound(table, gone), second=self.second.rewound(table, gone))


class Pair(Mixer):
    """The module; it reaches as far as the mixer that reaches farther."""

    def __init__(self, first: Mixer, second: Mixer) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.reach, self.causal = _farther(first.reach, second.reach), first.causal
        self.memory_width = first.memory_width or second.memory_width

    @property
    def looks_back(self) -> int | None:
        """As many positions as the one that needs more."""
        return _farther(self.first.looks_back, self.second.looks_back)

    def init_state(
        self,
        batch: int,
        capacity: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Memory | None = None,
        rewind: int = 0,
    ) -> PairState:
        """An empty state of each."""
        first, second = (
            mixer.init_state(batch, capacity, dtype=dtype, device=device, memory=memory, rewind=rewind)
            for mixer in (self.first, self.second)
        )
        return PairState(first, second)

    def forward(self, x: Tensor, layout: Layout, state: PairState | None = None) -> tuple[Tensor, PairState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        y, first = self.first(x, layout, None if state is None else state.first)
        z, second = self.second(x, layout, None if state is None else state.second)
        return y + z, None if state is None else PairState(first, second)


def _farther(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)
