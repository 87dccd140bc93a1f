"""A design: the config of a whole model, and of its embedding, layers and head."""

import hashlib
import json
from collections.abc import Iterator
from typing import Self

from pydantic import model_validator

from heddle.config import Config, Count, Positive, Rate, refuse
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.mixers import MixerConfig, Place
from heddle.parts.norms import NormConfig
from heddle.parts.positions import AdditiveConfig
from heddle.parts.residuals import ResidualConfig

MOST_LAYERS = 4096


class EmbeddingConfig(Config):
    """`scale` multiplies embeddings by sqrt(width); `position` is added to them."""

    scale: bool = False
    position: AdditiveConfig | None = None
    dropout: Rate = 0.0


class HeadConfig(Config):
    """`tied` uses the embedding's weight. Logits are `cap · tanh(scale · (W h + b) / cap)` with `softcap` as cap."""

    tied: bool = True
    bias: bool = False
    scale: Positive = 1.0  # Cohere's logit_scale
    softcap: Positive | None = None  # Gemma 2


class InitialisationConfig(Config):
    """normal(0, std); `depth_scaled` divides the std of each branch's last projection by sqrt(2 · layers)."""

    std: Positive = 0.02
    depth_scaled: bool = True


class LayerConfig(Config):
    """One layer, or `repeat` equal ones; or a nested list of `layers`, repeated."""

    repeat: Count = 1
    mixer: MixerConfig | None = None
    feedforward: FeedforwardConfig | None = None
    layers: "tuple[LayerConfig, ...] | None" = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = self.mixer is not None or self.feedforward is not None
        if self.layers is not None and own:
            refuse("layers", "a layer either nests layers or has a mixer and a feedforward; keep one of the two")
        if self.layers is not None and not self.layers:
            refuse("layers", "is empty; name at least one layer")
        if self.layers is None and not own:
            refuse("mixer", "a layer needs a mixer, a feedforward or both; add one")
        return self

    def count(self) -> int:
        """Layers this entry stands for."""
        inner = 1 if self.layers is None else sum(layer.count() for layer in self.layers)
        return self.repeat * inner

    def expand(self, path: str) -> Iterator[tuple[str, "LayerConfig"]]:
        """Each single layer, with the path of the entry it comes from."""
        for _ in range(self.repeat):
            if self.layers is None:
                yield path, self
            else:
                for index, layer in enumerate(self.layers):
                    yield from layer.expand(f"{path}.layers[{index}]")


class ModelConfig(Config):
    """A decoder (or, with every mixer `causal: false`, an encoder). `norm` is the default of every norm.

    `encoder` is a whole design besides, without a head of its own: its hidden states are the memory that the layers'
    `cross_attention` reads.
    """

    vocab_size: Count | None = None  # None: taken from the tokenizer when the model is trained; an encoder: the same
    encoder: "ModelConfig | None" = None
    width: Count
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    embedding: EmbeddingConfig = EmbeddingConfig()
    residual: ResidualConfig
    head: HeadConfig = HeadConfig()
    initialisation: InitialisationConfig = InitialisationConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.layers:
            refuse("layers", "is empty; name at least one layer")
        if self.depth > MOST_LAYERS:
            refuse("layers", f"stands for {self.depth} layers; at most {MOST_LAYERS} are built")
        if self.encoder is not None and self.encoder.encoder is not None:
            refuse("encoder.encoder", "an encoder has none of its own; leave it out")
        if self.encoder is not None and not self.encoder.head.tied:
            refuse("encoder.head.tied", "an encoder has no head that could be untied; leave it out")
        return self

    @property
    def depth(self) -> int:
        """Layers, repeats counted."""
        return sum(layer.count() for layer in self.layers)

    def fingerprint(self) -> str:
        """SHA-256 of the design as plain data: equal for equal designs, layers written out."""
        layers = [layer.dump() | {"repeat": 1} for _, layer in self.expand()]
        text = json.dumps(self.dump() | {"layers": layers}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def resolved(self) -> Self:
        """The same design with layers and defaults written out: equal for designs that build the same model."""
        place = Place(self.width, self.norm)
        layers = []
        for _, layer in self.expand():
            mixer, forward = layer.mixer, layer.feedforward
            mixer = None if mixer is None else mixer.resolved(place)
            forward = None if forward is None else forward.resolved()
            layers.append(LayerConfig(mixer=mixer, feedforward=forward))
        encoder = None if self.encoder is None else self.encoder.resolved()
        return self.replace(layers=tuple(layers), encoder=encoder)

    def expand(self) -> Iterator[tuple[str, LayerConfig]]:
        """Each single layer from the bottom, with the path of its entry."""
        for index, layer in enumerate(self.layers):
            yield from layer.expand(f"layers[{index}]")
