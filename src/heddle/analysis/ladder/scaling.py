"""A design at another size: its width is chosen, and everything that grows with it follows.

Depth, head widths, experts, states, windows and positions stay; heads, hidden channels and the ranks of latents are in
proportion to the width (`heddle.model.width_scaling`). Where a number of heads would not be whole, or 1 for several,
the nearest number is taken that divides the width, and the widths of heads change instead. Groups of heads that share
keys stay as large as they are.

Size is the number of parameters that act on one token, with the embedding (a tied one once): all of them but in a
mixture of experts. Counts without the embedding bend the curve at small sizes, where it is most of the model, and are
one reason why Kaplan et al. (2020) found another law than Hoffmann et al. (2022) (Pearce & Song 2024).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from heddle.analysis.comparison.equal_size import with_width
from heddle.config import DesignError
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import build
from heddle.model.distinct_layers import parameter_counts
from heddle.model.size import flops_per_token
from heddle.model.width_scaling import scale_to_width

MAX_WIDTH_FACTOR = 64  # times the design's own width
MAX_SIZE_RATIO = 1.6  # of a size to the one that was asked for, or the inverse
NEAREST_WIDTHS = 4  # widths that are tried to each side: sizes do not grow evenly where numbers of heads change


@dataclass(frozen=True)
class Rung:
    """A design at one size. parameters: that act on one token."""

    config: ModelConfig
    parameters: int
    sequence_length: int

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of a forward pass over a row of `sequence_length` tokens, divided by them."""
        return flops_per_token(build(self.config, device="meta"), self.sequence_length)

    @property
    def width(self) -> int:
        """The model's width."""
        return self.config.width


class DesignScale:
    """All sizes of one design. config: its vocab_size is set. Raises ConfigError for a design that is not scaled."""

    def __init__(self, name: str, config: ModelConfig, sequence_length: int) -> None:
        self.name, self.config, self.sequence_length = name, config, sequence_length
        try:
            scale_to_width(config, 2 * config.width)
        except DesignError as error:
            raise ConfigError(f"{name}: cannot be scaled to other sizes: {error}") from None
        self.width_step = _width_step(config)
        self.rung = cache(self._rung)

    def _rung(self, width: int) -> Rung | None:
        """The design at a width; None where it cannot be built."""
        try:
            config = design_at_width(self.config, width)
            model = build(config, device="meta")
        except ConfigError:
            return None
        return Rung(config, parameter_counts(model)[1], self.sequence_length)

    def nearest_rung(self, parameters: float) -> Rung:
        """The rung whose size is nearest, as a ratio. Raises ConfigError where none is near."""
        low, high = 1, MAX_WIDTH_FACTOR * self.config.width // self.width_step
        while high - low > 1:
            middle = (low + high) // 2
            rung = next(self._rungs(range(middle, high)), None)
            if rung is None or rung.parameters >= parameters:
                high = middle
            else:
                low = rung.width // self.width_step
        nearby = [
            *self._rungs(range(high, high + NEAREST_WIDTHS)),
            *self._rungs(range(high - 1, max(0, high - NEAREST_WIDTHS), -1)),
        ]
        if not nearby:
            raise ConfigError(
                f"{self.name}: can be built at no width near {high * self.width_step}; choose other sizes"
            )
        best = min(nearby, key=lambda rung: abs(math.log(rung.parameters / parameters)))
        if abs(math.log(best.parameters / parameters)) > math.log(MAX_SIZE_RATIO):
            raise ConfigError(
                f"sizes {parameters:.0f}: {self.name} comes no nearer than {best.parameters} parameters, at width "
                f"{best.width}; choose sizes that it has, or give it more heads or a smaller vocabulary"
            )
        return best

    def _rungs(self, multiples: range) -> Iterator[Rung]:
        for multiple in multiples:
            if (rung := self.rung(multiple * self.width_step)) is not None:
                yield rung


def design_at_width(config: ModelConfig, width: int) -> ModelConfig:
    """The design at another width, by `scale_to_width` where that leaves whole numbers of heads, else nearest to it.

    Raises ConfigError where it cannot be built.
    """
    if width == config.width:
        return config
    try:
        scaled = scale_to_width(config, width)
        if _smallest_heads(scaled) < min(2, _smallest_heads(config)):
            raise DesignError("heads", "1 for several")
        build(scaled, device="meta")
    except DesignError:
        resized = with_width(config, width)
        layers = tuple(_scale_layer(layer, config.width, width) for layer in resized.layers)
        return resized.replace(layers=layers)
    return scaled


def _scale_layer(layer: LayerConfig, width: int, new_width: int) -> LayerConfig:
    if layer.layers is not None:
        return layer.replace(layers=tuple(_scale_layer(inner, width, new_width) for inner in layer.layers))
    return layer if layer.mixer is None else layer.replace(mixer=layer.mixer.near_width(width, new_width))


def _width_step(config: ModelConfig) -> int:
    """Widths are multiples of a quarter of the widest head."""
    return max(2, config.width // _smallest_heads(config) // 4)


def _smallest_heads(config: ModelConfig) -> int:
    """The smallest number of heads of any mixer that states one; 1 where none does."""
    mixers = [layer.mixer for _, layer in config.expand() if layer.mixer is not None]
    return min((count for mixer in mixers if (count := mixer.head_shape(config.width)[0])), default=1)
