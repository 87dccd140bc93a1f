"""Options: every field of a design acts, or is refused where it would do nothing.

For each field, other values are tried until one changes something. A value that is invalid counts as refused. Where
valid values change nothing, a number in the configs around the field may hide it: a window of one token hides whatever
changes scores, and small heads have too few frequencies. So other numbers are tried, and the field must act beside
these. A choice, or a part, that makes a field do nothing must refuse it.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.laws.alternatives import (
    Option,
    Steps,
    alternatives,
    config_at,
    far_numbers,
    field_values,
    options,
    with_values,
)
from heddle.laws.harness import LawViolation, forward, model_under_test, new_state, normal_tensor, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.initialization import initialize, materialize
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.modules.router_statistics import record_router_statistics

ROWS, LENGTH = 6, 12
CACHE_LENGTH = 64
FEW = 3  # values tried beside other numbers
NEAR, LARGE = 3, 8  # how many configs around a field have their whole numbers multiplied, and by what
LEAST_CHANGE = 1e-9  # of float64 numbers: more than any rounding


def options_have_effect(config: ModelConfig) -> None:
    """Another value of any field changes sizes, outputs, gradients or first weights, or is refused."""
    behavior = Behavior(config)
    for option in options(config):
        if not has_effect(option, behavior):
            raise LawViolation(
                f"{option.path}: every other value gives the sizes, outputs, gradients and first weights of "
                f"{option.value!r}; refuse it where it does nothing"
            )


def has_effect(option: Option, behavior: "Behavior") -> bool:
    """Whether another value of the field changes what the design computes, or all are refused."""
    return changes(option, behavior) is not False or numbers_with_effect(option, behavior) is not None


def changes(option: Option, behavior: "Behavior", most: int | None = None) -> bool | None:
    """True: another value changes something. False: valid values change nothing. None: all are refused.

    most: how many values of a group are tried, the last ones, which are far from its own.
    """
    for group in alternatives(option):
        accepted: list[Behavior] = []
        for value in group if most is None else reversed(group):
            if len(accepted) == most:
                break
            try:
                changed = Behavior(with_values(behavior.config, {option.steps: value}), behavior)
                if changed.differs(behavior):
                    return True
            except ConfigError:
                continue
            # None stands for a default. The same default written out is no other value.
            if None not in (option.value, value) or changed.config.resolved() != behavior.config.resolved():
                accepted.append(changed)
        if accepted:
            return accepted[0].differs_in_detail(behavior)
    return None


def numbers_with_effect(option: Option, behavior: "Behavior") -> dict[Steps, float] | None:
    """Numbers around the field whose other values let it change something; None if there are none."""
    for change in _changes_around(option, behavior):
        other = _behavior_with(change, behavior)
        if other is not None and changes(option, other, most=FEW):
            return change
    return None


def _changes_around(option: Option, behavior: "Behavior") -> Iterator[dict[Steps, float]]:
    """Other values of numbers around a field, the likeliest to show what it does first.

    One number at a time, the smallest first, and all whole numbers doubled, because a width may depend on another. Then
    one other number at a time beside the whole numbers of the nearest configs multiplied as far as they can be: a head
    of one pair, a window of one token and a small base together hide what a scaling does. Then one number at a time
    beside the field's own config doubled as far as it can be. Last, each number of that config which cannot be doubled
    alone, together with one around it.
    """
    numbers = {
        (*steps, name): value
        for steps in option.around
        for name, value in field_values(config_at(behavior.config, steps))
        if not isinstance(value, bool)
        and isinstance(value, int | float)
        and (*steps, name) != option.steps
        and name != "vocab_size"  # hides nothing
    }
    smallest_first = sorted(numbers.items(), key=lambda item: (isinstance(item[1], float), item[1]))
    alone: list[dict[Steps, float]] = [{steps: new} for steps, old in smallest_first for new in far_numbers(old)]
    yield from alone
    whole = {steps: number for steps, number in numbers.items() if isinstance(number, int)}
    yield {steps: 2 * number for steps, number in whole.items()}
    near = option.around[:NEAR]
    large = _multiplied({steps: number for steps, number in whole.items() if steps[:-1] in near}, LARGE, behavior)
    yield from (large | change for change in alone if not large.keys() & change.keys())
    siblings = {steps: number for steps, number in numbers.items() if steps[:-1] == option.around[0]}
    own = _multiplied(siblings, 2, behavior)
    yield from (own | change for change in alone if own)
    stuck = [steps for steps in siblings if steps not in own]
    outer = [steps for steps in whole if steps[:-1] != option.around[0]]
    yield from ({steps: 2 * numbers[steps], other: 2 * numbers[other]} for steps in stuck for other in outer)


def _multiplied(numbers: dict[Steps, float], factor: int, behavior: "Behavior") -> dict[Steps, float]:
    """The numbers times a factor, but for those with which the design, multiplied so far, would be refused."""
    multiplied: dict[Steps, float] = {}
    for steps, number in numbers.items():
        if _behavior_with(multiplied | {steps: factor * number}, behavior) is not None:
            multiplied[steps] = factor * number
    return multiplied


def _behavior_with(numbers: dict[Steps, float], behavior: "Behavior") -> "Behavior | None":
    """The design with these numbers; None if it is refused."""
    try:
        other = Behavior(with_values(behavior.config, numbers), behavior)
        _ = other.logits
    except ConfigError:
        return None
    return other


class Behavior:
    """What a design computes, each part of it when it is first asked for; with the weights of `like`, if they fit.

    Raises ConfigError if the design cannot be built.
    """

    def __init__(self, config: ModelConfig, like: "Behavior | None" = None) -> None:
        self.config, self.like = config, like
        with torch.device("meta"):
            self._meta = Decoder(config)
        self.shapes = [(tuple(value.shape), value.requires_grad) for value in self._meta.parameters()]

    def differs(self, other: "Behavior") -> bool:
        """Whether sizes or outputs differ."""
        if len(self.shapes) != len(other.shapes):
            larger = self if len(self.shapes) > len(other.shapes) else other
            return not larger.has_unused_parameters
        if self.shapes != other.shapes:
            return True
        return _differ(self.logits, other.logits) or _differ(self.training, other.training)

    def differs_in_detail(self, other: "Behavior") -> bool:
        """Whether the state's size, the rounding or the first weights differ, though outputs do not."""
        return self.shapes == other.shapes and (
            self.state_bytes != other.state_bytes
            or not torch.equal(self.narrow_logits, other.narrow_logits)
            or any(_differ(value, other.first_weights.get(name)) for name, value in self.first_weights.items())
        )

    @cached_property
    def model(self) -> Decoder:
        """The model in float64, in eval mode, with random weights. Every method leaves these as they were."""
        if self.like is None:
            return model_under_test(self.config)
        materialize(self._meta, torch.float64, torch.get_default_device())
        _set_weights(self._meta, self.weights)
        return self._meta.eval()

    @cached_property
    def weights(self) -> list[Tensor]:
        """The weights, in the order of the model's parameters."""
        if self.like is None:
            return [value.detach().clone() for value in self.model.parameters()]
        if self.shapes == self.like.shapes:
            return self.like.weights
        generator = torch.Generator().manual_seed(2)
        return [normal_tensor(shape, generator) * shape[-1] ** -0.5 + (len(shape) < 2) for shape, _ in self.shapes]

    @cached_property
    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits [B, T, vocab_size] in eval mode."""
        return _logits(self.model)

    @cached_property
    @torch.no_grad()
    def training(self) -> Tensor:
        """Logits and auxiliary losses in training mode, and the parameters without a gradient after a step."""
        _ = self.weights
        numbers = self._training_numbers()
        numbers += [value.detach().clone() for value in self.model.parameters() if not value.requires_grad]
        _set_weights(self.model, self.weights)
        return torch.cat([number.flatten() for number in numbers])

    def _training_numbers(self) -> list[Tensor]:
        self.model.train()
        with use_random_key(RandomKey(1, 1, torch.arange(ROWS))), record_router_statistics() as recorded:
            numbers = [_logits(self.model)]
        self.model.eval()
        for entry in recorded.entries:
            numbers += [] if entry.aux_loss is None else [entry.aux_loss]
            entry.mixture.update_expert_bias(entry.expert_counts)
        return numbers

    @cached_property
    def has_unused_parameters(self) -> bool:
        """Whether a trainable parameter is in no computation, so that it gets no gradient, not even zero."""
        _ = self.weights
        total = torch.stack([number.sin().sum() for number in self._training_numbers()]).sum()
        trainable = [value for value in self.model.parameters() if value.requires_grad]
        grads = torch.autograd.grad(total, trainable, allow_unused=True)
        _set_weights(self.model, self.weights)
        return any(grad is None for grad in grads)

    @cached_property
    def state_bytes(self) -> int:
        """The size of a state for a text longer than the law's; 0 for a bidirectional design."""
        return new_state(self.model, 2, CACHE_LENGTH).bytes if self.model.causal else 0

    @cached_property
    @torch.no_grad()
    def narrow_logits(self) -> Tensor:
        """Logits in bfloat16, which show what is rounded where."""
        _ = self.weights
        logits = _logits(self.model.to(torch.bfloat16))
        _set_weights(self.model.to(torch.float64), self.weights)
        return logits

    @cached_property
    def first_weights(self) -> dict[str, Tensor]:
        """The weights that the design's initialization draws, by name."""
        _ = self.weights
        initialize(self.model, seed=0)
        drawn = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        _set_weights(self.model, self.weights)
        return drawn


@torch.no_grad()
def _set_weights(model: Decoder, weights: list[Tensor]) -> None:
    for value, weight in zip(model.parameters(), weights, strict=True):
        value.copy_(weight)


def _logits(model: Decoder) -> Tensor:
    logits: Tensor = model.head(forward(model, random_tokens(model.config, ROWS, LENGTH)))
    return logits


def _differ(first: Tensor, second: Tensor | None) -> bool:
    """Whether two tensors differ by more than rounding. One that is missing differs in nothing."""
    if second is None or first.shape != second.shape:
        return second is not None
    changed = (first - second).abs().nan_to_num(nan=0.0) > LEAST_CHANGE
    return bool((changed | (first.isnan() != second.isnan())).any())
