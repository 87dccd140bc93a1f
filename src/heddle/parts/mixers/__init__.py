"""The slot of token mixers, and their one law: cutting a sequence anywhere and carrying the state gives the
uncut answer. Training passes no state, prefill a fresh one, decode passes it back token by token.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from heddle.config import DesignError, Part
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.norms import NormConfig


class Place(NamedTuple):
    """What the model tells a mixer when it is built: the width of the stream and the model's default norm."""

    width: int
    norm: NormConfig

    def head_dim(self, heads: int, given: int | None) -> int:
        """A head's width: as given, else width / heads. Raises DesignError if that is no whole number."""
        if given is None and self.width % heads:
            raise DesignError("heads", f"{heads} does not divide width = {self.width}; give head_dim, or other heads")
        return given or self.width // heads


class MixerConfig(Part, ABC):
    """Config of a mixer."""

    slot: ClassVar[str] = "mixers"

    def resolved(self, place: Place) -> Self:
        """The same mixer with every default that depends on the place, or on other fields, written out."""
        return self

    @abstractmethod
    def build(self, place: Place) -> "Mixer":
        """Make the module. Raises DesignError where the config and the place do not fit."""


class Mixer(nn.Module, ABC):
    """Maps x [B, T, width] to the same shape, each token from those it may see.

    reach: how many tokens back (itself included; to each side when bidirectional) a token sees; None is all.
    causal: whether later tokens are hidden; a mixer that is not causal refuses a state.
    memory_width: the width of the memory that it reads beside x; None: it reads none.
    """

    reach: int | None
    causal: bool
    memory_width: int | None = None

    @property
    def looks_back(self) -> int | None:
        """How many earlier positions its state needs of the model's table: all (None), some, or none (0)."""
        return self.reach

    @abstractmethod
    def init_state(
        self,
        batch: int,
        capacity: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Memory | None = None,
        rewind: int = 0,
    ) -> Any:
        """An empty state for `batch` rows of at most `capacity` tokens (None: grows), a `MixerState`.

        rewind: how many tokens more than it needs are kept, so that as many can be taken back; a recurrence
        keeps none. memory: for a mixer that reads one.
        """

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout, state: Any = None) -> tuple[Tensor, Any]:
        """x [B, T, width] -> ([B, T, width], new state, or None without a state). The state passed in is consumed."""


def widen(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads · d] -> [B, heads, T, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def narrow(x: Tensor) -> Tensor:
    """[B, heads, T, d] -> [B, T, heads · d]."""
    return torch.flatten(x.transpose(1, 2), 2)
