"""The latent attention part: its state, parameter names, scale, the cost of a step, and errors."""

from typing import Any

import pytest
import torch

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import (
    forward_in_chunks,
    forward_no_grad,
    forward_with_state,
    model_under_test,
    new_state,
    random_tokens,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import kernel_choices
from heddle.numerics.dispatch import count_flops
from heddle.numerics.kernels import kernels
from heddle.parts.mixers.latent_attention import LatentAttention
from tests.cases import YARN, case, design, latent, layer
from tests.laws.planting import calls, condition


def config(position: dict[str, Any] | None = YARN, **fields: Any) -> ModelConfig:
    return load_config(design(layer(latent(position, **{"rope_dim": 8, **fields}), repeat=2)))


@pytest.mark.parametrize("name", ["latent-full-query", "latent-no-rope", "latent-shared-unturned"])
def test_the_state_holds_one_latent_per_token(name: str) -> None:
    mixer = case(name).layers[0].dump()["mixer"]
    state = heddle.build(case(name)).init_state(3, 20)
    assert state.layer_bytes == [3 * 20 * (mixer["kv_rank"] + mixer.get("rope_dim", 0)) * 4] * 2


def test_parameter_shapes() -> None:
    mixer = heddle.build(case("latent-bias-scale")).layers[0].mixer
    assert {name: tuple(value.shape) for name, value in mixer.named_parameters()} == {  # type: ignore[union-attr]
        "q_down.weight": (6, 24),
        "q_down.bias": (6,),
        "q_norm.weight": (6,),
        "q_up.weight": (33, 6),
        "kv_down.weight": (10, 24),
        "kv_down.bias": (10,),
        "kv_norm.weight": (10,),
        "k_rope.weight": (4, 24),
        "k_rope.bias": (4,),
        "k_up.weight": (21, 10),
        "v_up.weight": (15, 10),
        "out.weight": (24, 15),
        "out.bias": (24,),
    }


def test_the_latent_norms_have_their_own_epsilon() -> None:
    data = design(layer(latent(query_rank=6)), norm={"kind": "layer", "eps": 0.1})
    model = heddle.build(load_config(data))
    epsilons = {name: module.eps for name, module in model.named_modules() if name.endswith(("q_norm", "kv_norm"))}
    assert set(epsilons.values()) == {1e-6}
    assert len(epsilons) == 2


def test_the_scale_is_that_of_the_whole_head_and_of_yarn() -> None:
    tokens = random_tokens(config(), 2, 9)
    plain: dict[str, Any] = {"kind": "rope", "base": 100.0}
    default = forward_no_grad(model_under_test(config(plain)), tokens)
    assert torch.equal(forward_no_grad(model_under_test(config(plain, scale=15**-0.5)), tokens), default)
    growth = 0.1 * 0.8 * torch.tensor(8.0, dtype=torch.float64).log().item() + 1.0
    scales = [heddle.build(config(scale=scale)).layers[0].mixer.scale for scale in (None, 0.5)]  # type: ignore[union-attr]
    assert scales == pytest.approx([15**-0.5 * growth**2, 0.5 * growth**2], rel=1e-12)


def step_flops(context: int, kernel: str | None = None) -> int:
    """FLOPs of one more token after `context` tokens, on the meta device."""
    model = build(config(), device="meta")
    state = model.init_state(1, context + 1)
    with torch.no_grad():
        _, after = model(torch.zeros(1, context, dtype=torch.int64, device="meta"), None, state)
        with count_flops() as total, kernels(**({} if kernel is None else {"latent": kernel})):
            model(torch.zeros(1, 1, dtype=torch.int64, device="meta"), None, after)
    return total[0]


def test_a_step_does_not_expand_cached_latents() -> None:
    heads, rank, rope, nope, value = 3, 10, 8, 7, 5
    layers, more = 2, 512 - 64
    assert step_flops(512) - step_flops(64) == layers * more * 2 * heads * (2 * rank + rope)
    expanded = layers * more * 2 * heads * (nope + rope + value + rank * (nope + value))
    assert step_flops(512, "reference") - step_flops(64, "reference") == expanded


def test_the_chosen_kernels() -> None:
    chosen = {}
    for name, (queries, past) in {"training": (64, -1), "step": (1, 64), "chunk": (40, 64)}.items():
        counted = kernel_choices(config(), queries, past, torch.float32, "cpu")
        chosen[name] = {choice.kernel: count for choice, count in counted.items() if choice.operation == "latent"}
    assert chosen == {"training": {"expanded": 2}, "step": {"absorbed": 2}, "chunk": {"expanded": 2}}


@pytest.mark.parametrize("kernel", ["absorbed", "reference"])
def test_a_kernel_can_be_forced(kernel: str) -> None:
    model = model_under_test(config())
    tokens = random_tokens(config(), 2, 9)
    want, _ = forward_in_chunks(model, tokens, [5, 1, 3])
    with kernels(latent=kernel):
        got, _ = forward_in_chunks(model, tokens, [5, 1, 3])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    _, state = forward_with_state(model, new_state(model, 2), tokens)
    with kernels(latent="expanded"), pytest.raises(ConfigError, match="10 keys"):
        forward_with_state(model, state, tokens[:, :1])


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "a latent wider than the model": ({"kv_rank": 25}, "mixer.kv_rank: 25 is larger than width = 24; lower it"),
    "the same of queries": ({"query_rank": 25}, "mixer.query_rank: 25 is larger than width = 24; lower it"),
    "dims in no pairs": ({"rope_dim": 5}, "mixer.rope_dim: 5 is odd, but dims are rotated in pairs; give an even"),
    "a position without dims": ({"rope_dim": None}, "mixer.rope_dim: is missing, so position has no dims to rotate;"),
    "more rotary dims than there are": (
        {"position": {"kind": "rope", "rotary_dim": 10}},
        "mixer.position.rotary_dim: 10 dims of 8 cannot be rotated",
    ),
    "a norm of nothing": (
        {"query_norm": "rms"},
        "mixer.query_norm: normalizes the latent of queries, but there is none;",
    ),
    "gates of queries without gates": (
        {"query_rank": 6, "gate_input": "queries"},
        "mixer.gate_input: queries needs gates and a latent of queries; give gate,",
    ),
    "gates of queries without a latent": (
        {"gate": "head", "gate_input": "queries"},
        "mixer.gate_input: queries needs gates and a latent of queries; give query_rank,",
    ),
    "an unknown norm": ({"kv_norm": "layer"}, "mixer.kv_norm: unknown value 'layer'; choices: rms, none"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_invalid_fields_are_named(name: str) -> None:
    fields, message = REFUSALS[name]
    with pytest.raises(ConfigError) as error:
        config(**fields)
    assert str(error.value).startswith(f"layers[0].{message}")


def test_unset_fields_are_not_dumped() -> None:
    data = design(layer({"kind": "latent_attention", "heads": 2, "kv_rank": 8, "nope_dim": 6}))
    mixer = parse_config(ModelConfig, data).dump()["layers"][0]["mixer"]
    assert mixer == {"kind": "latent_attention", "heads": 2, "kv_rank": 8, "nope_dim": 6, "bias": False}


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_gate_multiplies_what_out_reads(gate: str, planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options: tuple[dict[str, Any], ...] = ({"gate": gate}, {})
    gated, bare = (model_under_test(config(**fields)).layers[0].mixer for fields in options)
    assert isinstance(gated, LatentAttention)
    assert isinstance(bare, LatentAttention)
    own, read = gated.state_dict(), list[torch.Tensor]()
    bare.load_state_dict({name: value for name, value in own.items() if name != "gate.weight"})
    bare.out.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    bare(x, heddle.Layout.causal(2, 7))
    gates = (x @ own["gate.weight"].T).sigmoid().repeat_interleave(5 if gate == "head" else 1, dim=-1)
    want = (read[0] * gates) @ own["out.weight"].T
    if planted:
        condition(LatentAttention.forward, "gates", False)(monkeypatch)
    apart = float((gated(x, heddle.Layout.causal(2, 7))[0] - want).abs().max().detach())
    assert (apart > 1e-3) if planted else (apart < 1e-10)


@pytest.mark.parametrize("planted", [False, True])
def test_a_sink_takes_the_weight_of_its_head(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A very high one leaves nothing of its head, and a very low one takes nothing."""
    options: tuple[dict[str, Any], ...] = ({"sink": True}, {})
    sunk, bare = (model_under_test(config(**fields)).layers[0].mixer for fields in options)
    assert isinstance(sunk, LatentAttention)
    assert isinstance(bare, LatentAttention)
    assert sunk.sink is not None
    bare.load_state_dict({name: value for name, value in sunk.state_dict().items() if name != "sink"})
    with torch.no_grad():
        sunk.sink.fill_(-1e3)
        sunk.sink[1] = 1e3
        bare.out.weight.unflatten(1, (sunk.heads, -1))[:, 1] = 0.0
    if planted:
        calls(LatentAttention._attend, "latent_attention", lambda attend, *inputs: attend(*inputs[:-1]))(monkeypatch)
    x, layout = torch.randn(2, 7, 24, dtype=torch.float64), heddle.Layout.causal(2, 7)
    apart = float((sunk(x, layout)[0] - bare(x, layout)[0]).abs().max().detach())
    assert (apart > 1e-3) if planted else (apart < 1e-10)


BESIDE = {"query_rank": 6, "query_norm": "beside", "gate": "channel", "gate_input": "queries"}
WITHOUT = {  # what leaves one of the two out
    "raw latent": condition(LatentAttention.forward, "beside", False),
    "gates of x": condition(LatentAttention.forward, "gates_queries", False),
}


def test_queries_and_gates_read_a_latent_and_its_norm() -> None:
    """A mixer without a latent of queries, that is given what the projections read, is the same."""
    mixer, bare = (model_under_test(config(**fields)).layers[0].mixer for fields in (BESIDE, {"gate": "channel"}))
    assert isinstance(mixer, LatentAttention)
    assert isinstance(bare, LatentAttention)
    assert mixer.q_down is not None
    own = mixer.state_dict()
    x, layout = torch.randn(2, 7, 24, dtype=torch.float64), heddle.Layout.causal(2, 7)
    raw = x @ own["q_down.weight"].T
    normed = own["q_norm.weight"] * raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    read = torch.cat((normed, raw), dim=-1)
    queries, gates = read @ own["q_up.weight"].T, read @ own["gate.weight"].T
    shared = {name: value for name, value in own.items() if name.startswith(("kv_", "k_", "v_", "out"))}
    bare.load_state_dict(shared, strict=False)
    assert bare.q is not None
    assert bare.gate is not None
    for module, output in ((bare.q, queries), (bare.gate, gates)):
        with torch.no_grad():
            solved = torch.linalg.lstsq(x.flatten(0, 1), output.flatten(0, 1)).solution.T
            module.weight.copy_(solved)
    assert float((mixer(x, layout)[0] - bare(x, layout)[0]).abs().max().detach()) < 1e-9


@pytest.mark.parametrize("planted", WITHOUT)
def test_a_projection_that_reads_less_is_seen(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WITHOUT[planted](monkeypatch)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        test_queries_and_gates_read_a_latent_and_its_norm()
