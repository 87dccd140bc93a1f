"""Cross-attention against torch's and transformers' modules with random weights; its state; its errors."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.parts.layout import EncoderOutput, Layout
from heddle.parts.mixers import Mixer
from tests.cases import Data, attention, cross, design, layer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # third-party warnings at import
    from transformers import BartConfig, T5Config
    from transformers.models.bart.modeling_bart import BartAttention
    from transformers.models.t5.modeling_t5 import T5Attention

WIDTH, ENCODER_WIDTH = 24, 10
IS_TOKEN = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [1, 0, 0, 0, 0]]) > 0


def mixer_of(width: int = WIDTH, **fields: Any) -> Mixer:
    """A mixer with large random parameters, in float64."""
    model = model_under_test(parse_config(ModelConfig, design(layer(cross(**fields)), width=width)))
    mixer = model.mixers()[0]
    assert mixer is not None
    return mixer


def random_inputs(width: int, encoder_width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4, width), (3, 5, encoder_width), (3, 5, encoder_width))
    x, keys, values = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return x, keys, values


def attend(mixer: Mixer, x: Tensor, encoder_output: EncoderOutput) -> Tensor:
    y, _ = mixer(x, Layout.causal(*x.shape[:2]).with_encoder_output(encoder_output))
    assert isinstance(y, Tensor)
    return y


def copy_parameters(target: nn.Module, names: dict[str, str], mixer: Mixer) -> None:
    """Copy the mixer's parameters into another module; `names` maps its parameter names to heddle's."""
    own = dict(mixer.named_parameters())
    with torch.no_grad():
        for theirs, parameter in target.named_parameters():
            if theirs in names:
                parameter.copy_(own[names[theirs]])
            else:
                assert theirs == "in_proj_bias"
                parameter.copy_(torch.cat([own[f"{name}.bias"] for name in "qkv"]))


@pytest.mark.parametrize("is_token", [None, IS_TOKEN])
def test_equals_torch(is_token: Tensor | None) -> None:
    mixer = mixer_of(heads=4, encoder_width=ENCODER_WIDTH, bias=True)
    theirs = nn.MultiheadAttention(
        WIDTH, 4, kdim=ENCODER_WIDTH, vdim=ENCODER_WIDTH, batch_first=True, dtype=torch.float64
    ).eval()
    names = {f"{name}_proj_weight": f"{name}.weight" for name in "qkv"}
    copy_parameters(theirs, names | {"out_proj.weight": "out.weight", "out_proj.bias": "out.bias"}, mixer)
    x, keys, values = random_inputs(WIDTH, ENCODER_WIDTH)
    want, _ = theirs(x, keys, values, key_padding_mask=None if is_token is None else ~is_token)
    torch.testing.assert_close(attend(mixer, x, EncoderOutput(keys, values, is_token)), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_token", [None, IS_TOKEN])
def test_equals_bart(is_token: Tensor | None) -> None:
    mixer = mixer_of(heads=4, bias=True)
    config = BartConfig(d_model=WIDTH)
    config._attn_implementation = "eager"
    theirs = BartAttention(WIDTH, 4, is_decoder=True, config=config, layer_idx=0).double().eval()
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "out"}
    kinds = ("weight", "bias")
    copy_parameters(
        theirs, {f"{theirs_}.{kind}": f"{ours}.{kind}" for theirs_, ours in names.items() for kind in kinds}, mixer
    )
    x, keys, _ = random_inputs(WIDTH, WIDTH)
    mask = (
        None
        if is_token is None
        else (~is_token).double()[:, None, None].expand(3, 1, 4, 5) * torch.finfo(torch.float64).min
    )
    want = theirs(x, key_value_states=keys, attention_mask=mask)[0]
    torch.testing.assert_close(attend(mixer, x, EncoderOutput(keys, is_token=is_token)), want, rtol=0, atol=1e-12)


def test_equals_t5() -> None:
    """No scale, no bias, heads that do not fill the width."""
    mixer = mixer_of(heads=3, head_dim=5, scale=1.0)
    config = T5Config(d_model=WIDTH, d_kv=5, num_heads=3, dropout_rate=0.0, is_decoder=True)
    theirs = T5Attention(config, has_relative_attention_bias=False, layer_idx=0).double().eval()
    copy_parameters(
        theirs,
        {f"{letter}.weight": f"{name}.weight" for letter, name in zip("qkvo", ("q", "k", "v", "out"), strict=True)},
        mixer,
    )
    x, keys, _ = random_inputs(WIDTH, WIDTH)
    want = theirs(x, key_value_states=keys)[0]
    torch.testing.assert_close(attend(mixer, x, EncoderOutput(keys)), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalization", ["softmax", "double_softmax"])
def test_groups_are_heads_with_repeated_weights(normalization: str) -> None:
    sizes: Data = {"heads": 6, "head_dim": 5, "value_dim": 3, "normalization": normalization}
    grouped, full = mixer_of(kv_heads=2, **sizes), mixer_of(**sizes)
    weights = grouped.state_dict()
    for name in ("k.weight", "v.weight"):
        weights[name] = weights[name].unflatten(0, (2, -1)).repeat_interleave(3, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    x, keys, values = random_inputs(WIDTH, WIDTH)
    encoder_output = EncoderOutput(keys, values, IS_TOKEN)
    torch.testing.assert_close(attend(full, x, encoder_output), attend(grouped, x, encoder_output), rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalization", ["softmax", "double_softmax"])
def test_a_row_of_padding_gets_zeros(normalization: str) -> None:
    mixer = mixer_of(heads=4, normalization=normalization)
    x, keys, _ = random_inputs(WIDTH, WIDTH)
    is_token = IS_TOKEN.clone()
    is_token[1] = False
    y = attend(mixer, x, EncoderOutput(keys.masked_fill(~is_token[..., None], float("nan")), is_token=is_token))
    assert float(y[1].detach().abs().max()) == 0
    assert bool((y[::2] != 0).all())


STACK = design(
    layer(attention(kv_heads=2)), layer(cross(6, kv_heads=2, head_dim=5, value_dim=7, encoder_width=ENCODER_WIDTH))
)


@pytest.mark.parametrize("cache_length", [None, 9, 90])
def test_the_state_is_the_projected_encoder_output(cache_length: int | None) -> None:
    _, keys, _ = random_inputs(WIDTH, ENCODER_WIDTH)
    model = heddle.build(parse_config(ModelConfig, STACK), dtype=torch.float64)
    encoder_output = EncoderOutput(keys.requires_grad_())
    state = model.init_state(3, cache_length, encoder_output)
    assert state.layer_bytes[1] == 3 * 2 * 5 * (5 + 7) * 8
    assert not any(tensor.requires_grad for tensor in state.tensors().values())
    padded = model.init_state(3, cache_length, EncoderOutput(keys, is_token=IS_TOKEN))
    assert padded.layer_bytes[1] == state.layer_bytes[1] + 3 * 5 * 8
    double = load_config(STACK, ["layers.1.mixer.normalization=double_softmax"])
    state = heddle.build(double).init_state(3, cache_length, EncoderOutput(keys))
    assert state.layer_bytes[1] == 3 * 2 * 5 * 7 * 4


@pytest.mark.parametrize(
    "design_",
    [STACK, design(layer(cross(encoder_width=ENCODER_WIDTH)), embedding={"position": {"kind": "sinusoidal"}})],
)
def test_rollback(design_: Data) -> None:
    """The projected encoder output stays. The position in the text is restored, although no earlier one is cached."""
    model = model_under_test(parse_config(ModelConfig, design_))
    tokens, encoder_output = (
        random_tokens(model.config, 3, 9),
        EncoderOutput(random_inputs(WIDTH, ENCODER_WIDTH)[1], is_token=IS_TOKEN),
    )
    with torch.no_grad():
        whole, _ = model(tokens, Layout.causal(3, 9).with_encoder_output(encoder_output))
        _, state = model(tokens, None, model.init_state(3, None, encoder_output, rollback=3))
        hidden, state = model(tokens[:, 6:], None, state.rollback(3))
        torch.testing.assert_close(hidden, whole[:, 6:], rtol=0, atol=1e-12)
        selected, _ = model(tokens[[2, 0], 7:], None, state.rollback(2).select([2, 0]))
    torch.testing.assert_close(selected, whole[[2, 0], 7:], rtol=0, atol=1e-12)


def test_a_table_rolls_back_no_further_than_declared() -> None:
    model = model_under_test(parse_config(ModelConfig, design(layer(cross(encoder_width=ENCODER_WIDTH)))))
    encoder_output = EncoderOutput(random_inputs(WIDTH, ENCODER_WIDTH)[1])
    with torch.no_grad():
        _, state = model(random_tokens(model.config, 3, 9), None, model.init_state(3, None, encoder_output, rollback=2))
    with pytest.raises(ConfigError, match="3 tokens"):
        state.rollback(3)


def test_an_encoder_output_of_another_dtype_is_cast() -> None:
    model = heddle.build(parse_config(ModelConfig, STACK), dtype=torch.bfloat16)
    _, keys, _ = random_inputs(WIDTH, ENCODER_WIDTH)
    hidden, _ = model(random_tokens(model.config, 3, 4), Layout.causal(3, 4).with_encoder_output(EncoderOutput(keys)))
    assert hidden.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layers.1.mixer.kv_heads=4"],
         "layers[1].mixer.kv_heads: 4"),
        (["layers.1.mixer.heads=7", "layers.1.mixer.kv_heads=null", "layers.1.mixer.head_dim=null"],
         "layers[1].mixer.heads: 7"),
        (["layers.1.mixer.scale=2", "layers.1.mixer.normalization=double_softmax"],
         "layers[1].mixer.scale: double_softmax"),
        (["layers.1.mixer.head_dim=1", "layers.1.mixer.normalization=double_softmax"],
         "layers[1].mixer.head_dim: 1"),
        (["layers.0.mixer={kind: cross_attention, heads: 2}"],
         "layers[1].mixer:"),
    ],
)  # fmt: skip
def test_refused_designs(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        load_config(STACK, overrides)


@pytest.mark.parametrize(
    ("encoder_output", "message"),
    [
        (
            None,
            "encoder_output:",
        ),
        (EncoderOutput(torch.zeros(3, 5, 9)), "encoder_output:"),
        (EncoderOutput(torch.zeros(2, 5, 10)), "encoder_output:"),
    ],
)
def test_refused_encoder_outputs(encoder_output: EncoderOutput | None, message: str) -> None:
    model = heddle.build(parse_config(ModelConfig, STACK))
    layout = Layout.causal(3, 4)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        model(
            random_tokens(model.config, 3, 4),
            layout if encoder_output is None else layout.with_encoder_output(encoder_output),
        )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        model.init_state(3, None, encoder_output)
