"""Designs made as large as the baseline: the width at which a design has its parameters, or its FLOPs a token.

`width` changes, and every feed-forward's `hidden` in proportion; all other numbers that a design writes down stay:
heads, head_dim where it is given, ranks, windows, depth. A head's width that is not given follows the width, so only
widths remain that heads divide and rotations can turn: those at which the design can be built. Sizes stay as round as
they were: in steps of the largest power of two that divides them and is at most 1/64 of them. Where the nearest width
is over 1 % away, because heads divide few widths, `hidden` alone gives or takes up to an eighth more.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from heddle.analysis.comparison.plan import Entry
from heddle.config import decode
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.size import flops_per_token, parameter_counts

KINDS = ("parameters", "active-parameters", "flops")
WIDEST = 64  # times the design's own width
CLOSE, APART = 0.01, 0.10  # of the baseline's size: near enough for proportions to stay, and the most that is equal
PARTS = range(-8, 9)  # of hidden, in 1/64
Measure = Callable[[ModelConfig], float]


def equalise(entries: Sequence[Entry], baseline: str, kind: str, vocab_size: int, context: int) -> tuple[Entry, ...]:
    """The entries, all but the baseline resized to its size of a kind: of a token at the training context for flops.

    vocab_size: of designs that name none. Raises ConfigError where no width comes within 10 %.
    """
    if kind not in KINDS:
        raise ConfigError(f"--equal {kind}: unknown size; choices: {', '.join(KINDS)}")
    if any(path == "width" for entry in entries for path, _ in entry.varied):
        raise ConfigError("--equal: solves for the width, which --vary sets; leave one of the two out")

    def measure(config: ModelConfig) -> float:
        full = config if config.vocab_size is not None else config.replace(vocab_size=vocab_size)
        return size_of(build(full, device="meta"), kind, context)

    target = next(measure(entry.config) for entry in entries if entry.name == baseline)
    made = []
    for entry in entries:
        resized = entry.config if entry.name == baseline else nearest(entry.config, measure, target)
        apart = measure(resized) / target - 1
        if abs(apart) > APART:
            raise ConfigError(
                f"--equal {kind}: {entry.name} comes no nearer to {baseline} than {apart:+.0%}, at width "
                f"{resized.width}; compare it without --equal, or give heads that divide more widths, or a head_dim"
            )
        made.append(replace(entry, config=resized, width=entry.config.width))
    return tuple(made)


def size_of(model: Decoder, kind: str, context: int) -> float:
    """A meta model's parameters, those a token meets, or its forward FLOPs a token at a context."""
    if kind == "flops":
        return flops_per_token(model, context)
    return float(parameter_counts(model)[kind == "active-parameters"])


def nearest(config: ModelConfig, measure: Measure, target: float) -> ModelConfig:
    """The design resized so that its measure is nearest to the target."""
    width = nearest_width(config, measure, target)
    made = with_width(config, width)
    if abs(measure(made) - target) <= CLOSE * target:
        return made

    @cache
    def apart(part: int) -> float:
        return measure(with_width(config, width, 1 + part / 64)) - target

    place = bisect_left(PARTS, 0.0, key=apart)
    part = min(PARTS[max(0, place - 1) : place + 1], key=lambda one: abs(apart(one)))
    return with_width(config, width, 1 + part / 64)


def nearest_width(config: ModelConfig, measure: Measure, target: float) -> int:
    """The width that can be built and whose measure, which grows with it, is nearest to the target; of two, the less.

    The design's own width is one of them.
    """
    step = grain(config.width)

    def found(place: int, towards: int, end: int) -> int | None:
        """The first place from this one on, in steps of 1 or −1 to the end, at which the design can be built."""
        places = range(place, end + towards, towards)
        return next((one for one in places if _can_be_built(config, one * step)), None)

    @cache
    def size(place: int) -> float:
        return measure(with_width(config, place * step))

    # low: too small, or nothing; high: large enough, or as large as it gets
    low, high = 0, config.width // step
    last = high * WIDEST
    while size(high) < target and high < last:
        low, high = high, found(2 * high, 1, last) or found(last, -1, high) or high
        if low == high:
            break
    while high - low > 1:
        middle = found((low + high) // 2, 1, high - 1)
        if middle is None:
            middle = found((low + high) // 2 - 1, -1, low + 1)
        if middle is None:
            break
        if size(middle) < target:
            low = middle
        else:
            high = middle
    best = min([place for place in (low, high) if place], key=lambda place: abs(size(place) - target))
    return best * step


def with_width(config: ModelConfig, width: int, more: float = 1.0) -> ModelConfig:
    """The design at another width, its feed-forwards' `hidden` in proportion, times `more`."""
    share = more * width / config.width
    data = config.dump()
    data["layers"] = [_resized(layer, share) for layer in data["layers"]]
    return decode(ModelConfig, data | {"width": width})


def _resized(layer: dict[str, Any], share: float) -> dict[str, Any]:
    made = dict(layer)
    if layer.get("layers"):
        made["layers"] = [_resized(inner, share) for inner in layer["layers"]]
    feedforward = layer.get("feedforward")
    if feedforward:
        # hidden of all, and what else a mixture of experts calls so: shared_hidden
        sizes = {name: value for name, value in feedforward.items() if name.rpartition("_")[2] == "hidden"}
        made["feedforward"] = feedforward | {name: _scaled(value, share) for name, value in sizes.items()}
    return made


def _scaled(value: int, share: float) -> int:
    step = grain(value)
    return max(1, round(value * share / step)) * step


def grain(value: int) -> int:
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
