"""Two mixers side by side in one layer: `y = first(x) + second(x)`, as in hybrid-head models (Hymba, Dong et al. 2024).

With multipliers it is `o₁ · first(i₁ · x) + o₂ · second(i₂ · x)`, with constant numbers (Falcon-H1, 2025). A second
mixer whose `out` is zero leaves the first exactly as it was, so a second mixer can be added to a trained model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import model_validator
from torch import Tensor

from heddle.config import DesignError, Part, PositiveFloat, build_under, refuse
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer, MixerConfig
from heddle.parts.position_table import PositionTable
from heddle.parts.states import MixerState, StateSpec


class PairConfig(MixerConfig):
    """Any two mixers, also a nested pair. Both must be causal, or both bidirectional."""

    first: MixerConfig
    second: MixerConfig
    input_multipliers: tuple[PositiveFloat, ...] | None = None  # of the inputs of first and second
    output_multipliers: tuple[PositiveFloat, ...] | None = None  # of their outputs

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("input_multipliers", "output_multipliers"):
            numbers = getattr(self, name)
            if numbers is not None and len(numbers) != 2:
                refuse(name, f"{list(numbers)} should be two numbers; give one each for first and second")
        return self

    def resolved(self, context: BuildContext) -> Self:
        """The defaults of both written out."""
        return self.replace(first=self.first.resolved(context), second=self.second.resolved(context))

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of both."""
        return self.first.windows + self.second.windows

    def with_window(self, window: int) -> Self:
        """The same config with this window in both mixers, where they can have one."""
        return self.replace(first=self.first.with_window(window), second=self.second.with_window(window))

    @property
    def reads_tokens(self) -> bool:
        """Whether one of the two does."""
        return self.first.reads_tokens or self.second.reads_tokens

    @property
    def template(self) -> MixerConfig:
        """The first mixer."""
        return self.first.template

    def head_shape(self, width: int) -> tuple[int, int]:
        """The head shape of the first mixer."""
        return self.first.head_shape(width)

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """The previous mixer twice."""
        return {"first": previous.dump(), "second": previous.dump()}

    def build(self, context: BuildContext) -> "Pair":
        """Build the module. Raises DesignError if a mixer does not fit the context or the other mixer."""
        first = build_under("first", self.first.build, context)
        second = build_under("second", self.second.build, context)
        for name, mixer in (("first", self.first), ("second", self.second)):
            table = mixer.value_table
            of_layers = {
                mixer.kv_read[0]: mixer.reads_kv,
                "value_residual": mixer.adds_first_values,
                "value_embedding.shared": table is not None and table.shared,
                "value_embedding.table": table is not None and table.table is not None,
                "position.shared": bool(mixer.shares_bias),
            }
            for field, is_set in of_layers.items():
                if is_set:
                    raise DesignError(f"{name}.{field}", "is for a layer, not for one mixer of a pair; leave it out")
            if mixer.short_convolution is not None and "input" in mixer.short_convolution.of:
                reason = "input is shared by both mixers of a pair; give it in the pair's own short_convolution"
                raise DesignError(f"{name}.short_convolution.of", reason)
        if first.causal != second.causal:
            raise DesignError("second", "one mixer of a pair is causal, the other is not; make both causal, or neither")
        if None not in (first.encoder_width, second.encoder_width) and first.encoder_width != second.encoder_width:
            widths = f"{second.encoder_width} wide, the first mixer one {first.encoder_width} wide"
            raise DesignError("second", f"reads an encoder output {widths}; give both the same encoder_width")
        return Pair(first, second, self)


@dataclass(frozen=True, eq=False)
class PairState(MixerState):
    """The states of both."""

    first: MixerState
    second: MixerState

    def can_roll_back(self, tokens: int, table: PositionTable) -> bool:
        """Whether both states can."""
        return self.first.can_roll_back(tokens, table) and self.second.can_roll_back(tokens, table)

    def rolled_back(self, table: PositionTable, freed: Callable[[int], Tensor]) -> "PairState":
        """Both states without the removed tokens."""
        return replace(self, first=self.first.rolled_back(table, freed), second=self.second.rolled_back(table, freed))


class Pair(Mixer):
    """The module. Its window is the larger of the two."""

    def __init__(self, first: Mixer, second: Mixer, config: PairConfig) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.input_multipliers, self.output_multipliers = config.input_multipliers, config.output_multipliers
        self.window, self.causal = _larger(first.window, second.window), first.causal
        reaches = (None if each.window is None else each.window + each.beyond_window for each in (first, second))
        reach = _larger(*reaches)
        self.beyond_window = 0 if reach is None or self.window is None else reach - self.window
        self.encoder_width = first.encoder_width or second.encoder_width
        self.state_note = " and ".join(filter(None, (first.state_note, second.state_note)))
        self.uses_layer_index = first.uses_layer_index or second.uses_layer_index
        self.absolute_positions = first.absolute_positions or second.absolute_positions
        if first.input_projections is not None and second.input_projections is not None:
            inner = (("first", first.input_projections), ("second", second.input_projections))
            self.input_projections = [f"{path}.{name}" for path, names in inner for name in names]

    @property
    def lookback(self) -> int | None:
        """The larger lookback of the two."""
        return _larger(self.first.lookback, self.second.lookback)

    def init_state(self, spec: StateSpec) -> PairState:
        """An empty state for each mixer."""
        return PairState(self.first.init_state(spec), self.second.init_state(spec))

    def forward(self, x: Tensor, layout: Layout, state: PairState | None = None) -> tuple[Tensor, PairState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        x_first, x_second = _multiplied(self.input_multipliers, x, x)
        y, first = self.first(x_first, layout, None if state is None else state.first)
        z, second = self.second(x_second, layout, None if state is None else state.second)
        y, z = _multiplied(self.output_multipliers, y, z)
        return y + z, None if state is None else PairState(first, second)


def _multiplied(multipliers: tuple[float, ...] | None, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors, each times its number."""
    return (first, second) if multipliers is None else (first * multipliers[0], second * multipliers[1])


def _larger(a: int | None, b: int | None) -> int | None:
    """The larger of two windows or lookbacks; None is unlimited."""
    return None if a is None or b is None else max(a, b)
