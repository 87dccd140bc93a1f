"""The plan of a comparison: which designs are trained, on what, for how long; checked before anything runs."""

import itertools
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from heddle.config import DesignError
from heddle.data.samples import PLAIN_ROWS
from heddle.errors import ConfigError, choices_hint
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.load_config import load_config, parse_values
from heddle.progress import parse_duration, print_status
from heddle.training.optimizer import LearningRateScales, learning_rate_factors
from heddle.training.settings import OPTIMIZERS, SCHEDULES, Settings
from heddle.training.width_transfer import transfer_over_width

# Variants of a design: parse `path=value,value` into varied fields, and take their product as named overrides.


MAX_VARIANTS = 64
MAX_LABEL_LENGTH, MAX_NAME_LENGTH = 40, 120  # a variant's name becomes part of file names


@dataclass(frozen=True)
class FieldValue:
    """One value of a varied field: the override `path=text` and a short label.

    standalone: whether the label is clear without the field's name, as a kind is.
    """

    override: str
    label: str
    standalone: bool


@dataclass(frozen=True)
class VariedField:
    """A config field, the shortest title that identifies it among the varied fields, and the values it takes."""

    path: str
    title: str
    values: tuple[FieldValue, ...]


@dataclass(frozen=True)
class Variant:
    """One value for every varied field.

    name: empty where no field is varied. field_labels: (path, label) of each field.
    """

    name: str
    overrides: tuple[str, ...]
    field_labels: tuple[tuple[str, str], ...]


def parse_varied_fields(assignments: Sequence[str]) -> tuple[VariedField, ...]:
    """Parse `path=value,value` texts, one for each field. Raises ConfigError for what cannot be varied."""
    values_of: dict[str, str] = {}
    for assignment in assignments:
        path, equals, values = assignment.partition("=")
        if not path or not equals:
            raise ConfigError(f"vary {assignment}: expected path.to.field=value,value, such as norm.kind=rms,layer")
        if path in values_of:
            raise ConfigError(f"vary {assignment}: {path} is varied already; give all its values at once")
        values_of[path] = values
    title_of = short_titles(list(values_of))
    return tuple(VariedField(path, title_of[path], _parse_values(path, text)) for path, text in values_of.items())


def enumerate_variants(varied_fields: Sequence[VariedField], design_count: int) -> list[Variant]:
    """The product of all fields' values; the last field changes fastest.

    Raises ConfigError where `design_count` designs would have more than 64 variants together.
    """
    value_counts = [len(field.values) for field in varied_fields]
    count = design_count * math.prod(value_counts)
    if varied_fields and count > MAX_VARIANTS:
        factors = " × ".join(map(str, ([design_count] if design_count > 1 else []) + value_counts))
        raise ConfigError(
            f"vary: {factors} makes {count} variants, and at most {MAX_VARIANTS} are trained; leave values out"
        )
    variants = []
    for values in product(*(field.values for field in varied_fields)):
        pairs = list(zip(varied_fields, values, strict=True))
        full_name = " ".join(_value_name(varied_fields, field, value) for field, value in pairs)
        name = re.sub(r"[/\\\x00-\x1f\x7f]", "_", full_name)[:MAX_NAME_LENGTH]
        labels = tuple((field.path, value.label) for field, value in pairs)
        variants.append(Variant(name, tuple(value.override for value in values), labels))
    return variants


def short_titles(paths: Sequence[str]) -> dict[str, str]:
    """The last word of each path (`.kind` removed), or as many words as distinguish it from the other paths."""
    words = {path: path.removesuffix(".kind").split(".") for path in paths}
    titles: dict[str, str] = {}
    for length in range(1, max(map(len, words.values()), default=0) + 1):
        candidates = {path: ".".join(path_words[-length:]) for path, path_words in words.items()}
        uses = Counter(candidates.values())
        titles |= {path: title for path, title in candidates.items() if path not in titles and uses[title] == 1}
    return {path: titles.get(path, path) for path in paths}


def _value_name(varied_fields: Sequence[VariedField], field: VariedField, value: FieldValue) -> str:
    """`kv_heads=2`; the label alone where it is standalone and no other field has the same one."""
    labels_elsewhere = [
        candidate.label
        for another in varied_fields
        if another is not field
        for candidate in another.values
        if candidate.standalone
    ]
    unambiguous = value.standalone and value.label not in labels_elsewhere
    return value.label if unambiguous else f"{field.title}={value.label}"


