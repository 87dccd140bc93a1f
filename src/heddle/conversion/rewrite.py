"""The contract of a rewrite, and how rewrites are found: one file of `rewrites/` is one rewrite."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from heddle.config import Config, DesignError, own_class
from heddle.conversion.weights import CalibrationText, Weights
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig

REWRITES_FOLDER = Path(__file__).parent / "rewrites"


class Rewrite(Config, ABC):
    """One conversion of a design and its weights. Its fields are its options.

    targets: fields of a design that it changes, each with the option that takes the new value. methods: sets of options
    by which it converts in different ways, for a comparison of all. layers: the numbers of the layers that it changes;
    None: all that it applies to. keeps_attention: whether layers that read the keys and values of others still can.
    keeps_modules: whether multi-token modules still fit, which have a layer of the last one's kind.
    """

    targets: ClassVar[Mapping[str, str]] = {}
    methods: ClassVar[Sequence[Mapping[str, str]]] = ()
    keeps_attention: ClassVar[bool] = False
    keeps_modules: ClassVar[bool] = False
    layers: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The name of its file."""
        return type(self).__module__.rpartition(".")[2]

    def describe(self) -> dict[str, Any]:
        """Its name and options, as conversion.json records them."""
        return {"rewrite": self.name, **self.dump()}

    @property
    def needs_text(self) -> bool:
        """Whether it reads a calibration text."""
        return False

    @abstractmethod
    def is_exact(self, design: ModelConfig) -> bool:
        """Whether the converted model computes the same logits as one of this design, up to rounding."""

    @abstractmethod
    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Return the new design and its weights, which are made when they are looked up.

        text: given if `needs_text`. Raises DesignError, one sentence that says why the design cannot be converted.
        """

    def check_source(self, design: ModelConfig) -> None:
        """Raises DesignError for what a conversion cannot keep.

        Layers that read the keys and values of others, unless `keeps_attention`; multi-token modules, unless
        `keeps_modules`.
        """
        if design.multi_token is not None and not self.keeps_modules:
            reason = f"{self.name} would leave the modules those of the old design"
            raise DesignError("multi_token", f"{reason}; convert with drop_multi_token first")
        for index, source in enumerate(design.kv_sources):
            if source is not None and not self.keeps_attention:
                reason = f"reads the keys and values of layer {source}, which {self.name} would change for one of them"
                raise DesignError(f"layers.{index}.mixer.shared_kv", f"{reason}; convert a design without it")

    def refuse_layers(self, field: str) -> None:
        """Raises DesignError if layers are named, for a field that belongs to the whole design."""
        if self.layers is not None:
            raise DesignError(field, "belongs to the whole design, not to some layers; name no layers")

    def selected_layers(self, design: ModelConfig) -> tuple[int, ...]:
        """The numbers of the layers that it may change. Raises ConfigError for a layer that there is not."""
        if self.layers is None:
            return tuple(range(design.depth))
        for index in self.layers:
            if not 0 <= index < design.depth:
                raise ConfigError(f"layers.{index}: the design has layers 0 to {design.depth - 1}; name one of them")
        return tuple(sorted(set(self.layers)))


def replace_layers(design: ModelConfig, new_layers: Mapping[int, LayerConfig]) -> ModelConfig:
    """A resolved design with some layers replaced, by number. Raises DesignError if nothing changes."""
    layers = tuple(new_layers.get(index, layer) for index, layer in enumerate(design.layers))
    if layers == design.layers:
        raise DesignError("layers", "are as asked for already, so nothing would change; ask for something else")
    return design.replace(layers=layers)


def merged_repeats(design: ModelConfig) -> ModelConfig:
    """A resolved design whose equal neighboring layers are one entry with `repeat`."""
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
