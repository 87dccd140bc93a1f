"""Attention residuals by blocks against the decoder layers of Inkling 2 in transformers: random stacks in float64."""

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heddle.config import parse_config
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import ResidualConfig
from tests.parity.reference import ExactRMS
from tests.parity.stacks import FUNCTIONS, NAMES, Branch, random_stack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers.models.inkling2 import modeling_inkling2 as theirs


class Config:
    """What their residuals read of a config."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size


def their_layer(ours: Any, index: int, block_size: int, width: int) -> nn.Module:
    """Their decoder layer with our norms and queries; they divide scores by √width."""
    layer = theirs.Inkling2SlidingDecoderLayer.__new__(theirs.Inkling2SlidingDecoderLayer)
    nn.Module.__init__(layer)
    layer.is_block_boundary = index % block_size == 0
    mixes = [their_mix(ours.mixes[name], width) if name in ours.mixes else None for name in NAMES]
    layer.attention_input, layer.mlp_input = mixes
    layer.self_attn, layer.mlp = Branch(FUNCTIONS["mixer"], 1), Branch(FUNCTIONS["feedforward"])
    layer.post_attention_convolution = layer.post_mlp_convolution = Branch(lambda x: x)
    layer.input_layernorm, layer.post_attention_layernorm = (ExactRMS(ours.norms[name], 0.0, 1e-5) for name in NAMES)
    return layer


def their_mix(ours: Any, width: int) -> nn.Module:
    mix = theirs.Inkling2BlockAttentionResidual(Config(width))
    del mix.query
    mix.query = ours.query[0] * width**0.5
    return mix


def both(seed: int) -> list[tuple[Tensor, ...]]:
    """Outputs and gradients of ours and theirs."""
    draw = random.Random(seed)
    depth, width, length = draw.randint(1, 9), draw.randint(2, 12), draw.randint(1, 5)
    block_size = draw.randint(1, depth)
    fields = {"kind": "attention_residuals", "block_size": block_size, "value_norm": True}
    config = parse_config(ResidualConfig, fields)  # type: ignore[type-abstract]
    norm = parse_config(NormConfig, {"kind": "rms"})  # type: ignore[type-abstract]
    blocks, final, x, _ = stack = random_stack(config, norm, (depth, width, length), seed)
    hidden, states = x, x.new_zeros(2, length, 0, width)
    for index, block in enumerate(blocks):
        layer = their_layer(block, index, block_size, width)
        new_hidden = layer(hidden, states)
        if layer.is_block_boundary:
            states = torch.cat((states, hidden.unsqueeze(-2)), dim=-2)
        hidden = new_hidden
    return stack.beside(ExactRMS(final.norm, 0.0, 1e-5)(their_mix(final.mix, width)(states, hidden)[0]))


def test_random_stacks_equal_inkling2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    for seed in range(60):
        for got, want in zip(*both(seed), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_another_query_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    right, original = both(3), their_mix
    assert float((right[0][0] - right[1][0]).detach().abs().max()) < 1e-10
    monkeypatch.setitem(globals(), "their_mix", lambda ours, width: original(ours, 1))
    wrong = both(3)
    assert float((wrong[0][0] - wrong[1][0]).detach().abs().max()) > 1e-3