def _parse_values(path: str, text: str) -> tuple[FieldValue, ...]:
    argument = f"vary {path}={text}"
    parsed = parse_values(text, argument)
    for index, (value_text, value) in enumerate(parsed):
        if any(_is_same(value, previous) for _, previous in parsed[:index]):
            raise ConfigError(f"{argument}: {value_text} is given twice; leave one out")
    all_values = [value for _, value in parsed]
    field_values = []
    for value_text, value in parsed:
        label = _label(value_text, value, all_values)
        is_kind_name = path.endswith(".kind") and isinstance(value, str)
        standalone = label != value_text if isinstance(value, dict) else is_kind_name
        field_values.append(FieldValue(f"{path}={value_text}", label, standalone))
    if len({value.label for value in field_values}) < len(field_values):  # shortened, or 1 and "1"
        numbered = enumerate(field_values, 1)
        field_values = [replace(value, label=f"{value.label}#{number}") for number, value in numbered]
    return tuple(field_values)


def _is_same(value: Any, reference: Any) -> bool:
    """Equal as JSON: unlike in Python, 1 and true differ."""
    return json.dumps(value, sort_keys=True) == json.dumps(reference, sort_keys=True)


def _kind(value: Any) -> str | None:
    return value["kind"] if isinstance(value, dict) and isinstance(value.get("kind"), str) else None


def _label(text: str, value: Any, all_values: Sequence[Any]) -> str:
    """A string itself; a mapping by its kind and the fields that differ within it; else the text."""
    if isinstance(value, str):
        text = value
    elif value is None:
        text = "null"
    elif isinstance(value, dict):
        same_kind = [mapping for mapping in all_values if isinstance(mapping, dict) and _kind(mapping) == _kind(value)]
        names = dict.fromkeys(name for mapping in same_kind for name in mapping if name != "kind")
        differing = [
            name for name in names if not all(_is_same(mapping.get(name), value.get(name)) for mapping in same_kind)
        ]
        words = [_kind(value) or "", *(f"{name}={_field_text(value.get(name))}" for name in differing)]
        text = " ".join(word for word in words if word) or text
    return text if len(text) <= MAX_LABEL_LENGTH else text[: MAX_LABEL_LENGTH - 1] + "…"


def _field_text(value: Any) -> str:
    return value if isinstance(value, str) else _kind(value) or json.dumps(value)


# Training fields that are tuned for each design: parse `field=low..high` or `field=value,value` into grids.


Value = float | int | str
Candidate = tuple[Value, ...]  # a value for each tuned field, in the fields' order
MAX_RATIO = 2.0  # of two neighbors in the grid of a range
MAX_CANDIDATES = 64
LR_SCALE_PREFIX = "lr_scale."  # then the path of the parameters: lr_scale.layers.*.mixer
SETTINGS_NAMES = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "batch_size": "batch_size",
    "warmup": "warmup",
    "optimizer": "optimizer",
    "schedule": "schedule",
}
INTEGER_FIELDS = ("batch_size", "warmup")
WORDS = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}


