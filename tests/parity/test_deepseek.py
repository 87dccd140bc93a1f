"""The attention of DeepSeek-V3 in transformers with random weights, in float64: with and without YaRN, in each form."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.config import parse_config
from heddle.numerics.kernels import kernels
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from heddle.parts.norms.rms import RMSConfig
from tests.parity.recurrence import randomize
from tests.parity.reference import ExactRMS, close, latent_weights, scaling_options

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

WIDTH, HEADS, RANK, NOPE, ROPE, VALUE = 42, 3, 20, 10, 8, 7
YARN = {"factor": 8.0, "original_length": 32, "beta_fast": 4.0}
BASE = 100.0  # pairs of both kinds and between, within 32 tokens
YARNS: dict[str, dict[str, Any]] = {
    "no scaling": {},
    "yarn": YARN,
    "yarn with equal factors": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn with unlike factors": YARN | {"mscale": 1.3, "mscale_all_dim": 0.6},
}


def theirs(yarn: dict[str, Any]) -> Any:
    default = {"rope_type": "default", "rope_theta": BASE}
    config = DeepseekV3Config(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, kv_lora_rank=RANK, q_lora_rank=17,
        qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE, max_position_embeddings=256,
        rope_parameters=scaling_options("yarn", BASE, yarn) if yarn else default, attn_implementation="sdpa",
    )  # fmt: skip
    attention: Any = DeepseekV3Attention(config, 0).double().eval()
    randomize(attention)
    for norm in ("q_a_layernorm", "kv_a_layernorm"):
        setattr(attention, norm, ExactRMS(getattr(attention, norm), 0.0, 1e-6))
    return attention


def ours(yarn: dict[str, Any], attention: Any) -> Any:
    position: dict[str, Any] = {"kind": "rope", "base": BASE, "layout": "interleaved"}
    position |= {"scaling": {"kind": "yarn", **yarn}} if yarn else {}
    sizes = {"heads": HEADS, "kv_rank": RANK, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE, "query_rank": 17}
    config = parse_config(LatentAttentionConfig, sizes | {"position": position})
    mixer = config.build(BuildContext(WIDTH, RMSConfig())).double()
    mixer.load_state_dict(latent_weights(attention.state_dict(), HEADS, NOPE, ROPE))
    return mixer


def exact_table(positions: Tensor, yarn: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, T, ROPE] in float64, from the paper's formulas."""
    thetas, amplitude = [BASE ** (-2 * i / ROPE) for i in range(ROPE // 2)], 1.0
    if yarn:
        factor, length = yarn["factor"], yarn["original_length"]
        pair = {t: ROPE * math.log(length / (t * 2 * math.pi)) / (2 * math.log(BASE)) for t in (yarn["beta_fast"], 1.0)}
        low, high = math.floor(pair[yarn["beta_fast"]]), math.ceil(pair[1.0])
        ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(ROPE // 2)]
        thetas = [(1 - r) * theta + r * theta / factor for theta, r in zip(thetas, ramp, strict=True)]
        grown = [0.1 * s * math.log(factor) + 1 for s in (yarn.get("mscale", 1.0), yarn.get("mscale_all_dim", 0.0))]
        amplitude = grown[0] / grown[1]
    angle = positions[:, None].double() * torch.tensor(thetas * 2, dtype=torch.float64)
    return (angle.cos() * amplitude)[None], (angle.sin() * amplitude)[None]


def both(yarn: dict[str, Any], mixer_yarn: dict[str, Any], form: str | None = None) -> tuple[Tensor, Tensor]:
    """Their outputs with one scaling and ours with another."""
    attention = theirs(yarn)
    x, hidden = torch.randn(2, 40, WIDTH, dtype=torch.float64), torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    with torch.no_grad(), kernels(**({} if form is None else {"latent": form})):
        want, _ = attention(x, exact_table(torch.arange(40), yarn), hidden)
        return want, ours(mixer_yarn, attention)(x, Layout.causal(2, 40))[0]


@pytest.mark.parametrize("form", ["absorbed", "reference", None])
@pytest.mark.parametrize("name", YARNS)
def test_their_attention_in_float64(name: str, form: str | None) -> None:
    want, got = both(YARNS[name], YARNS[name], form)
    close(got, want)


@pytest.mark.parametrize("wrong", [{}, YARN | {"attention_factor": 1.0}])
def test_another_scaling_is_told_apart(wrong: dict[str, Any]) -> None:
    want, got = both(YARNS["yarn with equal factors"], wrong)
    assert float((got - want).abs().max()) > 1e-3
