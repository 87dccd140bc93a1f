"""Mixtures of experts: refusals, what they enter for balancing against plain loops, balance, capacity, sizes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.config import DesignError, decode
from heddle.errors import ConfigError
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import flops_per_token, size
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.feedforwards.moe import MoE
from heddle.parts.modules.router_statistics import Entry, ledger
from tests.cases import attention, case, design, layer

WIDTH = 10


def made(**fields: Any) -> MoE:
    data = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 6, **fields}
    part = decode(FeedforwardConfig, data).build(WIDTH).double()  # type: ignore[type-abstract]
    assert isinstance(part, MoE)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return part


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 5}, "top_k: 5 is more than experts = 4; choose fewer, or add experts"),
        ({"routing": "topk_softmax", "renormalise": False}, "renormalise: false has no meaning with topk_softmax"),
        ({"shared_gate": True}, "shared_gate: belongs to shared experts, of which there are none"),
        ({"shared_hidden": 7}, "shared_hidden: belongs to shared experts, of which there are none"),
        ({"bias": "shared"}, "bias: 'shared' belongs to shared experts, of which there are none"),
        ({"groups": 2}, "groups: is not read by softmax_topk"),
        ({"routing": "topk_softmax", "top_groups": 2}, "top_groups: is not read by topk_softmax"),
        ({"routing": "softmax_group_max"}, "groups: is missing; give groups and top_groups"),
        ({"routing": "sigmoid", "groups": 2}, "top_groups: is missing"),
        ({"routing": "sigmoid", "top_groups": 2}, "groups: is missing"),
        ({"routing": "sigmoid", "groups": 3, "top_groups": 1}, "groups: 3 does not divide experts = 4"),
        ({"routing": "sigmoid", "groups": 4, "top_groups": 2}, "groups: 4 leaves one expert a group"),
        ({"routing": "sigmoid", "groups": 2, "top_groups": 3}, "top_groups: 3 is more than groups = 2"),
        ({"routing": "softmax_group_max", "groups": 4, "top_groups": 1}, "top_k: 2 is more than the 1 experts of"),
        ({"routing": "topk"}, "routing: unknown value 'topk'"),
        ({"aux_loss": -0.1}, "aux_loss: should be"),
        ({"capacity": 0.0}, "capacity: should be"),
    ],
)
def test_refusals(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DesignError) as told:
        made(**fields)
    assert str(told.value).startswith(words)


def entered(part: MoE, x: Tensor, layout: Layout) -> Entry:
    with ledger() as kept:
        part(x, layout)
    (entry,) = kept.entries
    return entry


HOLES = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0, 1], [0, 0, 1, 1, 1, 0, 1, 1, 0]])
LAYOUTS = {
    "even rows": Layout.causal(2, 9),
    "holes": Layout(torch.where(HOLES > 0, HOLES.cumsum(1) - 1, -1)),
    "documents": Layout.packed([[4, 5], [1, 8]]),
}


@pytest.mark.parametrize("routing", ["softmax_topk", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_entries_against_a_plain_loop(name: str, routing: str) -> None:
    """The losses of Switch and of ST-MoE, per sequence over its real tokens, in Python's numbers."""
    part, layout = made(routing=routing, aux_loss=0.3, z_loss=0.07).train(), LAYOUTS[name]
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    numbers = (x @ part.router.weight.T).tolist()
    sequences: dict[tuple[int, int], list[list[float]]] = {}
    for row in range(2):
        for token in range(9):
            if layout.positions[row, token] >= 0:
                key = row, int(layout.numbers[row, token])
                sequences.setdefault(key, []).append(numbers[row][token])
    aux = z = entropy = 0.0
    loads, tokens = [0] * 4, 0
    for sequence in sequences.values():
        share, chance = [0.0] * 4, [0.0] * 4
        for one in sequence:
            worth = [1 / (1 + math.exp(-l)) for l in one] if routing == "sigmoid" else [math.exp(l) for l in one]
            for expert in range(4):
                chance[expert] += worth[expert] / sum(worth) / len(sequence)
            for expert in sorted(range(4), key=lambda expert, worth=worth: -worth[expert])[:2]:  # type: ignore[misc]
                share[expert] += 1 / (2 * len(sequence))
                loads[expert] += 1
            entropy -= sum(w / sum(worth) * math.log(w / sum(worth)) for w in worth)
            z += math.log(sum(math.exp(l) for l in one)) ** 2
        aux += len(sequence) * 4 * sum(f * p for f, p in zip(share, chance, strict=True))
        tokens += len(sequence)
    entry = entered(part, x, layout)
    assert entry.penalty is not None
    assert float(entry.penalty.detach()) == pytest.approx(0.3 * aux + 0.07 * z, rel=1e-12)
    assert float(entry.entropy) == pytest.approx(entropy, rel=1e-12)
    assert (entry.loads.tolist(), int(entry.tokens), int(entry.dropped)) == (loads, tokens, 0)
    assert entry.loads.dtype == entry.tokens.dtype == entry.dropped.dtype == torch.int64
    assert entered(part.eval(), x, layout).penalty is None


