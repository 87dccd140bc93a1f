"""A design: the config of a whole model, with its embedding, layers and head."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from pydantic import model_validator

from heddle.config import (
    Config,
    DesignError,
    Part,
    PositiveFloat,
    PositiveInt,
    Probability,
    Width,
    is_slot,
    kind_class,
    kinds,
    refuse,
)
from heddle.errors import ConfigError, shorten_value
from heddle.notebook import html_table
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import Activation, FeedforwardConfig
from heddle.parts.mixers import MixerConfig
from heddle.parts.modules.short_convolution import ShortConvolutionConfig
from heddle.parts.norms import NormConfig
from heddle.parts.positions import AdditivePositionConfig
from heddle.parts.residuals import ResidualConfig

# Limits on the size of a design.


MAX_LAYERS = 1024  # more take over two seconds to parse and to match against families
MAX_DISTINCT_LAYERS = 128  # each takes about 20 ms to build and measure


def too_many_layers(depth: int) -> str | None:
    """Return why a design of `depth` layers is refused, or None if it is not."""
    count = f"{depth}" if depth < 2**64 else "more than 2^64"
    return f"expands to {count} layers; at most {MAX_LAYERS} are allowed" if depth > MAX_LAYERS else None


@contextmanager
def refuse_overflow() -> Iterator[None]:
    """Turn the error of a meta tensor with more than 2^63 bytes into a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ConfigError(f"design: cannot be built ({error}); choose smaller sizes") from None


class PerLayerConfig(Config):
    """A second embedding of each token for every layer, `dim` wide (Gemma 3n, 2025).

    vocab_size: rows of its table; tokens beyond them read the first row. None: as many as the model's.

    Layer l adds `N(W_out (f(W_gate s) ⊙ p_l))` to its stream s, after its branches. With the embedding's output x and
    a table E, `p_l = (N(P_l x / sqrt(width)) + sqrt(dim) · E_l[token]) / sqrt(2)`.
    """

    later_fields = ("vocab_size",)

    dim: PositiveInt
    vocab_size: PositiveInt | None = None
    activation: Activation = "gelu_tanh"  # of the gate by which a layer reads its embedding


class EmbeddingConfig(Config):
    """`scale` multiplies embeddings by sqrt(width), `multiplier` by a number. `position` is added to them.

    token_types: how many types a token may have (BERT's segments, `layout.with_token_types`); a vector of each is
    added. norm: whether the sum passes through the model's norm (BERT, ModernBERT). per_layer: embeddings that layers
    read beside the stream.
    """

    later_fields = ("per_layer",)

    scale: bool = False
    multiplier: PositiveFloat | None = None  # Granite's embedding_multiplier
    token_types: PositiveInt | None = None
    position: AdditivePositionConfig | None = None
    norm: bool = False
    dropout: Probability = 0.0
    per_layer: PerLayerConfig | None = None


class HeadConfig(Config):
    """`tied` shares the embedding's weight. Logits are `cap · tanh(scale · (W h + b) / cap)` with `softcap` as cap.

    transform: an activation f; then h is N(f(V h + c)) of the hidden states, N the model's norm (BERT's masked language
    models). transform_bias: whether c is added.
    width_scale: another factor of the logits, set by hyperparameter transfer over width; the next transfer replaces it.
    """

    tied: bool = True
    bias: bool = False
    scale: PositiveFloat = 1.0  # Cohere's logit_scale
    softcap: PositiveFloat | None = None  # Gemma 2
    transform: Activation | None = None
    transform_bias: bool = False
    width_scale: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.transform_bias and self.transform is None:
            refuse("transform_bias", "does nothing without a transform; give transform an activation, or leave it out")
        return self

    def resolved(self) -> Self:
        """The same config with one factor of the logits, the product."""
        return self if self.width_scale is None else self.replace(scale=self.scale * self.width_scale, width_scale=None)


class InitializationConfig(Config):
    """normal(0, std). `depth_scaled` divides the std of each branch's output projection by sqrt(2 · layers).

    A residual kind may have other factors (`deep_norm`).
    """

    std: PositiveFloat = 0.02
    depth_scaled: bool = True


