"""What a comparison is asked to do, checked before anything runs."""

import itertools
import shlex
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from heddle.analysis.comparison.variation import Axis, Variant, variants
from heddle.config import DesignError
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.training.optimizer import Scales, factors

BUDGETS = ("tokens", "seconds", "flops")


@dataclass(frozen=True)
class Entry:
    """One design of a comparison: a short unique name, where it came from, and its config.

    varied: (field, value) of each varied field, the design it is a variant of among them where there are several.
    as_given: whether it is that design itself. width: its own, where an equal size asked for another.
    """

    name: str
    source: str
    config: ModelConfig
    varied: tuple[tuple[str, str], ...] = ()
    as_given: bool = True
    width: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """budget: how much each run may use, `value` tokens, seconds or training FLOPs. seeds pair the designs."""

    entries: tuple[Entry, ...]
    baseline: str | None = None  # a name; None: the first
    equal: str | None = None  # what all designs have as much of as the baseline
    data: tuple[str, ...]
    budget: str
    value: float
    seeds: tuple[int, ...]
    batch_size: int
    context: int
    learning_rate: float
    optimizer: str
    schedule: str
    warmup: int | None
    lr_scale: tuple[tuple[str, float], ...]  # (path, factor)
    precision: str
    vocab_size: int | None
    tokenizer: str | None
    device: str
    threads: int | None
    parts: tuple[str, ...]
    contexts: tuple[int, ...]
    recall: tuple[str, ...]  # probes, by name
    extrapolate: int  # the longest text, in trained contexts; 1: none is read

    def identity(self) -> dict[str, Any]:
        """What a continued comparison must share with the one that began: not the baseline, which no run knows."""
        shared = asdict(self) | {"entries": {entry.name: entry.config.dump() for entry in self.entries}}
        return {name: value for name, value in shared.items() if name != "baseline"}


def read_entries(
    designs: Sequence[str], overrides: Sequence[str], *, axes: Sequence[Axis] = (), scales: Scales = ()
) -> tuple[Entry, ...]:
    """Load designs, or the variants of each, under unique names: a preset's or a file's own, or what was varied.

    Raises ConfigError naming a design that cannot be trained, or in which a path of `scales` leads nowhere.
    """
    if not designs:
        raise ConfigError("compare: names no design; give at least one file, preset:NAME or folder")
    choices = variants(axes, len(designs))
    entries: list[Entry] = []
    bases: list[str] = []
    for source in designs:
        bases.append(_unique(_name(source), bases))
        plain = _plain_design(source, overrides) if axes else None
        own: list[Entry] = []
        for variant in choices:
            config = _load(source, overrides, variant, scales)
            for other in own:
                if other.config == config:
                    raise ConfigError(f"--vary: {other.name} and {variant.name} are one design; leave one of them out")
            several = bool(axes) and len(designs) > 1
            name = f"{bases[-1]} {variant.name}" if several else variant.name or bases[-1]
            own.append(
                Entry(
                    name=_unique(name, [entry.name for entry in (*entries, *own)]),
                    source=" ".join([source, *map(shlex.quote, variant.overrides)]),
                    config=config,
                    varied=((("design", bases[-1]),) if several else ()) + variant.values,
                    as_given=not axes or config == plain,
                )
            )
        entries += own
    return tuple(entries)


def _load(source: str, overrides: Sequence[str], variant: Variant, scales: Scales) -> ModelConfig:
    """A variant of a design that can be trained on text."""
    named = f"{source} ({variant.name})" if variant.name else source
    try:
        config = load_config(source, [*overrides, *variant.overrides])
    except DesignError as error:
        raise error.under(named) from None
    model = build(config if config.vocab_size else config.replace(vocab_size=1), device="meta")
    if not model.causal:
        raise ConfigError(f"{named}: a mixer sees later tokens, so the design cannot learn to predict them")
    if model.memory_width is not None:
        raise ConfigError(f"{named}: reads a memory, and texts come without one; take cross_attention out of it")
    try:
        factors(model, scales)
    except ConfigError as error:
        raise ConfigError(f"{named}: {error}") from None
    return config


def _plain_design(source: str, overrides: Sequence[str]) -> ModelConfig | None:
    """The design itself; None where it cannot be built, as one that leaves out what is varied."""
    try:
        return load_config(source, overrides)
    except ConfigError:
        return None


def _unique(name: str, taken: Container[str]) -> str:
    """The name, numbered where it is taken."""
    numbered = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
    return next(one for one in numbered if one not in taken)


def choose_baseline(entries: Sequence[Entry], wanted: str | None) -> str:
    """The name asked for, else the first design as it was given, else the first variant."""
    names = [entry.name for entry in entries]
    if wanted is None:
        return next((entry.name for entry in entries if entry.as_given), names[0])
    if wanted not in names:
        near = get_close_matches(wanted, names, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(f"--baseline {wanted}: names no design; {hint}choices: {', '.join(names)}")
    return wanted


def _name(source: str) -> str:
    """A preset's name, a file's without its suffix, or a folder's."""
    if source.startswith("preset:"):
        return source.removeprefix("preset:")
    path = Path(source)
    return path.resolve().name if path.is_dir() else path.stem


def shared_vocabulary(entries: Sequence[Entry], wanted: int | None, default: int) -> int:
    """The largest tokenizer that every design can take."""
    named = [entry.config.vocab_size for entry in entries if entry.config.vocab_size is not None]
    if wanted is not None:
        for entry in entries:
            if entry.config.vocab_size is not None and entry.config.vocab_size < wanted:
                raise ConfigError(
                    f"--vocab-size {wanted}: is above vocab_size = {entry.config.vocab_size} of {entry.name}; "
                    "all designs share one tokenizer, so lower it"
                )
        return wanted
    return min(named) if named else default


def warnings(plan: Plan, parameters: dict[str, int], trained: dict[str, int], available: int) -> list[str]:
    """Why the comparison may not be able to tell designs apart, in plain sentences."""
    found = []
    for entry in plan.entries:
        windows = {layer.mixer.dump().get("window") for _, layer in entry.config.expand() if layer.mixer is not None}
        for window in sorted(value for value in windows if value is not None and value >= plan.context):
            found.append(
                f"{entry.name}: its window of {window} covers the whole training context of {plan.context} tokens, "
                "so it was trained as full attention; a longer --context would tell."
            )
    trained = {name: tokens for name, tokens in trained.items() if tokens}  # of a failed run nothing is known
    ratios = {name: trained[name] / parameters[name] for name in trained}
    if ratios and min(ratios.values()) < 1:
        lowest = min(ratios.values())
        found.append(
            f"A short race: {lowest:.2g} training tokens for each parameter, where about 20 are usual; "
            "the order of the designs may change with more training."
        )
    if parameters and max(parameters.values()) > 1.05 * min(parameters.values()):
        small, large = min(parameters, key=parameters.__getitem__), max(parameters, key=parameters.__getitem__)
        share = parameters[large] / parameters[small] - 1
        found.append(f"The designs differ in size: {large} has {share:.0%} more parameters than {small}.")
    if trained and max(trained.values()) > available:
        found.append(f"The text was read more than once: it holds {available:,} training tokens.")
    if len(set(trained.values())) > 1:
        found.append("The designs saw different amounts of text: each had the same time or operations to spend.")
    return found