@dataclass(frozen=True)
class TunedField:
    """A training field and its grid: numbers in ascending order, or words in the user's order."""

    name: str
    values: tuple[Value, ...]

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers, so that each has neighbors."""
        return self.name not in WORDS

    def next_value(self, values: Sequence[Value], direction: int) -> Value | None:
        """The value that continues ascending numbers geometrically, below (−1) or above (+1) them.

        None where there is none: words, numbers that touch 0, an integer that stays the same.
        """
        if not self.is_number or len(values) < 2:
            return None
        edge, inner = (float(values[index]) for index in ((0, 1) if direction < 0 else (-1, -2)))
        if edge <= 0 or inner <= 0:
            return None
        value = _rounded(self.name, edge * edge / inner)
        return None if value == edge or value <= 0 else value


@dataclass(frozen=True)
class TuningPlan:
    """Which fields are tuned, and what the search may cost.

    budget_kind: "share" of the training of the comparison itself, or "seconds" of training steps.
    """

    fields: tuple[TunedField, ...]
    budget_kind: str
    budget_value: float


def parse_tuned_fields(assignments: Sequence[str]) -> tuple[TunedField, ...]:
    """Parse `field=low..high` or `field=value,value` texts, one for each field.

    A range becomes a grid in log space, whose neighbors differ by at most a factor of 2. Raises ConfigError for what
    cannot be tuned, and where the grids have over 64 combinations.
    """
    fields: dict[str, TunedField] = {}
    for assignment in assignments:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not name or not equals:
            raise ConfigError(
                f"tune {assignment}: expected field=low..high or field=value,value, such as lr=0.001..0.01"
            )
        name = "lr" if name == "learning_rate" else name
        if name in fields:
            raise ConfigError(f"tune {assignment}: {name} is tuned already; give all its values at once")
        known = name.startswith(LR_SCALE_PREFIX) and name != LR_SCALE_PREFIX
        if name not in SETTINGS_NAMES and not known:
            hint = choices_hint(name, [*SETTINGS_NAMES, f"{LR_SCALE_PREFIX}PATH"])
            raise ConfigError(f"tune {assignment}: {name} is not a training field that can be tuned; {hint}")
        fields[name] = TunedField(name, _parse_grid(name, text, f"tune {assignment}"))
    count = math.prod(len(field.values) for field in fields.values())
    if count > MAX_CANDIDATES:
        factors = " × ".join(str(len(field.values)) for field in fields.values())
        raise ConfigError(
            f"tune: {factors} makes {count} combinations, and at most {MAX_CANDIDATES} are tried; narrow the ranges"
        )
    return tuple(fields.values())


def parse_tuning_budget(text: str) -> tuple[str, float]:
    """("share", x) of `0.5` or `50%`, ("seconds", x) of `90s`, `10m` or `1d`. Raises ConfigError for anything else."""
    if re.fullmatch(r"[0-9.]+[smhd]", text):
        return "seconds", parse_duration(text, "tuning budget")
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(
            f"tuning budget {text}: expected a share of the comparison's training, such as 0.5, or a time, such as 10m"
        )
    return "share", value


def all_candidates(fields: Sequence[TunedField]) -> list[Candidate]:
    """Every combination of the fields' values; the last field changes fastest."""
    return list(product(*(field.values for field in fields)))


def planned_trials(fields: Sequence[TunedField]) -> int:
    """How many trials a search is given time for: the candidates, and one more for each numeric field."""
    return len(all_candidates(fields)) + sum(field.is_number for field in fields)


def tuned_settings(fields: Sequence[TunedField], candidate: Candidate, lr_scale: LearningRateScales) -> dict[str, Any]:
    """The fields of `Settings` that a candidate sets. lr_scale: shared by all designs; tuned paths come after it."""
    settings: dict[str, Any] = {}
    scales = list(lr_scale)
    for field, value in zip(fields, candidate, strict=True):
        if field.name.startswith(LR_SCALE_PREFIX):
            scales.append((field.name.removeprefix(LR_SCALE_PREFIX), float(value)))
        else:
            settings[SETTINGS_NAMES[field.name]] = value
    return settings | ({"lr_scale": tuple(scales)} if len(scales) > len(lr_scale) else {})


def tuned_paths(fields: Sequence[TunedField]) -> LearningRateScales:
    """(path, factor) for each tuned `lr_scale.PATH`, to check that the paths exist."""
    names = [field.name for field in fields if field.name.startswith(LR_SCALE_PREFIX)]
    return tuple((name.removeprefix(LR_SCALE_PREFIX), 1.0) for name in names)


def describe_candidate(names: Sequence[str], candidate: Sequence[Value]) -> str:
    """`lr 0.003, weight_decay 0.1`."""
    return ", ".join(f"{name} {format_value(value)}" for name, value in zip(names, candidate, strict=True))


