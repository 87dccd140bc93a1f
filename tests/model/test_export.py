"""`torch.export` of softmax designs: one program for every batch and length, equal to the model in float64."""

import pytest
import torch
from torch.export import Dim, export

from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from tests.cases import ALIBI, MLP, ROPE, Data, attention, design, indexer, latent, layer
from tests.generation.loops import amplify_layers

SHAPES = [(2, 11), (1, 2), (3, 5), (1, 200)]
DESIGNS: dict[str, Data] = {
    "rope-window": design(
        layer(attention(6, kv_heads=2, position=ROPE, qk_norm="head")), layer(attention(kv_heads=1, window=5), MLP)
    ),
    "gate": design(layer(attention(gate="channel", bias=True, window=9))),
    "alibi-dual": design(layer(attention(position=ALIBI), repeat=2), residual={"kind": "residual_dual"}),
    "attention-residuals": design(
        layer(attention(position=ALIBI), repeat=3), residual={"kind": "attention_residuals", "block_size": 2}
    ),
    "sink-softcap": design(layer(attention(sink=True)), layer(attention(softcap=3.0))),
    "bidirectional": design(layer(attention(causal=False))),
    "latent": design(layer(latent())),
    "indexer": design(layer(attention(kv_heads=2, indexer=indexer(top_k=9))), layer(latent(indexer=indexer()))),
}


def check_export(model: Decoder) -> None:
    """A program exported from one shape computes every other."""
    dims = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=4096)}
    program = export(model, (torch.randint(61, (2, 7)),), dynamic_shapes=(dims,)).module()
    for shape in SHAPES:
        tokens = torch.randint(61, shape)
        hidden, state = program(tokens)
        assert state is None
        torch.testing.assert_close(hidden, model(tokens)[0], rtol=0, atol=1e-10)


FIRST, *OTHERS = DESIGNS


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)])
def test_one_program_for_every_length(name: str) -> None:
    check_export(amplify_layers(build(load_config(DESIGNS[name]), dtype=torch.float64, seed=1)).eval())


@pytest.mark.soak
def test_learned_positions_bound_the_length() -> None:
    data = design(layer(attention(2, position=None)), embedding={"position": {"kind": "learned", "length": 64}})
    with pytest.raises(torch._dynamo.exc.UserError, match=r"length.*<= 64"):
        check_export(build(load_config(data), dtype=torch.float64))
