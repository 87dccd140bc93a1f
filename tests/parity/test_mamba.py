"""Mamba against a loop of the paper's formulas in float64; every form of its scan; initialization, sizes and errors."""

import ast
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import heddle
from heddle.config import DesignError, parse_config
from heddle.laws.harness import normal_tensor
from heddle.model.config import ModelConfig
from heddle.numerics.dispatch import DeviceSize
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent import selective_scan
from heddle.numerics.recurrent.selective_scan import ScanInputs, _by_halves, _scan, _stretch
from heddle.parts.build import BuildContext
from heddle.parts.mixers.mamba import Mamba, MambaConfig
from heddle.parts.norms.rms import RMSConfig
from tests.cases import Data, case, design, layer
from tests.laws.planting import Plant, calls, operand_dropped, operator, reads
from tests.parity.recurrence import loop_convolution, projected
from tests.parts.loops import Errors, assert_none, mixer_errors, with_large_weights

WIDTH = 6


def loop(x: Tensor, mixer: Any) -> Tensor:
    """One document x [T, WIDTH], one token at a time. Named as in the paper: C, B and x are q, k and v."""
    u, z = loop_convolution(mixer, projected(mixer, "v", x)), projected(mixer, "gate", x)
    h, rows = torch.zeros(mixer.hidden, mixer.state_size, dtype=x.dtype), []
    for t in range(len(x)):
        dt, b, c = (mixer.get_parameter(f"{name}.weight") @ u[t] for name in ("time_step_down", "k", "q"))
        if mixer.k_norm is not None:
            norms = (mixer.time_step_norm, mixer.k_norm, mixer.q_norm)
            gains = [1.0 if norm.weight is None else norm.weight for norm in norms]
            dt, b, c = (
                gain * y / (y.square().mean() + norm.eps).sqrt()
                for y, gain, norm in zip((dt, b, c), gains, norms, strict=True)
            )
        delta = torch.log1p(torch.exp(mixer.time_step_up.weight @ dt + mixer.time_step_bias))
        h = torch.exp(-torch.exp(mixer.rate) * delta[:, None]) * h + torch.outer(delta * u[t], b)
        rows.append((h @ c + mixer.skip * u[t]) * z[t] / (1 + torch.exp(-z[t])))
    return projected(mixer, "out", torch.stack(rows))


def built(draw: random.Random) -> Mamba:
    """A random mixer in float64 with large parameters."""
    norm = draw.choice((None, RMSConfig(eps=1e-4), RMSConfig(eps=0.1, weight=False)))
    least = 1 if norm is None else 2
    config = MambaConfig(
        hidden=draw.choice((None, 1, 5, 7)),
        state_size=draw.randint(least, 4),
        time_step_rank=draw.randint(least, 3),
        conv_kernel=draw.randint(1, 4),
        conv_bias=draw.random() < 0.5,
        bias=draw.random() < 0.5,
        norm=norm,
    )
    return with_large_weights(config.build(BuildContext(WIDTH, RMSConfig())), draw)


def largest_errors(seed: int) -> Errors:
    """For two packed documents."""
    draw = random.Random(seed)
    return mixer_errors(built(draw), loop, WIDTH, [draw.randint(1, 9), draw.randint(2, 12)], draw)


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches that begin and end within documents."""
    monkeypatch.setattr(selective_scan, "STRETCH", DeviceSize(0, 0))
    monkeypatch.setattr(selective_scan, "LEAST_TOKENS", 7)


def test_values_and_gradients_are_those_of_the_papers_loop() -> None:
    for seed in range(60):
        assert_none(largest_errors(seed), seed)


WRONG: dict[str, Plant] = {
    "a rate that is no logarithm": calls(Mamba._scan, "exp", lambda rate: rate.abs()),
    "B and C exchanged": calls(Mamba._scan, "ScanInputs", lambda make, q, k, *rest: make(k, q, *rest)),
    "no skip": reads(Mamba._scan, "skip", lambda skip: 0 * skip),
    "no gate": operand_dropped(Mamba.forward, "silu"),
    "no bias of the time step": reads(Mamba.forward, "time_step_bias", lambda bias: 0 * bias),
    "Δ without softplus": calls(Mamba.forward, "softplus", lambda _, x: x.abs()),
    "C that is not normalized": calls(Mamba.forward, "q_norm", lambda _, x: x),
    "additions without Δ": operator(_stretch, ast.Mult, ast.Add, 1),
    "neighbors that do not decay": operator(_by_halves, ast.Mult, ast.Add),
    "the last documents in the state": reads(_stretch, "starts", lambda _: None, 0),
    "stretches that begin anew": calls(
        _scan,
        "checkpoint",
        lambda run, stretch, *tokens, **options: run(stretch, *tokens[:-1], 0 * tokens[-1], **options),
    ),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_a_wrong_scan(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[bug](monkeypatch)
    assert any(max(largest_errors(seed)) > 1e-3 for seed in range(6))


@pytest.mark.parametrize("rate", [0.0, -1e-6, -5.0, -1e4, -1e30])
def test_extreme_decays_stay_exact_in_float32(rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, time_step = (normal_tensor((2, n, 40, d), generator) for n, d in ((1, 3), (1, 3), (4, 1), (4, 1)))
    wide = ScanInputs(q, k, v, time_step.square(), torch.full((4, 3), rate, dtype=v.dtype), v.new_ones(4))
    with kernels(selective_scan="reference"):
        expected, after = selective_scan.selective_scan(wide, None)
    narrow = ScanInputs._make([*(x.float() for x in wide[:6]), None, None])
    actual = selective_scan.selective_scan(narrow, None)
    for got, want in zip(actual, (expected, after), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-4)


def test_the_states_of_a_stretch_are_not_kept_for_the_backward_pass() -> None:
    """What is kept of 28 tokens with 9 states of 32 numbers each is at most as large as a token's states."""
    kept: list[int] = []
    generator = torch.Generator().manual_seed(0)
    q, k, v, time_step = (normal_tensor((1, n, 28, d), generator) for n, d in ((1, 32), (1, 32), (9, 1), (9, 1)))
    rate = -normal_tensor((9, 32), generator).square()
    leaves = [x.requires_grad_() for x in (q, k, v, time_step.square(), rate, v.new_ones(9))]

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y, _ = selective_scan.selective_scan(ScanInputs._make([*leaves, None, None]), None)
    assert 0 < max(kept) <= 9 * 32
    assert all(gradient is not None for gradient in torch.autograd.grad(y.sum(), leaves))


