"""Options: every field of a design has an effect, or is refused where it would have none.

For each field, other values are tried until one changes something. A value that is invalid counts as refused. Where
valid values change nothing, a number in the configs around the field may hide the effect: a window of one token hides
whatever changes scores, and small heads have too few frequencies. So other numbers are tried, and the field must have
an effect beside these. A choice, or a part, that makes a field do nothing must refuse it.
"""

import types
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

from heddle.config import Config, Part, kind_class, kinds, literal_values
from heddle.errors import ConfigError
from heddle.laws.harness import (
    LawViolation,
    forward,
    layout_for,
    model_under_test,
    new_state,
    normal_tensor,
    random_tokens,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.initialization import initialize, materialize
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.modules.router_statistics import record_router_statistics

# Every field of a design, and other values for each: read from the types of the fields. No kind is named here.


C = TypeVar("C", bound=Config)
Steps = tuple[str | int, ...]

FACTORS = (2.0, 0.125, 64.0, 1 / 64)
SAMPLES: dict[type, tuple[Any, ...]] = {bool: (True, False), int: (2, 1, 3, 4, 8), float: (2.0, 0.5, 0.125)}
LENGTHS = (1, 2, 3, 4)  # of lists of numbers


class Option(NamedTuple):
    """A field of a config within a design. steps: its path, such as ("layers", 0, "mixer", "heads").

    around: the paths of the configs that contain it, the innermost first.
    """

    config: Config
    steps: Steps
    around: tuple[Steps, ...]

    @property
    def name(self) -> str:
        """The field's name."""
        return str(self.steps[-1])

    @property
    def value(self) -> Any:
        """The field's value in the design."""
        return getattr(self.config, self.name)

    @property
    def path(self) -> str:
        """The path as text: `layers[0].mixer.heads`."""
        return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.steps).removeprefix(".")


def field_values(config: Config) -> Iterator[tuple[str, Any]]:
    """Name and value of every field."""
    return ((name, getattr(config, name)) for name in type(config).model_fields)


def options(config: Config) -> Iterator[Option]:
    """Every field of a design and of the configs within it. Equal configs in one field of several layers count once."""
    return _options(config, (), (), set())


def _options(
    config: Config, steps: Steps, around: tuple[Steps, ...], seen: set[tuple[Steps, Config]]
) -> Iterator[Option]:
    key = (tuple(step for step in steps if isinstance(step, str)), config)
    if key in seen:
        return
    seen.add(key)
    around = (steps, *around)
    for name, value in field_values(config):
        yield Option(config, (*steps, name), around)
        for index, item in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if isinstance(item, Config):
                yield from _options(item, (*steps, name) if index is None else (*steps, name, index), around, seen)


def config_at(config: Config, steps: Steps) -> Config:
    """The config at a path."""
    value: Any = config
    for step in steps:
        value = value[step] if isinstance(step, int) else getattr(value, step)
    assert isinstance(value, Config)
    return value


def with_values(config: C, values: dict[Steps, Any]) -> C:
    """The design with another value at each path, all at once. Raises DesignError if that is refused."""
    changed: dict[str, Any] = {}
    for name in dict.fromkeys(str(steps[0]) for steps in values):
        inner = {steps[1:]: value for steps, value in values.items() if steps[0] == name}
        changed[name] = inner[()] if () in inner else _changed(getattr(config, name), inner)
    return config.replace(**changed)


def _changed(value: Any, values: dict[Steps, Any]) -> Any:
    if isinstance(value, Config):
        return with_values(value, values)
    items = list(value)
    for index in dict.fromkeys(steps[0] for steps in values):
        assert isinstance(index, int)
        items[index] = _changed(items[index], {steps[1:]: new for steps, new in values.items() if steps[0] == index})
    return tuple(items)


def alternatives(option: Option) -> Iterator[list[Any]]:
    """Other values of a field, in groups: first those most like its own value, last None. Some may be invalid."""
    for group in _groups(type(option.config).model_fields[option.name].annotation, option.value):
        yield [other for other in group if other != option.value]