class LayerConfig(Config):
    """`repeat` equal layers, each a mixer and a feed-forward; or a list of `layers`, repeated as a whole.

    shared: every visit of this entry uses the same weights, in its own repeats and those of enclosing entries
    (Universal Transformer, Dehghani et al. 2018; Zamba2's shared block, 2024; Ouro, Zhu et al. 2025). Each visit has
    its own state. Whatever depends on depth counts visits: `initialization.depth_scaled`, `drop_path`, the α and β of
    `deep_norm`, the blocks of `attention_residuals` and λ_init of `differential_attention`.

    adapter_rank: rank of the product B A that each visit of a layer adds to its projections, with A and B of its own
    (Relaxed Recursive Transformers, Bae et al. 2024, arXiv 2410.20672). Stacks of experts have none. B is zero at
    first.
    """

    later_fields = ("shared", "adapter_rank")

    repeat: PositiveInt = 1
    shared: bool = False  # one set of weights for all visits
    adapter_rank: Width | None = None  # of what each visit adds to the projections, its own
    mixer: MixerConfig | None = None
    feedforward: FeedforwardConfig | None = None
    layers: "tuple[LayerConfig, ...] | None" = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        has_parts = self.mixer is not None or self.feedforward is not None
        if self.layers is not None and has_parts:
            refuse("layers", "a layer either nests layers or has a mixer and a feedforward; keep one of the two")
        if self.layers is not None and not self.layers:
            refuse("layers", "is empty; name at least one layer")
        if self.layers is not None and self.adapter_rank is not None:
            refuse("adapter_rank", "applies to single layers, but this entry nests layers; set it on the nested layers")
        if self.layers is None and not has_parts:
            refuse("mixer", "a layer needs a mixer, a feedforward or both; add one")
        return self

    def count(self) -> int:
        """Return how many layers this entry stands for."""
        inner = 1 if self.layers is None else sum(layer.count() for layer in self.layers)
        return self.repeat * inner

    def map(self, change: Callable[["LayerConfig"], "LayerConfig"]) -> "LayerConfig":
        """The same entry with `change` applied to each entry within it that nests no others."""
        if self.layers is None:
            return change(self)
        return self.replace(layers=tuple(layer.map(change) for layer in self.layers))

    @property
    def reads_tokens(self) -> bool:
        """Whether the mixer or the feed-forward of this single layer reads the ids of tokens."""
        return any(part is not None and part.reads_tokens for part in (self.mixer, self.feedforward))

    @property
    def has_shared(self) -> bool:
        """Whether this entry, or an entry within it, is shared."""
        return self.shared or any(layer.has_shared for layer in self.layers or ())

    def expand(self, path: str) -> Iterator[tuple[str, "LayerConfig"]]:
        """Yield each single layer with the path of its entry."""
        for _ in range(self.repeat):
            if self.layers is None:
                yield path, self
            else:
                for index, layer in enumerate(self.layers):
                    yield from layer.expand(f"{path}.layers[{index}]")


class MultiTokenConfig(Config):
    """Modules that predict tokens further ahead in training (DeepSeek-V3), each with one more layer of the last kind.

    The module of depth d predicts the token after the next d. Training minimizes the loss of the next token +
    `loss_weight` · mean of the modules' losses.
    """

    depth: PositiveInt = 1
    loss_weight: PositiveFloat = 0.3


@dataclass(frozen=True)
class DistinctLayer:
    """A layer that occurs `count` times in a design. path, index: the entry and layer index of its first occurrence.

    weights: how many of the occurrences have their own weights. looped: whether the others reuse these weights.
    """

    config: LayerConfig
    path: str
    index: int
    count: int
    weights: int
    looped: bool


