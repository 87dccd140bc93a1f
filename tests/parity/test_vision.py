"""Attention over an image in Llama 4 and Qwen2-VL, with random weights: `axial_rope` turns as their rotations do."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from heddle.config import parse_config
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig
from heddle.parts.norms import NormConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import Llama4VisionConfig
    from transformers.models.llama4 import modeling_llama4 as llama4
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

WIDTH, HEADS, HEAD_DIM, SIDE = 36, 3, 12, 5
BASE = 200.0


def ours(layout: str, weights: dict[str, Tensor]) -> nn.Module:
    """Our attention of both ways, with weights by name."""
    data = {"kind": "attention", "heads": HEADS, "causal": False, "bias": True}
    position = {"kind": "axial_rope", "layout": layout, "base": BASE}
    context = BuildContext(WIDTH, parse_config(NormConfig, {"kind": "layer"}))  # type: ignore[type-abstract]
    mixer = parse_config(MixerConfig, data | {"position": position}).build(context)  # type: ignore[type-abstract]
    mixer.load_state_dict(weights)
    return mixer.eval()


def patches() -> tuple[Tensor, Tensor]:
    """Row and column of each patch of a square image, in reading order."""
    index = torch.arange(SIDE * SIDE)
    return index // SIDE, index % SIDE


def roughened(module: Any) -> Any:
    """Weights far from even."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return module.eval()


def test_llama_4() -> None:
    """Interleaved pairs; patches stand at 1, 2, …, the class token, which comes last, at (0, 0)."""
    config = Llama4VisionConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        image_size=SIDE * 2,
        patch_size=2,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    config._attn_implementation = "eager"
    theirs = roughened(llama4.Llama4VisionAttention(config))
    x = torch.randn(2, SIDE * SIDE + 1, WIDTH)
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"}
    weights = {}
    for name, value in theirs.state_dict().items():
        role, _, what = name.partition(".")
        weights[f"{names[role]}.{what}"] = value
    row, column = patches()
    places = torch.cat((torch.stack((column, row), dim=-1) + 1, torch.zeros(1, 2, dtype=torch.int64)))
    layout = Layout.causal(2, len(places)).with_coordinates(places.expand(2, -1, -1))
    with torch.no_grad():
        want, _ = theirs(x, llama4.Llama4VisionRotaryEmbedding(config)(x))
        got, _ = ours("interleaved", weights)(x, layout)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert want.std() > 0.1


def test_qwen_2() -> None:
    """Rows turn before columns, and pairs stand half a head apart: the same up to an order of the dims of each head."""
    turns = {"rope_type": "axial", "rope_theta": BASE}
    config = Qwen2VLVisionConfig(embed_dim=WIDTH, num_heads=HEADS, rope_parameters=turns)
    config._attn_implementation = "eager"
    theirs, turn = roughened(qwen2_vl.VisionAttention(config)), qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)
    x = torch.randn(SIDE * SIDE, WIDTH)
    row, column = patches()
    quarter = torch.arange(HEAD_DIM).split(HEAD_DIM // 4)  # first of rows, first of columns, second of either
    order = torch.cat((quarter[1], quarter[3], quarter[0], quarter[2]))
    whole = (torch.arange(HEADS)[:, None] * HEAD_DIM + order).flatten()
    weights = {"out.weight": theirs.proj.weight, "out.bias": theirs.proj.bias}
    for what, packed in (("weight", theirs.qkv.weight), ("bias", theirs.qkv.bias)):
        q, k, v = packed.chunk(3)
        weights |= {f"q.{what}": q[whole], f"k.{what}": k[whole], f"v.{what}": v}
    layout = Layout.causal(1, len(x)).with_coordinates(torch.stack((column, row), dim=-1)[None])
    with torch.no_grad():
        ends = torch.tensor([0, len(x)])
        want = theirs(x, ends, position_embeddings=turn(x, torch.stack((row, column), dim=-1)))
        got, _ = ours("half", weights)(x[None], layout)
    torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-5)
    assert want.std() > 0.1
