"""Resize designs to the baseline's size: find the width at which a design has its parameters or FLOPs per token.

(`heddle.analysis.comparison.equal_state` makes states equal, at unchanged widths.)

`width` changes, and the `hidden` of every feed-forward in proportion. All other numbers in the config stay: heads, an
explicit head_dim, ranks, windows, depth. A head_dim that is not given follows the width, so only those widths are
possible at which the design can be built: divisible by the heads, with an even rotary_dim. Sizes stay multiples of
the largest power of two that divides them and is at most 1/64 of them. Where the nearest width is more than 1 % away,
because few widths are possible, `hidden` alone is changed by up to an eighth.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from heddle.analysis.comparison.equal_state import STATE, equalize_states, parse_state_context
from heddle.analysis.comparison.plan import DesignEntry
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.distinct_layers import parameter_counts
from heddle.model.size import flops_per_token

WIDTH_KINDS = ("parameters", "active-parameters", "flops")  # what the width sets
SIZE_KINDS = (*WIDTH_KINDS, STATE)
MAX_WIDTH_FACTOR = 64  # times the design's own width
CLOSE_TOLERANCE = 0.01  # of the target: from there on `hidden` keeps its proportion to the width
MAX_DEVIATION = 0.10  # of the target: beyond it sizes do not count as equal
HIDDEN_STEPS = range(-8, 9)  # of `hidden`, in 1/64
SizeFunction = Callable[[ModelConfig], float]


def equalize_sizes(
    entries: Sequence[DesignEntry],
    baseline: str,
    kind: str,
    vocab_size: int,
    context: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[DesignEntry, ...]:
    """Resize all entries but the baseline to the baseline's size of a kind, one of SIZE_KINDS.

    vocab_size: for designs that leave it open. context: the sequence length at which FLOPs are counted, and states
    unless the kind names another (`state@4096`). dtype: of keys and values.
    Raises ConfigError where no width comes within 10 %, or no state within 5 %.
    """
    length = parse_state_context(kind, context)
    if length is not None:
        return equalize_states(entries, baseline, length, dtype)
    if kind not in WIDTH_KINDS:
        raise ConfigError(f"equal {kind}: unknown size; choices: {', '.join(SIZE_KINDS)}")
    if any(path == "width" for entry in entries for path, _ in entry.varied_fields):
        raise ConfigError("equal: solves for the width, which vary sets; leave one of the two out")

    def size_of(config: ModelConfig) -> float:
        complete = config if config.vocab_size is not None else config.replace(vocab_size=vocab_size)
        return model_size(build(complete, device="meta"), kind, context)

    target = next(size_of(entry.config) for entry in entries if entry.name == baseline)
    resized_entries = []
    for entry in entries:
        resized = entry.config if entry.name == baseline else resize_to(entry.config, size_of, target)
        deviation = size_of(resized) / target - 1
        if abs(deviation) > MAX_DEVIATION:
            raise ConfigError(
                f"equal {kind}: {entry.name} comes no nearer to {baseline} than {deviation:+.0%}, at width "
                f"{resized.width}; compare it without equal, or give heads that divide more widths, or a head_dim"
            )
        resized_entries.append(replace(entry, config=resized, original_width=entry.config.width))
    return tuple(resized_entries)


def model_size(model: Decoder, kind: str, context: int) -> float:
    """The size of a model on the meta device: all parameters, those active per token, or forward FLOPs per token."""
    if kind == "flops":
        return flops_per_token(model, context)
    return float(parameter_counts(model)[kind == "active-parameters"])


def resize_to(config: ModelConfig, size_of: SizeFunction, target: float) -> ModelConfig:
    """The design resized so that `size_of` it is nearest to the target."""
    width = nearest_width(config, size_of, target)
    resized = with_width(config, width)
    if abs(size_of(resized) - target) <= CLOSE_TOLERANCE * target:
        return resized

    @cache
    def excess(step: int) -> float:
        return size_of(with_width(config, width, 1 + step / 64)) - target

    index = bisect_left(HIDDEN_STEPS, 0.0, key=excess)
    best = min(HIDDEN_STEPS[max(0, index - 1) : index + 1], key=lambda step: abs(excess(step)))
    return with_width(config, width, 1 + best / 64)


def nearest_width(config: ModelConfig, size_of: SizeFunction, target: float) -> int:
    """The possible width at which `size_of` the design is nearest to the target; of two equally near, the smaller.

    `size_of` must grow with the width. Widths are multiples of the design's rounding step.
    """
    step = rounding_step(config.width)

    def first_possible(start: int, direction: int, end: int) -> int | None:
        """The first multiple of the step from `start` to `end` at which the design can be built."""
        multiples = range(start, end + direction, direction)
        return next((multiple for multiple in multiples if _can_be_built(config, multiple * step)), None)

    @cache
    def size(multiple: int) -> float:
        return size_of(with_width(config, multiple * step))

    # low: too small, or 0; high: large enough, or the largest possible
    low, high = 0, config.width // step
    largest = high * MAX_WIDTH_FACTOR
    while size(high) < target and high < largest:
        low, high = high, first_possible(2 * high, 1, largest) or first_possible(largest, -1, high) or high
        if low == high:
            break
    while high - low > 1:
        middle = first_possible((low + high) // 2, 1, high - 1)
        if middle is None:
            middle = first_possible((low + high) // 2 - 1, -1, low + 1)
        if middle is None:
            break
        if size(middle) < target:
            low = middle
        else:
            high = middle
    best = min([multiple for multiple in (low, high) if multiple], key=lambda multiple: abs(size(multiple) - target))
    return best * step


def with_width(config: ModelConfig, width: int, hidden_factor: float = 1.0) -> ModelConfig:
    """The design at another width, with `hidden` of its feed-forwards in proportion, times `hidden_factor`."""
    factor = hidden_factor * width / config.width
    layers = tuple(_with_hidden_scaled(layer, factor) for layer in config.layers)
    return config.replace(width=width, layers=layers)


def _with_hidden_scaled(layer: LayerConfig, factor: float) -> LayerConfig:
    if layer.layers is not None:
        return layer.replace(layers=tuple(_with_hidden_scaled(inner, factor) for inner in layer.layers))
    if layer.feedforward is None:
        return layer
    return layer.replace(feedforward=layer.feedforward.with_hidden(lambda hidden: _scale(hidden, factor)))


def _scale(value: int, factor: float) -> int:
    step = rounding_step(value)
    return max(1, round(value * factor / step)) * step


def rounding_step(value: int) -> int:
    """The largest power of two that divides a number and is at most 1/64 of it, or 1."""
    step = 1
    while value % (2 * step) == 0 and 2 * step * 64 <= value:
        step *= 2
    return step


def _can_be_built(config: ModelConfig, width: int) -> bool:
    try:
        build(with_width(config, width).replace(vocab_size=1), device="meta")
    except ConfigError:
        return False
    return True
