"""Resize designs to the baseline's size: find the width at which a design has its parameters or FLOPs per token.

(`equalize_states` makes states equal, at unchanged widths.)

`width` changes, and the `hidden` of every feed-forward in proportion. All other numbers in the config stay: heads, an
explicit head_dim, ranks, windows, depth. A head_dim that is not set follows the width, so the width must be divisible
by the heads, with an even rotary_dim. Sizes stay multiples of the largest power of two that divides them and is at most
1/64 of them. Where the nearest width is more than 1 % away, because few widths are possible, `hidden` alone is changed
by up to an eighth.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from heddle.errors import ConfigError
from heddle.lab.compare.plan import DesignEntry
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.size import flops_per_token, parameter_counts, state_bytes
from heddle.parts.build import BuildContext
from heddle.parts.mixers import MixerConfig
from heddle.parts.mixers.differential_attention import DifferentialAttentionConfig
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.states import StateSpec
from heddle.training.width_transfer import with_hidden

# Scale the states of designs to the baseline's: each mixer changes the field that sets the size of its state.
#
# Every mixer of a design is scaled by the same factor, found by bisection, until the state at a context length has as
# many bytes as the baseline's: a window, key and value heads or their widths, a latent's rank, the keys of a recurrence
# (`scale_state`). Widths and feed-forwards stay.


STATE = "state"  # the kind of size; `state@4096` names the context length
MAX_FACTOR = 16.0  # times the design's own state, or its inverse: beyond it, little is left of the design
MAX_CONTEXT = 10**9  # tokens
STEPS = 24  # of the bisection
LONG = 2**20  # tokens, more than a window has
CLOSE_STATE_TOLERANCE = 0.002  # of the target: no further steps
MAX_STATE_DEVIATION = 0.05  # of the target: beyond it states do not count as equal


def parse_state_context(kind: str, default: int) -> int | None:
    """The context length that `state` or `state@4096` names; None for another kind of size."""
    name, at, text = kind.partition("@")
    if name != STATE:
        return None
    if not at:
        return default
    if not (text.isdecimal() and len(text) <= 10 and 0 < int(text) <= MAX_CONTEXT):
        raise ConfigError(f"equal {kind}: expected state@N with N context tokens, such as state@4096")
    return int(text)


def equalize_states(
    entries: Sequence[DesignEntry], baseline: str, context: int, dtype: torch.dtype = torch.float32
) -> tuple[DesignEntry, ...]:
    """Scale the states of all entries but the baseline to as many bytes as the baseline's, for `context` tokens.

    dtype: of keys and values. Raises ConfigError where no size of its fields comes within 5 %.
    """

    def bytes_of(config: ModelConfig) -> int:
        return state_bytes(config if config.vocab_size is not None else config.replace(vocab_size=2), context, 1, dtype)

    target = next(bytes_of(entry.config) for entry in entries if entry.name == baseline)
    scaled_entries = []
    for entry in entries:
        if entry.name == baseline:
            scaled_entries.append(entry)
            continue
        config, size = _scale_to(entry.config, bytes_of, target)
        changes = _changes(entry.config, config)
        if abs(size / target - 1) > MAX_STATE_DEVIATION:
            reached = ", ".join(changes) or "none of its mixers' fields gets closer"
            raise ConfigError(
                f"equal state: {entry.name} gets no closer to {baseline} at {context} tokens than "
                f"{size / target - 1:+.0%} ({reached}); choose another baseline or context length, or leave it out"
            )
        for other in scaled_entries:
            if other.config == config:
                reason = f"{other.name} and {entry.name} become the same design ({', '.join(changes) or 'unchanged'})"
                raise ConfigError(f"equal state: {reason}; leave one of them out")
        scaled_entries.append(replace(entry, config=config, scaled_fields=tuple(changes)))
    return tuple(scaled_entries)


def _scale_to(config: ModelConfig, bytes_of: Callable[[ModelConfig], int], target: int) -> tuple[ModelConfig, int]:
    """The buildable design with the state nearest to the target, and the bytes of its state."""
    best, best_size = config, bytes_of(config)
    low, high = 1 / MAX_FACTOR, MAX_FACTOR
    factor = target / best_size
    for _ in range(STEPS):
        if abs(best_size - target) <= CLOSE_STATE_TOLERANCE * target:
            break
        factor = min(max(factor, low), high)
        try:
            candidate = with_state_factor(config, factor)
            size = bytes_of(candidate)
        except ConfigError:  # too small or too large to build
            size = target + 1 if factor > 1 else target - 1
        else:
            if abs(size - target) < abs(best_size - target):
                best, best_size = candidate, size
        low, high = (factor, high) if size < target else (low, factor)
        factor = (low * high) ** 0.5
    return best, best_size


def with_state_factor(config: ModelConfig, factor: float) -> ModelConfig:
    """The design with about `factor` times the state in every mixer. Raises ConfigError if it cannot be built."""
    return with_mixers(config, lambda mixer: scale_state(mixer, factor, config.width))


def with_mixers(config: ModelConfig, change: Callable[[MixerConfig], MixerConfig]) -> ModelConfig:
    """The design with every mixer changed."""

    def changed(layer: LayerConfig) -> LayerConfig:
        return layer if layer.mixer is None else layer.replace(mixer=change(layer.mixer))

    return config.replace(layers=tuple(layer.map(changed) for layer in config.layers))


def scale_state(mixer: MixerConfig, factor: float, width: int) -> MixerConfig:
    """The same config with about `factor` times the state in a model of this width; unchanged if no field sets it."""
    values = {name: getattr(mixer, name) for name in type(mixer).model_fields}
    inner = {name: value for name, value in values.items() if isinstance(value, MixerConfig)}
    if inner:
        return mixer.replace(**{name: scale_state(value, factor, width) for name, value in inner.items()})
    return mixer.replace(**_state_changes(mixer, values, factor, width))


def _state_changes(mixer: MixerConfig, values: dict[str, Any], factor: float, width: int) -> dict[str, Any]:
    """The fields that set the size of a state, scaled. values: all fields."""
    if "encoder_width" in values:  # the state holds the encoder output, which the design does not set
        return {}
    number = _scaling_choice(mixer, width)
    return {} if number is None else list(_choices(mixer, values, factor, width))[number]


@cache
def _scaling_choice(mixer: MixerConfig, width: int) -> int | None:
    """The number of the first choice that, for a factor of 2 or a half, changes a long sequence's state by a tenth."""
    values = {name: getattr(mixer, name) for name in type(mixer).model_fields}
    size = _state_size(mixer, width)
    pairs = zip(_choices(mixer, values, 2.0, width), _choices(mixer, values, 0.5, width), strict=True)
    for number, pair in enumerate(pairs):
        for changes in pair:
            try:
                changed = _state_size(mixer.replace(**changes), width)
            except ConfigError:  # it allows no such value
                continue
            if max(changed, size) > 1.1 * min(changed, size):
                return number
    return None


