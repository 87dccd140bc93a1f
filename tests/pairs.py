"""Designs in which every two choices of different factors meet: a covering array over the cases of tests/cases.py.

A factor is chosen once per layer (mixer, its position, feed-forward) or once per design (norm, residual, embedding,
head, encoder, dropout rates). A choice is a kind of the factor's slot. Mixers also differ by what they declare: a
window, both directions, an encoder output. Each use of a choice takes another variant from the cases. Nothing here
names a kind: a new part or a new field of the model joins with its line in tests/cases.py.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import torch

from heddle.config import Config, Part, Probability, build_under, kind_class, parse_config
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import build
from heddle.parts.build import BuildContext
from heddle.parts.mixers import MixerConfig
from heddle.parts.positions import PositionConfig
from tests.cases import CASES, Data, case, design, layer

WIDTH, DEPTH, MODEL = 24, 2, -1  # of every design; layer index −1 stands for the design itself
RATE = 0.2
MIXER, POSITION, FORWARD, RATES, ENCODER = "mixer", "position", "feedforward", "rates", "encoder"
NONE, BIDIRECTIONAL, CROSS = "none", "bidirectional", "with an encoder output"
# Fields of a design that are not chosen here. A law adds multi-token modules to every design.
FIXED_FIELDS = {"vocab_size", "width", "layers", "multi_token"}
WIDTHS = ("head_dim", "rope_dim")  # fields that set how many dims a position rotates

Choice = tuple[str, str]  # factor, label
Pair = frozenset[Choice]
Site = tuple[int, str]  # layer or MODEL, factor
C = TypeVar("C", bound=Config)


class PositionVariant(NamedTuple):
    """A position from a case, and the width of the heads in that case."""

    data: Data
    dims: int


@cache
def type_hints(cls: type[Config]) -> dict[str, Any]:
    """The annotation of each field, with what a field's type is annotated with."""
    return get_type_hints(cls, include_extras=True)


def classes(hint: Any) -> list[type]:
    """Every class within an annotation."""
    return [hint] if isinstance(hint, type) else [cls for inner in get_args(hint) for cls in classes(inner)]


@cache
def fields_of_slot(cls: type[Config], slot: str) -> list[str]:
    """The fields of a config that hold a part of a slot."""
    hints = type_hints(cls)
    return [name for name in cls.model_fields if slot in {getattr(inner, "slot", "") for inner in classes(hints[name])}]


def fields_of(config: Config) -> Iterator[tuple[str, Any]]:
    """Name and value of every field; iterating over a pydantic model would also give its cached properties."""
    return ((name, getattr(config, name)) for name in type(config).model_fields)


@cache
def rates(cls: type[Config]) -> frozenset[str]:
    """The dropout rates of a config, without those of its parts."""
    return frozenset(name for name, hint in type_hints(cls).items() if hint == Probability)


def with_rate(config: C, rate: float) -> C:
    """The design with this value for every dropout rate, also those of its parts."""
    own = rates(type(config))
    changed: dict[str, Any] = {}
    for name, value in fields_of(config):
        if name in own:
            changed[name] = rate
        elif isinstance(value, Config):
            changed[name] = with_rate(value, rate)
        elif isinstance(value, tuple):
            changed[name] = tuple(with_rate(item, rate) if isinstance(item, Config) else item for item in value)
    return (
        config.replace(**changed) if any(getattr(config, name) != value for name, value in changed.items()) else config
    )


def mixer_label(config: MixerConfig, context: BuildContext) -> str:
    """The kind, and what the module declares about the tokens it sees."""
    with torch.device("meta"):
        mixer = config.build(context)
    words = [config.kind]
    if mixer.encoder_width is not None:
        words.append(CROSS)
    elif mixer.window is not None:
        words.append("with a window")
    return " ".join([*words, *([] if mixer.causal else [BIDIRECTIONAL])])


def is_bidirectional(label: str) -> bool:
    """Whether a mixer with this label sees later tokens."""
    return label.endswith(BIDIRECTIONAL)


def reads_encoder(label: str) -> bool:
    """Whether a mixer with this label reads an encoder output."""
    return CROSS in label


def with_position(mixer: Data, position: Data | None) -> Data:
    """The mixer, and mixers nested in it, with this position (or none) in every field for a position."""
    cls = kind_class(MixerConfig.slot, mixer["kind"])
    inner = {name: mixer[name] for name in fields_of_slot(cls, MixerConfig.slot) if takes_position(mixer[name])}
    own = fields_of_slot(cls, PositionConfig.slot) or ([] if inner else [POSITION])  # the config then raises an error
    data = {name: value for name, value in mixer.items() if name not in own}
    data |= {name: with_position(value, position) for name, value in inner.items()}
    return data if position is None else data | dict.fromkeys(own, position)


