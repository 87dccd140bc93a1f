"""Short convolutions of mixers and feed-forwards: a plain loop, Inkling's attention, states, sizes, what is refused."""

import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import model_under_test, normal_tensor, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.recurrent.convolution import causal_conv1d
from heddle.parts.build import BuildContext
from heddle.parts.mixers.attention import Attention, AttentionConfig
from heddle.parts.modules import short_convolution
from heddle.parts.modules.short_convolution import RESIDUAL_SCALE
from heddle.parts.norms.rms import RMSConfig
from tests.cases import SHIFT, Data, attention, by_day, convolution, design, layer
from tests.laws.planting import calls
from tests.parity.reference import ExactRMS
from tests.parts.loops import DecoderLoop, assert_none, errors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers.models.inkling import modeling_inkling as theirs

WIDTH = 8


def random_design(seed: int) -> Data:
    """One to three layers of attention and a feed-forward, with convolutions of any of their tensors."""
    draw = random.Random(seed)

    def some(*names: str) -> Data:
        of = [name for name in names if draw.random() < 0.6]
        fields = {
            "conv_kernel": draw.choice((1, 2, 3, 4, 4, 9)), "residual": draw.random() < 0.7,
            "activation": draw.choice((None, "silu")),
        }  # fmt: skip
        fields = draw.choice((fields, fields, fields, SHIFT))
        return {"short_convolution": convolution(*of) | fields | {"of": of}} if of else {}

    layers = []
    for _ in range(draw.randint(1, 3)):
        groups = draw.choice((1, 2))
        mixer = attention(
            groups * draw.choice((1, 2)), position=None, kv_heads=groups, head_dim=draw.choice((2, 3)),
            value_dim=draw.choice((2, 5)), window=draw.choice((None, 2, 4)), **some("input", "q", "k", "v"),
        )  # fmt: skip
        relu = {"kind": "mlp", "activation": draw.choice(("relu", "relu2"))}
        kind = draw.choice((relu, {"kind": "gated"}))
        forward = {**kind, "hidden": draw.randint(2, 6), **some("input", "hidden")}
        layers.append(layer(*draw.choice(((mixer, forward), (mixer, forward), (mixer, None), (None, forward)))))
    return design(*layers, width=WIDTH)


def largest_errors(model: Decoder, seed: int) -> tuple[float, float]:
    """The largest difference of the hidden states of each document, and of the gradients of all weights and embeddings.

    Row 0 is two or three packed documents; rows 1 and 2 are one document each, padded on one side.
    """
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    cuts = sorted(draw.sample(range(1, 9), draw.choice((1, 2))))
    lengths = [end - start for start, end in zip([0, *cuts], [*cuts, 9], strict=True)]
    left, right = draw.randint(1, 4), draw.randint(1, 4)
    positions = torch.full((3, 9), -1)
    positions[0] = torch.cat([torch.arange(length) for length in lengths])
    positions[1, left:], positions[2, :-right] = torch.arange(9 - left), torch.arange(9 - right)
    segment_ids = torch.zeros(3, 9, dtype=torch.int64)
    segment_ids[0] = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
    layout = heddle.Layout(positions, segment_ids)
    embedded = normal_tensor((3, 9, WIDTH), generator).requires_grad_()
    hidden, loop = model(embedded, layout)[0], DecoderLoop(model, model.config)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    places = [(0, start, start + length) for start, length in zip(starts, lengths, strict=True)]
    places += [(1, left, 9), (2, 0, 9 - right)]
    actual = torch.cat([hidden[row, start:end] for row, start, end in places])
    expected = torch.cat([loop.hidden(list(embedded[row, start:end])) for row, start, end in places])
    return errors(actual, expected, [embedded, *model.layers.parameters()])


@pytest.mark.parametrize("seed", by_day(15, 60))
def test_convolutions_are_those_of_a_plain_loop(seed: int) -> None:
    assert_none(largest_errors(model_under_test(parse_config(ModelConfig, random_design(seed))), seed))


