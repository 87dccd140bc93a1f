"""RWKV-7's time mixing against a plain loop of the paper's formulas; sizes, first weights, and what is refused."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import forward_no_grad, model_under_test, normal_tensor, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.recurrent.general_delta import _chunked, general_delta_flops
from heddle.parts.layout import Layout
from heddle.parts.mixers.rwkv7 import RWKV7
from heddle.parts.modules.recurrent import token_before
from heddle.training.width_transfer import transfer_over_width
from tests.cases import Data, attention, by_day, case, design, layer, rwkv7
from tests.laws.planting import Plant, calls, condition, reads, result
from tests.parts.loops import assert_none, decoder_errors, normalized, sigmoid

WIDTH, LENGTH = 12, 37


def time_mixing(
    get: Any, mixer: Any, xs: list[Tensor], first: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of one layer of one document, and its values before any value residual, [token] each.

    get: a parameter by its name. first: the values of the first layer. S is [d_v, d_k], vectors are rows, as in the
    paper.
    """
    d_k, d_v, width = mixer.head_dim, mixer.value_dim, len(xs[0])
    states = [torch.zeros(d_v, d_k, dtype=xs[0].dtype) for _ in range(mixer.heads)]
    mu, outputs, values = get("shift").view(6, width), [], []
    for t, x in enumerate(xs):
        before = xs[t - 1] if t else torch.zeros_like(x)
        x_r, x_w, x_k, x_v, x_a, x_g = ((1 - m) * x + m * before for m in mu)
        r, k, v = get("q.weight") @ x_r, get("k.weight") @ x_k, get("v.weight") @ x_v
        raw = get("decay_bias") + get("decay_up.weight") @ torch.tanh(get("decay_down.weight") @ x_w)
        w = torch.exp(-math.exp(-0.5) * sigmoid(raw))
        a = sigmoid(get("rate_bias") + get("rate_up.weight") @ (get("rate_down.weight") @ x_a))
        g = get("gate_up.weight") @ sigmoid(get("gate_down.weight") @ x_g)
        values.append(v)
        if first is not None and mixer.value_residual:
            nu = sigmoid(get("value_bias") + get("value_up.weight") @ (get("value_down.weight") @ x_v))
            v = (1 - nu) * v + nu * first[t]
        kappa, replacement = k * get("removal"), k * (1 - get("replacement") + get("replacement") * a)
        heads = []
        for h in range(mixer.heads):
            keys, own = slice(h * d_k, (h + 1) * d_k), slice(h * d_v, (h + 1) * d_v)
            removal = kappa[keys] / kappa[keys].square().sum().sqrt()
            transition = torch.diag(w[keys]) - torch.outer(removal, a[keys] * removal)
            states[h] = states[h] @ transition + torch.outer(v[own], replacement[keys])
            o = states[h] @ r[keys]
            norm = mixer.norm
            if norm.kind == "layer":
                o = (o - o.mean()) / (o.var(correction=0) + norm.eps).sqrt() * get("norm.weight")[h] + get("norm.bias")[
                    h
                ]
            else:
                o = o / (o.square().mean() + norm.eps).sqrt() * get("norm.weight")[h]
            heads.append(o + (r[keys] * replacement[keys] * get("bonus")[keys]).sum() * v[own])
        outputs.append(get("out.weight") @ (torch.cat(heads) * g))
    return outputs, values


def loop(model: Decoder, stream: list[Tensor]) -> Tensor:
    """The hidden states of one document of embeddings, in a model whose layers have this mixer alone."""
    first, parameters = None, dict(model.named_parameters())
    for index, config in enumerate(model.config.resolved().layers):
        inputs = [normalized(x, parameters[f"layers.{index}.residual.norms.mixer.weight"]) for x in stream]
        get = lambda name, index=index: parameters[f"layers.{index}.mixer.{name}"]  # noqa: E731
        outputs, values = time_mixing(get, config.mixer, inputs, first)
        first = first or values
        stream = [x + y for x, y in zip(stream, outputs, strict=True)]
    return torch.stack([normalized(x, parameters["final_norm.norm.weight"]) for x in stream])


