"""Values of the first layer that later ones add to theirs: a plain loop, states, sizes, and what is refused."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.conversion.convert import Conversion
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import ModelWeights
from heddle.errors import ConfigError
from heddle.exchange.family_match import chosen_match
from heddle.laws.harness import model_under_test, normal_tensor, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.mixers.attention import Attention
from tests.cases import Data, attention, by_day, case, design, layer
from tests.conversion.exactness import converted_model, difference, source_model
from tests.laws.planting import Plant, calls, condition, reads
from tests.parts.test_shared_keys import normalized, rotated

WIDTH, LENGTH = 12, 7


def loop(model: Decoder, stream: list[Tensor]) -> list[Tensor]:
    """The hidden states of one sequence of embeddings: one layer, one head and one token at a time."""
    first: list[list[Tensor]] | None = None  # values of the first layer, [token][head]
    parameters = dict(model.named_parameters())
    for index, config in enumerate(model.config.resolved().layers):
        mixer: Any = config.mixer
        inputs = [normalized(x, parameters[f"layers.{index}.residual.norms.mixer.weight"]) for x in stream]
        d, d_v = mixer.head_dim, mixer.value_dim

        def head(name: str, x: Tensor, number: int, d: int, index: int = index) -> Tensor:
            return parameters[f"layers.{index}.mixer.{name}.weight"][number * d : (number + 1) * d] @ x

        def turned(name: str, t: int, number: int, d: int = d, mixer: Any = mixer, xs: Any = inputs) -> Tensor:
            y = head(name, xs[t], number, d)
            return y if mixer.position is None else rotated(y, t)

        values = [[head("v", x, g, d_v) for g in range(mixer.kv_heads)] for x in inputs]
        if mixer.value_residual is not None:
            assert first is not None
            learned = mixer.value_residual == "learned"
            mix = parameters[f"layers.{index}.mixer.value_mix"] if learned else mixer.value_residual
            values = [[mix[0] * own[g] + mix[1] * v1[g] for g in range(len(own))] for own, v1 in zip(values, first)]  # noqa: B905
        first = first or values
        outputs = []
        for t in range(len(inputs)):
            start, heads = 0 if mixer.window is None else max(0, t + 1 - mixer.window), []
            for number in range(mixer.heads):
                g = number // (mixer.heads // mixer.kv_heads)
                q = turned("q", t, number)
                scores = torch.stack([q @ turned("k", s, g) for s in range(start, t + 1)]) / math.sqrt(d)
                weights = scores.exp() / scores.exp().sum()
                heads.append(sum((w * values[start + s][g] for s, w in enumerate(weights)), torch.zeros(d_v)))
            outputs.append(parameters[f"layers.{index}.mixer.out.weight"] @ torch.cat(heads))
        stream = [x + y for x, y in zip(stream, outputs, strict=True)]
    return [normalized(x, parameters["final_norm.norm.weight"]) for x in stream]


def random_design(seed: int) -> Data:
    """Layers of attention alone; the second one and some later ones add the first layer's values."""
    draw = random.Random(seed)
    kv_heads, value_dim = draw.choice((1, 2)), draw.randint(1, 5)

    def mixer(residual: Any) -> Data:
        return attention(
            kv_heads * draw.choice((1, 2)),
            draw.choice((None, {"kind": "rope"})),
            kv_heads=kv_heads,
            head_dim=draw.choice((2, 4, 6)),
            value_dim=value_dim,
            window=draw.choice((None, 2, 3)),
            value_residual=residual,
        )

    numbers = [round(draw.uniform(-1.5, 1.5), 3), round(draw.uniform(0.1, 1.5), 3)]
    kinds = [None, draw.choice(("learned", numbers)), *(draw.choice((None, "learned", numbers)) for _ in range(3))]
    return design(*(layer(mixer(kind), None) for kind in kinds[: draw.randint(2, 5)]), width=WIDTH)


def largest_errors(model: Decoder, seed: int) -> tuple[float, float]:
    """The largest difference of the hidden states, and of the gradients of all weights and embeddings."""
    generator = torch.Generator().manual_seed(seed)
    embedded = normal_tensor((1, LENGTH, WIDTH), generator).requires_grad_()
    probe = normal_tensor((LENGTH, WIDTH), generator)
    actual, expected = model(embedded)[0][0], torch.stack(loop(model, list(embedded[0])))
    inputs = [embedded, *model.layers.parameters()]
    gradients = [torch.autograd.grad((y * probe).sum(), inputs) for y in (actual, expected)]
    return (
        float((actual - expected).detach().abs().max()),
        max(float((got - want).abs().max()) for got, want in zip(*gradients, strict=True)),
    )