def _state_size(mixer: MixerConfig, width: int) -> int:
    """Bytes of the state of the mixer alone, whose keys and values are its own; 0 for a bidirectional one."""
    own = mixer.replace(**{mixer.kv_read[0]: False}) if mixer.reads_kv else mixer
    with torch.device("meta"):
        module = own.build(BuildContext(width, RMSConfig()))
        state = module.init_state(StateSpec(1, LONG, torch.float32, "meta")) if module.causal else None
    return 0 if state is None else sum(tensor.nbytes for tensor in state.tensors().values())


def _choices(mixer: MixerConfig, values: dict[str, Any], factor: float, width: int) -> Iterator[dict[str, Any]]:
    """Changes that scale the states of mixers: by the fields that mixers share, then by each number of its own."""
    if values.get("window") is not None:
        yield {"window": max(1, round(values["window"] * factor))}
    if "kv_rank" in values:  # rotated keys stay
        rotated = values["rope_dim"] or 0
        yield {"kv_rank": min(width, max(1, round((values["kv_rank"] + rotated) * factor) - rotated))}
    if "state_size" in values:
        yield {"state_size": max(1, round(values["state_size"] * factor))}
    heads, value_dim = mixer.head_shape(width)
    if "hidden" in values:  # a number for each channel
        blocks = max(1, heads)
        yield {"hidden": blocks * max(1, round((values["hidden"] or width) * factor / blocks))}
    if "kv_heads" in values:
        queries = 2 if isinstance(mixer, DifferentialAttentionConfig) else 1  # of each head
        dim = values["head_dim"] or width // (queries * heads)
        number, new_dim, new_value = scale_heads(values["kv_heads"] or heads, factor, heads, (dim, value_dim))
        changed = (new_dim, new_value) != (dim, value_dim)
        yield {"kv_heads": number} | ({"head_dim": new_dim, "value_dim": new_value} if changed else {})
    if "head_dim" in values and heads:  # a recurrence: keys of another width; values stay as wide as they were
        dim = values["head_dim"] or width // heads
        names = ("value_dim",) if values.get("full_gates") else ("value_dim", "gate_rank")
        as_before: dict[str, int] = {name: values[name] or dim for name in names if name in values}
        if values.get("rope_dim") is not None:
            as_before["rope_dim"] = min(values["rope_dim"], scale_even(dim, factor))
        yield {"head_dim": scale_even(dim, factor)} | as_before
    if "conv_kernel" in values:
        yield {"conv_kernel": 1 + max(1, round(factor * (values["conv_kernel"] - 1)))}
    resolved = mixer.resolved(BuildContext(width, RMSConfig()))
    for name in values:
        if type(value := getattr(resolved, name)) is int:
            yield {name: max(1, round(value * factor))}