class ModelConfig(Config):
    """A decoder (or, with every mixer `causal: false`, an encoder). `norm` is the default of every norm.

    `encoder` is a second design, without a head: `cross_attention` layers read its hidden states.
    `multi_token` adds modules that predict tokens further ahead, for training and for drafts.
    """

    vocab_size: PositiveInt | None = None  # None: the tokenizer's, set by training; in an encoder: the decoder's
    encoder: "ModelConfig | None" = None
    width: Width
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    embedding: EmbeddingConfig = EmbeddingConfig()
    residual: ResidualConfig
    head: HeadConfig = HeadConfig()
    initialization: InitializationConfig = InitializationConfig()
    multi_token: MultiTokenConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.layers:
            refuse("layers", "is empty; name at least one layer")
        if reason := too_many_layers(self.depth):
            refuse("layers", reason)
        if len(self.distinct_layers) > MAX_DISTINCT_LAYERS:
            reason = f"has {len(self.distinct_layers)} different layers; at most {MAX_DISTINCT_LAYERS} are allowed"
            refuse("layers", reason)
        if self.encoder is not None and self.encoder.encoder is not None:
            refuse("encoder.encoder", "an encoder cannot have an encoder; leave it out")
        if self.encoder is not None:
            for name, default in HeadConfig():
                if getattr(self.encoder.head, name) != default:
                    refuse(f"encoder.head.{name}", "does nothing, because an encoder has no head; leave it out")
        self._check_multi_token()
        self._check_residual()
        for (path, layer), source in zip(self.expand(), self.kv_sources, strict=True):
            if source is None and layer.mixer is not None and layer.mixer.reads_kv:
                field, what = layer.mixer.kv_read
                reason = f"no earlier layer has {what} of this window and this direction; leave it out"
                refuse(f"{path}.mixer.{field}", reason)
        for (path, layer), source in zip(self.expand(), self.value_sources, strict=True):
            if source is None and layer.mixer is not None and layer.mixer.adds_first_values:
                reason = f"no earlier layer has {layer.mixer.kind} with values to add; leave it out of the first one"
                refuse(f"{path}.mixer.value_residual", reason)
        self._check_tables()
        for (path, layer), source in zip(self.expand(), self.bias_sources, strict=True):
            if source is None and layer.mixer is not None and layer.mixer.shares_bias:
                reason = "no earlier layer has relative biases with a table of their own; leave it out of the first one"
                refuse(f"{path}.mixer.position.shared", reason)
        for path, visits in self._shared_visits.items():
            if visits == 1:
                refuse(f"{path}.shared", "does nothing for an entry that is visited once; repeat it, or leave it out")
        for (path, layer), looped in zip(self.expand(), self.looped_layers, strict=True):
            if layer.adapter_rank is not None and not looped:
                reason = "is for visits of a shared layer, but this one has its own weights; share it, or leave it out"
                refuse(f"{path}.adapter_rank", reason)
        return self

    def _check_tables(self) -> None:
        sources = self.table_sources
        for index, (path, layer) in enumerate(self.expand()):
            table = None if layer.mixer is None else layer.mixer.value_table
            if layer.mixer is None or table is None:
                continue
            field = f"{path}.mixer.value_embedding"
            if table.shared and sources[index] is None:
                number = "without a number" if table.table is None else f"with the number {table.table}"
                reason = f"no earlier layer has {layer.mixer.kind} with a table of its own {number}; leave it out"
                refuse(f"{field}.shared", reason)
            if table.table is not None and not table.shared and index not in sources:
                refuse(f"{field}.table", f"no later layer shares the table {table.table}; leave the number out")

    def _check_multi_token(self) -> None:
        if self.encoder is not None and self.encoder.multi_token is not None:
            refuse("encoder.multi_token", "does nothing, because an encoder has no head; leave it out")
        if self.multi_token is None:
            return
        if reason := too_many_layers(self.depth + self.multi_token.depth):
            refuse("multi_token.depth", reason)
        mixer = self.last_layer.mixer
        if self.last_layer.reads_tokens:
            refuse("multi_token", "the last layer reads the ids of tokens; change it, or leave this out")
        if mixer is not None and (mixer.reads_kv or mixer.adds_first_values or mixer.shares_bias):
            what = mixer.kv_read[1] if mixer.reads_kv else "values" if mixer.adds_first_values else "the position table"
            refuse("multi_token", f"the last layer reads {what} of another layer; give it its own, or leave this out")

    @property
    def last_layer(self) -> LayerConfig:
        """The last single layer."""
        layer = self.layers[-1]
        while layer.layers is not None:
            layer = layer.layers[-1]
        return layer

    def _check_residual(self) -> None:
        layers = [layer.config for layer in self.distinct_layers]
        most_branches = max((layer.mixer is not None) + (layer.feedforward is not None) for layer in layers)
        mixers = {"" if layer.mixer is None else layer.mixer.kind for layer in layers}
        if self.embedding.per_layer is not None and not self.residual.takes_embeddings:
            refuse("embedding.per_layer", f"is added to one stream, and {self.residual.kind} has several; leave it out")
        try:
            self.residual.check_layers(self.depth, most_branches, mixers)
        except DesignError as error:
            refuse(f"residual.{error.path}", error.reason)

    def _repr_html_(self) -> str:
        rows = [
            (count, *("none" if part is None else describe(part) for part in parts))
            for parts, count in self.equal_layers.items()
        ]
        vocab_size = "set by the data" if self.vocab_size is None else f"{self.vocab_size:,}"
        caption = f"width {self.width:,}, vocabulary {vocab_size}, {self.depth} layers"
        caption += f", norm {describe(self.norm)}, residual {describe(self.residual)}"
        return html_table(("layers", "mixer", "feed-forward"), rows, caption)

    @property
    def position_limit(self) -> int | None:
        """The maximum sequence length: the number of learned positions; None without learned positions."""
        return getattr(self.embedding.position, "length", None)

    def usual_length(self, length: int, following: int = 0) -> int:
        """A default sequence length: `length`, or less if `following` more tokens would have no positions."""
        return length if self.position_limit is None else max(1, min(length, self.position_limit - following))

    @cached_property
    def depth(self) -> int:
        """The number of layers, counting repeats."""
        return sum(layer.count() for layer in self.layers)

    @cached_property
    def kv_sources(self) -> tuple[int | None, ...]:
        """For each layer from the bottom up, the layer whose keys and values, or selection, it reads, or None."""
        last: dict[Any, int] = {}
        sources: list[int | None] = []
        for index, (_, layer) in enumerate(self.expand()):
            mixer = layer.mixer
            kind = None if mixer is None else mixer.kv_kind
            sources.append(last.get(kind) if mixer is not None and mixer.reads_kv else None)
            if mixer is not None and kind is not None and not mixer.reads_kv:
                last[kind] = index
        return tuple(sources)

    @cached_property
    def value_sources(self) -> tuple[int | None, ...]:
        """For each layer from the bottom up, the first layer of its kind if it adds that layer's values, else None."""
        first: dict[str, int] = {}
        sources: list[int | None] = []
        for index, (_, layer) in enumerate(self.expand()):
            mixer = layer.mixer
            sources.append(None if mixer is None or not mixer.adds_first_values else first.get(mixer.kind))
            if mixer is not None and mixer.hands_values:
                first.setdefault(mixer.kind, index)
        return tuple(sources)

    @cached_property
    def table_sources(self) -> tuple[int | None, ...]:
        """For each layer from the bottom up, the layer whose table of value embeddings it shares, or None."""
        last: dict[Any, int] = {}
        sources: list[int | None] = []
        for index, (_, layer) in enumerate(self.expand()):
            table = None if layer.mixer is None else layer.mixer.value_table
            key = None if layer.mixer is None or table is None else (layer.mixer.kind, table.table)
            sources.append(last.get(key) if table is not None and table.shared else None)
            if table is not None and not table.shared:
                last[key] = index
        return tuple(sources)

    @cached_property
    def bias_sources(self) -> tuple[int | None, ...]:
        """For each layer from the bottom up, the layer whose table of relative positions it shares, or None."""
        last: int | None = None
        sources: list[int | None] = []
        for index, (_, layer) in enumerate(self.expand()):
            shares = None if layer.mixer is None else layer.mixer.shares_bias
            sources.append(last if shares else None)
            last = index if shares is False else last
        return tuple(sources)

    @property
    def hands_over(self) -> bool:
        """Whether a layer reads keys, values or a table of an earlier one, its part of the embedding, or token ids."""
        sources = (*self.kv_sources, *self.value_sources, *self.bias_sources)
        reads_ids = self.embedding.per_layer is not None or self.reads_tokens
        return reads_ids or any(source is not None for source in sources)

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether a layer reads the ids of tokens."""
        return any(layer.reads_tokens for _, layer in self.expand())

    @cached_property
    def weight_sources(self) -> tuple[int, ...]:
        """For each layer from the bottom up, the first layer with its weights: itself, unless an entry is shared."""
        sources: list[int] = []
        first_visits: dict[str, list[int]] = {}

        def visit(entry: LayerConfig, path: str) -> None:
            for _ in range(entry.repeat):
                first = len(sources)
                if path in first_visits:
                    sources.extend(first_visits[path])
                elif entry.layers is None:
                    sources.append(first)
                else:
                    for index, inner in enumerate(entry.layers):
                        visit(inner, f"{path}.layers[{index}]")
                if entry.shared:
                    first_visits.setdefault(path, sources[first:])

        for index, entry in enumerate(self.layers):
            visit(entry, f"layers[{index}]")
        return tuple(sources)

    @property
    def _shared_visits(self) -> dict[str, int]:
        """How often each shared entry is visited, by its path."""
        visits: dict[str, int] = {}

        def count(entry: LayerConfig, path: str, times: int) -> None:
            times *= entry.repeat
            if entry.shared:
                visits[path] = times
            for index, inner in enumerate(entry.layers or ()):
                count(inner, f"{path}.layers[{index}]", times)

        for index, entry in enumerate(self.layers):
            count(entry, f"layers[{index}]", 1)
        return visits

    def shared_entry(self, path: str) -> str:
        """The path of the outermost shared entry that contains the layer at `path`."""
        return next(entry for entry in self._shared_visits if f"{path}.".startswith(f"{entry}."))

    @property
    def is_looped(self) -> bool:
        """Whether layers reuse the weights of other layers."""
        return any(entry.has_shared for entry in self.layers)

    @cached_property
    def looped_layers(self) -> tuple[bool, ...]:
        """For each layer from the bottom up, whether its weights are used by several visits."""
        visits = Counter(self.weight_sources)
        return tuple(visits[source] > 1 for source in self.weight_sources)

    @cached_property
    def layer_order(self) -> tuple[int, ...]:
        """For each layer from the bottom up, its index in `distinct_layers`."""
        index_of_parts: dict[Any, int] = {}
        # Repeats are the same object, which is faster to look up than its fields.
        index_of_object: dict[tuple[int, bool], int] = {}
        order: list[int] = []
        sources_of_layers = (self.kv_sources, self.value_sources, self.table_sources, self.bias_sources)
        layers = zip(self.expand(), *sources_of_layers, self.looped_layers, strict=True)
        for number, ((_, layer), *sources, looped) in enumerate(layers):
            differs = self.residual.stream_grows or (not order and self.residual.first_layer_differs)
            reads = any(source is not None for source in sources)
            index = None if differs or reads else index_of_object.get((id(layer), looped))
            if index is None:
                own = number if differs else None
                read = tuple(None if source is None else order[source] for source in sources)
                parts = (own, layer.mixer, layer.feedforward, layer.adapter_rank, read, looped)
                index = index_of_parts.setdefault(parts, len(index_of_parts))
            if not differs and not reads:
                index_of_object[id(layer), looped] = index
            order.append(index)
        return tuple(order)

    @cached_property
    def distinct_layers(self) -> tuple[DistinctLayer, ...]:
        """The different layers of the design, in the order of their first occurrence."""
        counts = Counter(self.layer_order)
        weights = Counter(self.layer_order[source] for source in set(self.weight_sources))
        first_layers: dict[int, tuple[LayerConfig, str, int]] = {}
        for layer_index, (index, (path, layer)) in enumerate(zip(self.layer_order, self.expand(), strict=True)):
            first_layers.setdefault(index, (layer, path, layer_index))
        return tuple(
            DistinctLayer(*first, counts[index], weights[index], self.looped_layers[first[2]])
            for index, first in first_layers.items()
        )

    @property
    def equal_layers(self) -> dict[tuple[MixerConfig | None, FeedforwardConfig | None], int]:
        """How many layers have the same mixer and feed-forward, in the order of their first occurrence."""
        counts: dict[tuple[MixerConfig | None, FeedforwardConfig | None], int] = {}
        for layer in self.distinct_layers:
            parts = layer.config.mixer, layer.config.feedforward
            counts[parts] = counts.get(parts, 0) + layer.count
        return counts

    def fingerprint(self) -> str:
        """Return the SHA-256 of the design as plain data with repeats written out: the same for equal designs."""
        layers = [layer.config.replace(repeat=1, shared=False).dump() for layer in self.distinct_layers]
        plain = self.dump() | {"layers": [layers[index] for index in self.layer_order]}
        plain |= {"weight_sources": self.weight_sources} if self.is_looped else {}
        text = json.dumps(plain, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def resolved(self) -> Self:
        """Return the design with repeats and defaults written out: equal for designs that build the same model.

        Shared entries, and entries that contain them, are not expanded.
        """
        return self._resolved

    @cached_property
    def _resolved(self) -> Self:
        context = BuildContext(self.width, self.norm)

        def resolved(layer: LayerConfig) -> LayerConfig:
            mixer = None if layer.mixer is None else layer.mixer.resolved(context)
            feedforward = None if layer.feedforward is None else layer.feedforward.resolved(context)
            return layer.replace(mixer=mixer, feedforward=feedforward)

        layers = [resolved(layer.config.replace(repeat=1, shared=False)) for layer in self.distinct_layers]
        in_order: list[LayerConfig] = []
        number = 0
        for entry in self.layers:
            indices = self.layer_order[number : number + entry.count()]
            in_order += [entry.map(resolved)] if entry.has_shared else [layers[index] for index in indices]
            number += len(indices)
        encoder = None if self.encoder is None else self.encoder.resolved()
        return self.replace(layers=tuple(in_order), encoder=encoder, head=self.head.resolved())

    def expand(self) -> Iterator[tuple[str, LayerConfig]]:
        """Yield each single layer from the bottom up, with the path of its entry."""
        for index, layer in enumerate(self.layers):
            yield from layer.expand(f"layers[{index}]")


def describe(part: Config, with_defaults: bool = True) -> str:
    """Return a part as a short phrase: `attention heads=4 kv_heads=2 position=rope`.

    Fields that are off are omitted if that is their default; without `with_defaults` all that have their default.
    """
    words = [part.kind] if isinstance(part, Part) else []
    for name in part.dump():
        if name == "kind":
            continue
        value, default = getattr(part, name), type(part).model_fields[name].default
        if value == default and type(value) is type(default) and (not with_defaults or value in (False, 0)):
            continue
        if isinstance(value, ShortConvolutionConfig):
            others = describe(value, with_defaults=False).removeprefix(f"of={list(value.of)}")
            value = f"({','.join(value.of)}{others})" if others else ",".join(value.of)
        elif isinstance(value, Config):
            dims = getattr(value, "rotary_dim", None)
            if dims is not None and dims == getattr(part, "head_dim", None):  # the default, written out
                value = value.replace(rotary_dim=None)
            is_whole = isinstance(value, MixerConfig) or not isinstance(value, Part)
            inner = describe(value, is_whole)
            value = f"({inner})" if is_whole or " " in inner else inner
        elif isinstance(value, tuple):
            value = shorten_value(part.dump()[name])
        words.append(name if value is True else f"{name}={str(value).lower() if value is False else value}")
    return " ".join(words)


# JSON Schema of designs, for editors. A field that holds a part allows every kind that fits there, by any name.


SLOTS = ("feedforwards", "mixers", "norms", "positions", "residuals", "scalings")


def schema() -> dict[str, Any]:
    """Return the schema of a design file (JSON Schema draft 2020-12)."""
    definitions: dict[str, Any] = {}
    root = _config_schema(ModelConfig, definitions)
    for slot in SLOTS:
        choices_by_base: dict[str, list[dict[str, Any]]] = {}
        for kind in kinds(slot):
            cls = kind_class(slot, kind)
            part = _config_schema(cls, definitions)
            names = [kind, *cls.aliases]
            word = [] if "required" in part else [{"enum": names}]  # a kind without required fields is also a word
            part["properties"] = {"kind": {"enum": names} if cls.aliases else {"const": kind}, **part["properties"]}
            part["required"] = ["kind", *part.get("required", [])]
            for base in cls.__mro__:
                if issubclass(base, Part) and is_slot(base):
                    choices = choices_by_base.setdefault(base.__name__, [])
                    choices += [{"$ref": f"#/$defs/{slot}.{kind}"}, *word]
            definitions[f"{slot}.{kind}"] = part
        definitions |= {name: {"oneOf": choices} for name, choices in choices_by_base.items()}
    # load_config has defaults for norm and residual. A design may contain a design (its encoder), hence a definition.
    design = definitions[ModelConfig.__name__]
    design["required"] = [name for name in design["required"] if name not in ("norm", "residual")]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def _config_schema(config: type[Config], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one config class, and add the schemas that it refers to to `definitions`."""
    schema: dict[str, Any] = config.model_json_schema(ref_template="#/$defs/{model}")
    for name, definition in schema.pop("$defs", {}).items():
        definitions.setdefault(name, definition)
    return schema