@pytest.fixture(autouse=True)
def float64() -> Any:
    """What the loop makes is float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("seed", by_day(12, 48))
def test_mixed_values_are_those_of_a_plain_loop(seed: int) -> None:
    config = parse_config(ModelConfig, random_design(seed))
    assert config.value_sources[:2] == (None, 0)
    errors = largest_errors(model_under_test(config), seed)
    assert errors[0] < 1e-10
    assert errors[1] < 1e-9


WRONG = {
    "the two numbers in each other's place": calls(Attention._mixed_values, "unbind", lambda x: x.flip(0).unbind()),
    "the first values without their factor": reads(Attention._mixed_values, "factors", lambda f: (f[0], 1.0), nth=2),
    "own values alone": condition(Attention._mixed_values, "value_source", True),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_a_wrong_mixture(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant: Plant = WRONG[bug]
    plant(monkeypatch)
    data = design(*(layer(attention(2, value_residual=each), None) for each in (None, "learned", "learned")), width=12)
    model = model_under_test(parse_config(ModelConfig, data))
    embedded = normal_tensor((1, LENGTH, WIDTH), torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert float((model(embedded)[0][0] - torch.stack(loop(model, list(embedded[0])))).abs().max()) > 1e-3


READERS = design(
    layer({"kind": "retention", "heads": 2}),
    layer(attention(kv_heads=2, value_dim=5, window=3)),
    layer(attention(kv_heads=2, value_dim=5)),
    layer(attention(kv_heads=2, value_dim=5, value_residual="learned"), repeat=2),
    layer(attention(kv_heads=2, value_dim=5, value_residual=[1.0, 0.5])),
)


def test_sizes_are_those_without_the_option_and_two_numbers() -> None:
    config = parse_config(ModelConfig, READERS)
    assert config.value_sources == (None, None, None, 1, 1, 1)
    plain = [each | {"mixer": each["mixer"] | {"value_residual": None}} for each in READERS["layers"][1:]]
    sizes = [
        heddle.size(each, 20)
        for each in (config, parse_config(ModelConfig, READERS | {"layers": [READERS["layers"][0], *plain]}))
    ]
    assert sizes[0].parameters - sizes[1].parameters == 2 * 2
    assert sizes[0].parameters == sum(each.numel() for each in heddle.build(config).parameters())
    assert sizes[0].state_bytes == sizes[1].state_bytes
    assert sizes[0].flops_per_token == sizes[1].flops_per_token


def test_learned_numbers_begin_at_one_half() -> None:
    model = heddle.build(parse_config(ModelConfig, READERS))
    assert model.get_parameter("layers.3.mixer.value_mix").tolist() == [0.5, 0.5]


def test_the_cache_holds_mixed_values() -> None:
    """So a layer that shares keys and values reads the mixed ones, and a state has no first values."""
    model = model_under_test(case("attention-value-residual"))
    assert model.config.kv_sources[-1] == 3
    state = model.init_state(2, 9)
    assert set(state.tensors()) == set(model_under_test(without_residual(model.config)).init_state(2, 9).tensors())


def without_residual(config: ModelConfig) -> ModelConfig:
    """The design with values of their own everywhere."""
    layers = [each.replace(mixer=without_field(each.mixer)) for each in config.layers]
    return config.replace(layers=tuple(layers))


def without_field(mixer: Any) -> Any:
    """The mixer with values of its own."""
    return mixer.replace(value_residual=None) if "value_residual" in type(mixer).model_fields else mixer


def test_a_layer_of_another_kind_is_not_the_first() -> None:
    data = design(layer({"kind": "retention", "heads": 2}), layer(attention(value_residual="learned")))
    with pytest.raises(ConfigError, match=r"^layers\[1\].mixer.value_residual: no earlier layer has attention"):
        heddle.load_config(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (design(layer(attention(value_residual="learned"))), r"layers\[0\].mixer.value_residual: no earlier layer has"),
        (
            design(layer(attention(kv_heads=2)), layer(attention(kv_heads=1, value_residual="learned"))),
            r"layers\[1\].mixer.kv_heads: differs from that of layers\[0\], whose values it adds; make the two equal",
        ),
        (
            design(layer(attention(value_dim=4)), layer(attention(value_dim=5, value_residual="learned"))),
            r"layers\[1\].mixer.value_dim: differs from",
        ),
        (
            design(layer(attention()), layer(attention(value_residual=[0.5]))),
            r"layers\[1\].mixer.value_residual: \[0.5\] should be two numbers",
        ),
        (
            design(layer(attention()), layer(attention(value_residual=[0.5, 0.0]))),
            r"layers\[1\].mixer.value_residual: adds nothing",
        ),
        (
            design(layer(attention()), layer(attention(shared_kv=True, value_residual="learned"))),
            r"layers\[1\].mixer.value_residual: has no effect with shared_kv",
        ),
        (
            design(
                layer(attention()),
                layer({"kind": "pair", "first": attention(), "second": attention(value_residual="learned")}),
            ),
            r"layers\[1\].mixer.second.value_residual: is for a layer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(data: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        heddle.load_config(data)


def test_recomputed_layers_have_the_same_gradients() -> None:
    """A checkpointed layer finds in the backward pass what the first one handed over in the forward pass."""
    model = model_under_test(parse_config(ModelConfig, READERS)).train()
    tokens, gradients = random_tokens(model.config, 2, 9), []
    for model.checkpointing in (False, True):
        model(tokens)[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None
        assert recomputed is not None
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=1e-12)


def test_no_family_takes_them() -> None:
    gated: Data = {"kind": "gated", "hidden": 20}
    data = design(layer(attention(4), gated), layer(attention(4, value_residual="learned"), gated))
    with pytest.raises(ConfigError, match=r"layers.1.mixer.value_residual is learned"):
        chosen_match(parse_config(ModelConfig, data), "llama")


@pytest.mark.parametrize("target", ["width=32", "head.tied=false", "fold_norms,final_norm=false"])
def test_conversions_that_leave_attention_alone_keep_the_logits(target: str) -> None:
    torch.set_default_dtype(torch.float32)
    source = source_model(parse_config(ModelConfig, READERS))
    assert difference(source, converted_model(source, parse_rewrite(target))) < 1e-10


@pytest.mark.parametrize(
    "target", ["kv_heads=1,groups=contiguous,merge=mean", "window,window=2", "rope_layout,layout=interleaved"]
)
def test_other_conversions_are_refused(target: str) -> None:
    torch.set_default_dtype(torch.float32)
    source: Any = SimpleNamespace(
        weights=ModelWeights(source_model(parse_config(ModelConfig, READERS))), tokenizer=None
    )
    with pytest.raises(ConfigError, match=r"layers.3.mixer.value_residual .*: reads the values of layer 1"):
        Conversion(source, (parse_rewrite(target),)).plan()
