"""Experts selected by a hash of the token's id: a plain loop, transformers' router of DeepSeek V4, and refusals."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import normal_tensor
from heddle.model.config import ModelConfig
from heddle.numerics.experts import mixture
from heddle.numerics.experts.mixture import hashed_experts
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards.moe import ExpertTable, MoE, MoEConfig
from heddle.parts.layout import HandedOver, Layout
from heddle.parts.norms.rms import RMSConfig
from tests.cases import case, moe
from tests.laws.planting import Plant, calls, reads
from tests.parts.loops import assert_none, errors, with_large_weights

WIDTH = 6


def mixed(x: int) -> int:
    """The permutation of 32-bit numbers, with Python's own integers."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def loop_experts(token: int, experts: int, top_k: int, seed: int) -> list[int]:
    hashes = [mixed(token ^ mixed(expert + experts * seed)) for expert in range(experts)]
    return sorted(range(experts), key=lambda expert: -hashes[expert])[:top_k]


def loop(x: Tensor, tokens: list[int], mixture: MoE) -> Tensor:
    """x [T, width] -> [T, width], a token and an expert at a time."""
    config, get, rows = mixture.config, dict(mixture.named_parameters()), []
    for value, token in zip(x, tokens, strict=True):
        logits = get["router.weight"] @ value
        scores = logits.exp() / logits.exp().sum()
        if config.routing != "softmax_topk":
            scores = torch.sigmoid(logits) if config.routing == "sigmoid" else torch.sqrt(torch.log1p(logits.exp()))
        if mixture.table is None:
            chosen = loop_experts(token % 2**32, config.experts, config.top_k, config.hash_seed)
        else:
            chosen = [int(expert) for expert in get["table.experts"][token % len(get["table.experts"])]]
        total = sum(scores[expert] for expert in chosen) if config.renormalize else 1.0
        y = torch.zeros_like(value)
        for expert in chosen:
            up, gate = get["up.weight"][expert] @ value, get["gate.weight"][expert] @ value
            hidden = gate / (1 + torch.exp(-gate)) * up
            y = y + config.scale * scores[expert] / total * (get["down.weight"][expert] @ hidden)
        rows.append(y)
    return torch.stack(rows)


def built(draw: random.Random) -> MoE:
    """A random mixture in float64 with large parameters."""
    experts = draw.randint(3, 7)
    by_table = draw.random() < 0.5
    selection: Any = {"selection": "table", "id_range": 50} if by_table else {"selection": "hash"}
    config = MoEConfig(
        experts=experts, top_k=draw.randint(2, experts - 1), hidden=draw.randint(1, 5), **selection,
        hash_seed=0 if by_table else draw.choice((0, 1, 65535)),
        routing=draw.choice(("sigmoid", "softmax_topk", "sqrt_softplus")), renormalize=draw.random() < 0.5,
        scale=draw.choice((1.0, 1.5)),
    )  # fmt: skip
    mixture = with_large_weights(config.build(BuildContext(WIDTH, RMSConfig())), draw)
    if mixture.table is not None:
        mixture.table.init_weights(0.02, ParameterDraws(draw.randint(0, 99), "table"))
    return mixture


def with_tokens(tokens: list[int]) -> Layout:
    layout, handed_over = Layout.causal(1, len(tokens)), HandedOver()
    handed_over.tokens = torch.tensor([tokens])
    return heddle.Layout(**(vars(layout) | {"handed_over": handed_over, "cache": {}}))


def drawn(seed: int, layer: MoE | None = None) -> tuple[MoE, Tensor, list[int], Layout]:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layer = layer or built(draw)
    tokens = [draw.choice((0, 1, 2, 40, 70_000, 2**31 - 1, 2**40)) for _ in range(9)]
    x = normal_tensor((len(tokens), WIDTH), generator).requires_grad_()
    return layer, x, tokens, with_tokens(tokens)


def largest_errors(seed: int) -> tuple[float, float]:
    """Of the outputs, and of the gradients of x and of all weights."""
    layer, x, tokens, layout = drawn(seed)
    expected = loop(x, tokens, layer)
    return errors(
        layer(x[None], layout)[0][0], expected, [x, *(each for each in layer.parameters() if each.requires_grad)]
    )


def test_tokens_are_routed_as_by_the_plain_loop() -> None:
    for seed in range(40):
        assert_none(largest_errors(seed), seed)


