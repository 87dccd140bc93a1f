"""Attention residuals by blocks against the decoder layers of Inkling 2 in transformers: random stacks in float64."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heddle.config import parse_config
from heddle.parts.build import ResidualContext
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import ResidualConfig
from tests.parity.reference import ExactRMS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers.models.inkling2 import modeling_inkling2 as theirs

NAMES = ("mixer", "feedforward")


class Branch(nn.Module):
    """A function in the place of attention, experts or a convolution; attention returns its weights, too."""

    def __init__(self, function: Callable[[Tensor], Tensor], with_weights: bool = False) -> None:
        super().__init__()
        self.function, self.with_weights = function, with_weights

    def forward(self, hidden_states: Tensor, **options: Any) -> Any:
        y = self.function(hidden_states)
        return (y, None) if self.with_weights else y


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mixer": lambda x: x.flip(1).tanh(),
    "feedforward": lambda x: x.roll(1, dims=-1).sin(),
}


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
    layer.self_attn, layer.mlp = Branch(FUNCTIONS["mixer"], True), Branch(FUNCTIONS["feedforward"])
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
    contexts = [ResidualContext(NAMES, width, norm, depth=depth, layer_index=index) for index in range(depth)]
    blocks, final = nn.ModuleList(map(config.build, contexts)).double(), config.build_final_norm(width, norm).double()
    torch.manual_seed(seed)
    parameters = [*blocks.parameters(), *final.parameters()]
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(1.0 if parameter.dim() < 2 else 0.0, 0.8)
    x = torch.randn(2, length, width, dtype=torch.float64, requires_grad=True)

    stream = config.expand(x)
    for block in blocks:
        stream = block(stream, FUNCTIONS)
    ours = final(stream)

    hidden, states = x, x.new_zeros(2, length, 0, width)
    for index, block in enumerate(blocks):
        layer = their_layer(block, index, block_size, width)
        new_hidden = layer(hidden, states)
        if layer.is_block_boundary:
            states = torch.cat((states, hidden.unsqueeze(-2)), dim=-2)
        hidden = new_hidden
    last: Any = final
    other = ExactRMS(last.norm, 0.0, 1e-5)(their_mix(last.mix, width)(states, hidden)[0])

    direction = torch.randn(2, length, width, dtype=torch.float64)
    return [(y, *torch.autograd.grad((y * direction).sum(), [x, *parameters])) for y in (ours, other)]


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
