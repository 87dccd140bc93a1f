"""Hyper-connections against the decoder layers and last modules of the four families that have them, in float64."""

import random
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.numerics.norms import sinkhorn
from heddle.numerics.random import ParameterDraws
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.residuals.hyper_connections import GateMaps, HyperConnectionsConfig, MixingMaps
from tests.laws.planting import Plant, calls, reads, wrapped
from tests.parity.reference import ExactRMS
from tests.parity.stacks import FUNCTIONS, NAMES, Branch, random_stack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers.models.deepseek_v4 import modeling_deepseek_v4
    from transformers.models.glm5_next import modeling_glm5_next
    from transformers.models.hy_v4 import modeling_hy_v4
    from transformers.models.qwen4_exp import modeling_qwen4_exp

FAMILIES: dict[str, tuple[ModuleType, str]] = {
    "deepseek_v4": (modeling_deepseek_v4, "DeepseekV4"),
    "glm5_next": (modeling_glm5_next, "Glm5NextText"),
    "hy_v4": (modeling_hy_v4, "HYV4"),
    "qwen4_exp": (modeling_qwen4_exp, "Qwen4ExpText"),
}


def drawn(family: str, draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random fields of the residual and of the norm, as the family has them."""
    fields: dict[str, Any] = {"streams": draw.randint(2, 5), "collapse": "weighted"}
    norm: dict[str, Any] = {"eps": draw.choice((1e-6, 1e-2))}
    if family == "qwen4_exp":
        return fields | {"mixing": False, "gate_rank": draw.randint(1, 6)}, norm | {"offset": 1.0, "cast": "after"}
    fields |= {"norm_weight": False, "eps": draw.choice((1e-6, 1e-3, 0.1)), "whole_bias": draw.random() < 0.5}
    if family == "hy_v4":
        return fields | {"mixing": False, "magnitude": draw.choice((2.0, 0.7))}, norm
    return fields | {"iterations": draw.randint(1, 9)} | ({"collapse": "mean"} if family == "glm5_next" else {}), norm


def assign(module: nn.Module, **tensors: Tensor) -> None:
    """Functions of our parameters in the place of theirs, so that gradients are of ours."""
    for name, tensor in tensors.items():
        delattr(module, name)
        setattr(module, name, tensor)


def their_maps(family: str, config: Any, ours: Any, is_last: bool = False) -> nn.Module:
    """Their module of one branch, or of the end, with our parameters; their matrix acts from the other side."""
    module, prefix = FAMILIES[family]
    if isinstance(ours, GateMaps):
        theirs: Any = getattr(module, f"{prefix}GatedResidual")(config, use_combine=not is_last)
        assign(theirs.hc_norm, weight=ours.norm.get_parameter("weight").flatten())
        theirs.input_mix_weight_down, theirs.input_mix_weight_up = ours.down, ours.up
        theirs.block_inject_weight = ours.write
        return theirs
    theirs = getattr(module, f"{prefix}{'HyperHead' if is_last else 'HyperConnection'}")(config)
    n = config.hc_mult
    weight, bias = list(ours.projection.weight.split(ours.sizes)), list(ours.bias.split(ours.sizes))
    whole = ours.config.whole_bias
    bias[0] = bias[0] - (0.0 if whole else torch.tensor(n - 1.0, dtype=torch.float64).log())
    if len(ours.sizes) == 3:
        weight[2] = weight[2].unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)
        bias[2] = (bias[2].view(n, n) + (0.0 if whole else 4 * torch.eye(n))).T.flatten()
    values = {"fn": torch.cat(weight), "base": torch.cat(bias), "scale": ours.gain}
    assign(theirs, **({f"hc_{name}": value for name, value in values.items()} if is_last else values))
    return theirs


def their_layer(family: str, config: Any, ours: Any) -> nn.Module:
    """Their decoder layer with our norms and maps."""
    module, prefix = FAMILIES[family]
    cls = getattr(module, f"{prefix}DecoderLayer")
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    maps = [their_maps(family, config, ours.maps[name]) for name in NAMES]
    more = {"deepseek_v4": 1, "hy_v4": 2}.get(family, 0)
    mixer, layer.mlp = Branch(FUNCTIONS["mixer"], more), Branch(FUNCTIONS["feedforward"])
    if family == "qwen4_exp":
        layer.layer_type, layer.linear_attn, layer.ple = "linear_attention", mixer, None
        layer.attn_hyper_connection, layer.mlp_hyper_connection = maps
        return layer
    layer.block_type, layer.self_attn = "linear_attention", mixer
    layer.attn_hc, layer.ffn_hc = maps
    eps = config.rms_norm_eps
    layer.input_layernorm, layer.post_attention_layernorm = (ExactRMS(ours.norms[name], 0.0, eps) for name in NAMES)
    return layer


def their_stack(family: str, config: Any, x: Tensor, blocks: Any, final: Any) -> Tensor:
    """x [B, T, width] through their layers and to the hidden states."""
    module, prefix = FAMILIES[family]
    n, width = config.hc_mult, x.shape[-1]
    stream = x.repeat(1, 1, n) if family == "qwen4_exp" else x.unsqueeze(2).expand(-1, -1, n, width).contiguous()
    for block in blocks:
        options = {"position_embeddings": None} if family == "qwen4_exp" else {}
        stream = their_layer(family, config, block)(stream, **options)
        stream = stream[0] if isinstance(stream, tuple) else stream
    if family == "glm5_next":
        hidden = getattr(module, f"{prefix}HyperHead")()(stream)
    else:
        hidden = their_maps(family, config, final.maps, is_last=True)(stream)
    return hidden if family == "qwen4_exp" else ExactRMS(final.norm, 0.0, config.rms_norm_eps)(hidden)


def both(family: str, seed: int) -> list[tuple[Tensor, ...]]:
    """Outputs and gradients of ours and theirs."""
    draw = random.Random(f"{family} {seed}")
    fields, norm_fields = drawn(family, draw)
    depth, width, length = draw.randint(1, 4), draw.randint(2, 9), draw.randint(1, 5)
    config = parse_config(HyperConnectionsConfig, fields)
    norm = parse_config(RMSConfig, norm_fields)
    stack = random_stack(config, norm, (depth, width, length), seed)
    theirs = SimpleNamespace(
        hidden_size=width, rms_norm_eps=norm_fields["eps"], hc_mult=fields["streams"], hc_count=fields["streams"],
        hc_eps=fields.get("eps"), hc_sinkhorn_iters=fields.get("iterations"), hc_magnitude=fields.get("magnitude"),
        hc_lowrank=fields.get("gate_rank"),
    )  # fmt: skip
    return stack.beside(their_stack(family, theirs, stack.x, stack.blocks, stack.final))


def largest_error(family: str, seeds: int) -> float:
    """Of outputs and gradients, over random designs."""
    pairs = (pair for seed in range(seeds) for pair in zip(*both(family, seed), strict=True))
    return max(float(((got - want).abs() / (1 + want.abs())).detach().max()) for got, want in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_stacks_equal_their_layers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    assert largest_error(family, 15) < 1e-10


MISTAKES: dict[str, tuple[str, Plant]] = {
    "columns after rows": (
        "deepseek_v4", wrapped(sinkhorn, lambda sinkhorn, logits, *options: sinkhorn(logits.mT, *options).mT),
    ),
    "eps in Sinkhorn's steps left out": (
        "glm5_next", wrapped(sinkhorn, lambda sinkhorn, logits, iterations, eps: sinkhorn(logits, iterations)),
    ),
    "constants beside biases that hold them": ("deepseek_v4", reads(MixingMaps.forward, "whole_bias", lambda _: False)),
    "writing weights up to 2 whatever the magnitude": (
        "hy_v4", reads(MixingMaps.forward, "magnitude", lambda magnitude: 2.0),
    ),
    "gates before the division by the number of streams": (
        "qwen4_exp", calls(GateMaps.forward, "down", lambda maps, flat, *, n: n * maps.down(flat)),
    ),
    "the sum of gated streams": ("qwen4_exp", calls(GateMaps.forward, "mean", lambda x, dim: x.sum(dim))),
}  # fmt: skip


def test_a_whole_bias_starts_around_its_constants() -> None:
    """Drawn by the design's std: R of 1/n, W of 1, and M near the identity."""
    norm, n = parse_config(RMSConfig, {}), 3
    for mixing in (False, True):
        config = parse_config(HyperConnectionsConfig, {"streams": n, "whole_bias": True, "mixing": mixing})
        maps = config.build_maps(4, norm)
        assert isinstance(maps, MixingMaps)
        maps.init_weights(1e-3, ParameterDraws(0, "maps"))
        start = [*[-0.6931] * n, *[0.0] * n, *(4 * torch.eye(n)).flatten().tolist()][: 2 * n + n * n * mixing]
        assert maps.bias.tolist() == pytest.approx(start, abs=0.01)
        assert float(maps.bias.detach().diff().abs().min()) > 0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, plant = MISTAKES[mistake]
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    plant(monkeypatch)
    assert largest_error(family, 3) > 1e-4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixing": False, "iterations": 5}, "iterations: is for Sinkhorn's steps, but mixing is false"),
        ({"gate_rank": 4}, "gate_rank: gates streams that are not mixed"),
        ({"gate_rank": 4, "mixing": False, "eps": 0.1}, "eps: is added to n weights, but gate_rank"),
        ({"gate_rank": 4, "mixing": False, "whole_bias": True}, "whole_bias: is for b, but gate_rank"),
        ({"eps": 1.0}, "eps: .*less than 1"),
        ({"magnitude": 0.0}, "magnitude"),
        ({"collapse": "sum"}, "collapse"),
    ],
)  # fmt: skip
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(HyperConnectionsConfig, fields)
