"""Kimi Delta Attention against a loop of the paper's formulas in float64; first decays, its state, and errors."""

from functools import partial

import pytest
import torch
from torch.nn import functional

import heddle
from heddle.config import DesignError, parse_config
from heddle.model.config import ModelConfig
from heddle.numerics.recurrent.batched_chunks import channel_decays
from heddle.parts.build import BuildContext
from heddle.parts.mixers.kda import KDA, KDAConfig
from heddle.parts.modules.recurrent import DeltaRuleMixer, GatedDecay
from heddle.parts.norms.rms import RMSConfig
from tests.cases import Data, design, layer
from tests.laws.planting import calls, result, wrapped
from tests.parity.recurrence import EPS, WIDTH, compare_with_loop, loop_delta_rule, randomize

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
