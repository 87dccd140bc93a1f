"""The contract of a rewrite, and how rewrites are found: one file of `rewrites/` is one rewrite."""

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from heddle.config import Config, DesignError, Part, own_class
from heddle.conversion.weights import CalibrationText, Weights
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.modules.indexer import indexer_field

EVERYTHING = frozenset({"attention", "layers", "convolutions", "modules"})  # that a rewrite may keep
REWRITES_FOLDER = Path(__file__).parent / "rewrites"


class Rewrite(Config, ABC):
    """One conversion of a design and its weights. Its fields are its options.

    targets: fields of a design that it changes, each with the option that takes the new value. methods: sets of options
    by which it converts in different ways, for a comparison of all. layers: the numbers of the layers that it changes;
    None: all that it applies to. keeps: features that it preserves: `attention`, so that layers may share keys and
    values or have an indexer; `layers`, so that they may be visited several times; the inputs of short `convolutions`;
    and multi-token `modules`, which are built like the last layer. exact: `is_exact`, if that is always the same.
    text_decides_weights: it reads a text for its weights only; its options fix the design.
    """

    targets: ClassVar[Mapping[str, str]] = {}
    methods: ClassVar[Sequence[Mapping[str, str]]] = ()
    keeps: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool]
    text_decides_weights: ClassVar[bool] = False
    layers: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The name of its file."""
        return type(self).__module__.rpartition(".")[2]

    def describe(self) -> dict[str, Any]:
        """Its name and options, as conversion.json records them."""
        return {"rewrite": self.name, **self.dump()}

    @property
    def other_models(self) -> tuple[Path, ...]:
        """The folders of other models that it reads; their tokenizers must be the source's."""
        return ()

    @property
    def needs_text(self) -> bool:
        """Whether it reads a calibration text."""
        return self.text_decides_weights

    @property
    def chooses_on_text(self) -> bool:
        """Whether the text decides its design, not only its weights."""
        return self.needs_text and not self.text_decides_weights

    @property
    def fits_on_text(self) -> bool:
        """Whether it solves for matrices on the text, which takes as many tokens as they are wide."""
        return self.needs_text

    @property
    def sizes_on_text(self) -> bool:
        """Whether the text decides sizes, and so what the design costs."""
        return self.chooses_on_text

    def is_exact(self, design: ModelConfig) -> bool:
        """Whether the converted model computes the same logits as one of this design, up to rounding."""
        return type(self).exact

    @abstractmethod
    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Return the new design and its weights, which are made when they are looked up.

        text: given if `needs_text`. Raises DesignError, one sentence that says why the design cannot be converted.
        """

    def check_layers(self, design: ModelConfig) -> None:
        """Raises DesignError for a feature of the design that the rewrite neither supports nor keeps.

        These are layers that share weights, keys, values or a table of relative positions, short convolutions,
        indexers, values that are keys or are normalized, per-layer embeddings, layers that read ids, and multi-token
        modules, which are built like the last layer.
        """
        if design.multi_token is not None and "modules" not in self.keeps:
            reason = f"{self.name} would leave the modules in the old design"
            raise DesignError("multi_token", f"{reason}; give --to drop_multi_token before it, which leaves them out")
        if design.embedding.per_layer is not None and "layers" not in self.keeps:
            reason = f"gives every layer an embedding of its own, which {self.name} does not support"
            raise DesignError("embedding.per_layer", f"{reason}; convert a design without it")
        for index, (_, layer) in enumerate(design.expand()):
            for name, part in (("feedforward", layer.feedforward), ("mixer", layer.mixer)):
                if part is not None and part.reads_tokens and "layers" not in self.keeps:
                    reason = f"reads the ids of tokens, which {self.name} does not support"
                    raise DesignError(f"layers.{index}.{name}", f"{reason}; convert a design without it")
        if design.is_looped and "layers" not in self.keeps:
            reason = f"shares weights between layers, but {self.name} converts each layer separately"
            raise DesignError("layers.*.shared", f"{reason}; convert a design without it")
        for distinct in design.distinct_layers:
            for name, part in (("mixer", distinct.config.mixer), ("feedforward", distinct.config.feedforward)):
                if part is not None and has_convolutions(part) and "convolutions" not in self.keeps:
                    reason = f"is not supported by {self.name}, which would change its input"
                    path = f"layers.{distinct.index}.{name}.short_convolution"
                    raise DesignError(path, f"{reason}; convert a design without it")
        if "attention" not in self.keeps:
            self._check_attention(design)

    def _check_attention(self, design: ModelConfig) -> None:
        selected = self.selected_layers(design)
        for index, (_, layer) in enumerate(design.expand()):
            if index not in selected:
                continue
            fields = {"k_eq_v": "uses keys as values", "value_norm": "normalizes values"}
            found = {name: what for name, what in fields.items() if getattr(layer.mixer, name, False)}
            if indexer := indexer_field(layer.mixer):
                found[indexer] = "selects the keys of each query"
            for field, what in found.items():
                reason = f"{what}, which {self.name} does not support"
                raise DesignError(f"layers.{index}.mixer.{field}", f"{reason}; convert other layers, or leave it out")
        mixers = [layer.mixer for _, layer in design.expand()]
        read = (
            (None, design.kv_sources),
            (("value_residual", "values"), design.value_sources),
            (("position.shared", "table of relative positions"), design.bias_sources),
        )
        for value, sources in read:
            for index, (mixer, source) in enumerate(zip(mixers, sources, strict=True)):
                if source is not None and mixer is not None:
                    field, what = value or mixer.kv_read
                    reason = f"reads the {what} of layer {source}, but {self.name} would change only one of the two"
                    raise DesignError(f"layers.{index}.mixer.{field}", f"{reason}; convert a design without it")

    def refuse_layers(self, field: str) -> None:
        """Raises DesignError if layers are named, for a field that belongs to the whole design."""
        if self.layers is not None:
            raise DesignError(field, "applies to the whole design; name no layers")

    def selected_layers(self, design: ModelConfig) -> tuple[int, ...]:
        """The numbers of the layers that it may change. Raises ConfigError for a layer that does not exist."""
        if self.layers is None:
            return tuple(range(design.depth))
        for index in self.layers:
            if not 0 <= index < design.depth:
                raise ConfigError(f"layers.{index}: the design has layers 0 to {design.depth - 1}; name one of them")
        return tuple(sorted(set(self.layers)))

    def change_feedforwards(
        self, design: ModelConfig, change: Callable[[FeedforwardConfig | None, str], FeedforwardConfig | str], none: str
    ) -> ModelConfig:
        """The design with other feed-forwards in the selected layers that can have them.

        change: of a feed-forward and its path, returns its new config, or why it has none: a reason to refuse a named
        layer, and to leave any other unchanged. Raises DesignError with the reason `none` if no layer changes.
        """
        changed: dict[int, LayerConfig] = {}
        for index in self.selected_layers(design):
            layer, path = design.layers[index], f"layers.{index}.feedforward"
            new = change(layer.feedforward, path)
            if not isinstance(new, str):
                changed[index] = layer.replace(feedforward=new)
            elif self.layers is not None:
                raise DesignError(path, f"{new}; leave this layer out")
        if not changed:
            raise DesignError("feedforward", none)
        return replace_layers(design, changed)


class UnchangedError(DesignError):
    """A rewrite would change no layer."""


@contextmanager
def naming_layers(design: ModelConfig) -> Iterator[None]:
    """Within the block, a DesignError on `layers.N` says that N counts layers, where the design's entries repeat."""
    try:
        yield
    except DesignError as error:
        layer = re.match(r"layers\.(\d+)", error.path)
        if layer is None or len(merged_repeats(design).layers) == design.depth:
            raise
        raise DesignError(f"{error.path} (layer {layer[1]} of {design.depth}, from 0)", error.reason) from None


