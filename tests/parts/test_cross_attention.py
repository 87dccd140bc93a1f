"""Cross-attention against torch's and transformers' modules with random weights; its state; what it refuses."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heddle
from heddle.config import decode
from heddle.errors import ConfigError
from heddle.laws.subject import subject, text
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.mixers import Mixer
from tests.cases import Data, attention, cross, design, layer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import BartConfig, T5Config
    from transformers.models.bart.modeling_bart import BartAttention
    from transformers.models.t5.modeling_t5 import T5Attention

WIDTH, BESIDE = 24, 10
REAL = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [1, 0, 0, 0, 0]]) > 0


def mixer_of(width: int = WIDTH, **fields: Any) -> Mixer:
    """A mixer with rough parameters, in float64."""
    model = subject(decode(ModelConfig, design(layer(cross(**fields)), width=width)))
    mixer = model.mixers()[0]
    assert mixer is not None
    return mixer


def drawn(width: int, beside: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4, width), (3, 5, beside), (3, 5, beside))
    x, keys, values = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return x, keys, values


def read(mixer: Mixer, x: Tensor, memory: Memory) -> Tensor:
    y, _ = mixer(x, Layout.causal(*x.shape[:2]).with_memory(memory))
    assert isinstance(y, Tensor)
    return y


def take(target: nn.Module, names: dict[str, str], mixer: Mixer) -> None:
    """Give another module this one's parameters, by their names there."""
    own = dict(mixer.named_parameters())
    with torch.no_grad():
        for theirs, parameter in target.named_parameters():
            if theirs in names:
                parameter.copy_(own[names[theirs]])
            else:
                assert theirs == "in_proj_bias"
                parameter.copy_(torch.cat([own[f"{name}.bias"] for name in "qkv"]))


@pytest.mark.parametrize("real", [None, REAL])
def test_torch_says_the_same(real: Tensor | None) -> None:
    mixer = mixer_of(heads=4, memory_width=BESIDE, bias=True)
    theirs = nn.MultiheadAttention(WIDTH, 4, kdim=BESIDE, vdim=BESIDE, batch_first=True, dtype=torch.float64).eval()
    names = {f"{name}_proj_weight": f"{name}.weight" for name in "qkv"}
    take(theirs, names | {"out_proj.weight": "out.weight", "out_proj.bias": "out.bias"}, mixer)
    x, keys, values = drawn(WIDTH, BESIDE)
    want, _ = theirs(x, keys, values, key_padding_mask=None if real is None else ~real)
    torch.testing.assert_close(read(mixer, x, Memory(keys, values, real)), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("real", [None, REAL])
def test_bart_says_the_same(real: Tensor | None) -> None:
    mixer = mixer_of(heads=4, bias=True)
    config = BartConfig(d_model=WIDTH)
    config._attn_implementation = "eager"
    theirs = BartAttention(WIDTH, 4, is_decoder=True, config=config, layer_idx=0).double().eval()
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "out"}
    kinds = ("weight", "bias")
    take(theirs, {f"{one}.{kind}": f"{other}.{kind}" for one, other in names.items() for kind in kinds}, mixer)
    x, keys, _ = drawn(WIDTH, WIDTH)
    mask = None if real is None else (~real).double()[:, None, None].expand(3, 1, 4, 5) * torch.finfo(torch.float64).min
    want = theirs(x, key_value_states=keys, attention_mask=mask)[0]
    torch.testing.assert_close(read(mixer, x, Memory(keys, real=real)), want, rtol=0, atol=1e-12)


