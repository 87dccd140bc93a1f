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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from heddle.analysis.comparison.equal_size import with_width
from heddle.config import DesignError
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import build
from heddle.model.size import flops_per_token, parameter_counts
from heddle.model.width_scaling import scale_to_width
from heddle.parts.mixers import MixerConfig

MAX_WIDTH_FACTOR = 64  # times the design's own width
MAX_SIZE_RATIO = 1.6  # of a size to the one that was asked for, or the inverse
NEAREST_WIDTHS = 4  # widths that are tried to each side: sizes do not grow evenly where numbers of heads change
HEAD_WIDTH_FIELDS = ("head_dim", "value_dim", "nope_dim", "rope_dim")
KEY_HEAD_FIELDS = ("kv_heads", "key_heads", "groups")
RANK_FIELDS = ("kv_rank", "query_rank")


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
    return layer if layer.mixer is None else layer.replace(mixer=_scale_mixer(layer.mixer, width, new_width))


def _scale_mixer(mixer: MixerConfig, width: int, new_width: int) -> MixerConfig:
    """The mixer with the number of heads that leaves their widths nearest to what they were."""
    values: dict[str, Any] = {name: getattr(mixer, name) for name in type(mixer).model_fields}
    changes: dict[str, Any] = {
        name: _scale_mixer(value, width, new_width) for name, value in values.items() if isinstance(value, MixerConfig)
    }
    if isinstance(heads := values.get("heads"), int):
        ratio = new_width / width
        new_heads = _nearest_heads(heads, _group_size(values, heads), ratio, new_width)
        dims = ratio * heads / new_heads  # of the widths of heads
        changes |= _scaled(values, HEAD_WIDTH_FIELDS, lambda dim: max(2, 2 * round(dim * dims / 2)))
        changes |= _scaled(values, RANK_FIELDS, lambda rank: max(1, round(rank * ratio)))
        changes |= _scaled(values, KEY_HEAD_FIELDS, lambda count: max(1, count * new_heads // heads))
        changes["heads"] = new_heads
    return mixer.replace(**changes)


def _scaled(values: dict[str, Any], names: tuple[str, ...], scale: Callable[[int], int]) -> dict[str, int]:
    return {name: scale(values[name]) for name in names if isinstance(values.get(name), int)}


def _group_size(values: dict[str, Any], heads: int) -> int:
    """Heads in each of several groups that share keys; 1 where all heads share one group, which any number may."""
    groups = [values[name] for name in KEY_HEAD_FIELDS if isinstance(values.get(name), int) and values[name] > 1]
    return math.lcm(*(heads // count for count in groups)) if groups else 1


def _nearest_heads(heads: int, group_size: int, ratio: float, width: int) -> int:
    """The number nearest, as a ratio, to heads · ratio that has whole groups and divides the width into even parts."""
    counts = range(group_size, width // 2 + 1, group_size)
    choices = [count for count in counts if width % (2 * count) == 0 and count >= min(2, heads)]
    return min(choices or [heads], key=lambda count: abs(math.log(count / (heads * ratio))))


def _width_step(config: ModelConfig) -> int:
    """Widths are multiples of a quarter of the widest head."""
    return max(2, config.width // _smallest_heads(config) // 4)


def _smallest_heads(config: ModelConfig) -> int:
    """The smallest number of heads of any mixer that states one; 1 where none does."""
    mixers = [layer.mixer for _, layer in config.expand() if layer.mixer is not None]
    return min((count for mixer in mixers if (count := mixer.head_shape(config.width)[0])), default=1)
