"""DeepSeek-V3 of transformers with random weights and dense layers: the same attention, logits and greedy text."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heddle
from heddle.config import parse_config
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.load_config import DEFAULTS
from heddle.numerics.kernels import kernels
from tests.parity import reference

HEADS, RANK, NOPE, ROPE, VALUE = 3, 20, 10, 8, 7
YARN = {"factor": 8.0, "original_length": 32, "beta_fast": 4.0}
BASE = 100.0  # pairs of both kinds and between, within 32 tokens
YARNS: dict[str, dict[str, Any]] = {
    "no scaling": {},
    "yarn": YARN,
    "yarn with equal factors": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn with unlike factors": YARN | {"mscale": 1.3, "mscale_all_dim": 0.6},
}


def design(yarn: dict[str, Any], query_rank: int | None = 17, layout: str = "interleaved", **mixer: Any) -> Any:
    position: dict[str, Any] = {"kind": "rope", "base": BASE, "layout": layout}
    if yarn:
        position["scaling"] = {"kind": "yarn", **yarn}
    sizes = {"heads": HEADS, "kv_rank": RANK, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE}
    latent = {"kind": "latent_attention", "query_rank": query_rank, "position": position, **sizes, **mixer}
    feedforward = {"kind": "gated", "hidden": reference.HIDDEN}
    layer = {"repeat": reference.DEPTH, "mixer": latent, "feedforward": feedforward}
    # The model's epsilon is another than that of the latents' norms.
    return {"norm": {"kind": "rms", "eps": 1e-3}, "layers": [layer], "head": {"tied": False}}


def theirs(yarn: dict[str, Any], query_rank: int | None = 17, layout: str = "interleaved", bias: bool = False) -> Any:
    default = {"rope_type": "default", "rope_theta": BASE}
    return reference.theirs(
        "deepseek",
        HEADS,
        HEADS,
        kv_lora_rank=RANK,
        q_lora_rank=query_rank,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        first_k_dense_replace=reference.DEPTH,
        num_mtp_layers=0,
        max_position_embeddings=256,
        rms_norm_eps=1e-3,
        rope_interleave=layout == "interleaved",
        rope_parameters=reference.scaling_options("yarn", BASE, yarn) if yarn else default,
        attention_bias=bias,
        tie_word_embeddings=False,
    )


def ours(data: Any, model: Any, strict: bool = True) -> Decoder:
    config = parse_config(ModelConfig, DEFAULTS | {"vocab_size": reference.VOCABULARY, "width": reference.WIDTH} | data)
    mine = heddle.build(config).eval()
    mine.load_state_dict(reference.renamed(split(model.state_dict()), tied=False), strict=strict)
    return mine


def split(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Theirs fuse the two projections from the stream, and the two from the latent, head by head."""
    renamed: dict[str, Tensor] = {}
    for name, value in weights.items():
        prefix, what = name.rpartition(".")[::2]
        if prefix.endswith("kv_a_proj_with_mqa"):
            role = prefix.removesuffix("kv_a_proj_with_mqa")
            renamed[f"{role}kv_down.{what}"], renamed[f"{role}k_rope.{what}"] = value.split((RANK, ROPE))
        elif prefix.endswith("kv_b_proj"):
            role = prefix.removesuffix("kv_b_proj")
            k_up, v_up = value.unflatten(0, (HEADS, -1)).split((NOPE, VALUE), dim=1)
            renamed[f"{role}k_up.{what}"], renamed[f"{role}v_up.{what}"] = k_up.flatten(0, 1), v_up.flatten(0, 1)
        else:
            renamed[name] = value
    return renamed


@pytest.mark.parametrize("query_rank", [17, None])
@pytest.mark.parametrize("name", YARNS)
def test_whole_models(name: str, query_rank: int | None) -> None:
    model = theirs(YARNS[name], query_rank)
    reference.compare(ours(design(YARNS[name], query_rank), model), model, [17, 5, 11], count=24)


@pytest.mark.parametrize("options", [{"layout": "half"}, {"bias": True}])
def test_options(options: dict[str, Any]) -> None:
    model = theirs(YARN, **options)
    reference.compare(ours(design(YARN, **options), model), model, [17, 9], count=16)


EQUAL = YARNS["yarn with equal factors"]
WRONG: dict[str, Any] = {
    "pairs of the other layout": design(EQUAL, layout="half"),
    "no scaling": design({}),
    "scores not multiplied": design(YARN | {"attention_factor": 1.0}),
    "a scale of the dims not turned": design(EQUAL, scale=NOPE**-0.5),
    "no norm of the latent": design(EQUAL, kv_norm="none"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_design_is_told_apart(name: str) -> None:
    model = theirs(EQUAL)
    tokens, _, _ = reference.left_padded([17])
    want = reference.their_logits(model, tokens)
    mine = ours(WRONG[name], model, strict=name != "no norm of the latent")  # whose weight is then left over
    assert float((reference.logits(mine, tokens) - want).abs().max()) > 1e-3


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


@pytest.mark.parametrize("form", ["absorbed", "reference", None])
@pytest.mark.parametrize("name", YARNS)
def test_their_attention_in_float64(name: str, form: str | None) -> None:
    """Their norms and tables are float32 whatever the model's: exact ones take their place."""
    model = theirs(YARNS[name])
    attention = model.model.layers[1].self_attn.double()
    attention.config._attn_implementation = "sdpa"
    for norm in ("q_a_layernorm", "kv_a_layernorm"):
        exact = nn.RMSNorm(getattr(attention, norm).weight.shape, eps=1e-6, dtype=torch.float64)
        exact.load_state_dict(getattr(attention, norm).state_dict())
        setattr(attention, norm, exact)
    mixer = ours(design(YARNS[name]), model).double().mixers()[1]
    assert mixer is not None
    x, positions = torch.randn(2, 40, reference.WIDTH, dtype=torch.float64), torch.arange(40)
    hidden = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    with torch.no_grad(), kernels(**({} if form is None else {"latent": form})):
        want, _ = attention(x, exact_table(positions, YARNS[name]), hidden)
        got, _ = mixer(x, heddle.Layout.causal(2, 40))
    assert float(want.std()) > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
