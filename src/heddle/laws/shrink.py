"""A small design with the structure of a large one, on which the laws run in seconds."""

from math import lcm

from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import build
from heddle.parts.shrink import ShrinkContext

VOCAB_SIZE = 97
LEAST_WIDTH = 16


def shrink(config: ModelConfig) -> ModelConfig:
    """Return a design with the same parts and options and small sizes.

    Layers: each distinct layer once, in order; one distinct layer is kept twice if it was repeated. The width is the
    least multiple of every layer's heads from 16 on; odd head widths stay odd. Every part gives its own small sizes
    (`shrunk`); one that gives none is unchanged. If the small sizes do not fit together, only layers, windows and
    vocabulary are reduced.
    """
    for sizes in (True, False):
        try:
            small = _shrunk(config, sizes)
            build(small, device="meta")
        except ConfigError:
            continue
        return small
    return config.replace(vocab_size=config.vocab_size or VOCAB_SIZE)


def _shrunk(config: ModelConfig, sizes: bool) -> ModelConfig:
    encoder, small_encoder, width = config.encoder, None, config.width
    small_width, encoder_width = width, None
    if encoder is not None:
        encoder_width, alike = encoder.width, encoder.width == width  # then both stay so
        if sizes:
            small_width = _width(config, encoder) if alike else _width(config)
            encoder_width = small_width if alike else _width(encoder)
        small_encoder = _stack(encoder, ShrinkContext(encoder.width, encoder_width), sizes)
        if encoder.vocab_size is not None:
            small_encoder = small_encoder.replace(vocab_size=VOCAB_SIZE)
    elif sizes:
        small_width = _width(config)
    small = _stack(config, ShrinkContext(width, small_width, encoder_width), sizes)
    return small.replace(vocab_size=VOCAB_SIZE, encoder=small_encoder)


def _stack(config: ModelConfig, context: ShrinkContext, sizes: bool) -> ModelConfig:
    """A design without its encoder, with each distinct layer once."""
    layers = [_layer(distinct.config, context, sizes) for distinct in config.distinct_layers]
    if len(layers) == 1 and config.depth > 1:
        layers *= 2
    embedding = config.embedding
    if embedding.position is not None:
        embedding = embedding.replace(position=embedding.position.shrunk())
    return config.replace(width=context.small_width, layers=tuple(layers), embedding=embedding, encoder=None)


def _layer(layer: LayerConfig, context: ShrinkContext, sizes: bool) -> LayerConfig:
    mixer, feedforward = layer.mixer, layer.feedforward
    if mixer is not None:
        mixer = mixer.shrunk(context) if sizes else mixer.with_small_window()
    if feedforward is not None and sizes:
        feedforward = feedforward.shrunk()
    return LayerConfig(mixer=mixer, feedforward=feedforward)


def _width(*configs: ModelConfig) -> int:
    """The small width of designs of the same width."""
    width, least = configs[0].width, 1
    odd = width % 2 == 1
    for config in configs:
        for distinct in config.distinct_layers:
            mixer = distinct.config.mixer
            for heads, few_heads in () if mixer is None else mixer.head_counts():
                least = lcm(least, few_heads)
                odd = odd or width // heads % 2 == 1
    step = least if odd else 2 * least
    times = -(-LEAST_WIDTH // step)
    return step * (times + (1 - times % 2 if odd else 0))