def format_value(value: Value) -> str:
    """A value as the user writes it: 0.003, 16, muon."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _parse_grid(name: str, text: str, argument: str) -> tuple[Value, ...]:
    low_text, is_range, high_text = text.partition("..")
    if is_range:
        return _log_grid(name, low_text, high_text, argument)
    values = [_parse_value(name, part.strip(), argument) for part in text.split(",")]
    if len(values) < 2:
        raise ConfigError(f"{argument}: has one value; give at least two, or a range such as {name}=low..high")
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ConfigError(f"{argument}: {format_value(value)} is given twice; leave one out")
    return tuple(values if name in WORDS else sorted(values, key=float))


def _log_grid(name: str, low_text: str, high_text: str, argument: str) -> tuple[Value, ...]:
    """Values from low to high, evenly spaced in log space."""
    if name in WORDS:
        raise ConfigError(f"{argument}: {name} has no range; list values of {', '.join(WORDS[name])}")
    low, high = (float(_parse_value(name, end.strip(), argument)) for end in (low_text, high_text))
    if low <= 0:
        raise ConfigError(f"{argument}: a range must start above 0 (its values are spaced by factors); list 0 instead")
    if low >= high:
        remedy = f"write {name}={high_text}..{low_text}" if low > high else "give two ends that differ"
        raise ConfigError(f"{argument}: the range must start at its lower end; {remedy}")
    intervals = max(1, math.ceil(math.log(high / low) / math.log(MAX_RATIO) - 1e-9))
    if intervals >= MAX_CANDIDATES:
        raise ConfigError(f"{argument}: the range spans over {MAX_CANDIDATES} factors of {MAX_RATIO:g}; narrow it")
    inner = [_rounded(name, low * (high / low) ** (index / intervals)) for index in range(1, intervals)]
    ends = [int(end) if name in INTEGER_FIELDS else end for end in (low, high)]
    return tuple(sorted({ends[0], *inner, ends[1]}))


def _rounded(name: str, value: float) -> float | int:
    """Three digits; a whole number where the field takes no other."""
    return round(value) if name in INTEGER_FIELDS else float(f"{value:.3g}")


def _parse_value(name: str, text: str, argument: str) -> Value:
    if name in WORDS:
        if text not in WORDS[name]:
            raise ConfigError(f"{argument}: unknown {name} {text}; {choices_hint(text, WORDS[name])}")
        return text
    try:
        value: float | int = int(text) if name in INTEGER_FIELDS else float(text)
    except ValueError:
        kind = "a whole number" if name in INTEGER_FIELDS else "a number"
        raise ConfigError(f"{argument}: '{text}' is not {kind}") from None
    if not 0 <= value < math.inf:
        raise ConfigError(f"{argument}: {text} must be at least 0 and finite")
    probe: Mapping[str, Any] = {} if name.startswith(LR_SCALE_PREFIX) else {SETTINGS_NAMES[name]: value}
    try:
        Settings(steps=1, **probe)
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}") from None
    return value


MAY_CHANGE = ("baseline", "until_resolved", "time_budget", "trackers", "budget_notes")


@dataclass(frozen=True)
class DesignEntry:
    """One design of a comparison: a short unique name, where it came from, and its config.

    varied_fields: (path, label) of each varied field; where several designs are varied, ("design", name) comes first.
    is_unmodified: whether the variant equals the unvaried design.
    original_width: the width in the design's config, where `config` was resized to an equal size.
    scaled_fields: what changed if its state was scaled: `layers[0].mixer.kv_rank 56 → 64`.
    """

    name: str
    source: str
    config: ModelConfig
    varied_fields: tuple[tuple[str, str], ...] = ()
    is_unmodified: bool = True
    original_width: int | None = None
    scaled_fields: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """Everything that defines a comparison.

    Each run may use `budget_value` tokens, seconds or training FLOPs. Runs with the same seed form a pair.
    """

    entries: tuple[DesignEntry, ...]
    baseline: str | None = None  # an entry's name; None: the first entry
    equal_size: str | None = None  # one of SIZE_KINDS: the size in which all designs equal the baseline
    data: tuple[str, ...]
    budget_kind: str  # tokens, seconds or flops
    budget_value: float
    seeds: tuple[int, ...]
    batch_size: int
    sequence_length: int
    learning_rate: float
    optimizer: str
    schedule: str
    warmup: int | None
    lr_scale: tuple[tuple[str, float], ...]  # (path, factor)
    precision: str
    vocab_size: int | None
    tokenizer: str | None
    device: str  # its kind: a comparison may continue on other devices of the same kind
    threads: int | None
    part_files: tuple[str, ...]
    speed_contexts: tuple[int, ...]  # context lengths at which speed is measured
    recall_probes: tuple[str, ...]  # "auto" or names of RECALL_PROBES
    max_length_multiple: int  # longest sequence read after training, in training lengths; 1: none is read
    until_resolved: float | None = None  # more seeds, until every design is resolved or a tie within ± this
    time_budget: float | None = None  # seconds of training, until resolved
    tuning: TuningPlan | None = None  # training fields tuned for each design before the comparison
    transfer_width: int | None = None  # the width at which the learning rate was chosen
    tf32: bool = False  # float32 products on CUDA
    deterministic: bool = False  # equal bits on CUDA, too
    trackers: tuple[str, ...] = ()  # to which the training on text is logged as well
    budget_notes: tuple[tuple[str, str], ...] = ()  # (setting, sentence) of what a time budget chose

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.sequence_length

    @property
    def token_steps(self) -> int:
        """The steps of a run of `budget_value` tokens."""
        return int(self.budget_value) // self.tokens_per_step

    def __post_init__(self) -> None:
        """Raise ConfigError naming a design to which the learning rate does not transfer from its width."""
        for entry in self.entries:
            config = entry.config if entry.config.vocab_size else entry.config.replace(vocab_size=1)
            try:
                transfer_over_width(config, self.transfer_width, self.optimizer)
            except ConfigError as error:
                raise ConfigError(f"{entry.name}: {error}") from None

    def identity(self) -> dict[str, Any]:
        """What must be equal for a comparison to be resumed.

        The baseline and the stopping rule are left out: the baseline affects no run, and `growth` has what may change
        of the rule.
        """
        identity = asdict(self) | {"entries": {entry.name: entry.config.dump() for entry in self.entries}}
        for name in ("tuning", "transfer_width", "tf32", "deterministic"):  # older comparisons lack these
            if not identity[name]:
                del identity[name]
        return {name: value for name, value in identity.items() if name not in MAY_CHANGE}


def split_designs(designs: Sequence[str]) -> tuple[list[str], list[str]]:
    """The designs, and the overrides among them, which apply to all."""
    sources = [design for design in designs if "=" not in design or Path(design).exists()]
    return sources, [design for design in designs if design not in sources]


def load_entries(
    sources: Sequence[str],
    overrides: Sequence[str],
    *,
    varied_fields: Sequence[VariedField] = (),
    scales: LearningRateScales = (),
) -> tuple[DesignEntry, ...]:
    """Load designs, or all variants of each, under unique names.

    A design is named after its preset, file or folder, a variant after its field values.
    Raises ConfigError naming a design that cannot be trained on text, or that a path of `scales` does not match.
    """
    if not sources:
        raise ConfigError("compare: no designs given; give at least one file, preset:NAME or folder")
    variants = enumerate_variants(varied_fields, len(sources))
    several_designs = bool(varied_fields) and len(sources) > 1
    entries: list[DesignEntry] = []
    design_names: list[str] = []
    for source in sources:
        design_name = _unique(_source_name(source), design_names)
        design_names.append(design_name)
        unmodified = _load_unmodified(source, overrides) if varied_fields else None
        variant_entries: list[DesignEntry] = []
        for variant in variants:
            config = _load_variant(source, overrides, variant, scales)
            for entry in variant_entries:
                if entry.config == config:
                    raise ConfigError(f"vary: {entry.name} and {variant.name} are the same design; leave one out")
            name = f"{design_name} {variant.name}" if several_designs else variant.name or design_name
            variant_entries.append(
                DesignEntry(
                    name=_unique(name, [entry.name for entry in (*entries, *variant_entries)]),
                    source=" ".join([source, *map(shlex.quote, variant.overrides)]),
                    config=config,
                    varied_fields=((("design", design_name),) if several_designs else ()) + variant.field_labels,
                    is_unmodified=not varied_fields or config == unmodified,
                )
            )
        entries += variant_entries
    if folders := [source for source in sources if Path(source).is_dir()]:
        print_status(
            f"{', '.join(folders)}: only the design is read, and trained from random weights like all others, on "
            f"sequences {PLAIN_ROWS}; `heddle compare loss` reads trained weights"
        )
    return tuple(entries)


def _load_variant(source: str, overrides: Sequence[str], variant: Variant, scales: LearningRateScales) -> ModelConfig:
    """The config of a variant. Raises ConfigError where it cannot be trained on text."""
    label = f"{source} ({variant.name})" if variant.name else source
    try:
        config = load_config(source, [*overrides, *variant.overrides])
    except DesignError as error:
        raise error.under(label) from None
    model = build(config if config.vocab_size else config.replace(vocab_size=1), device="meta")
    if not model.causal:
        raise ConfigError(f"{label}: a mixer sees later tokens, so the design cannot learn to predict them")
    if model.encoder_width is not None:
        raise ConfigError(f"{label}: reads an encoder's output, which text does not have; remove its cross_attention")
    try:
        learning_rate_factors(model, scales)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    return config


def _load_unmodified(source: str, overrides: Sequence[str]) -> ModelConfig | None:
    """The design without variation; None if it cannot be built, for example because it leaves the varied field open."""
    try:
        return load_config(source, overrides)
    except ConfigError:
        return None


def _unique(name: str, taken: Container[str]) -> str:
    """The name, with a number added where it is taken."""
    candidates = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


def _source_name(source: str) -> str:
    """The name of a preset, of a file without its suffix, or of a folder."""
    if source.startswith("preset:"):
        return source.removeprefix("preset:")
    path = Path(source)
    return path.resolve().name if path.is_dir() else path.stem


def choose_baseline(entries: Sequence[DesignEntry], requested: str | None) -> str:
    """The requested name; by default the first unmodified design, or else the first variant."""
    names = [entry.name for entry in entries]
    if requested is None:
        return next((entry.name for entry in entries if entry.is_unmodified), names[0])
    if requested not in names:
        raise ConfigError(f"baseline {requested}: names no design; {choices_hint(requested, names)}")
    return requested


def shared_vocab_size(entries: Sequence[DesignEntry], requested: int | None, default: int) -> int:
    """The size of the tokenizer that all designs share: the requested one, or the largest that every design allows."""
    limits = {entry.name: entry.config.vocab_size for entry in entries if entry.config.vocab_size is not None}
    if requested is None:
        return min(limits.values()) if limits else default
    for name, limit in limits.items():
        if limit < requested:
            raise ConfigError(
                f"vocab_size {requested}: is above vocab_size = {limit} of {name}; "
                "all designs share one tokenizer, so lower it"
            )
    return requested


def plan_warnings(
    plan: ComparisonPlan, parameters: dict[str, int], trained_tokens: dict[str, int], available_tokens: int
) -> list[str]:
    """Reasons why the comparison may not distinguish the designs, as sentences.

    parameters, trained_tokens: by design; 0 trained tokens where every run failed. available_tokens: of the text.
    """
    sentences = []
    length = plan.sequence_length
    for entry in plan.entries:
        mixers = [layer.mixer for _, layer in entry.config.expand() if layer.mixer is not None]
        windows = {window for mixer in mixers for window in mixer.windows}
        sentences += [
            f"{entry.name}: its window of {window} covers the whole training sequence of {length} tokens, "
            "so it was trained as full attention. Longer sequences would show the effect of the window."
            for window in sorted(windows)
            if window >= length
        ]
    trained = {name: tokens for name, tokens in trained_tokens.items() if tokens}
    lowest = min((tokens / parameters[name] for name, tokens in trained.items()), default=1.0)
    if lowest < 1:
        sentences.append(
            f"Short training: {lowest:.2g} tokens per parameter; about 20 are usual. "
            "The order of the designs may change with more training."
        )
    if parameters and max(parameters.values()) > 1.05 * min(parameters.values()):
        small, large = min(parameters, key=parameters.__getitem__), max(parameters, key=parameters.__getitem__)
        excess = parameters[large] / parameters[small] - 1
        sentences.append(f"The designs differ in size: {large} has {excess:.0%} more parameters than {small}.")
    if trained and max(trained.values()) > available_tokens:
        sentences.append(f"The text was read more than once: it has {available_tokens:,} training tokens.")
    is_rounded = plan.tuning is not None and plan.budget_kind == "tokens"  # to whole steps of the tuned batch sizes
    if len(set(trained.values())) > 1 and not is_rounded:
        sentences.append("The designs saw different amounts of text: each had the same budget in seconds or FLOPs.")
    return sentences
