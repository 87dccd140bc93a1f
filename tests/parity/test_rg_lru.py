"""RG-LRU against a loop of the paper's formula and transformers' block in float64; first weights, state and errors."""

import ast
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as theirs

import heddle
from heddle.config import DesignError, parse_config
from heddle.laws.harness import normal_tensor
from heddle.model.config import ModelConfig
from heddle.numerics.recurrent.selective_scan import _by_halves, _diagonal_scan, _diagonal_step, diagonal_reference
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers.rg_lru import RGLRU, BlockGate, RGLRUConfig, bounded_sqrt
from heddle.parts.norms.rms import RMSConfig
from tests.cases import Data, case, design, layer
from tests.laws.bugs import Bug, assert_caught, check_without_bugs, each, inputs_with
from tests.laws.planting import Plant, calls, constant, operand_dropped, operator, reads
from tests.parity.recurrence import projected
from tests.parts.loops import Errors, assert_none, errors, mixer_errors, sigmoid, with_large_weights

WIDTH = 6


def loop(x: Tensor, mixer: Any) -> Tensor:
    """One document x [T, WIDTH], one token and block at a time."""
    u, z, rows, heads = projected(mixer, "v", x), projected(mixer, "gate", x), [], len(mixer.input_gate.weight)
    h, taps = torch.zeros(mixer.hidden, dtype=x.dtype), mixer.convolution.weight
    for t in range(len(x)):
        v = mixer.convolution.bias + sum(taps[:, -1 - back] * u[t - back] for back in range(min(t + 1, taps.shape[1])))
        blocks = v.split(mixer.hidden // heads)
        i, r = (
            sigmoid(torch.cat([matrix @ block for matrix, block in zip(gate.weight, blocks, strict=True)]) + gate.bias)
            for gate in (mixer.input_gate, mixer.decay_gate)
        )
        a = torch.exp(-8 * torch.log1p(torch.exp(mixer.rate)) * r)
        h = a * h + (1 if t == 0 else (1 - a**2).sqrt()) * i * v
        tanh = torch.tanh((2 / torch.pi) ** 0.5 * (z[t] + 0.044715 * z[t] ** 3))
        rows.append(h * z[t] * (1 + tanh) / 2)
    return projected(mixer, "out", torch.stack(rows))


def built(draw: random.Random) -> RGLRU:
    """A random mixer in float64 with large parameters, but no decay so near 1 that the gradient is bounded."""
    heads = draw.choice((1, 2, 3))
    config = RGLRUConfig(
        heads=heads,
        hidden=draw.choice((None, 2 * heads, 3 * heads)),
        conv_kernel=draw.randint(1, 4),
        bias=draw.random() < 0.5,
    )
    mixer = with_large_weights(config.build(BuildContext(WIDTH, RMSConfig())), draw)
    with torch.no_grad():
        mixer.decay_gate.bias.clamp_(min=0)
        mixer.decay_gate.weight.mul_(0.5)
    return mixer


def largest_errors(seed: int) -> Errors:
    """For two packed documents."""
    draw = random.Random(seed)
    return mixer_errors(built(draw), loop, WIDTH, [draw.randint(1, 9), draw.randint(2, 12)], draw)


def test_values_and_gradients_are_those_of_the_papers_loop() -> None:
    for seed in range(60):
        assert_none(largest_errors(seed), seed)


WRONG: dict[str, Plant] = {
    "a factor at the first token": reads(RGLRU._recurrence, "positions", lambda positions: positions + 1),
    "another rate": constant(RGLRU._recurrence, 2, 1),
    "the gates exchanged": constant(RGLRU._recurrence, 1, 0, 0),
    "a rate that is not softened": calls(RGLRU._recurrence, "softplus", lambda _, rate: rate.abs()),
    "no input gate": operand_dropped(RGLRU._recurrence, "masked_fill"),
    "blocks that are transposed": reads(BlockGate.forward, "mT", lambda weight: weight.mT),
    "no bias of the gates": operand_dropped(BlockGate.forward, "bias"),
    "neighbors that do not decay": operator(_by_halves, ast.Mult, ast.Add),
    "documents that are joined": reads(_diagonal_scan, "starts", lambda _: None, 0),
    "a step that does not decay": calls(_diagonal_step, "mul_", lambda state, decay: state),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_a_wrong_recurrence(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[bug](monkeypatch)
    assert any(max(largest_errors(seed)) > 1e-3 for seed in range(6))


def their_errors(seed: int) -> Errors:
    """Of the outputs, and of the gradients of x and of all weights, of one document in transformers."""
    draw = random.Random(seed)
    heads, dim = draw.choice((1, 2, 3)), draw.randint(2, 4)
    fields = {"num_attention_heads": heads, "lru_width": heads * dim, "conv1d_width": draw.randint(1, 4)}
    block: Any = theirs.RecurrentGemmaRecurrentBlock(RecurrentGemmaConfig(hidden_size=WIDTH, **fields), 0)
    with_large_weights(block, draw)
    config = RGLRUConfig(heads=heads, hidden=heads * dim, conv_kernel=fields["conv1d_width"])
    mixer: Any = config.build(BuildContext(WIDTH, RMSConfig())).double()
    unit, length = block.rg_lru, draw.randint(2, 12)
    pairs = [
        *((getattr(block, f"linear_{hf}"), getattr(mixer, ours)) for hf, ours in zip("yx", ("gate", "v"), strict=True)),
        (block.linear_out, mixer.out),
    ]
    copies = [pair for hf, ours in pairs for pair in ((hf.weight, ours.weight), (hf.bias, ours.bias))]
    copies += [(block.conv_1d.weight[:, 0], mixer.convolution.weight), (block.conv_1d.bias, mixer.convolution.bias)]
    copies += [(unit.input_gate_weight.mT, mixer.input_gate.weight)]
    copies += [(unit.input_gate_bias.flatten(), mixer.input_gate.bias)]
    copies += [(unit.recurrent_gate_weight.mT, mixer.decay_gate.weight), (unit.recurrent_param, mixer.rate)]
    copies += [(unit.recurrent_gate_bias.flatten(), mixer.decay_gate.bias)]
    with torch.no_grad():
        for hf, ours in copies:
            ours.copy_(hf)
    x = normal_tensor((1, length, WIDTH), torch.Generator().manual_seed(seed)).requires_grad_()
    parameters = [ours for _, ours in copies]
    actual = mixer(x, Layout.causal(1, length))[0]
    leaves = dict(block.named_parameters())
    probe = normal_tensor(tuple(actual.shape), torch.Generator().manual_seed(99))
    expected = block(x, torch.arange(length)[None], None, use_cache=False)[0]
    wanted = torch.autograd.grad((expected * probe).sum(), [x, *leaves.values()])
    got = torch.autograd.grad((actual * probe).sum(), [x, *parameters])
    of_theirs = dict(zip(leaves, wanted[1:], strict=True))
    order = ["linear_y.weight", "linear_y.bias", "linear_x.weight", "linear_x.bias", "linear_out.weight"]
    order += ["linear_out.bias", "conv_1d.weight", "conv_1d.bias", "rg_lru.input_gate_weight", "rg_lru.input_gate_bias"]
    order += ["rg_lru.recurrent_gate_weight", "rg_lru.recurrent_param", "rg_lru.recurrent_gate_bias"]
    gradients = [of_theirs[name].mT if "gate_weight" in name else of_theirs[name] for name in order]
    differences = [(a.flatten() - b.flatten()).abs().max() for a, b in zip(got[1:], gradients, strict=True)]
    gradient = max([float((got[0] - wanted[0]).abs().max()), *map(float, differences)])
    return float((actual - expected).detach().abs().max()), gradient


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sums are in float32 otherwise."""
    monkeypatch.setattr(theirs.RecurrentGemmaRglru._rnn_scan, "__defaults__", (torch.float64,))


@pytest.mark.usefixtures("in_float64")
def test_values_and_gradients_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(40):
        assert_none(their_errors(seed), seed)
    WRONG["a factor at the first token"](monkeypatch)
    assert max(their_errors(0)) > 1e-3


def test_the_gradient_of_the_root_is_theirs() -> None:
    x = torch.tensor([0.0, 1e-30, 2.4e-7, 2.6e-7, 1e-3, 1.0], dtype=torch.float64, requires_grad=True)
    assert_none(errors(bounded_sqrt(x), theirs.SqrtBoundDerivative.apply(x), [x]))
    assert bounded_sqrt(torch.zeros(1, requires_grad=True)).sum().backward() is None


def test_gates_that_are_closed_have_finite_gradients_in_float32() -> None:
    mixer: Any = RGLRUConfig(heads=2).build(BuildContext(WIDTH, RMSConfig()))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
        mixer.decay_gate.bias.fill_(-200.0)  # r is 0, and a is 1
    mixer(torch.ones(1, 9, WIDTH), Layout.causal(1, 9))[0].sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in mixer.parameters())


def test_the_first_weights_are_those_of_the_authors() -> None:
    config = design(layer({"kind": "rg_lru", "heads": 4}), width=512)
    mixer: Any = heddle.build(parse_config(ModelConfig, config)).layers[0].mixer
    decay = torch.exp(-torch.nn.functional.softplus(mixer.rate.detach()))
    assert 0.8999 < float(decay.min()) < 0.901 < 0.998 < float(decay.max()) < 0.9991
    assert float(decay.square().mean()) == pytest.approx((0.9**2 + 0.999**2) / 2, rel=0.01)
    assert float(mixer.input_gate.weight.detach().std()) == pytest.approx(0.1 / 128**0.5, rel=0.02)
    assert mixer.decay_gate.bias.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_has_a_fixed_size_and_at_least_float32(dtype: torch.dtype) -> None:
    model, item_size = heddle.build(case("rg-lru-own-width"), dtype=dtype), torch.finfo(dtype).bits // 8
    for cache_length in (None, 5000):
        assert model.init_state(2, cache_length).layer_bytes == [2 * (15 * 4 + (15 + 3 * 24) * item_size)] * 2


def test_flops_are_those_of_the_products_and_the_recurrence() -> None:
    """Each token: three projections, two gates of blocks of 8, 4 taps, and a multiply-add for each channel."""
    config = case("rg-lru").replace(layers=(case("rg-lru").layers[0].replace(repeat=1, feedforward=None),))
    parts = heddle.size(config, context_length=32).flops_per_token - 2 * 24 * 61  # logits
    assert parts == 2 * (3 * 24 * 24 + 2 * 24 * 8 + 4 * 24 + 24)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 5}, r"heads: 5 does not divide hidden = 24"),
        ({"heads": 4, "hidden": 6}, r"heads: 4 does not divide hidden = 6"),
        ({"heads": 4, "conv_kernel": 0}, r"conv_kernel:.*0"),
        ({"heads": 4, "activation": "swiglu_clamped"}, r"activation:"),
    ],
)
def test_invalid_fields_raise(fields: Data, message: str) -> None:
    with pytest.raises(DesignError, match=message):
        heddle.build(parse_config(ModelConfig, design(layer({"kind": "rg_lru", **fields}))))


BUGS = [
    Bug(
        "a state that decays at padding",
        "padding_not_cached",
        "rg-lru",
        calls(RGLRU._recurrence, "without_padding", lambda _, x, layout: x, every=True),
    ),
    Bug(
        "a convolution that forgets its last tokens",
        "chunked_decoding",
        "rg-lru-own-width",
        calls(RGLRU._recurrence, "next_state", lambda convolution, x, layout, last: 0 * last),
    ),
    Bug(
        "a first token of each call without its factor",
        "chunked_decoding",
        "rg-lru",
        reads(RGLRU._recurrence, "positions", lambda positions: positions - positions[:, :1]),
    ),
    Bug(
        "a state carried into the next document in single steps",
        "chunked_ragged_batch",
        "rg-lru",
        inputs_with(_diagonal_step, lambda inputs: {"call_segment_ids": None}),
    ),
    Bug(
        "a state carried into the next document",
        "document_isolation",
        "rg-lru-own-width",
        reads(_diagonal_scan, "starts", lambda _: None, 0),
    ),
    Bug(
        "a factor left out token by token",
        "kernel_equivalence",
        "rg-lru",
        inputs_with(diagonal_reference, lambda inputs: {"factor": torch.ones_like(inputs.factor)}),
    ),
]


@each(BUGS)
def test_laws_catch_it(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(bug, monkeypatch)


@pytest.mark.nightly
def test_laws_hold_without_them() -> None:
    check_without_bugs(BUGS)
