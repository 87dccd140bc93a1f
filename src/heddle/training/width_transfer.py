"""Transfer of the learning rate over width: a rate that was chosen for a narrow model works for a wide one.

The spectral condition (Yang, Simon & Bernstein 2023), which is µP (Yang et al. 2022, table 3) for every shape: a matrix
and its updates keep the spectral norm sqrt(outputs / inputs). With m_in and m_out, the ratios of a matrix's inputs and
outputs to the base width's, and 1 for sizes that do not grow:

    initial std    1 / sqrt(m_in), but 1 / m_in where the outputs do not grow
    AdamW's rate   1 / m_in;   ε in proportion to the gradient's elements, m_in / (ratio of the number of elements)
    Muon's rate    sqrt(m_out / m_in) / sqrt(ratio of the larger side), because Muon's update grows with that side

Norms, biases, convolutions and lookups have no inputs that grow, so m_in is 1. Weight decay is divided by the rate's
factor: rate times decay stays the same (Wang & Aitchison 2024). A tied head shares the embedding's weight, so its
logits are divided by m instead (`head.width_scale`, which is saved with the design and replaced by another transfer);
`embedding.scale` multiplies by sqrt(m), for which weight and rate compensate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from heddle.config import DesignError, build_under
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.mixers import MixerConfig
from heddle.parts.mixers.retention import RetentionConfig
from heddle.training.optimizer import ParameterScale, matrix_parameters

# A design at another width: more or fewer heads and hidden channels, and everything else the same.
#
# Heads, the ranks of latents and hidden channels are in proportion to the width. Head widths, depth, experts, states,
# windows and positions stay. The fields that grow are listed in `MixerConfig.width_fields` and `HIDDEN_FIELDS`.

HIDDEN_FIELDS = ("hidden", "shared_hidden")


def scale_to_width(config: ModelConfig, width: int) -> ModelConfig:
    """Return the resolved design at another width; hidden channels are rounded to whole numbers.

    The head keeps both factors of its logits, so that a transfer over width replaces its own. Raises DesignError for a
    design with an encoder, and if a part has no version of that width.
    """
    if width == config.width:
        return config.resolved().replace(head=config.head)
    if config.encoder is not None:
        raise DesignError("encoder", "cannot be scaled to another width; leave it out")
    resolved = config.resolved()
    single = [layer for _, layer in resolved.expand()]
    scaled = {
        id(single[layer.index]): build_under(layer.path, _scale_layer, single[layer.index], config.width, width)
        for layer in config.distinct_layers
    }

    def at_width(layer: LayerConfig) -> LayerConfig:
        return scaled[id(layer)] if id(layer) in scaled else _scale_layer(layer, config.width, width)

    layers = tuple(entry.map(at_width) for entry in resolved.layers)
    return resolved.replace(width=width, layers=layers, head=config.head)


def _scale_layer(layer: LayerConfig, width: int, new_width: int) -> LayerConfig:
    mixer, feedforward = layer.mixer, layer.feedforward
    if mixer is not None:
        mixer = build_under("mixer", mixer_at_width, mixer, width, new_width)
    if feedforward is not None:
        feedforward = with_hidden(feedforward, lambda hidden: max(1, round(hidden * new_width / width)))
    return layer.replace(mixer=mixer, feedforward=feedforward)


def mixer_at_width(mixer: MixerConfig, width: int, new_width: int) -> MixerConfig:
    """Return a resolved config at another width: `width_fields` grow in proportion, other fields stay.

    A single key head for several heads stays single. Raises DesignError if a number would not be whole, or if the
    mixer's function depends on its number of heads.
    """
    if isinstance(mixer, RetentionConfig):  # γ_h depends on h
        reason = "retention's decays depend on the number of heads, so it has no version at another width"
        raise DesignError("", f"{reason}; choose another mixer")
    several_heads = mixer.head_shape(width)[0] > 1
    changes: dict[str, Any] = {}
    for name in type(mixer).model_fields:
        value = getattr(mixer, name)
        if isinstance(value, MixerConfig):
            changes[name] = build_under(name, mixer_at_width, value, width, new_width)
        if name not in mixer.width_fields or value is None or (value == 1 and several_heads):
            continue
        if value * new_width % width:
            reason = f"{value} at width = {width} is not a whole number at {new_width}; choose another width"
            raise DesignError(name, reason)
        changes[name] = value * new_width // width
    return mixer.replace(**changes)


def with_hidden(feedforward: FeedforwardConfig, change: Callable[[int], int]) -> FeedforwardConfig:
    """Return the config with `change` applied to every number of hidden channels."""
    numbers = {name: getattr(feedforward, name, None) for name in HIDDEN_FIELDS}
    return feedforward.replace(**{name: change(number) for name, number in numbers.items() if number is not None})


@dataclass(frozen=True)
class WidthTransfer:
    """The changes to a design and its training when the learning rate was chosen at another width.

    config: the design, with the factor of a tied head's logits. scales: by parameter name; others are not scaled.
    """

    config: ModelConfig
    scales: dict[str, ParameterScale]

    def build_model(self, device: torch.device | str = "cpu", seed: int = 0) -> Decoder:
        """Build the model with the seed's initial weights, each times its factor."""
        model = build(self.config, device=device, seed=seed)
        self.scale_weights(model)
        return model

    @torch.no_grad()
    def scale_weights(self, model: Decoder) -> None:
        """Multiply the weights of a fresh model, which may be sharded, by their factors."""
        for name, parameter in model.named_parameters():
            if name in self.scales:
                parameter.mul_(self.scales[name].initial_std)


