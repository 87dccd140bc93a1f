"""Scale the states of designs to the baseline's: each mixer changes the field that sets the size of its state.

Every mixer of a design is scaled by the same factor, found by bisection, until the state at a context length has as
many bytes as the baseline's. Which field that is, each mixer says itself (`with_state_scaled`): key and value heads
or their widths, a latent's rank, a window, the keys of a recurrence. Widths and feed-forwards stay.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from heddle.analysis.comparison.plan import DesignEntry
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.size import state_bytes
from heddle.parts.context.build import BuildContext

STATE = "state"  # the kind of size; `state@4096` names the context length
MAX_FACTOR = 16.0  # times the design's own state, or its inverse: beyond it, little is left of the design
MAX_CONTEXT = 10**9  # tokens
STEPS = 24  # of the bisection
CLOSE_TOLERANCE = 0.002  # of the target: no further steps
MAX_DEVIATION = 0.05  # of the target: beyond it states do not count as equal


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
    """Scale the states of all entries but the baseline to the bytes of the baseline's, for `context` tokens.

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
        if abs(size / target - 1) > MAX_DEVIATION:
            reached = ", ".join(changes) or "no field of its mixers reaches it"
            raise ConfigError(
                f"equal state: {entry.name} comes no nearer to {baseline} at {context} tokens than "
                f"{size / target - 1:+.0%} ({reached}); choose another baseline or context length, or leave it out"
            )
        for other in scaled_entries:
            if other.config == config:
                reason = f"{other.name} and {entry.name} become one design ({', '.join(changes) or 'unchanged'})"
                raise ConfigError(f"equal state: {reason}; leave one of them out")
        scaled_entries.append(replace(entry, config=config, scaled_fields=tuple(changes)))
    return tuple(scaled_entries)


def _scale_to(config: ModelConfig, bytes_of: Callable[[ModelConfig], int], target: int) -> tuple[ModelConfig, int]:
    """The design whose state is nearest to the target among those that can be built, and the bytes of its state."""
    best, best_size = config, bytes_of(config)
    low, high = 1 / MAX_FACTOR, MAX_FACTOR
    factor = target / best_size
    for _ in range(STEPS):
        if abs(best_size - target) <= CLOSE_TOLERANCE * target:
            break
        factor = min(max(factor, low), high)
        try:
            candidate = with_state_factor(config, factor)
            size = bytes_of(candidate)
        except ConfigError:  # too small or too large to be built
            size = target + 1 if factor > 1 else target - 1
        else:
            if abs(size - target) < abs(best_size - target):
                best, best_size = candidate, size
        low, high = (factor, high) if size < target else (low, factor)
        factor = (low * high) ** 0.5
    return best, best_size


def with_state_factor(config: ModelConfig, factor: float) -> ModelConfig:
    """The design with about `factor` times the state in every mixer. Raises ConfigError if it cannot be built."""
    layers = tuple(_with_mixers_scaled(layer, factor, config.width) for layer in config.layers)
    return config.replace(layers=layers)


def _with_mixers_scaled(layer: LayerConfig, factor: float, width: int) -> LayerConfig:
    if layer.layers is not None:
        return layer.replace(layers=tuple(_with_mixers_scaled(inner, factor, width) for inner in layer.layers))
    return layer if layer.mixer is None else layer.replace(mixer=layer.mixer.with_state_scaled(factor, width))


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
