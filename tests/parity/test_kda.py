"""Kimi Delta Attention against a loop of the paper's formulas and against transformers, in float64."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

import heddle
from heddle.config import DesignError, parse_config
from heddle.model.config import ModelConfig
from heddle.numerics.recurrent.batched_chunks import channel_decays
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers.kda import KDA, KDAConfig
from heddle.parts.modules.recurrent import DeltaRuleMixer, GatedDecay
from heddle.parts.norms.rms import RMSConfig
from tests.cases import Data, design, layer
from tests.laws.planting import calls, result, wrapped
from tests.parity.recurrence import (
    EPS,
    PIECES,
    WIDTH,
    close,
    compare_with_loop,
    compute_in_float64,
    in_pieces,
    inputs,
    loop_delta_rule,
    randomize,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import DynamicCache, KimiLinearConfig
    from transformers.models.kimi_linear import modeling_kimi_linear

PLAIN: Data = {"heads": 3}
OTHERS: Data = {"heads": 4, "head_dim": 5, "conv_kernel": 2}
OWN_WIDTHS: Data = {"heads": 2, "head_dim": 7, "value_dim": 11, "gate_rank": 3}


def ours(sizes: Data) -> KDA:
    config = parse_config(KDAConfig, sizes | {"norm": {"kind": "rms", "eps": EPS}})
    mixer = config.build(BuildContext(WIDTH, RMSConfig(offset=1.0))).double().eval()
    randomize(mixer)
    return mixer


def compare(sizes: Data) -> None:
    compare_with_loop(ours(sizes), partial(loop_delta_rule, {"kind": "kda"} | sizes))


@pytest.mark.parametrize("sizes", [PLAIN, OTHERS, OWN_WIDTHS])
@torch.no_grad()
def test_values_equal_a_loop_of_the_paper(sizes: Data) -> None:
    compare(sizes)


BUGS = {
    "the decay's sign": result(GatedDecay.forward, lambda pair: (-pair[0], pair[1])),
    "no β": calls(DeltaRuleMixer._delta_rule, "sigmoid", torch.ones_like),
    "one decay for all channels of a head": wrapped(
        DeltaRuleMixer._delta_rule,
        lambda rule, mixer, qkv, log_decay, *rest: rule(mixer, qkv, log_decay.mean(-1, keepdim=True), *rest),
    ),
    "queries without their scale": calls(
        DeltaRuleMixer._delta_rule, "DeltaInputs", lambda make, q, *rest, self: make(q * self.head_dim**0.5, *rest)
    ),
    "no output gate": calls(KDA.forward, "sigmoid", torch.ones_like),
    "keys undecayed from one half of a chunk to the other": calls(channel_decays, "exp", torch.ones_like, nth=1),
}


@pytest.mark.parametrize("bug", BUGS)
@torch.no_grad()
def test_a_planted_bug_is_caught_by_the_loop(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        compare(OTHERS)


def their_config(mixer: KDA) -> Any:
    return KimiLinearConfig(
        hidden_size=WIDTH,
        linear_num_heads=mixer.heads,
        linear_head_dim=mixer.head_dim,
        linear_conv_kernel_dim=mixer.conv_kernel,
        num_hidden_layers=2,
        rms_norm_eps=EPS,
    )


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch, modeling_kimi_linear)


def theirs(mixer: KDA) -> Any:
    """Their module with our weights."""
    module, ours = modeling_kimi_linear.KimiLinearDeltaAttention(their_config(mixer), 0), mixer.state_dict()
    names = {
        "q": "q_proj", "k": "k_proj", "v": "v_proj", "beta": "b_proj", "decay_down": "forget_gate.f_a_proj",
        "decay_up": "forget_gate.f_b_proj", "gate_down": "g_a_proj", "gate_up": "g_b_proj", "norm": "o_norm",
        "out": "o_proj",
    }  # fmt: skip
    weights = {f"{name}.weight": ours[f"{own}.weight"] for own, name in names.items()}
    weights["conv1d.weight"] = ours["convolution.weight"][:, None]
    weights["forget_gate.A_log"] = ours["decay.rate"][None, None, :, None]
    weights["forget_gate.dt_bias"] = ours["decay.bias"]
    module.double().eval().load_state_dict(weights)
    return module


@pytest.mark.parametrize("sizes", [PLAIN, OTHERS])
@pytest.mark.usefixtures("float64")
@torch.no_grad()
def test_outputs_equal_those_of_transformers(sizes: Data) -> None:
    """At once, and decoded with their cache."""
    mixer, x = ours(sizes), inputs(2)
    module, cache = theirs(mixer), DynamicCache(config=their_config(mixer))
    close(mixer(x, Layout.causal(*x.shape[:2]))[0], module(x))
    want = torch.cat([module(piece, cache_params=cache) for piece in x.split(PIECES, dim=1)], dim=1)
    close(in_pieces(mixer, x, PIECES), want)


@pytest.mark.usefixtures("float64")
@torch.no_grad()
def test_padded_rows_equal_those_of_transformers() -> None:
    layout = Layout.padded([23, 9, 2])
    mixer, x, real = ours(OTHERS), inputs(3, 23), layout.positions >= 0
    close(mixer(x, layout)[0][real], theirs(mixer)(x, attention_mask=real.long())[real])


def test_each_channel_draws_its_own_initial_decay() -> None:
    config = parse_config(ModelConfig, design(layer({"kind": "kda", "heads": 40, "head_dim": 50})))
    mixer = heddle.build(config).layers[0].mixer
    assert isinstance(mixer, KDA)
    rate, step = mixer.decay.rate.detach().exp(), functional.softplus(mixer.decay.bias.detach())
    assert (rate.shape, step.shape) == ((40,), (2000,))
    assert 1.0 <= float(rate.min()) < 2.0 < 15.0 < float(rate.max()) <= 16.01
    assert 0.00099 < float(step.min()) < 0.00102 < 0.098 < float(step.max()) < 0.101
    assert 0.009 < float(step.median()) < 0.011


def test_a_bounded_decay_starts_as_in_the_authors_code() -> None:
    config = parse_config(ModelConfig, design(layer({"kind": "kda", "heads": 40, "head_dim": 50, "decay_bound": 5.0})))
    mixer = heddle.build(config).layers[0].mixer
    assert isinstance(mixer, KDA)
    assert not bool(mixer.decay.rate.any())
    with torch.no_grad():
        log_decay, share = mixer.decay(torch.zeros(1, 1, 2000))
    assert 0.00098 < float(share.min()) < 0.00102 < 0.094 < float(share.max()) < 0.0953
    assert torch.equal(log_decay, -5.0 * share)


def test_the_state_has_a_fixed_size() -> None:
    model = heddle.build(parse_config(ModelConfig, design(layer({"kind": "kda", **OWN_WIDTHS}))))
    for cache_length in (None, 5000):
        assert model.init_state(2, cache_length).layer_bytes == [2 * 4 * (2 * 7 * 11 + 3 * 2 * (7 + 7 + 11))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 5}, r"heads: 5.*24"),
        ({"gate_rank": 0}, "gate_rank:"),
        (
            {"preconditioned": True, "negative_eigenvalues": True},
            "preconditioned: does not bound the state with negative_eigenvalues; leave one of the two out",
        ),
        ({"decay_bound": -5.0}, "decay_bound: .*greater than 0"),
        ({"decay_bound": float("inf")}, "decay_bound: .*finite"),
    ],
)
def test_invalid_fields_raise(fields: Data, message: str) -> None:
    with pytest.raises(DesignError, match=message):
        heddle.build(parse_config(ModelConfig, design(layer({"kind": "kda", "heads": 3, **fields}))))