def scale_heads(count: int, factor: float, heads: int, dims: tuple[int, int]) -> tuple[int, int, int]:
    """`count` key and value heads of `dims` dims with about `factor` times the elements per token.

    Returns the number, a divisor of `heads`, and both widths, which change only if no number comes within 1 %.
    """
    divisors = [number for number in range(1, heads + 1) if heads % number == 0]
    goal = count * factor
    nearest = min(divisors, key=lambda number: abs(number - goal))
    if abs(nearest - goal) <= 0.01 * goal:
        return nearest, *dims
    number = next((number for number in divisors if number >= goal), heads)
    key_dim, value_dim = (scale_even(dim, goal / number) for dim in dims)
    exact = sum(dims) * goal / number
    if abs(key_dim + value_dim - exact) > 0.01 * exact:  # an odd width, which is slower, only where it is needed
        value_dim = max(1, round(exact) - key_dim)
    return number, key_dim, value_dim


def scale_even(dims: int, factor: float) -> int:
    """`dims` times a factor, as the nearest even number above 0: pairs can be rotated."""
    return max(2, 2 * round(dims * factor / 2))


def _changes(before: ModelConfig, after: ModelConfig) -> list[str]:
    """`layers[0].mixer.kv_rank 56 → 64` for each field of an entry that differs."""
    contexts = [BuildContext(config.width, config.norm) for config in (before, after)]
    changes: dict[str, None] = {}  # an ordered set: repeated layers have one entry
    for (path, old), (_, new) in zip(before.expand(), after.expand(), strict=True):
        if old.mixer is not None and new.mixer is not None and old.mixer != new.mixer:
            mixers = zip((old.mixer, new.mixer), contexts, strict=True)
            resolved = [mixer.resolved(context).dump() for mixer, context in mixers]
            changes |= dict.fromkeys(_differences(f"{path}.mixer", (old.mixer.dump(), new.mixer.dump()), resolved))
    return list(changes)


def _differences(path: str, written: Sequence[Any], resolved: Sequence[Any]) -> Iterator[str]:
    """The fields that are written differently, with their values, defaults included."""
    if all(isinstance(value, dict) for value in written):
        for name in dict.fromkeys(name for value in written for name in value):
            inner = [[value.get(name) for value in pair] for pair in (written, resolved)]
            yield from _differences(f"{path}.{name}", *inner)
    elif written[0] != written[1] and resolved[0] != resolved[1]:
        yield f"{path} {resolved[0]} → {resolved[1]}"


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
                f"equal {kind}: {entry.name} gets no closer to {baseline} than {deviation:+.0%}, at width "
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

    def scaled(layer: LayerConfig) -> LayerConfig:
        if layer.feedforward is None:
            return layer
        return layer.replace(feedforward=with_hidden(layer.feedforward, lambda hidden: _scale(hidden, factor)))

    return config.replace(width=width, layers=tuple(layer.map(scaled) for layer in config.layers))


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
