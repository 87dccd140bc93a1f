"""PaTH attention against the paper's plain loop: layouts, states, blocks, sizes, and what is refused."""

import ast
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import normal_tensor
from heddle.model.config import ModelConfig
from heddle.numerics.attention import householder
from heddle.numerics.attention.householder import HouseholderProducts, householder_products
from heddle.parts.build import BuildContext
from heddle.parts.mixers.path_attention import PathAttention, PathAttentionConfig
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.position_table import PositionTable
from tests.cases import case, design, layer
from tests.laws.planting import Plant, calls, operator, reads
from tests.parts.loops import assert_none, mixer_errors, sigmoid, with_large_weights

WIDTH = 10


def loop(x: Tensor, mixer: Any) -> Tensor:
    """One document x [T, width] -> [T, width]: every product of matrices is written out for each pair."""
    size, d, d_v, kernel = mixer.heads // mixer.kv_heads, mixer.head_dim, mixer.value_dim, mixer.conv_kernel
    reflections: list[list[Tensor]] = []
    vectors = x @ mixer.w_down.weight.T @ mixer.w_up.weight.T
    for t in range(len(x)):
        sums = torch.zeros_like(vectors[0])
        for back in range(min(kernel, t + 1)):
            sums = sums + mixer.convolution.weight[:, kernel - 1 - back] * vectors[t - back]
        w, rates = sums / (1 + torch.exp(-sums)), mixer.beta.weight @ x[t] + mixer.beta.bias
        of_token = []
        for g in range(mixer.kv_heads):
            own = w[g * d : (g + 1) * d]
            own = own / (own.square().sum() + 1e-6).sqrt()
            beta = 2 / (1 + torch.exp(-rates[g]))
            of_token.append(torch.eye(d, dtype=x.dtype) - beta * torch.outer(own, own))
        reflections.append(of_token)
    rows, gates = [], None if mixer.forget is None else sigmoid(x @ mixer.forget.weight.T + mixer.forget.bias)
    for i in range(len(x)):
        heads = []
        for h in range(mixer.heads):
            g = h // size
            turned, scores = mixer.q.weight[h * d : (h + 1) * d] @ x[i], []
            for j in range(i, -1, -1):
                score = (mixer.k.weight[g * d : (g + 1) * d] @ x[j]) @ turned * mixer.scale
                scores.append(score if gates is None else score + gates[j + 1 : i + 1, h].prod().log())
                turned = reflections[j][g] @ turned
            weights = torch.stack(scores[::-1]).softmax(0)
            heads.append(weights @ (x[: i + 1] @ mixer.v.weight[g * d_v : (g + 1) * d_v].T))
        rows.append(mixer.out.weight @ torch.cat(heads))
    return torch.stack(rows)


def built(draw: random.Random) -> PathAttention:
    """A random mixer in float64 with large parameters."""
    groups = draw.choice((1, 2))
    config = PathAttentionConfig(
        heads=groups * draw.choice((1, 2, 3)),
        kv_heads=groups,
        head_dim=draw.randint(1, 5),
        value_dim=draw.randint(1, 4),
        vector_rank=draw.randint(1, 4),
        conv_kernel=draw.randint(1, 4),
        scale=draw.choice((None, 0.4)),
        forget=draw.random() < 0.5,
    )
    return with_large_weights(config.build(BuildContext(WIDTH, RMSConfig())), draw)


