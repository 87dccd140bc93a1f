"""A design at another width: more or fewer heads and hidden channels, and everything else the same.

Heads, the ranks of latents and hidden channels are in proportion to the width. Head widths, depth, experts, states,
windows and positions stay. What grows is what each part says itself (`MixerConfig.at_width`, `with_hidden`).
"""

from heddle.config import DesignError, build_under
from heddle.model.config import LayerConfig, ModelConfig


def scale_to_width(config: ModelConfig, width: int) -> ModelConfig:
    """Return the resolved design at another width; hidden channels are rounded to whole numbers.

    The head keeps both factors of its logits, so that a transfer over width replaces its own. Raises DesignError for a
    design with an encoder, and where a part has no version of that width.
    """
    if width == config.width:
        return config.resolved().replace(head=config.head)
    if config.encoder is not None:
        raise DesignError("encoder", "is not scaled to another width; leave it out")
    resolved = config.resolved()
    scaled = {
        layer.index: build_under(layer.path, _scale_layer, resolved.layers[layer.index], config.width, width)
        for layer in config.distinct_layers
    }
    first_index = [layer.index for layer in config.distinct_layers]
    layers = tuple(scaled[first_index[index]] for index in config.layer_order)
    return resolved.replace(width=width, layers=layers, head=config.head)


def _scale_layer(layer: LayerConfig, width: int, new_width: int) -> LayerConfig:
    mixer, feedforward = layer.mixer, layer.feedforward
    if mixer is not None:
        mixer = build_under("mixer", mixer.at_width, width, new_width)
    if feedforward is not None:
        feedforward = feedforward.with_hidden(lambda hidden: max(1, round(hidden * new_width / width)))
    return LayerConfig(mixer=mixer, feedforward=feedforward)
