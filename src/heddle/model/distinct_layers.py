"""A meta model with each distinct layer of a design once, and what is measured around its layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.initialization import materialize
from heddle.model.limits import refuse_overflow
from heddle.parts.feedforwards import Feedforward


def build_distinct_layers(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """Build a meta model with one layer for each different one of the design. Several measurements can share it."""
    with refuse_overflow():
        with torch.device("meta"):
            model = Decoder(config, distinct_layers_only=True)
        materialize(model, dtype, "meta")
    return model


def with_encoder(model: Decoder) -> list[Decoder]:
    """The decoder, and the encoder if there is one."""
    return [model] if model.encoder is None else [model, model.encoder]


def stacked_layers(model: Decoder) -> list[tuple[nn.Module, int]]:
    """The layers of each stack, and how many layers of the design each stands for."""
    return [pair for stack in with_encoder(model) for pair in zip(stack.layers, stack.layer_counts, strict=True)]


@contextmanager
def around_layers(
    layers: Sequence[nn.Module], before: Callable[[int, tuple[Any, ...]], None], after: Callable[[int], None]
) -> Iterator[None]:
    """Within the block, call before(index, arguments) and after(index) around each call of a layer."""
    hooks = []
    for index, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(lambda _, inputs, index=index: before(index, inputs)))
        hooks.append(layer.register_forward_hook(lambda *_, index=index: after(index)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def parameter_count(module: nn.Module) -> int:
    """The number of a module's parameters, a shared one counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def active_parameter_count(module: nn.Module) -> int:
    """How many of a module's parameters act on one token."""
    idle = sum(part.inactive_parameters for part in module.modules() if isinstance(part, Feedforward))
    return parameter_count(module) - idle


def parameter_counts(model: Decoder) -> tuple[int, int]:
    """Return the number of parameters, a shared one counted once, and how many of them act on one token."""
    total, active = parameter_count(model), active_parameter_count(model)
    for layer, count in stacked_layers(model):
        total += (count - 1) * parameter_count(layer)
        active += (count - 1) * active_parameter_count(layer)
    return total, active
