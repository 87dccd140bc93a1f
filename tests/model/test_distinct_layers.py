"""What is measured around layers: calls within a block only, and the parameters that act on a token."""

import torch
from torch import nn

from heddle.config import parse_config
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.size import active_parameter_count, around_layers, parameter_count
from tests.cases import Data, attention, design, layer


def model_of(feedforward: Data) -> Decoder:
    return build(parse_config(ModelConfig, design(layer(attention(), feedforward))), device="meta")


def test_hooks_around_layers_end_with_the_block() -> None:
    calls, layers = list[str](), [nn.Linear(2, 2), nn.Linear(2, 2)]
    with around_layers(
        layers, lambda index, _: calls.append(f"before {index}"), lambda index: calls.append(f"{index}")
    ):
        layers[1](torch.ones(2))
    layers[1](torch.ones(2))
    assert calls == ["before 1", "1"]


def test_parameters_of_experts_that_are_not_chosen_are_idle() -> None:
    dense = model_of({"kind": "gated", "hidden": 10})
    assert active_parameter_count(dense) == parameter_count(dense)
    mixture = model_of({"kind": "moe", "experts": 5, "top_k": 2, "hidden": 10, "shared": None})
    assert active_parameter_count(mixture) == parameter_count(mixture) - 3 * 3 * 10 * mixture.config.width


def test_layers_are_not_checkpointed_before_they_are_asked_to_be() -> None:
    assert not model_of({"kind": "gated", "hidden": 10}).checkpointing