def takes_position(mixer: Data) -> bool:
    """Whether a mixer, or one nested in it, has a field for a position."""
    cls = kind_class(MixerConfig.slot, mixer["kind"])
    inner = fields_of_slot(cls, MixerConfig.slot)
    return bool(fields_of_slot(cls, PositionConfig.slot)) or any(takes_position(mixer[name]) for name in inner)


def positions(config: Part) -> Iterator[PositionConfig]:
    """Every position of a mixer and of mixers nested in it."""
    for _, value in fields_of(config):
        if isinstance(value, PositionConfig):
            yield value
        elif isinstance(value, Part):
            yield from positions(value)


def kinds_in(part: Part) -> str:
    """A part's kind and the kinds of the parts nested in it: `rope + yarn`."""
    return " + ".join([part.kind, *(kinds_in(value) for _, value in fields_of(part) if isinstance(value, Part))])


def layer_choices(config: LayerConfig, context: BuildContext) -> Iterator[tuple[str, str, Any]]:
    """Factor, label and value of each choice of a layer."""
    mixer, feedforward = config.mixer, config.feedforward
    yield (
        FORWARD,
        NONE if feedforward is None else feedforward.kind,
        None if feedforward is None else feedforward.dump(),
    )
    if mixer is None:
        yield MIXER, NONE, None
    else:
        data = mixer.dump()
        yield MIXER, mixer_label(mixer, context), with_position(data, None)
        dims = data.get("rope_dim") or data.get("head_dim") or context.width // data.get("heads", 1)
        for position in positions(mixer):
            yield POSITION, kinds_in(position), PositionVariant(position.dump(), dims)
    if mixer is None or not list(positions(mixer)):
        yield POSITION, NONE, None