def test_t5_says_the_same() -> None:
    """No scale, no bias, heads that do not fill the width."""
    mixer = mixer_of(heads=3, head_dim=5, scale=1.0)
    config = T5Config(d_model=WIDTH, d_kv=5, num_heads=3, dropout_rate=0.0, is_decoder=True)
    theirs = T5Attention(config, has_relative_attention_bias=False, layer_idx=0).double().eval()
    take(
        theirs,
        {f"{one}.weight": f"{other}.weight" for one, other in zip("qkvo", ("q", "k", "v", "out"), strict=True)},
        mixer,
    )
    x, keys, _ = drawn(WIDTH, WIDTH)
    want = theirs(x, key_value_states=keys)[0]
    torch.testing.assert_close(read(mixer, x, Memory(keys)), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalisation", ["softmax", "double_softmax"])
def test_groups_are_heads_with_repeated_weights(normalisation: str) -> None:
    sizes: Data = {"heads": 6, "head_dim": 5, "value_dim": 3, "normalisation": normalisation}
    grouped, full = mixer_of(kv_heads=2, **sizes), mixer_of(**sizes)
    weights = grouped.state_dict()
    for name in ("k.weight", "v.weight"):
        weights[name] = weights[name].unflatten(0, (2, -1)).repeat_interleave(3, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    x, keys, values = drawn(WIDTH, WIDTH)
    memory = Memory(keys, values, REAL)
    torch.testing.assert_close(read(full, x, memory), read(grouped, x, memory), rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalisation", ["softmax", "double_softmax"])
def test_a_row_without_real_tokens_gets_zeros(normalisation: str) -> None:
    mixer = mixer_of(heads=4, normalisation=normalisation)
    x, keys, _ = drawn(WIDTH, WIDTH)
    real = REAL.clone()
    real[1] = False
    y = read(mixer, x, Memory(keys.masked_fill(~real[..., None], float("nan")), real=real))
    assert float(y[1].detach().abs().max()) == 0
    assert bool((y[::2] != 0).all())


STACK = design(layer(attention(kv_heads=2)), layer(cross(6, kv_heads=2, head_dim=5, value_dim=7, memory_width=BESIDE)))


@pytest.mark.parametrize("capacity", [None, 9, 90])
def test_the_state_is_the_projected_memory(capacity: int | None) -> None:
    _, keys, _ = drawn(WIDTH, BESIDE)
    model = heddle.build(decode(ModelConfig, STACK), dtype=torch.float64)
    memory = Memory(keys.requires_grad_())
    state = model.init_state(3, capacity, memory)
    assert state.layer_bytes[1] == 3 * 2 * 5 * (5 + 7) * 8
    assert not any(tensor.requires_grad for tensor in state.tensors().values())
    padded = model.init_state(3, capacity, Memory(keys, real=REAL))
    assert padded.layer_bytes[1] == state.layer_bytes[1] + 3 * 5 * 8
    double = load_config(STACK, ["layers.1.mixer.normalisation=double_softmax"])
    state = heddle.build(double).init_state(3, capacity, Memory(keys))
    assert state.layer_bytes[1] == 3 * 2 * 5 * 7 * 4


@pytest.mark.parametrize(
    "design_", [STACK, design(layer(cross(memory_width=BESIDE)), embedding={"position": {"kind": "sinusoidal"}})]
)
def test_taking_tokens_back(design_: Data) -> None:
    """The memory stays, and so does the place in the text, which a table without earlier positions must know."""
    model = subject(decode(ModelConfig, design_))
    tokens, memory = text(model.config, 3, 9), Memory(drawn(WIDTH, BESIDE)[1], real=REAL)
    with torch.no_grad():
        whole, _ = model(tokens, Layout.causal(3, 9).with_memory(memory))
        _, state = model(tokens, None, model.init_state(3, None, memory, rewind=3))
        rest, state = model(tokens[:, 6:], None, state.rewind(3))
        torch.testing.assert_close(rest, whole[:, 6:], rtol=0, atol=1e-12)
        some, _ = model(tokens[[2, 0], 7:], None, state.rewind(2).select([2, 0]))
    torch.testing.assert_close(some, whole[[2, 0], 7:], rtol=0, atol=1e-12)


def test_a_table_goes_back_no_further_than_it_was_made_to() -> None:
    model = subject(decode(ModelConfig, design(layer(cross(memory_width=BESIDE)))))
    memory = Memory(drawn(WIDTH, BESIDE)[1])
    with torch.no_grad():
        _, state = model(text(model.config, 3, 9), None, model.init_state(3, None, memory, rewind=2))
    with pytest.raises(ConfigError, match="the table of positions cannot take back 3 tokens"):
        state.rewind(3)


def test_another_dtype_is_brought_to_the_models() -> None:
    model = heddle.build(decode(ModelConfig, STACK), dtype=torch.bfloat16)
    _, keys, _ = drawn(WIDTH, BESIDE)
    hidden, _ = model(text(model.config, 3, 4), Layout.causal(3, 4).with_memory(Memory(keys)))
    assert hidden.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layers.1.mixer.kv_heads=4"],
         "layers[1].mixer.kv_heads: 4 does not divide heads = 6; choose a divisor of it"),
        (["layers.1.mixer.heads=7", "layers.1.mixer.kv_heads=null", "layers.1.mixer.head_dim=null"],
         "layers[1].mixer.heads: 7 does not divide width = 24; give head_dim, or other heads"),
        (["layers.1.mixer.scale=2", "layers.1.mixer.normalisation=double_softmax"],
         "layers[1].mixer.scale: double_softmax makes no scores to scale; leave it out"),
        (["layers.0.mixer={kind: cross_attention, heads: 2}"],
         "layers[1].mixer: reads a memory 10 wide, a layer before one 24 wide; make them equal"),
    ],
)  # fmt: skip
def test_refused_designs(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load_config(STACK, overrides)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (None, "memory: is missing; give layout.with_memory(...), or init_state(..., memory=...)"),
        (Memory(torch.zeros(3, 5, 9)), "memory: keys are 9 wide, the design reads memory_width = 10"),
        (Memory(torch.zeros(2, 5, 10)), "memory: has 2 rows, the call has 3; they must be equal"),
    ],
)
def test_refused_memories(memory: Memory | None, message: str) -> None:
    model = heddle.build(decode(ModelConfig, STACK))
    layout = Layout.causal(3, 4)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        model(text(model.config, 3, 4), layout if memory is None else layout.with_memory(memory))
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        model.init_state(3, None, memory)
