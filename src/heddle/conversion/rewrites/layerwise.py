"""A different rewrite for each layer, as a search chooses them.

Rewrites applied one after another are each fitted to the model that the earlier ones made. Here all are fitted to the
source, so that a converted layer does not depend on the other conversions, and layers that were fitted alone can be put
together.
"""

import re
from collections.abc import Callable, Mapping

from torch import Tensor

from heddle.config import DesignError
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.targets import parse_rewrites
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights
from heddle.model.config import LayerConfig, ModelConfig

MakeLayer = Callable[[], dict[str, Tensor]]


class Layerwise(Rewrite):
    """Rewrites beside each other: `choices=["layers.0,3.kv_heads=2", "layers.1.window=64"]`, each fitted to MODEL."""

    choices: tuple[str, ...]

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """The rewrites of the choices."""
        return parse_rewrites(self.choices)

    @property
    def needs_text(self) -> bool:
        """Whether one of them does."""
        return any(rewrite.needs_text for rewrite in self.rewrites)

    @property
    def chooses_on_text(self) -> bool:
        """Whether one of them does."""
        return any(rewrite.chooses_on_text for rewrite in self.rewrites)

    @property
    def fits_on_text(self) -> bool:
        """Whether one of them does."""
        return any(rewrite.fits_on_text for rewrite in self.rewrites)

    def is_exact(self, design: ModelConfig) -> bool:
        """Whether all of them are."""
        return all(rewrite.is_exact(design) for rewrite in self.rewrites)

    def check_layers(self, design: ModelConfig) -> None:
        """As each of them does."""
        for rewrite in self.rewrites:
            rewrite.check_layers(design)

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError for a layer without a number or with two choices, and for what changes more than layers.

        Also if a layer would read the keys of another layer than the one that it was fitted to.
        """
        self.refuse_layers("layers")
        if not self.choices:
            raise DesignError("choices", 'is empty; give targets such as "layers.0.kv_heads=2"')
        chosen: dict[int, Weights] = {}
        for target, rewrite in zip(self.choices, self.rewrites, strict=True):
            if rewrite.layers is None:
                raise DesignError("choices", f"{target} names no layers; write layers.0.{target}")
            twice = sorted(set(rewrite.layers) & set(chosen))
            if twice:
                raise DesignError("choices", f"layer {twice[0]} is named twice; choose one rewrite for each layer")
            converted = rewrite.apply(source, text)
            check_only_layers(target, source.design, converted.design)
            chosen |= dict.fromkeys(rewrite.layers, converted)
        configs = {index: converted.design.layers[index] for index, converted in chosen.items()}
        made = {index: (lambda i=index, of=converted: of.layer(i)) for index, converted in chosen.items()}
        sources = {index: converted.design.kv_sources[index] for index, converted in chosen.items()}
        return assembled(source, configs, made, sources)


def check_only_layers(target: str, design: ModelConfig, converted: ModelConfig) -> None:
    """Raises DesignError if a conversion changes more than the configs of its layers."""
    if converted.depth != design.depth or converted.replace(layers=design.layers) != design:
        reason = f"{re.split('[=,]', target)[0]} changes more than single layers"
        raise DesignError("choices", f"{reason}; give it as a --to of its own")


def assembled(
    source: Weights,
    configs: Mapping[int, LayerConfig],
    made: Mapping[int, MakeLayer],
    kv_sources: Mapping[int, int | None],
) -> Weights:
    """The weights of a source with some layers replaced.

    configs: of the layers. made: their parameters. kv_sources: the layer whose keys and values each was fitted to, as
    in `ModelConfig.kv_sources`. Raises DesignError if a layer would read others.
    """
    layers = tuple(configs.get(index, layer) for index, layer in enumerate(source.design.layers))
    design = source.design.replace(layers=layers).resolved()
    for index, expected in kv_sources.items():
        if expected is not None and (design.kv_sources[index] != expected or expected in configs):
            reason = f"was fitted to the keys and values of layer {expected}, which changes; leave that layer unchanged"
            raise DesignError(f"layers.{index}.mixer", reason)
    return _Assembled(source, design, made)


class _Assembled(ConvertedWeights):
    def __init__(self, source: Weights, design: ModelConfig, made: Mapping[int, MakeLayer]) -> None:
        super().__init__(source, design)
        self.made: Mapping[int, MakeLayer] = made

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer of the source, or the one that replaces it."""
        return self.made[index]() if index in self.made else self.source.layer(index)