def _groups(annotation: Any, value: Any) -> Iterator[list[Any]]:
    if value is None:
        yield list(_samples(annotation))
        return
    if isinstance(value, bool | str):
        yield [choice for choice in _samples(annotation) if isinstance(choice, bool | str)]
    elif isinstance(value, int | float):
        yield other_numbers(value)
    elif isinstance(value, Part):
        yield list(_parts(annotation, value))
    elif isinstance(value, tuple) and value:
        if isinstance(value[0], str):
            words = literal_values(get_args(annotation)[0])
            yield [*(value[:i] + value[i + 1 :] for i in range(len(value))), *((*value, word) for word in words)]
        else:
            yield [(*value, value[-1])] if isinstance(value[0], Config) else list(_other_lists(value))
    if type(None) in get_args(annotation):
        yield [None]


def other_numbers(value: float) -> list[Any]:
    """Numbers near and far from `value`, of its type."""
    if isinstance(value, int):
        return list(dict.fromkeys((value + 1, 2 * value, value - 1, value // 2, 1, 2, 16)))
    return [*(value * factor for factor in FACTORS), 1.0, 0.5]


def far_numbers(value: float) -> list[Any]:
    """A few numbers far from `value`, of its type."""
    numbers = (2 * value, 1, 2, 16) if isinstance(value, int) else (2.0 * value, value / 64, value * 64)
    return [number for number in numbers if number != value]


def _other_lists(values: tuple[float, ...]) -> Iterator[tuple[Any, ...]]:
    """Lists of numbers with one entry changed, and with all changed."""
    for factor in FACTORS:
        yield (values[0] * factor, *values[1:])
        yield tuple(value * factor for value in values)


def _samples(annotation: Any) -> Iterator[Any]:
    """A few values of a type, None aside."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _samples(arguments[0])
    elif origin is Literal:
        yield from arguments
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _samples(argument)
    elif origin is tuple:
        for sample in (sample for sample in _samples(arguments[0]) if not isinstance(sample, Config)):
            yield from ((sample,) * length for length in LENGTHS)
    elif annotation in SAMPLES:
        yield from SAMPLES[annotation]
    else:
        yield from _parts(annotation, None)


def _parts(annotation: Any, old: Part | None) -> Iterator[Part]:
    """A part of every kind that fits a field: first with the fields that it shares with the old one, then without."""
    classes = [kind_class(slot.slot, kind) for slot in _slots(annotation) for kind in kinds(slot.slot)]
    classes = [cls for cls in classes if any(issubclass(cls, slot) for slot in _slots(annotation))]
    for cls in classes:
        if old is not None and cls is not type(old):
            yield from _built(cls, {name: value for name, value in field_values(old) if name in cls.model_fields})
    for cls in classes:
        yield from _built(cls, {})


def _slots(annotation: Any) -> Iterator[type[Part]]:
    """The classes of parts within an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, Annotated):
        for argument in get_args(annotation):
            yield from _slots(argument)


def _built(cls: type[Part], fields: dict[str, Any]) -> Iterator[Part]:
    """A config of a kind with these fields, and samples of the others that it requires. Nothing if that is refused."""
    for name, field in cls.model_fields.items():
        if field.is_required() and name not in fields:
            fields[name] = next(_samples(field.annotation), None)
    try:
        yield cls(**fields)
    except ConfigError:
        return


ROWS, LENGTH = 6, 12
CACHE_LENGTH = 64
FEW = 3  # values tried beside other numbers
NEAR, LARGE = 3, 8  # how many configs around a field have their whole numbers multiplied, and by what
LEAST_CHANGE = 1e-9  # of float64 numbers: more than any rounding


def options_have_effect(config: ModelConfig) -> None:
    """Another value of any field changes sizes, outputs, gradients or initial weights, or is refused."""
    behavior = Behavior(config)
    for option in options(config):
        if not has_effect(option, behavior):
            raise LawViolation(
                f"{option.path}: every other value gives the same sizes, outputs, gradients and initial "
                f"weights as {option.value!r}; refuse it where it does nothing"
            )


def has_effect(option: Option, behavior: "Behavior") -> bool:
    """Whether another value of the field changes what the design computes, or all are refused."""
    return changes(option, behavior) is not False or numbers_with_effect(option, behavior) is not None


def changes(option: Option, behavior: "Behavior", most: int | None = None) -> bool | None:
    """True: another value changes something. False: valid values change nothing. None: all are refused.

    most: how many values to try of each group: the last ones, which are farthest from the field's own.
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
            # None stands for a default. The same default written out is not another value.
            if None not in (option.value, value) or changed.config.resolved() != behavior.config.resolved():
                accepted.append(changed)
        if accepted:
            return accepted[0].differs_in_detail(behavior)
    return None


def numbers_with_effect(option: Option, behavior: "Behavior") -> dict[Steps, float] | None:
    """Numbers around the field beside which it has an effect; None if there are none."""
    for change in _changes_around(option, behavior):
        other = _behavior_with(change, behavior)
        if other is not None and changes(option, other, most=FEW):
            return change
    return None


def _changes_around(option: Option, behavior: "Behavior") -> Iterator[dict[Steps, float]]:
    """Other values of numbers around a field, first those most likely to show what it does.

    One number at a time, the smallest first, and all whole numbers doubled, because a width may depend on another. Then
    one other number at a time beside the whole numbers of the nearest configs, multiplied as far as possible: a head of
    one pair, a window of one token and a small base together hide what a scaling does. Then one number at a time beside
    the field's own config, doubled as far as possible. Last, each number of that config which cannot be doubled alone,
    together with one around it.
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
    """The numbers times a factor, except those with which the design, multiplied so far, would be refused."""
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
    """What a design computes, each result on first use; with the weights of `like`, if they fit.

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
        """Whether the state's size, rounding or initial weights differ, though outputs do not."""
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
        """Logits (also of multi-token modules) and auxiliary losses in training mode, and what a step updates."""
        _ = self.weights
        numbers = self._training_numbers()
        numbers += [value.detach().clone() for value in self.model.parameters() if not value.requires_grad]
        _set_weights(self.model, self.weights)
        return torch.cat([number.flatten() for number in numbers])

    def _training_numbers(self) -> list[Tensor]:
        self.model.train()
        with use_random_key(RandomKey(1, 1, torch.arange(ROWS))), record_router_statistics() as recorded:
            numbers = [_logits(self.model), *_weighted_predictions(self.model)]
        self.model.eval()
        numbers += recorded.losses
        for entry in recorded.entries:
            entry.mixture.update_expert_bias(entry.expert_counts)
        return numbers

    @cached_property
    def has_unused_parameters(self) -> bool:
        """Whether a trainable parameter is not used at all, so that its gradient is None instead of zero."""
        _ = self.weights
        total = torch.stack([number.sin().sum() for number in self._training_numbers()]).sum()
        trainable = [value for value in self.model.parameters() if value.requires_grad]
        grads = torch.autograd.grad(total, trainable, allow_unused=True)
        _set_weights(self.model, self.weights)
        return any(grad is None for grad in grads)

    @cached_property
    def state_bytes(self) -> int:
        """The size of a state for a sequence longer than the law's; 0 for a bidirectional design."""
        return new_state(self.model, 2, CACHE_LENGTH).bytes if self.model.causal else 0

    @cached_property
    @torch.no_grad()
    def narrow_logits(self) -> Tensor:
        """Logits in bfloat16, which show where numbers are rounded."""
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


def _weighted_predictions(model: Decoder) -> list[Tensor]:
    """Logits of multi-token modules, times the weight of their loss."""
    if model.config.multi_token is None:
        return []
    length, weight = LENGTH + model.config.multi_token.depth, model.config.multi_token.loss_weight
    tokens, layout = random_tokens(model.config, ROWS, length), layout_for(model, ROWS, length)
    predictions = model.predict_ahead(model(tokens, layout)[0], tokens, layout)
    return [weight / len(predictions) * model.head(hidden) for hidden, _ in predictions]


def _differ(first: Tensor, second: Tensor | None) -> bool:
    """Whether two tensors differ by more than rounding. A missing one counts as equal."""
    if second is None or first.shape != second.shape:
        return second is not None
    changed = (first - second).abs().nan_to_num(nan=0.0) > LEAST_CHANGE
    return bool((changed | (first.isnan() != second.isnan())).any())