def largest_errors(seed: int) -> tuple[float, float]:
    """Of the outputs, with and without a state, and of the gradients, for two packed documents."""
    draw = random.Random(seed)
    return mixer_errors(built(draw), loop, WIDTH, [draw.randint(1, 6), draw.randint(2, 9)], draw)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that begin and end within documents."""
    monkeypatch.setattr(householder, "BLOCK", 7)


def test_scores_are_those_of_the_papers_loop() -> None:
    for seed in range(40):
        assert_none(largest_errors(seed), seed)


WRONG: dict[str, Plant] = {
    "1 + β w wᵀ": operator(HouseholderProducts.bias, ast.Sub, ast.Add, 3),
    "a block whose own corrections are left out": operator(HouseholderProducts.bias, ast.Sub, ast.Add, 2),
    "the key's own matrix": operator(householder_products, ast.Lt, ast.LtE, 0),
    "matrices of other documents": reads(householder_products, "segment_ids", lambda _: None, 0),
    "β up to 1": calls(PathAttention.forward, "sigmoid", lambda x: x.sigmoid() / 2),
    "w that is not normalized": calls(PathAttention._attend, "l2_normalize", lambda _, x: x),
    "gates that are not sigmoids": calls(PathAttention.forward, "logsigmoid", lambda _, x: x),
    "gates that a state does not keep": calls(
        PathAttention._attend, "_extended", lambda extend, cache, logs, layout: extend(cache, 0.0 * logs, layout), 1
    ),
    "keys that the state does not convolve": reads(PathAttention._attend, "convolved", lambda x: x.roll(1, 1), 0),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_wrong_products(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[bug](monkeypatch)
    assert any(max(largest_errors(seed)) > 1e-3 for seed in range(12))


def test_blocks_of_any_length_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of all keys is the paper's formula; a query beyond many blocks has the same scores."""
    generator = torch.Generator().manual_seed(0)
    q, k, w = (normal_tensor((2, heads, 70, 5), generator) for heads in (4, 2, 2))
    w, beta = w / w.norm(dim=-1, keepdim=True), 2 * normal_tensor((2, 2, 70), generator).sigmoid()
    positions, segments = torch.arange(70).repeat(2, 1), (torch.arange(70) > 20).long().repeat(2, 1)
    visible = (positions[:, :, None] >= positions[:, None]) & (segments[:, :, None] == segments[:, None])
    biases = []
    for block in (1, 3, 16, 64, 70):
        monkeypatch.setattr(householder, "BLOCK", block)
        biases.append(householder_products(q, k, w, beta, positions, segments).bias(visible))
    assert all(float((bias - biases[-1]).masked_fill(~visible[:, None], 0).abs().max()) < 1e-11 for bias in biases)
    assert float(biases[0].abs().max()) > 1.0


def test_a_product_of_reflections_composes_a_permutation() -> None:
    """With β of 2 and w of (e₀ − e₁)/√2 a token swaps two coordinates: the score follows the number of swaps."""
    swap, k = torch.tensor([1.0, -1.0, 0.0]).double() / math.sqrt(2), torch.tensor([1.0, 2.0, 3.0])
    keys, positions = k.expand(1, 1, 4, 3).double(), torch.arange(4)[None]
    beta = torch.tensor([[[0.0, 2.0, 0.0, 2.0]]]).double()
    visible = torch.ones(1, 1, 4, dtype=torch.bool)
    queries = torch.tensor([[[[1.0, 0.0, 0.0]]]]).double()
    bias = householder_products(queries, keys, swap.expand(1, 1, 4, 3), beta, positions, None).bias(visible)
    assert (bias[0, 0, 0] + 1).tolist() == pytest.approx([1.0, 2.0, 2.0, 1.0], abs=1e-12)


@pytest.mark.parametrize(("name", "gates"), [("path", 0), ("path-forget", 4)])
def test_the_state_has_what_each_token_says(name: str, gates: int) -> None:
    """2 d of a key, its value, and β and gates in at least float32; the convolution's inputs do not grow."""
    config = case(name)
    sizes = [heddle.size(config, length, dtype=torch.bfloat16).layers[0].state_bytes for length in (20, 21)]
    mixer: Any = config.resolved().layers[0].mixer
    per_layer = mixer.kv_heads * (2 * (2 * mixer.head_dim + mixer.value_dim) + 4) + gates * 4
    assert sizes[1] - sizes[0] == per_layer
    state = heddle.build(config).bfloat16().init_state(3, 20)
    assert state.tensors()["layers.0.beta.keys"].dtype == torch.float32
    table = PositionTable.empty(1, None, None, "cpu")
    layer_state = state.layers[0]
    assert layer_state is not None
    assert not layer_state.can_roll_back(1, table)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_heads": 3}, "kv_heads: 3 does not divide heads = 4"),
        ({"heads": 5}, "heads"),
        ({"window": 3}, "window"),
        ({"vector_rank": 0}, "vector_rank"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        heddle.build(parse_config(ModelConfig, design(layer({"kind": "path_attention", "heads": 4, **fields}))))