def transfer_over_width(config: ModelConfig, base_width: int | None, optimizer: str = "adamw") -> WidthTransfer:
    """Derive the factors of a design from the shapes of its parameters, here and at the base width.

    base_width: None changes nothing; the design's own width only undoes an earlier transfer. Raises ConfigError
    naming a part or a parameter that the rules do not cover.
    """
    if base_width is None:
        return WidthTransfer(config, {})
    config = config.replace(head=config.head.replace(width_scale=None))
    if base_width == config.width:
        return WidthTransfer(config, {})
    try:
        base = build(scale_to_width(config, base_width), device="meta")
    except DesignError as error:
        raise ConfigError(f"transfer_width {base_width}: {error}") from None
    model = build(config, device="meta")
    base_shapes = {name: parameter.shape for name, parameter in base.named_parameters()}
    matrices = matrix_parameters(model) | {"head.weight"}
    muon_matrices = matrix_parameters(model) if optimizer == "muon" else frozenset()
    ratio = config.width / base_width
    scales = {}
    for name, parameter in model.named_parameters():
        if name not in base_shapes or len(base_shapes[name]) != parameter.dim():
            raise ConfigError(
                f"transfer_width {base_width}: {name} is missing or has other dims at that width; choose another"
            )
        base_shape = base_shapes[name]
        if name in matrices:
            _check_proportion(name, parameter.shape, base_shape, ratio, base_width)
            scales[name] = _matrix_scale(parameter.shape, base_shape, name in muon_matrices)
            owner = name.rpartition(".")[0]
            own, base_own = (getattr(each.get_submodule(owner), "initial_std", None) for each in (model, base))
            if own and base_own:  # the std depends on the width already
                scales[name] = scales[name]._replace(initial_std=scales[name].initial_std * base_own / own)
        else:
            scales[name] = ParameterScale(epsilon=math.prod(base_shape) / math.prod(parameter.shape))
    input_factor = math.sqrt(ratio) if config.embedding.scale else 1.0
    scales["embed.weight"] = _behind_factor(scales["embed.weight"], input_factor)
    if not config.head.tied:
        return WidthTransfer(config, scales)
    head_factor = input_factor / ratio
    if config.head.bias:
        scales["head.bias"] = _behind_factor(scales["head.bias"], head_factor)
    return WidthTransfer(config.replace(head=config.head.replace(width_scale=head_factor)), scales)


def _check_proportion(name: str, shape: torch.Size, base_shape: torch.Size, ratio: float, base_width: int) -> None:
    """Refuse a matrix with a size that neither stays nor grows with the width, up to rounding of hidden sizes."""
    for size, base_size in zip(shape, base_shape, strict=True):
        if size != base_size and abs(size - ratio * base_size) > max(1.0, ratio):
            raise ConfigError(
                f"transfer_width {base_width}: {name} is {list(base_shape)} there and {list(shape)} here, which is "
                f"not proportional to the width; leave transfer_width out, or replace this part"
            )


def _matrix_scale(shape: torch.Size, base_shape: torch.Size, muon: bool) -> ParameterScale:
    """Factors of a matrix [..., outputs, inputs]."""
    inputs, outputs = shape[-1] / base_shape[-1], shape[-2] / base_shape[-2]
    elements = math.prod(shape) / math.prod(base_shape)
    initial_std = 1 / inputs if outputs == 1.0 else inputs**-0.5
    if muon:
        larger_side = max(shape[-2:]) / max(base_shape[-2:])
        return ParameterScale(initial_std, math.sqrt(outputs / inputs / larger_side))
    return ParameterScale(initial_std, 1 / inputs, inputs / elements)


def _behind_factor(scale: ParameterScale, factor: float) -> ParameterScale:
    """Factors of a parameter whose output is multiplied by a factor that the base width does not have."""
    return ParameterScale(scale.initial_std / factor, scale.learning_rate / factor, scale.epsilon * factor)
