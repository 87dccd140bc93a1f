"""Mixtures of experts: errors, router statistics against plain loops, load balancing, capacity, sizes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.config import DesignError, parse_config
from heddle.errors import ConfigError
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import flops_per_token, size
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.feedforwards.moe import MoE, SharedExpert
from heddle.parts.layout import Layout
from heddle.parts.modules.router_statistics import RouterStatistics, _traced, record_router_statistics
from heddle.parts.norms.rms import RMSConfig
from tests.cases import attention, case, design, layer
from tests.laws.planting import condition

WIDTH = 10


def build_moe(**fields: Any) -> MoE:
    data = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 6, **fields}
    part = parse_config(FeedforwardConfig, data).build(BuildContext(WIDTH, RMSConfig())).double()  # type: ignore[type-abstract]
    assert isinstance(part, MoE)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return part


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 5}, "top_k: 5"),
        ({"routing": "topk_softmax", "renormalize": False}, "renormalize:"),
        ({"routing": "topk_softmax", "renormalize_eps": 0.1}, "renormalize_eps: is added to a sum"),
        ({"renormalize": False, "renormalize_eps": 0.1}, "renormalize_eps: is added to a sum"),
        ({"shared_gate": True}, "shared_gate:"),
        ({"shared_hidden": 7}, "shared_hidden:"),
        ({"bias": "shared"}, "bias: 'shared'"),
        ({"groups": 2}, "groups: is not used by softmax_topk"),
        ({"routing": "topk_softmax", "top_groups": 2}, "top_groups: is not used by topk_softmax"),
        ({"routing": "softmax_group_max"}, "groups: is missing; give groups and top_groups"),
        ({"routing": "sigmoid", "groups": 2}, "top_groups: is missing"),
        ({"routing": "sigmoid", "top_groups": 2}, "groups: is missing"),
        ({"routing": "sigmoid", "groups": 3, "top_groups": 1}, "groups: 3"),
        ({"routing": "sigmoid", "groups": 4, "top_groups": 2}, "groups: 4"),
        ({"routing": "sigmoid", "groups": 2, "top_groups": 3}, "top_groups: 3"),
        ({"routing": "softmax_group_max", "groups": 4, "top_groups": 1}, "top_k: 2"),
        ({"router_tolerance": 0.1}, "router_tolerance: is not used by softmax_topk"),
        ({"shared_limit": False}, "shared_limit: false"),
        ({"shared_limit": False, "shared": 1}, "shared_limit: false"),
        ({"routing": "topk"}, "routing:"),
        ({"aux_loss": -0.1}, "aux_loss: should be"),
        ({"capacity_factor": 0.0}, "capacity_factor: should be"),
    ],
)
def test_invalid_fields_raise(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DesignError) as error:
        build_moe(**fields)
    assert str(error.value).startswith(message)


def statistics_of(part: MoE, x: Tensor, layout: Layout) -> RouterStatistics:
    with record_router_statistics() as recorder:
        part(x, layout)
    (entry,) = recorder.entries
    return entry


@pytest.mark.parametrize("planted", [False, True])
def test_the_output_norm_reads_all_experts(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    normed, bare = build_moe(shared=1, output_norm=True), build_moe(shared=1)
    own = normed.state_dict()
    bare.load_state_dict({name: value for name, value in own.items() if name != "output_norm.weight"})
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    y, _ = bare(x, Layout.causal(2, 5))
    want = own["output_norm.weight"] * y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if planted:
        condition(MoE.forward, "output_norm", True)(monkeypatch)
    apart = float((normed(x, Layout.causal(2, 5))[0] - want).abs().max().detach())
    assert (apart > 1e-3) if planted else (apart < 1e-10)


@pytest.mark.parametrize("planted", [False, True])
def test_a_shared_expert_without_the_limit_of_the_others(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = {"shared": 1, "activation": "swiglu_limited", "limit": 0.3}
    part, other = build_moe(**limited, shared_limit=False), build_moe(**limited)
    other.load_state_dict(part.state_dict())
    if planted:
        condition(SharedExpert.__init__, "shared_limit", True)(monkeypatch)
        part = build_moe(**limited, shared_limit=False)
    x, layout = torch.randn(2, 5, WIDTH, dtype=torch.float64), Layout.causal(2, 5)
    assert part.shared is not None
    assert other.shared is not None
    assert part.shared.gate is not None
    routed = other(x, layout)[0] - other.shared(x)
    gate, up = part.shared.gate(x), part.shared.up(x)
    want = routed + part.shared.down(gate * gate.sigmoid() * up)
    apart = float((part(x, layout)[0] - want).abs().max().detach())
    assert (apart > 1e-3) if planted else (apart < 1e-10)


TOKEN_MASK = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0, 1], [0, 0, 1, 1, 1, 0, 1, 1, 0]])
LAYOUTS = {
    "no padding": Layout.causal(2, 9),
    "padding between tokens": Layout(torch.where(TOKEN_MASK > 0, TOKEN_MASK.cumsum(1) - 1, -1)),
    "documents": Layout.packed([[4, 5], [1, 8]]),
}


@pytest.mark.parametrize("routing", ["softmax_topk", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_statistics_against_a_plain_loop(name: str, routing: str) -> None:
    """The losses of Switch and of ST-MoE, per sequence without padding, in plain Python."""
    part, layout = build_moe(routing=routing, aux_loss=0.3, z_loss=0.07).train(), LAYOUTS[name]
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    logits = (x @ part.router.weight.T).tolist()
    sequences: dict[tuple[int, int], list[list[float]]] = {}
    for row in range(2):
        for token in range(9):
            if layout.positions[row, token] >= 0:
                key = row, int(layout.dense_segment_ids[row, token])
                sequences.setdefault(key, []).append(logits[row][token])
    aux = z = entropy = 0.0
    expert_counts, tokens = [0] * 4, 0
    for sequence in sequences.values():
        shares, probabilities = [0.0] * 4, [0.0] * 4
        for token_logits in sequence:
            if routing == "sigmoid":
                scores = [1 / (1 + math.exp(-l)) for l in token_logits]
            else:
                scores = [math.exp(l) for l in token_logits]
            for expert in range(4):
                probabilities[expert] += scores[expert] / sum(scores) / len(sequence)
            for expert in sorted(range(4), key=lambda expert, scores=scores: -scores[expert])[:2]:  # type: ignore[misc]
                shares[expert] += 1 / (2 * len(sequence))
                expert_counts[expert] += 1
            entropy -= sum(s / sum(scores) * math.log(s / sum(scores)) for s in scores)
            z += math.log(sum(math.exp(l) for l in token_logits)) ** 2
        aux += len(sequence) * 4 * sum(f * p for f, p in zip(shares, probabilities, strict=True))
        tokens += len(sequence)
    entry = statistics_of(part, x, layout)
    assert entry.aux_loss is not None
    assert float(entry.aux_loss.detach()) == pytest.approx(0.3 * aux + 0.07 * z, rel=1e-12)
    assert float(entry.entropy) == pytest.approx(entropy, rel=1e-12)
    assert (entry.expert_counts.tolist(), int(entry.tokens), int(entry.dropped)) == (expert_counts, tokens, 0)
    assert entry.expert_counts.dtype == entry.tokens.dtype == entry.dropped.dtype == torch.int64
    assert statistics_of(part.eval(), x, layout).aux_loss is None


def test_the_balance_loss_of_even_counts_is_one_per_token() -> None:
    part = build_moe(experts=2, top_k=1, aux_loss=1.0, renormalize=False).train()
    with torch.no_grad():
        part.router.weight.zero_()
        part.router.weight[0, 0] = 1e-9
    x = torch.ones(1, 8, WIDTH, dtype=torch.float64)
    x[0, ::2] = -1.0
    aux_loss = statistics_of(part, x, Layout.causal(1, 8)).aux_loss
    assert aux_loss is not None
    assert float(aux_loss.detach()) == pytest.approx(8.0)


def test_the_losses_have_a_gradient_through_probabilities_only() -> None:
    part = build_moe(aux_loss=0.5, z_loss=0.1, bias_update=0.1).train()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)

    def total_aux_loss(weight: Tensor) -> Tensor:
        with record_router_statistics() as recorder:
            torch.func.functional_call(part, {"router.weight": weight}, (x, Layout.causal(2, 5)))
        aux_loss = recorder.entries[0].aux_loss
        assert aux_loss is not None
        return aux_loss

    assert torch.autograd.gradcheck(total_aux_loss, part.router.weight.detach().clone().requires_grad_())
    assert not part.router.expert_bias.requires_grad  # type: ignore[union-attr]


def test_the_expert_bias_moves_by_the_step_toward_the_mean() -> None:
    part = build_moe(routing="sigmoid", bias_update=0.25)
    assert part.router.expert_bias is not None
    before = part.router.expert_bias.detach().clone()
    part.update_expert_bias(torch.tensor([4, 0, 2, 2]))
    assert (part.router.expert_bias - before).tolist() == pytest.approx([-0.25, 0.25, 0.0, 0.0])
    for unbalanced in (build_moe(routing="sigmoid", bias_update=0.0), build_moe()):
        before_update = {name: value.detach().clone() for name, value in unbalanced.named_parameters()}
        unbalanced.update_expert_bias(torch.tensor([4, 0, 2, 2]))
        assert all(torch.equal(value, before_update[name]) for name, value in unbalanced.named_parameters())


def test_balancing_steps_even_out_the_expert_counts() -> None:
    part = build_moe(experts=6, top_k=2, routing="sigmoid", bias_update=0.02).train()
    x = torch.randn(4, 50, WIDTH, dtype=torch.float64) + 0.7
    spreads = []
    for _ in range(60):
        expert_counts = statistics_of(part, x, Layout.causal(4, 50)).expert_counts
        spreads.append(float(expert_counts.double().std()))
        part.update_expert_bias(expert_counts)
    assert spreads[-1] < 0.25 * spreads[0]


def test_an_expert_drops_choices_beyond_its_capacity() -> None:
    """The expert takes the first tokens of each row; later tokens get only the output of the shared expert."""
    part = build_moe(experts=2, top_k=1, capacity_factor=0.6, shared=1, renormalize=False).train()
    with torch.no_grad():
        part.router.weight.zero_()  # every token chooses expert 0
    layout = Layout.padded([10, 5], 10, side="left")
    x = torch.randn(2, 10, WIDTH, dtype=torch.float64)
    entry = statistics_of(part, x, layout)
    assert (entry.expert_counts.tolist(), int(entry.tokens)) == ([15, 0], 15)
    assert int(entry.dropped) == (10 - 3) + (5 - 2)  # ⌈0.6 · 10 / 2⌉ and ⌈0.6 · 5 / 2⌉
    assert part.shared is not None
    with torch.no_grad():
        routed = (part(x, layout)[0] - part.shared(x)).abs().amax(-1) > 1e-9
    want = torch.zeros(2, 10, dtype=torch.bool)
    want[0, :3] = want[1, 5:7] = True
    assert torch.equal(routed, want)
    with torch.no_grad():
        assert bool(((part.eval()(x, layout)[0] - part.shared(x)).abs().amax(-1) > 1e-9)[layout.positions >= 0].all())


def test_training_with_a_state_and_a_capacity_factor_is_refused() -> None:
    model = build(case("moe-capacity")).train()
    with torch.no_grad(), pytest.raises(ConfigError, match=r"^capacity_factor:.*model.eval\(\)"):
        model(torch.ones(1, 3, dtype=torch.int64), None, model.init_state(1))


def test_the_output_projection_is_initialized_smaller() -> None:
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
    sizes, sizes_without = (
        size(load_config(design(*layers)), context_length=16)
        for layers in (data["layers"], [layer(attention(3), None, 2)])
    )
    inputs = 2 if kind == "gated" else 1
    expert = inputs * 7 * (24 + 1) + 24 * (7 + 1)
    shared = inputs * 14 * (24 + 1) + 24 * (14 + 1) + 24
    norm = 24
    assert sizes.parameters - sizes_without.parameters == 2 * (5 * expert + shared + 24 * 5 + 5 + 5 + norm)
    assert sizes.parameters - sizes.active_parameters == 2 * 3 * expert
    flops = 2 * 24 * ((inputs + 1) * (2 * 7 + 14) + 5 + 1)
    assert sizes.flops_per_token - sizes_without.flops_per_token == 2 * flops
    assert flops_per_token(build(load_config(data), device="meta"), 16) == sizes.flops_per_token


def test_the_balance_loss_of_a_single_token_of_a_single_choice() -> None:
    """tokens · E · f · P = E times the probability of the expert that it chose."""
    part, layout = build_moe(top_k=1, aux_loss=1.0, renormalize=False).train(), Layout.causal(1, 1)
    x = torch.randn(1, 1, WIDTH, dtype=torch.float64)
    chosen = float((x @ part.router.weight.detach().T).softmax(-1).max())
    aux_loss = statistics_of(part, x, layout).aux_loss
    assert aux_loss is not None
    assert float(aux_loss.detach()) == pytest.approx(4 * chosen, rel=1e-12)


def test_a_recorder_ends_with_its_block() -> None:
    part, x, layout = (
        build_moe(aux_loss=1.0).train(),
        torch.randn(1, 3, WIDTH, dtype=torch.float64),
        Layout.causal(1, 3),
    )
    with record_router_statistics() as outer:
        with record_router_statistics() as inner:
            part(x, layout)
        part(x, layout)
    part(x, layout)
    assert (len(inner.entries), len(outer.entries)) == (1, 1)
    assert inner.closed
    assert outer.closed
    assert _traced.recorder is None