WRONG: dict[str, Plant] = {
    "experts of the highest scores": reads(MoE._routed_experts, "chosen", lambda _: None, 0),
    "one hash for every expert": calls(
        hashed_experts, "arange", lambda _, n, device: torch.zeros(n, dtype=torch.int64)
    ),
    "a seed that nothing reads": reads(hashed_experts, "seed", lambda _: 0, 0),
    "rows of the next ids": reads(ExpertTable.forward, "tokens", lambda tokens: tokens + 1, 0),
    "gates of all experts": calls(mixture.route, "gather", lambda scores, _, index: scores[..., : index.shape[-1]], 1),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_wrong_routes(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[bug](monkeypatch)
    assert any(max(largest_errors(seed)) > 1e-3 for seed in range(12))


def test_gates_are_those_of_deepseek_v4() -> None:
    """With its table filled by the loop: the scores of the listed experts, renormalized and scaled."""
    vocabulary, experts, top_k = 50, 6, 3
    fields: dict[str, Any] = {"hidden_size": WIDTH, "vocab_size": vocabulary, "scoring_func": "sqrtsoftplus"}
    fields |= {"num_experts_per_tok": top_k, "num_local_experts": experts, "routed_scaling_factor": 1.5}
    peer = DeepseekV4HashRouter(SimpleNamespace(**fields)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        peer.weight.copy_(normal_tensor((experts, WIDTH), generator))
        peer.tid2eid.copy_(torch.tensor([loop_experts(token, experts, top_k, 7) for token in range(vocabulary)]))
    x, tokens = normal_tensor((1, 20, WIDTH), generator), torch.randint(0, vocabulary, (1, 20), generator=generator)
    logits, weights, indices = peer(x, tokens)
    config = MoEConfig(
        experts=experts, top_k=top_k, hidden=2, selection="hash", hash_seed=7, routing="sqrt_softplus", scale=1.5
    )
    route = mixture.route(logits[None], None, config.routing_config, hashed_experts(tokens, experts, top_k, 7))
    assert torch.equal(route.expert_indices[0], indices)
    assert float((route.gates[0] - weights).detach().abs().max()) < 1e-12


def test_a_new_table_is_a_hash_with_a_seed_of_its_own() -> None:
    """Rows are those of a seed, of another one in each layer; they are kept in float32 whatever the model's dtype."""
    design = parse_config(ModelConfig, moe(6, 2, selection="table", id_range=61))
    for dtype in (torch.float32, torch.bfloat16):
        model = heddle.build(design, seed=3, dtype=dtype)
        tables = [layer.table for layer in model.modules() if isinstance(layer, MoE)]
        assert [table.experts.dtype for table in tables if table is not None] == [torch.float32] * 2
        chosen = [table(torch.arange(61)) for table in tables if table is not None]
        assert not torch.equal(chosen[0], chosen[1])
        for layer, experts in enumerate(chosen):
            name = f"layers.{layer}.feedforward.table"
            seed = ParameterDraws(3, name)("experts").key % 2**16
            assert torch.equal(experts, hashed_experts(torch.arange(61), 6, 2, seed))


@pytest.mark.parametrize("single", [False, True])
def test_an_expert_named_twice_counts_twice(single: bool) -> None:
    """As in transformers, with a token alone, whose experts run one by one, and with several."""
    draw = random.Random(5)
    config = MoEConfig(experts=4, top_k=3, hidden=2, selection="table", id_range=5, routing="sqrt_softplus")
    layer = with_large_weights(config.build(BuildContext(WIDTH, RMSConfig())), draw)
    assert layer.table is not None
    with torch.no_grad():
        layer.table.experts.copy_(torch.tensor([[1, 3, 1]] * 5))
    _, x, tokens, layout = drawn(1, layer)
    if single:
        x, tokens, layout = x[:1], tokens[:1], with_tokens(tokens[:1])
    with torch.no_grad():
        got = layer(x[None], layout)[0][0]
    assert float((got - loop(x, tokens, layer)).detach().abs().max()) < 1e-10


def test_every_expert_gets_about_as_many_ids() -> None:
    """Of 30,000 ids each of 16 experts has its share within 5 %, alone and in pairs with another seed."""
    tokens = torch.arange(30_000)
    counts = torch.bincount(hashed_experts(tokens, 16, 4, 0).flatten(), minlength=16) / len(tokens)
    assert float((counts - 0.25).abs().max()) < 0.05 * 0.25
    first, second = (hashed_experts(tokens, 4, 1, seed)[:, 0] for seed in (0, 1))
    pairs = torch.bincount(4 * first + second, minlength=16) / len(tokens)
    assert float((pairs - 1 / 16).abs().max()) < 0.1 / 16


def test_a_model_hands_the_ids_to_its_layers_and_needs_them() -> None:
    model = heddle.build(case("moe-hash"))
    tokens = torch.tensor([[5, 9, 5, 7]])
    with pytest.raises(ConfigError, match=r"^tokens: are vectors, but a layer reads ids"):
        model(model.embed.weight[tokens])
    layer = next(module for module in model.modules() if isinstance(module, MoE))
    with pytest.raises(ConfigError, match="selection: hash reads the ids of tokens"):
        layer(torch.zeros(1, 4, 24), Layout.causal(1, 4))


HASH: dict[str, Any] = {"selection": "hash"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hash_seed": 3}, "hash_seed: 3 does nothing without selection: hash"),
        (HASH | {"id_range": 9}, "id_range: 9 does nothing without selection: table"),
        ({"selection": "table"}, "id_range: is missing"),
        (
            HASH | {"routing": "sigmoid", "experts": 6, "groups": 2, "top_groups": 1},
            "groups: selects experts by scores",
        ),
        (HASH | {"routing": "sigmoid_logits"}, "routing: selects experts by scores"),
        (HASH | {"bias_update": 0.1}, "bias_update: moves a selection by scores"),
        (HASH | {"experts": 2}, "selection: hash selects all experts"),
        (HASH | {"top_k": 1}, "top_k: 1 makes the gate 1"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(ModelConfig, moe(**fields))


def test_modules_ahead_are_refused() -> None:
    with pytest.raises(ConfigError, match="multi_token: the last layer reads the ids of tokens"):
        parse_config(ModelConfig, moe(**HASH) | {"multi_token": {"depth": 1}})
