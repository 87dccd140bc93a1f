"""The attention modules of gpt-oss (sinks), Gemma 2 (soft-cap, scale) and Qwen3-Next (gate), with random weights."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.config import parse_config
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig
from heddle.parts.norms import NormConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import Gemma2Config, GptOssConfig, Qwen3NextConfig
    from transformers.models.gemma2 import modeling_gemma2 as gemma2
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

WIDTH, ROWS, LENGTH, WINDOW = 30, 2, 13, 4
NAMES = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "q_norm": "q_norm", "k_norm": "k_norm"}
SHAPE = {"hidden_size": WIDTH, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
OURS = {"kind": "attention", "heads": 6, "kv_heads": 2, "head_dim": 8, "position": {"kind": "rope"}}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
KINDS = ["full_attention", "sliding_attention"]
BASE: dict[str, Any] = {
    **SHAPE,
    "num_hidden_layers": 2,
    "vocab_size": 8,
    "attn_implementation": "eager",
    "rope_parameters": DEFAULT,
}


def families() -> dict[str, tuple[Any, Any, Any, dict[str, Any]]]:
    """Family: its config, its modules of attention and rotation, and the fields of ours."""
    return {
        "gpt_oss": (
            GptOssConfig(**BASE, attention_bias=True, sliding_window=WINDOW, layer_types=KINDS),
            gpt_oss.GptOssAttention,
            gpt_oss.GptOssRotaryEmbedding,
            {"bias": True, "sink": True},
        ),
        "gemma2": (
            Gemma2Config(
                **BASE,
                attention_bias=True,
                sliding_window=WINDOW,
                layer_types=KINDS,
                query_pre_attn_scalar=5,
                attn_logit_softcapping=1.5,
            ),
            gemma2.Gemma2Attention,
            gemma2.Gemma2RotaryEmbedding,
            {"bias": True, "softcap": 1.5, "scale": 5**-0.5},
        ),
        "qwen3_next": (
            Qwen3NextConfig(**BASE | {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}}, rms_norm_eps=1e-5),
            qwen3_next.Qwen3NextAttention,
            qwen3_next.Qwen3NextRotaryEmbedding,
            {"gate": "channel", "qk_norm": "head", "position": {"kind": "rope", "rotary_dim": 4}},
        ),
    }


def theirs(family: str, window: int | None) -> tuple[Any, Any, Tensor]:
    """Their attention with wide random weights, its rotation, and a text [rows, length, width]."""
    config, attention, rotation, _ = families()[family]
    torch.manual_seed(3)
    module = attention(config, layer_idx=0 if window is None else 1).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.4 if parameter.dim() > 1 else 1.0))
    return module, rotation(config), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)


def their_answer(module: Any, rotation: Any, x: Tensor, window: int | None) -> Tensor:
    position = torch.arange(LENGTH)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (window or LENGTH))
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=x.dtype).masked_fill(~seen, float("-inf"))
    y: Tensor = module(x, rotation(x, position[None]), mask)[0]
    return y


def ours(family: str, module: Any, window: int | None, **fields: Any) -> Any:
    """Our part with their weights."""
    kind: Any = MixerConfig
    slot: Any = NormConfig
    options = families()[family][3] | fields
    norm = parse_config(slot, {"kind": "rms", "offset": 1.0, "cast": "after"})
    mine = parse_config(kind, OURS | options | {"window": window}).build(BuildContext(WIDTH, norm)).double()
    mine.load_state_dict(renamed(module.state_dict(), gated="gate" in options))
    return mine


def renamed(weights: dict[str, Tensor], gated: bool) -> dict[str, Tensor]:
    """Their names -> ours; Qwen3-Next keeps the gate of each head behind its query."""
    actual = {}
    for name, value in weights.items():
        role, _, what = name.rpartition(".")
        if name == "sinks":
            actual["sink"] = value
        elif role == "q_proj" and gated:
            q, gate = value.unflatten(0, (6, 2, 8)).unbind(1)
            actual["q.weight"], actual["gate.weight"] = q.flatten(0, 1), gate.flatten(0, 1)
        else:
            actual[f"{NAMES[role]}.{what}"] = value
    return actual


CASES = [
    ("gpt_oss", None),
    ("gpt_oss", WINDOW),
    ("gemma2", None),
    ("gemma2", WINDOW),
    ("qwen3_next", None),
]


@pytest.mark.parametrize(("family", "window"), CASES)
def test_the_same_answer_and_gradients(family: str, window: int | None) -> None:
    module, rotation, x = theirs(family, window)
    mine = ours(family, module, window)
    want = their_answer(module, rotation, x, window)
    got = mine(x, Layout.causal(ROWS, LENGTH))[0]
    assert float(want.detach().std()) > 0.5
    # Their angles are float32 whatever the model's dtype.
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    probe = torch.randn_like(want)
    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad((want * probe).sum(), inputs)
    named = {name: value for (name, _), value in zip(module.named_parameters(), expected[1:], strict=True)}
    actual = torch.autograd.grad((got * probe).sum(), [x, *mine.parameters()])
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=2e-4)
    gradients = renamed(named, gated=family == "qwen3_next")
    for (name, _), value in zip(mine.named_parameters(), actual[1:], strict=True):
        torch.testing.assert_close(value, gradients[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [("gpt_oss", {"softcap": 2.0}), ("gemma2", {"softcap": None}), ("gemma2", {"softcap": 1.6})],
)
def test_another_design_is_told_apart(family: str, wrong: dict[str, Any]) -> None:
    module, rotation, x = theirs(family, None)
    want = their_answer(module, rotation, x, None)
    got = ours(family, module, None, **wrong)(x, Layout.causal(ROWS, LENGTH))[0]
    assert float((got - want).detach().abs().max()) > 1e-2


def test_a_sink_that_is_left_out_is_told_apart() -> None:
    module, rotation, x = theirs("gpt_oss", None)
    want = their_answer(module, rotation, x, None)
    mine = ours("gpt_oss", module, None)
    with torch.no_grad():
        mine.sink.fill_(-50.0)
    assert float((mine(x, Layout.causal(ROWS, LENGTH))[0] - want).detach().abs().max()) > 1e-2