MISTAKES: dict[str, Callable[..., Tensor]] = {
    "weights in the other order": lambda x, weight, state, taps, run: run(x, weight.flip(1), state, taps),
    "one token ahead": lambda x, weight, state, taps, run: run(x.roll(-1, 1), weight, state, taps),
    "across documents": lambda x, weight, state, taps, run: run(x, weight, state, None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_loop_sees_a_mistake(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = MISTAKES[mistake]
    monkeypatch.setattr(short_convolution, "causal_conv1d", lambda *inputs: wrong(*inputs, causal_conv1d))
    data = design(layer(attention(2, short_convolution=convolution("k", "v"))), width=WIDTH)
    assert largest_errors(model_under_test(parse_config(ModelConfig, data)), 0)[0] > 1e-3


# Inkling's attention: keys and values pass through a short convolution, and near keys have logits of their own


def their_attention(ours: Any, width: int, kernel: int, temperature: tuple[int, float]) -> Any:
    """Their module with our weights."""
    config: Any = SimpleNamespace(
        hidden_size=width, layer_types=["hybrid"], head_dim=ours.head_dim, num_attention_heads=ours.heads,
        num_key_value_heads=ours.kv_heads, rel_extent=len(ours.relative_logits.weight), d_rel=2,
        sconv_kernel_size=kernel, rms_norm_eps=1e-5, attention_dropout=0.0, log_scaling_n_floor=temperature[0],
        log_scaling_alpha=temperature[1], _attn_implementation="eager",
    )  # fmt: skip
    module = theirs.InklingAttention(config, 0).double()
    for name in "qkv":
        setattr(getattr(module, f"{name}_proj"), "weight", getattr(ours, name).weight)  # noqa: B010
    module.o_proj.weight, module.r_proj.weight = ours.out.weight, ours.relative.weight
    for name in "kv":
        module.get_submodule(f"{name}_sconv").conv1d.weight = nn.Parameter(ours.convolutions[name].weight[:, None])
    module.q_norm, module.k_norm = (ExactRMS(norm, 0.0, 1e-5) for norm in (ours.q_norm, ours.k_norm))
    del module.rel_logits_proj.proj
    module.rel_logits_proj.proj = ours.relative_logits.weight.T
    return module


def exact_softmax(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, position_bias: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Their function for attention without its float32."""
    k, v = (theirs.repeat_kv(each, module.num_key_value_groups) for each in (k, v))
    weights = (q @ k.mT * scaling + position_bias + mask).softmax(-1)
    return (weights @ v).transpose(1, 2), None


def attention_errors(seed: int, convolve: bool = True) -> tuple[float, float]:
    """The largest difference of outputs, and of gradients of inputs and weights."""
    draw = random.Random(seed)
    groups, head_dim, kernel, length = draw.choice((1, 2)), draw.randint(2, 5), draw.randint(2, 5), draw.randint(1, 8)
    heads, width, (floor, alpha) = groups * draw.randint(1, 2), draw.randint(2, 9), (draw.randint(1, 4), 0.7)
    config = AttentionConfig(
        heads=heads, kv_heads=groups, head_dim=head_dim, scale=1.0 / head_dim, qk_norm="head", temperature_beta=alpha,
        temperature_length=floor, temperature_growth="smooth", relative_dim=2, relative_extent=draw.randint(1, 9),
        short_convolution=parse_config(
            short_convolution.ShortConvolutionConfig, convolution("k", "v", conv_kernel=kernel)
        ),
    )  # fmt: skip
    ours: Any = config.build(BuildContext(width, RMSConfig())).double()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(1.0 if parameter.dim() < 2 else 0.0, 0.8)
    module = their_attention(ours, width, kernel, (floor, alpha))
    x = torch.randn(2, length, width, dtype=torch.float64, requires_grad=True)
    got = ours(x, heddle.Layout.causal(2, length))[0]
    mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    if not convolve:
        module.k_sconv = nn.Identity()
        module.k_sconv.forward = lambda states, **_: states
    want = module(x, mask)[0]
    probe, inputs = torch.randn_like(got), [x, *ours.parameters()]
    own = torch.autograd.grad((got * probe).sum(), inputs)
    other = torch.autograd.grad((want * probe).sum(), [x, *their_parameters(ours, module)], allow_unused=not convolve)
    pairs = [(a, b) for a, b in zip(own, other, strict=True) if b is not None]
    return float((got - want).detach().abs().max()), max(float((a - b.view_as(a)).abs().max()) for a, b in pairs)


def their_parameters(ours: Any, module: Any) -> list[Tensor]:
    """The parameters in the place of ours; the two modules share all but those of the convolutions."""
    swapped = {}
    for name in "kv":
        if hasattr(module.get_submodule(f"{name}_sconv"), "conv1d"):
            swapped[id(ours.convolutions[name].weight)] = module.get_submodule(f"{name}_sconv").conv1d.weight
    return [swapped.get(id(parameter), parameter) for parameter in ours.parameters()]


def test_convolutions_of_keys_and_values_and_relative_logits_equal_inkling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(theirs, "eager_attention_forward", exact_softmax)
    for seed in range(40):
        assert_none(attention_errors(seed), seed)
    assert attention_errors(3, convolve=False)[0] > 1e-3
    calls(Attention._token_bias, "_temperatures", lambda *_: 1.0)(monkeypatch)
    assert attention_errors(3)[0] > 1e-3


# Sizes, first weights and states

ALL = design(
    layer(
        attention(kv_heads=2, window=5, short_convolution=convolution("input", "q", "v")),
        {"kind": "gated", "hidden": 10, "short_convolution": convolution("input", "hidden", conv_kernel=3)},
        repeat=2,
    ),
    layer(None, {"kind": "mlp", "hidden": 7, "short_convolution": convolution("hidden", conv_kernel=2)}),
)


def without_convolutions(data: Any) -> Any:
    """The same design without any."""
    if isinstance(data, dict):
        return {name: without_convolutions(value) for name, value in data.items() if name != "short_convolution"}
    return [without_convolutions(each) for each in data] if isinstance(data, list) else data


def test_sizes_are_counted() -> None:
    model = heddle.build(parse_config(ModelConfig, ALL))
    plain, sized = (heddle.size(parse_config(ModelConfig, data), 20) for data in (without_convolutions(ALL), ALL))
    weights = 2 * (4 * (24 + 24 + 12) + 3 * (24 + 2 * 10)) + 2 * 7
    inputs = 2 * (3 * (24 + 24 + 12) + 2 * (24 + 2 * 10)) + 1 * 7
    assert sized.parameters - plain.parameters == weights
    assert sized.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sized.flops_per_token - plain.flops_per_token == 2 * weights  # a multiply and an add for each
    assert sized.state_bytes - plain.state_bytes == 4 * inputs
    assert sized.state_bytes_per_token == plain.state_bytes_per_token
    for cache_length in (20, None):
        state = model.init_state(3, cache_length)
        names = [name for name in state.tensors() if name.startswith("layers.0")]
        assert names == [
            "layers.0.mixer.own.own.keys", "layers.0.mixer.own.own.values", "layers.0.mixer.own.conv_state",
            "layers.0.mixer.conv_state", "layers.0.feedforward.own.conv_state", "layers.0.feedforward.conv_state",
        ]  # fmt: skip
        assert state.tensors()["layers.2.feedforward.conv_state"].shape == (3, 1, 7)
        assert state.layer_bytes[2] == 3 * 7 * 4


def test_first_weights_and_their_scale() -> None:
    wide = {"kind": "mlp", "hidden": 20000, "short_convolution": convolution("hidden")}
    pure = wide | {"short_convolution": convolution("hidden", residual=False)}
    model = heddle.build(parse_config(ModelConfig, design(layer(None, wide), layer(None, pure), width=2)))
    weights = dict(model.named_parameters())
    scaled, unscaled = (weights[f"layers.{index}.feedforward.convolutions.up.weight"].detach() for index in (0, 1))
    assert float(scaled.std()) == pytest.approx(RESIDUAL_SCALE / 2, rel=0.02)
    assert float(unscaled.std()) == pytest.approx(1 / 2, rel=0.02)


def test_numbers_are_added_in_float32() -> None:
    """In bfloat16 the sum x + conv(x) is rounded once."""
    config = parse_config(short_convolution.ShortConvolutionConfig, convolution("input", conv_kernel=2))
    module = short_convolution.ShortConvolutions(config, {"input": 3})
    with torch.no_grad():
        module.get_parameter("input.weight").copy_(torch.tensor([[0.0, 2.0**-9]] * 3))
    x = torch.full((1, 4, 3), 1.0 + 2.0**-7, dtype=torch.bfloat16)
    (y,), _ = module.to(torch.bfloat16)({"input": x}, heddle.Layout.causal(1, 4), None)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, (x.float() * (1 + 2.0**-9)).to(torch.bfloat16))


def test_no_token_can_be_taken_back() -> None:
    """As with any other short convolution: a state holds no earlier inputs than the last ones."""
    data = design(layer(attention(), {"kind": "mlp", "hidden": 7, "short_convolution": convolution("hidden")}))
    model = model_under_test(parse_config(ModelConfig, data))
    with torch.no_grad():
        _, state = model(random_tokens(model.config, 2, 6), state=model.init_state(2, 20))
        assert state.can_roll_back(0)
        assert not state.can_roll_back(1)
        with pytest.raises(ConfigError, match=r"rollback: layer 0 \(LayerState\) cannot take back 1 tokens"):
            state.rollback(1)
        assert not state.rollback(0).consumed


def test_a_state_goes_on_where_it_was_saved(tmp_path: Any) -> None:
    model = model_under_test(parse_config(ModelConfig, ALL))
    tokens = random_tokens(model.config, 2, 9)
    with torch.no_grad():
        _, state = model(tokens[:, :5], state=model.init_state(2, 9))
        heddle.save_state(state, tmp_path / "state")
        want, _ = model(tokens[:, 5:], state=state)
        got, _ = model(tokens[:, 5:], state=heddle.load_state(model, tmp_path / "state"))
    assert torch.equal(got, want)
    heddle.save(model, tmp_path / "model")
    loaded, _ = heddle.load(tmp_path / "model")
    assert torch.equal(loaded(tokens)[0], model(tokens)[0])


# What is refused, by name


@pytest.mark.parametrize(
    ("mixer", "feedforward", "message"),
    [
        (attention(short_convolution=convolution()), None, r"mixer.short_convolution.of: \[\] should name each"),
        (attention(short_convolution=convolution("k", "k")), None, r"mixer.short_convolution.of: \['k', 'k'\] should"),
        (
            attention(short_convolution=convolution("hidden")),
            None,
            r"mixer.short_convolution.of: attention has no hidden to convolve; choose from input, q, k, v",
        ),
        (
            {"kind": "linear_attention", "heads": 4, "short_convolution": convolution("input", "q")},
            None,
            r"mixer.short_convolution.of: linear_attention has no q to convolve; choose from input",
        ),
        (
            None,
            {"kind": "moe", "experts": 2, "top_k": 1, "hidden": 3, "short_convolution": convolution("hidden")},
            r"feedforward.short_convolution.of: moe has no hidden to convolve; choose from input",
        ),
        (
            {"kind": "pair", "first": attention(short_convolution=convolution("input")), "second": attention()},
            None,
            r"mixer.first.short_convolution.of: input is shared by both mixers of a pair",
        ),
        (
            attention(shared_kv=True, short_convolution=convolution("v")),
            None,
            r"mixer.short_convolution.of: k and v come from another layer \(shared_kv\)",
        ),
        (
            None,
            {"kind": "mlp", "hidden": 3, "short_convolution": SHIFT | {"conv_kernel": 3}},
            "feedforward.short_convolution.token_shift: needs conv_kernel: 2, residual: false and no activation",
        ),
    ],
)
def test_what_cannot_be_convolved_is_refused(mixer: Data | None, feedforward: Data | None, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^layers\[0\].{message}"):
        heddle.load_config(design(layer(mixer, feedforward)))