def test_an_even_load_costs_one_a_token() -> None:
    part = made(experts=2, top_k=1, aux_loss=1.0, renormalise=False).train()
    with torch.no_grad():
        part.router.weight.zero_()
        part.router.weight[0, 0] = 1e-9
    x = torch.ones(1, 8, WIDTH, dtype=torch.float64)
    x[0, ::2] = -1.0
    penalty = entered(part, x, Layout.causal(1, 8)).penalty
    assert penalty is not None
    assert float(penalty.detach()) == pytest.approx(8.0)


def test_the_gradient_of_the_losses_goes_through_probabilities_alone() -> None:
    part = made(aux_loss=0.5, z_loss=0.1, bias_update=0.1).train()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)

    def penalty(weight: Tensor) -> Tensor:
        with ledger() as kept:
            torch.func.functional_call(part, {"router.weight": weight}, (x, Layout.causal(2, 5)))
        found = kept.entries[0].penalty
        assert found is not None
        return found

    assert torch.autograd.gradcheck(penalty, part.router.weight.detach().clone().requires_grad_())
    assert not part.router.balance.requires_grad  # type: ignore[union-attr]


def test_balance_moves_by_the_step_toward_the_mean() -> None:
    part = made(routing="sigmoid", bias_update=0.25)
    assert part.router.balance is not None
    before = part.router.balance.detach().clone()
    part.balance(torch.tensor([4, 0, 2, 2]))
    assert (part.router.balance - before).tolist() == pytest.approx([-0.25, 0.25, 0.0, 0.0])
    for still in (made(routing="sigmoid", bias_update=0.0), made()):
        held = {name: value.detach().clone() for name, value in still.named_parameters()}
        still.balance(torch.tensor([4, 0, 2, 2]))
        assert all(torch.equal(value, held[name]) for name, value in still.named_parameters())


def test_steps_of_balancing_even_out_the_loads() -> None:
    part = made(experts=6, top_k=2, routing="sigmoid", bias_update=0.02).train()
    x = torch.randn(4, 50, WIDTH, dtype=torch.float64) + 0.7
    spreads = []
    for _ in range(60):
        loads = entered(part, x, Layout.causal(4, 50)).loads
        spreads.append(float(loads.double().std()))
        part.balance(loads)
    assert spreads[-1] < 0.25 * spreads[0]


def test_beyond_its_capacity_an_expert_takes_nothing() -> None:
    """One expert has room for the first tokens of each row; the others get nothing but what is shared."""
    part = made(experts=2, top_k=1, capacity=0.6, shared=1, renormalise=False).train()
    with torch.no_grad():
        part.router.weight.zero_()  # everyone takes expert 0
    layout = Layout.padded([10, 5], 10, side="left")
    x = torch.randn(2, 10, WIDTH, dtype=torch.float64)
    entry = entered(part, x, layout)
    assert (entry.loads.tolist(), int(entry.tokens)) == ([15, 0], 15)
    assert int(entry.dropped) == (10 - 3) + (5 - 2)  # ⌈0.6 · 10 / 2⌉ and ⌈0.6 · 5 / 2⌉
    assert part.shared is not None
    with torch.no_grad():
        routed = (part(x, layout) - part.shared(x)).abs().amax(-1) > 1e-9
    want = torch.zeros(2, 10, dtype=torch.bool)
    want[0, :3] = want[1, 5:7] = True
    assert torch.equal(routed, want)
    with torch.no_grad():
        assert bool(((part.eval()(x, layout) - part.shared(x)).abs().amax(-1) > 1e-9)[layout.positions >= 0].all())


def test_training_with_a_state_and_a_capacity_is_refused() -> None:
    model = build(case("moe-capacity")).train()
    with torch.no_grad(), pytest.raises(ConfigError, match=r"^capacity: in training, .*; call model.eval\(\)"):
        model(torch.ones(1, 3, dtype=torch.int64), None, model.init_state(1))


def test_the_last_projection_starts_small() -> None:
    config = load_config(
        design(layer(attention(3), {"kind": "moe", "experts": 9, "top_k": 2, "hidden": 40, "shared": 1}, 8))
    )
    part = build(config).layers[0].feedforward
    assert isinstance(part, MoE)
    assert part.shared is not None
    for weight in (part.down.weight, part.shared.down.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.1)
    for weight in (part.up.weight, part.router.weight, part.shared.up.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_sizes_by_hand(kind: str) -> None:
    fields = {"experts": 5, "top_k": 2, "hidden": 7, "expert": kind, "bias": True, "shared": 2, "shared_gate": True}
    data = design(layer(attention(3), {"kind": "moe", **fields, "router_bias": True, "bias_update": 0.1}, 2))
    told, without = (
        size(load_config(design(*layers)), context=16) for layers in (data["layers"], [layer(attention(3), None, 2)])
    )
    first = 2 if kind == "gated" else 1
    expert = first * 7 * (24 + 1) + 24 * (7 + 1)
    shared = first * 14 * (24 + 1) + 24 * (14 + 1) + 24
    norm = 24
    assert told.parameters - without.parameters == 2 * (5 * expert + shared + 24 * 5 + 5 + 5 + norm)
    assert told.parameters - told.active_parameters == 2 * 3 * expert
    flops = 2 * 24 * ((first + 1) * (2 * 7 + 14) + 5 + 1)
    assert told.flops_per_token - without.flops_per_token == 2 * flops
    assert flops_per_token(build(load_config(data), device="meta"), 16) == told.flops_per_token