def model_choices(config: Config, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Factor, label and value of each choice of a design except its layers. Other values are labels themselves."""
    hints = type_hints(type(config))
    for name, value in fields_of(config):
        if hints[name] == Probability or (not path and name in FIXED_FIELDS):
            continue
        if any(issubclass(cls, Part) for cls in classes(hints[name])):
            yield path + name, NONE if value is None else value.kind, None if value is None else value.dump()
        elif type(None) in classes(hints[name]) and any(issubclass(cls, Config) for cls in classes(hints[name])):
            yield path + name, NONE if value is None else "some", None if value is None else value.dump()
        elif isinstance(value, Config):
            yield from model_choices(value, f"{path}{name}.")
        else:
            yield path + name, str(value), value


def names_table(entry: LayerConfig) -> bool:
    """Whether a layer's value embeddings have a number, by which a later layer shares their table."""
    table = None if entry.mixer is None else entry.mixer.value_table
    return table is not None and table.table is not None


@cache
def catalogue() -> dict[str, dict[str, list[Any]]]:
    """Factor -> label -> variants from the cases; the most frequent label first. A factor has at least two labels."""
    variants: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    frequency: Counter[Choice] = Counter()
    for name in CASES:
        config = with_rate(case(name), 0.0)
        context = BuildContext(config.width, config.norm)
        # What a layer reads of another one, or of a residual, is no choice of one layer; test_laws.py has those cases.
        of_layers = (config.kv_sources, config.value_sources, config.table_sources, config.bias_sources)
        sources = zip(config.expand(), *of_layers, strict=True)
        alone = [each for (_, each), *read in sources if read == [None] * len(of_layers) and not names_table(each)]
        alone = [each for each in alone if each.feedforward is None or not each.feedforward.reads_streams]
        layers = [choice for each in alone for choice in layer_choices(each, context)]
        for factor, label, value in [*layers, *model_choices(config)]:
            frequency[factor, label] += 1
            if value not in variants[factor][label]:
                variants[factor][label].append(value)
    variants[RATES] = {"off": [0.0], "on": [RATE]}
    return {
        factor: dict(sorted(labels.items(), key=lambda item: -frequency[factor, item[0]]))
        for factor, labels in variants.items()
        if len(labels) > 1
    }


_refusals: dict[str, str] = {}


def refusal(mixer: Data | None) -> str:
    """Why a layer's mixer cannot be built; empty if it can. Asked once for each."""
    key = repr(mixer)
    if key not in _refusals:
        _refusals[key] = ""
        try:
            config = None if mixer is None else parse_config(LayerConfig, {MIXER: mixer}).mixer
            with torch.device("meta"):
                _ = config is None or build_under(
                    MIXER, config.build, BuildContext(WIDTH, case(next(iter(CASES))).norm)
                )
        except ConfigError as error:
            _refusals[key] = str(error)
    return _refusals[key]


def joined(mixer: Data | None, position: PositionVariant | None) -> Data | None:
    """The mixer with the position. If its heads do not fit the position, they get the width of the position's case."""
    if mixer is None or position is None:
        return mixer
    data = with_position(mixer, position.data)
    return data if not refusal(data) else with_head_width(data, position.dims)


def with_head_width(mixer: Data, dims: int) -> Data:
    """The mixer, and mixers nested in it, with this many rotary dims."""
    cls = kind_class(MixerConfig.slot, mixer["kind"])
    inner = {name: with_head_width(mixer[name], dims) for name in fields_of_slot(cls, MixerConfig.slot)}
    return mixer | inner | {name: dims for name in WIDTHS if name in cls.model_fields}


@cache
def mixers_of(mixer: str, position: str) -> list[Data | None]:
    """Variants of a mixer with variants of a position; each variant that fits any other occurs at least once."""
    mixers, positions_ = catalogue()[MIXER][mixer], catalogue()[POSITION][position]
    if mixer == NONE:
        return [None] if position == NONE else []  # without a mixer there is no position
    combined: list[Data | None] = []
    for first, second in ((mixers, positions_), (positions_, mixers)):
        for number, variant in enumerate(first):
            for step in range(len(second)):
                partner = second[(number + step) % len(second)]
                data = joined(variant, partner) if first is mixers else joined(partner, variant)
                if not refusal(data):
                    combined += [data] if data not in combined else []
                    break
    return combined


def encoder_width(mixer: Data | None) -> int | None:
    """The encoder_width of a mixer, or of one nested in it."""
    if mixer is None:
        return None
    inner = fields_of_slot(kind_class(MixerConfig.slot, mixer["kind"]), MixerConfig.slot)
    return mixer.get("encoder_width") or next((width for name in inner if (width := encoder_width(mixer[name]))), None)


def with_encoder_width(mixer: Data, width: int | None) -> Data:
    """The mixer, and mixers nested in it, with this encoder_width: a design has one encoder output for all layers."""
    cls = kind_class(MixerConfig.slot, mixer["kind"])
    inner = {name: with_encoder_width(mixer[name], width) for name in fields_of_slot(cls, MixerConfig.slot)}
    reads = "encoder_width" in cls.model_fields and width is not None
    return mixer | inner | ({"encoder_width": width} if reads else {})


@dataclass
class Draft:
    """A label for each site, and the index of the variant used there."""

    labels: dict[Site, str]
    picks: dict[Site, int] = field(default_factory=dict)

    def pairs(self) -> set[Pair]:
        """Every two choices that meet: within a layer, or in the design."""
        pairs = set()
        for index in range(DEPTH):
            choices = [(factor, label) for (where, factor), label in self.labels.items() if where in (MODEL, index)]
            pairs |= {frozenset(pair) for pair in combinations(choices, 2)}
        return pairs

    def pairs_at(self, site: Site, label: str) -> set[Pair]:
        """Every two choices that a label at another site would let meet."""
        where, factor = site
        return {
            frozenset(((factor, label), (other, chosen)))
            for (place, other), chosen in self.labels.items()
            if (place in (MODEL, where) or where == MODEL) and other != factor
        }

    def variants(self, site: Site) -> list[Any]:
        """The variants for a site."""
        where, factor = site
        if factor == MIXER:
            return mixers_of(self.labels[site], self.labels[where, POSITION])
        return catalogue()[factor][self.labels[site]]

    def config(self) -> ModelConfig:
        """The design, built once on the meta device. Raises ConfigError if it is invalid."""
        config = self.parsed()
        build(config, device="meta")
        return config

    def parsed(self) -> ModelConfig:
        """The design, of which no model was built. Raises ConfigError if its fields are invalid."""
        value = {site: self.variants(site)[self.picks.get(site, 0) % len(self.variants(site))] for site in self.labels}
        encoder = value.get((MODEL, ENCODER))
        mixers = [value[index, MIXER] for index in range(DEPTH)]
        width = (
            encoder["width"] if encoder else next((width for mixer in mixers if (width := encoder_width(mixer))), None)
        )
        mixers = [None if mixer is None else with_encoder_width(mixer, width) for mixer in mixers]
        data = design(*(layer(mixers[index], value[index, FORWARD]) for index in range(DEPTH)), width=WIDTH)
        for (where, factor), variant in value.items():
            if where == MODEL and factor != RATES:
                path, _, name = factor.rpartition(".")
                if path:
                    data[path] = data.get(path, {}) | {name: variant}
                else:
                    data[name] = variant
        return with_rate(parse_config(ModelConfig, data), value[MODEL, RATES])
