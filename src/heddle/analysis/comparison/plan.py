"""The plan of a comparison: which designs are trained, on what, for how long; checked before anything runs."""

import itertools
import shlex
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heddle.analysis.comparison.tuning_fields import TuningPlan
from heddle.analysis.comparison.variation import Variant, VariedField, enumerate_variants
from heddle.config import DesignError
from heddle.errors import ConfigError, choices_hint
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.training.optimizer import LearningRateScales, learning_rate_factors
from heddle.training.width_transfer import transfer_over_width

BUDGET_KINDS = ("tokens", "seconds", "flops")
MAY_CHANGE = ("baseline", "until_resolved", "time_budget", "trackers")


@dataclass(frozen=True)
class DesignEntry:
    """One design of a comparison: a short unique name, where it came from, and its config.

    varied_fields: (path, label) of each varied field; where several designs are varied, ("design", name) comes first.
    is_unmodified: whether the variant equals the design as it was given.
    original_width: the width in the design's config, where `config` was resized to an equal size.
    scaled_fields: what changed, where its state was scaled: `layers[0].mixer.kv_rank 56 → 64`.
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
    budget_kind: str  # one of BUDGET_KINDS
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
    max_length_multiple: int  # longest text read after training, in sequence lengths; 1: none is read
    until_resolved: float | None = None  # more seeds, until every design is resolved or a tie within ± this
    time_budget: float | None = None  # seconds of training, for these seeds
    tuning: TuningPlan | None = None  # training fields that are tuned for each design before
    transfer_width: int | None = None  # the width at which the learning rate was chosen
    tf32: bool = False  # float32 products on CUDA
    deterministic: bool = False  # equal bits on CUDA, too
    trackers: tuple[str, ...] = ()  # to which the training on text is logged as well

    def __post_init__(self) -> None:
        """Raise ConfigError naming a design to which the learning rate of another width does not transfer."""
        for entry in self.entries:
            config = entry.config if entry.config.vocab_size else entry.config.replace(vocab_size=1)
            try:
                transfer_over_width(config, self.transfer_width, self.optimizer)
            except ConfigError as error:
                raise ConfigError(f"{entry.name}: {error}") from None

    def identity(self) -> dict[str, Any]:
        """What must be equal for a comparison to be continued.

        The baseline is left out, since it affects no run, and so is when to stop: `growth` holds what of it may change.
        """
        identity = asdict(self) | {"entries": {entry.name: entry.config.dump() for entry in self.entries}}
        for name in ("tuning", "transfer_width", "tf32", "deterministic"):  # earlier comparisons have none
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
        raise ConfigError("compare: names no design; give at least one file, preset:NAME or folder")
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
                    raise ConfigError(f"vary: {entry.name} and {variant.name} are one design; leave one of them out")
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
        raise ConfigError(f"{label}: reads an encoder's output, which texts do not have; remove its cross_attention")
    try:
        learning_rate_factors(model, scales)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    return config


def _load_unmodified(source: str, overrides: Sequence[str]) -> ModelConfig | None:
    """The design without variation; None where it cannot be built, because it leaves the varied field open, say."""
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
            f"A short training: {lowest:.2g} training tokens for each parameter, where about 20 are usual. "
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
        sentences.append("The designs saw different amounts of text: each had the same budget of time or operations.")
    return sentences