def has_convolutions(part: Part) -> bool:
    """Whether a part, or one within it, has short convolutions."""
    values = (getattr(part, name) for name in type(part).model_fields)
    own = getattr(part, "short_convolution", None) is not None
    return own or any(isinstance(value, Part) and has_convolutions(value) for value in values)


def replace_layers(design: ModelConfig, new_layers: Mapping[int, LayerConfig]) -> ModelConfig:
    """A resolved design with some layers replaced, by number. Raises DesignError if nothing changes."""
    layers = tuple(new_layers.get(index, layer) for index, layer in enumerate(design.layers))
    if layers == design.layers:
        raise UnchangedError("layers", "has this value in every layer already, so nothing would change; give another")
    return design.replace(layers=layers)


def merged_repeats(design: ModelConfig) -> ModelConfig:
    """Merge equal neighboring layers of a resolved design into entries with `repeat`."""
    entries: list[LayerConfig] = []
    for layer in design.layers:
        if entries and entries[-1].replace(repeat=1) == layer:
            entries[-1] = layer.replace(repeat=entries[-1].repeat + 1)
        else:
            entries.append(layer)
    return design.replace(layers=tuple(entries))


@cache
def rewrites() -> Mapping[str, type[Rewrite]]:
    """Every rewrite by its name, in alphabetical order."""
    names = sorted(file.stem for file in REWRITES_FOLDER.glob("*.py") if not file.stem.startswith("_"))
    folder = "heddle.conversion.rewrites"
    modules = {name: importlib.import_module(f"{folder}.{name}") for name in names}
    return {name: own_class(module, Rewrite, "rewrite") for name, module in modules.items()}  # type: ignore[type-abstract]
