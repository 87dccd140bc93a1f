"""Building: initial weights, depth scaling, input checks, outputs of the decoder and its head."""

import math

import pytest
import torch

import heddle
from heddle.errors import ConfigError
from heddle.model.initialization import initialize
from heddle.parts.layout import Layout
from heddle.parts.modules.linear import Linear
from tests.cases import attention, case, design, layer


def test_standard_deviation_of_initial_weights() -> None:
    data = design(layer(attention(), repeat=4), width=96, vocab_size=500, head={"tied": False})
    model = heddle.build(heddle.load_config(data, ["layers.0.feedforward.hidden=300"]), seed=1)
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            expected = 0.02 / math.sqrt(8) if name.endswith(("out", "down")) else 0.02
            assert float(module.weight.detach().std()) == pytest.approx(expected, rel=0.05), name
    for weight in (model.embed.weight, model.head.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_initial_weights_do_not_depend_on_globals() -> None:
    config = case("attention-gqa")
    expected = heddle.build(config).state_dict()
    torch.manual_seed(99)
    torch.set_default_dtype(torch.float64)
    actual = heddle.build(config).state_dict()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_an_added_layer_does_not_change_the_weights_of_others() -> None:
    two, three = (heddle.build(heddle.load_config(design(layer(attention(), repeat=n)))) for n in (2, 3))
    for name, value in two.layers[0].mixer.q.named_parameters():  # type: ignore[union-attr]
        assert torch.equal(value, three.get_parameter(f"layers.0.mixer.q.{name}"))


def test_parameters_on_meta_are_not_allocated() -> None:
    model = heddle.build(case("attention-gqa"), dtype=torch.bfloat16, device="meta")
    assert {(parameter.is_meta, parameter.dtype) for parameter in model.parameters()} == {(True, torch.bfloat16)}


def test_output_shapes() -> None:
    model = heddle.build(case("attention-gqa"))
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    hidden, state = model(tokens)
    assert (tuple(hidden.shape), state) == ((2, 5, 24), None)
    assert tuple(model.head(hidden).shape) == (2, 5, 61)


@pytest.mark.parametrize(
    ("tokens", "layout", "message"),
    [
        (torch.zeros(5), None, r"^tokens:.*\[5\].*\[batch, length\]"),
        (
            torch.zeros(2, 5, dtype=torch.int64),
            Layout.causal(2, 4),
            r"^layout:.*\[2, 4\].*\[2, 5\]",
        ),
    ],
)
def test_wrong_input_shapes_are_refused(tokens: torch.Tensor, layout: Layout | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        heddle.build(case("attention-gqa"))(tokens, layout)


def test_vocab_size_is_required() -> None:
    data = design(layer(attention()))
    del data["vocab_size"]
    config = heddle.load_config(data)
    with pytest.raises(ConfigError, match=r"^vocab_size:"):
        heddle.build(config)


def test_a_module_without_init_weights_is_refused() -> None:
    model = heddle.build(case("attention-mha"))
    model.layers[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"layers.0.extra:"):
        initialize(model, 0)