def random_design(seed: int) -> Data:
    """One to three layers; later ones may mix their values with those of the first."""
    draw = random.Random(seed)
    shape = {"heads": draw.randint(1, 3), "value_dim": draw.randint(2, 5)}
    layers = []
    for index in range(draw.choice((1, 2, 2, 3))):
        residual = index > 0 and draw.random() < 0.8
        norm: Data = {"kind": draw.choice(("layer", "layer", "rms")), "eps": draw.choice((1e-5, 64e-5, 0.1))}
        ranks = {name: draw.randint(1, 6) for name in ("decay_rank", "rate_rank", "gate_rank")}
        ranks |= {"value_rank": draw.randint(1, 6)} if residual else {}
        fields = {"head_dim": draw.randint(1, 6), "norm": norm, "value_residual": residual, **ranks}
        layers.append(layer({"kind": "rwkv7", **shape, **fields}, None))
    return design(*layers, width=WIDTH)


def embeddings(seed: int, length: int = LENGTH) -> Tensor:
    return normal_tensor((1, length, WIDTH), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", by_day(12, 48))
def test_values_and_gradients_are_those_of_a_plain_loop(seed: int) -> None:
    model = model_under_test(parse_config(ModelConfig, random_design(seed)))
    assert_none(decoder_errors(model, loop, seed, LENGTH))


PAIR = design(
    layer(rwkv7(head_dim=5, value_dim=3, norm={"kind": "layer"}), None),
    layer(rwkv7(head_dim=4, value_dim=3, norm={"kind": "layer"}, value_rank=2, value_residual=True), None),
    width=WIDTH,
)


@pytest.fixture(name="pair")
def _pair() -> Decoder:
    return model_under_test(parse_config(ModelConfig, PAIR))


@pytest.mark.parametrize("pieces", [[37], [1] * 37, [40], [5, 1, 1, 30], [33, 4], [36, 1]])
@torch.no_grad()
def test_any_cut_gives_the_loop(pair: Decoder, pieces: list[int]) -> None:
    x = embeddings(5, sum(pieces))
    state, got = pair.init_state(1), []
    for piece in x.split(pieces, dim=1):
        hidden, state = pair(piece, None, state)
        got.append(hidden)
    torch.testing.assert_close(torch.cat(got, dim=1)[0], loop(pair, list(x[0])), rtol=0, atol=1e-10)


@torch.no_grad()
def test_packed_documents_and_padded_rows_give_the_loop(pair: Decoder) -> None:
    x, documents = embeddings(6), [1, 2, 20, 14]
    want = torch.cat([loop(pair, list(piece)) for piece in x[0].split(documents)])
    torch.testing.assert_close(pair(x, Layout.packed([documents]))[0][0], want, rtol=0, atol=1e-10)
    layout = Layout.padded([23, 9, 2])
    rows = x[:, :23].expand(3, -1, -1)
    got = pair(rows, layout)[0]
    for row, length in enumerate([23, 9, 2]):
        real = got[row][layout.positions[row] >= 0]
        tokens = rows[row][layout.positions[row] >= 0]
        assert len(tokens) == length
        torch.testing.assert_close(real, loop(pair, list(tokens)), rtol=0, atol=1e-10)


WRONG: dict[str, Plant] = {
    "a removal after the decay": calls(RWKV7._recurrence, "exp", torch.ones_like),
    "no removal": calls(RWKV7._recurrence, "without_padding", lambda hide, x, layout: 0.0 * hide(x, layout), nth=1),
    "a decay without its bound": reads(RWKV7.forward, "RATE", lambda rate: 1.0),
    "removal keys that are not normalized": calls(RWKV7.forward, "normalize", lambda functional, x, dim: x),
    "the token itself in the place of the one before": result(token_before, lambda before: before.roll(-1, 1)),
    "values of this layer handed on after their mixture": condition(RWKV7._recurrence, "mix", False),
    "no bonus": calls(RWKV7.forward, "sum", lambda x, *_, keepdim: 0.0 * x.sum(-1, keepdim=keepdim)),
    "a chunk that adds nothing to the state": calls(_chunked, "baddbmm", lambda torch, a, b, c: a, nth=1),
}


@pytest.mark.parametrize("bug", WRONG)
@torch.no_grad()
def test_the_loop_sees_a_mistake(bug: str, pair: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[bug](monkeypatch)
    x = embeddings(7)
    assert float((pair(x)[0][0] - loop(pair, list(x[0]))).abs().max()) > 1e-3


def test_sizes() -> None:
    """A matrix for each head and one token, whatever the length of the text."""
    config = case("rwkv7-own-widths")
    projections = 24 * (2 * 20 + 12 + 5 + 3 + 6) + 5 * 20 + 3 * 20 + 6 * 12 + 12 * 24
    for context in (16, 5000):
        size = heddle.size(config, context, batch=2)
        assert size.layers[0].state_bytes == 2 * 4 * (4 * 5 * 3 + 24)
        assert size.state_bytes_per_token == 0
    model = heddle.build(config)
    mixer, count = (
        model.mixers()[0],
        24 * (2 * 20 + 12 + 5 + 3 + 6 + 6) + 5 * 20 + 3 * 20 + 6 * 12 + 12 * 24 + 5 * 20 + 12,
    )
    assert mixer is not None
    assert sum(each.numel() for each in mixer.parameters()) == count
    assert model.init_state(2, 7).layer_bytes == [2 * 4 * (4 * 5 * 3 + 24)] * 2
    alone = parse_config(ModelConfig, design(layer(rwkv7(4, head_dim=5, value_dim=3), None), head={"tied": True}))
    without = parse_config(ModelConfig, design(layer(None)))
    flops = [heddle.size(each, 16).flops_per_token for each in (alone, without)]
    assert flops[0] - flops[1] == 2 * projections + general_delta_flops(1, 4, 5, 3) - 2 * 2 * 24 * 20


def test_default_ranks_are_those_of_the_authors() -> None:
    config = parse_config(ModelConfig, design(layer({"kind": "rwkv7", "heads": 12}), width=768)).resolved()
    mixer: Any = config.layers[0].mixer
    assert (mixer.head_dim, mixer.value_dim) == (64, 64)
    assert (mixer.decay_rank, mixer.rate_rank, mixer.gate_rank, mixer.value_rank) == (64, 64, 128, None)
    mixer = mixer.replace(value_residual=True)
    assert mixer.rank("value_rank", 768) == 32


def test_first_weights_follow_the_authors_code() -> None:
    """Their formulas, one channel at a time; a few thousandths off, as each number has a draw."""
    width, heads, depth = 96, 3, 4
    entries = [layer(rwkv7(heads)), layer(rwkv7(heads, value_residual=True), repeat=depth - 1)]
    config = parse_config(ModelConfig, design(*entries, width=width, initialization={"std": 1e-6}))
    model, size = heddle.build(config), width // heads
    for number in range(depth):
        get = lambda name, number=number: model.get_parameter(f"layers.{number}.mixer.{name}").detach()  # noqa: E731
        left, progress = 1 - number / depth, number / (depth - 1)
        for n in (0, 1, 40, 95):
            middle = (size - 1) / 2
            place = (n % size - middle) / middle
            zigzag, linear = place * abs(place), n / (width - 1) - 0.5
            want = {
                "decay_bias": -6 + 6 * (n / (width - 1)) ** (1 + progress**0.3) + 0.5 + 2.5 * zigzag,
                "rate_bias": -0.19 + 0.3 * zigzag + 0.4 * linear, "removal": 0.71 - 0.1 * linear,
                "replacement": 1.02, "bonus": -0.04,
            }  # fmt: skip
            want |= {"value_bias": 0.73 - 0.4 * linear} if number else {}
            for name, value in want.items():
                assert float(get(name)[n]) == pytest.approx(value, abs=1e-5)
            for row, exponent in enumerate((0.2, 0.9, 0.7, 0.7, 0.9, 0.2)):
                shift = float(get("shift").view(6, width)[row, n])
                assert shift == pytest.approx(1 - (n / width) ** (exponent * left), abs=1e-5)
        assert not any(bool(get(f"{name}.weight").any()) for name in ("out", "decay_down", "rate_down", "gate_down"))
        for name, bound in (("q", 0.5), ("k", 0.05), ("v", 0.5)):
            assert float(get(f"{name}.weight").std()) == pytest.approx(bound / math.sqrt(3 * width), rel=0.05)
        orthogonal = torch.linalg.qr(torch.randn(width, 5))[0] * 0.1
        assert float(get("decay_up.weight").std()) == pytest.approx(float(orthogonal.std()), rel=0.2)


def test_the_first_step_of_training_moves_the_output_projection_alone() -> None:
    """It begins at zero, so no gradient reaches what is before it."""
    model = heddle.build(case("rwkv7"))
    tokens = random_tokens(model.config, 2, 9)
    functional.cross_entropy(model.head(model(tokens)[0]).flatten(0, 1), tokens.flatten()).backward()
    mixer = model.mixers()[0]
    assert mixer is not None
    moved = {name for name, each in mixer.named_parameters() if each.grad is not None and bool(each.grad.any())}
    assert moved == {"out.weight"}


def test_a_transfer_over_the_width_keeps_first_weights_that_depend_on_the_width() -> None:
    """They shrink with 1 / sqrt(width) by themselves, so the transfer must not shrink them again."""
    entry = layer({"kind": "rwkv7", "heads": 8, "decay_rank": 4, "rate_rank": 4, "gate_rank": 4})
    scales = transfer_over_width(parse_config(ModelConfig, design(entry, width=96)), 24).scales
    for name in ("q", "k", "v"):
        assert scales[f"layers.0.mixer.{name}.weight"].initial_std == 1.0
    assert scales["layers.0.feedforward.up.weight"].initial_std == 0.5


def test_weight_decay_spares_vectors() -> None:
    """It is for parameters with two dims: projections, not μ, ρ or biases."""
    mixer = heddle.build(case("rwkv7-value-residual")).mixers()[2]
    assert mixer is not None
    vectors = {name for name, each in mixer.named_parameters() if each.dim() == 1}
    assert vectors == {"shift", "decay_bias", "rate_bias", "value_bias", "removal", "replacement", "bonus"}


@torch.no_grad()
def test_long_texts_of_one_token_stay_finite() -> None:
    """4,096 times one token in float32: a is at most 1, so no step makes the state's old part longer."""
    model = model_under_test(case("rwkv7")).float()
    hidden = forward_no_grad(model, torch.full((1, 4096), 7))
    assert bool(hidden.isfinite().all())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (design(layer(rwkv7(5))), r"layers\[0\].mixer.heads: 5.*24"),
        (design(layer(rwkv7(value_dim=1))), r"layers\[0\].mixer.value_dim: leaves the norm one number"),
        (design(layer(rwkv7(value_rank=3))), r"layers\[0\].mixer.value_rank: does nothing without value_residual"),
        (design(layer(rwkv7(value_residual=True))), r"layers\[0\].mixer.value_residual: no earlier layer has rwkv7"),
        (
            design(layer(attention()), layer(rwkv7(value_residual=True))),
            r"layers\[1\].mixer.value_residual: no earlier layer has rwkv7",
        ),
        (
            design(layer(rwkv7(4)), layer(rwkv7(value_residual=True))),
            r"layers\[1\].mixer.heads: differs from layers\[0\]'s, whose values it adds",
        ),
        (
            design(layer(rwkv7()), layer({"kind": "pair", "first": rwkv7(value_residual=True), "second": attention()})),
            r"layers\[1\].mixer.first.value_residual: is for a layer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(data: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        heddle.load_config(data)