def test_the_first_weights_are_those_of_the_paper() -> None:
    mixer: Any = heddle.build(parse_config(ModelConfig, design(layer({"kind": "mamba"}), width=512))).layers[0].mixer
    assert (mixer.hidden, mixer.state_size, mixer.time_step_up.in_features) == (1024, 16, 32)
    noise = mixer.rate.detach() - torch.arange(1.0, 17.0).log()
    assert float(noise.std()) == pytest.approx(0.02, rel=0.02)
    assert float(noise.abs().max()) < 0.12
    step = functional.softplus(mixer.time_step_bias.detach())
    assert 0.00099 < float(step.min()) < 0.00103 < 0.097 < float(step.max()) < 0.101
    assert float(mixer.time_step_up.weight.detach().std()) == pytest.approx((3 * 32) ** -0.5, rel=0.02)
    assert mixer.skip.eq(1).all()
    assert mixer.convolution.bias.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_has_a_fixed_size_and_at_least_float32(dtype: torch.dtype) -> None:
    config = case("mamba-norms")
    model, item_size = heddle.build(config, dtype=dtype), torch.finfo(dtype).bits // 8
    for cache_length in (None, 5000):
        assert model.init_state(2, cache_length).layer_bytes == [2 * (27 * 3 * 4 + (1 * 27 + 3 * 24) * item_size)] * 2
    layer_state = model.init_state(2).layers[0]
    assert layer_state is not None
    assert not layer_state.can_roll_back(1, model.init_state(2).table)


def test_flops_are_those_of_the_products_and_the_recurrence() -> None:
    """Each token: projections of 2 · 48 + 48, 2 + 2 · 5 and 48 numbers, 4 taps, and 4 FLOPs for each number of S."""
    config = case("mamba").replace(layers=(case("mamba").layers[0].replace(repeat=1, feedforward=None),))
    parts = heddle.size(config, context_length=32).flops_per_token - 2 * 24 * 61  # logits
    assert parts == 2 * (24 * 3 * 48 + 48 * (2 + 2 * 5) + 2 * 48 + 4 * 48) + 4 * 48 * 5


def test_the_size_of_a_long_context_takes_one_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def spy(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        lengths.append(len(q))
        return _stretch(q, *rest)

    monkeypatch.setattr(selective_scan, "_stretch", spy)
    heddle.size(case("mamba"), context_length=2**16)
    assert set(lengths) == {2**16}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 6}, r"heads"),
        ({"hidden": 0}, r"hidden:.*0"),
        ({"conv_kernel": 0}, r"conv_kernel:.*0"),
        ({"norm": {"kind": "rms"}, "time_step_rank": 1}, r"time_step_rank: 1 is too few for norm"),
        ({"norm": {"kind": "rms"}, "state_size": 1}, r"state_size: 1 is too few for norm"),
    ],
)
def test_invalid_fields_raise(fields: Data, message: str) -> None:
    with pytest.raises(DesignError, match=message):
        heddle.build(parse_config(ModelConfig, design(layer({"kind": "mamba", **fields}))))
