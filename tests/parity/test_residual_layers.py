"""One layer with each kind of residual against the decoder layer of a model that has it, random weights, float64."""

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
from heddle.model.config import ModelConfig
from heddle.model.decoder import Layer
from heddle.model.load_config import DEFAULTS
from heddle.parts.build import ResidualContext
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.residuals.pre_norm import NormGate, PreNormConfig
from tests.laws.planting import calls

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import Gemma2Config, GPTJConfig, GPTNeoXConfig, Olmo2Config
    from transformers.models.axk2 import modeling_axk2 as axk2
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
    from transformers.models.gptj.modeling_gptj import GPTJBlock
    from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

WIDTH, HEADS, HEAD, HIDDEN, LENGTH = 24, 4, 6, 20, 11
Weights = dict[str, Tensor]
Call = Callable[[Tensor], Tensor]


class ExactRMS(nn.Module):
    """Their RMSNorm in the dtype of its input: theirs is float32 whatever the model's."""

    def __init__(self, norm: Any, offset: float, eps: float) -> None:
        super().__init__()
        self.weight, self.offset, self.eps = norm.weight, offset, eps

    def forward(self, x: Tensor) -> Tensor:
        return (self.offset + self.weight) * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


def randomised(layer: Any, offset: float | None = None, eps: float = 1e-6) -> Any:
    """The layer in float64, its weights drawn widely, its RMSNorms exact where an offset is given."""
    torch.manual_seed(4)
    layer.double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.3 if parameter.dim() < 2 else 0.0, 0.3)
    for name, module in list(layer.named_modules()):
        if offset is not None and type(module).__name__.endswith("RMSNorm"):
            layer.set_submodule(name, ExactRMS(module, offset, eps))
    return layer


def table(dims: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, T, dims] of the half layout in float64."""
    theta = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angle = torch.arange(LENGTH, dtype=torch.float64)[:, None] * torch.cat((theta, theta))
    return angle.cos()[None], angle.sin()[None]


def sizes(**more: Any) -> dict[str, Any]:
    shared = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": HEADS}
    return {**shared, "num_hidden_layers": 1, "attn_implementation": "sdpa", **more}


def projections(weights: Weights, prefix: str, names: dict[str, str]) -> Weights:
    return {f"{ours}.weight": weights[f"{prefix}{theirs}.weight"] for theirs, ours in names.items()}


ATTENTION = {"q_proj": "mixer.q", "k_proj": "mixer.k", "v_proj": "mixer.v", "o_proj": "mixer.out"}
GATED = {"gate_proj": "feedforward.gate", "up_proj": "feedforward.up", "down_proj": "feedforward.down"}
BEFORE, AFTER = "residual.norms.mixer", "residual.norms.feedforward"


def olmo2() -> tuple[dict[str, Any], Weights, Call]:
    layer = randomised(Olmo2DecoderLayer(Olmo2Config(**sizes(num_key_value_heads=2, rms_norm_eps=1e-4)), 0), 0.0, 1e-4)
    weights = layer.state_dict()
    norms = {"post_attention_layernorm": BEFORE, "post_feedforward_layernorm": AFTER}
    mapped = projections(weights, "self_attn.", ATTENTION | {"q_norm": "mixer.q_norm", "k_norm": "mixer.k_norm"})
    mapped |= projections(weights, "mlp.", GATED) | projections(weights, "", norms)
    mixer = {"kv_heads": 2, "qk_norm": "projection", "position": {"kind": "rope"}}
    design = {
        "residual": {"kind": "reordered"},
        "norm": {"kind": "rms", "eps": 1e-4, "cast": "after"},
        "layers": [{"mixer": mixer, "feedforward": {"kind": "gated", "hidden": HIDDEN}}],
    }
    return design, mapped, lambda x: layer(x, position_embeddings=table(HEAD))


def gemma2() -> tuple[dict[str, Any], Weights, Call]:
    config = Gemma2Config(
        **sizes(num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=5, attn_logit_softcapping=None),
        layer_types=["full_attention"],
    )
    layer = randomised(Gemma2DecoderLayer(config, 0), 1.0)
    weights = layer.state_dict()
    norms = {
        "input_layernorm": BEFORE,
        "post_attention_layernorm": "residual.after.mixer",
        "pre_feedforward_layernorm": AFTER,
        "post_feedforward_layernorm": "residual.after.feedforward",
    }
    mapped = projections(weights, "self_attn.", ATTENTION) | projections(weights, "mlp.", GATED)
    mixer = {"kv_heads": 2, "head_dim": 8, "scale": 5**-0.5, "position": {"kind": "rope"}}
    design = {
        "residual": {"kind": "sandwich"},
        "norm": {"kind": "rms", "eps": 1e-6, "offset": 1.0, "cast": "after"},
        "layers": [
            {"mixer": mixer, "feedforward": {"kind": "gated", "hidden": HIDDEN, "activation": "gelu_tanh"}},
        ],
    }
    return design, mapped | projections(weights, "", norms), lambda x: layer(x, position_embeddings=table(8))


def gpt_neox() -> tuple[dict[str, Any], Weights, Call]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.34}
    layer = randomised(GPTNeoXLayer(GPTNeoXConfig(**sizes(rope_parameters=rope, layer_norm_eps=1e-4)), 0))
    weights = layer.state_dict()
    norms = {"input_layernorm": BEFORE, "post_attention_layernorm": AFTER}
    roles = {"attention.dense": "mixer.out", "mlp.dense_h_to_4h": "feedforward.up", "mlp.dense_4h_to_h": DOWN}
    mapped: Weights = {}
    for theirs, ours in (norms | roles).items():
        mapped |= {f"{ours}.{what}": weights[f"{theirs}.{what}"] for what in ("weight", "bias")}
    for what in ("weight", "bias"):
        parts = weights[f"attention.query_key_value.{what}"].unflatten(0, (HEADS, 3, HEAD)).unbind(1)
        mapped |= {f"mixer.{name}.{what}": part.flatten(0, 1) for name, part in zip("qkv", parts, strict=True)}
    mlp = {"kind": "mlp", "hidden": HIDDEN, "activation": "gelu", "bias": True}
    design = {
        "residual": {"kind": "parallel", "norms": 2},
        "norm": {"kind": "layer", "eps": 1e-4},
        "layers": [{"mixer": {"bias": True, "position": {"kind": "rope", "rotary_dim": 2}}, "feedforward": mlp}],
    }
    return design, mapped, lambda x: layer(x, position_embeddings=table(2))


DOWN = "feedforward.down"


def gptj() -> tuple[dict[str, Any], Weights, Call]:
    config = GPTJConfig(n_embd=WIDTH, n_head=HEADS, n_inner=HIDDEN, rotary_dim=4, n_positions=LENGTH)
    config._attn_implementation = "eager"
    layer = randomised(GPTJBlock(config, 0))
    weights = layer.state_dict()
    names = {name.replace("o_proj", "out_proj"): ours for name, ours in ATTENTION.items()}
    mapped = projections(weights, "attn.", names)
    for theirs, ours in {"ln_1": "residual.norms.shared", "mlp.fc_in": "feedforward.up", "mlp.fc_out": DOWN}.items():
        mapped |= {f"{ours}.{what}": weights[f"{theirs}.{what}"] for what in ("weight", "bias")}
    mlp = {"kind": "mlp", "hidden": HIDDEN, "activation": "gelu_tanh", "bias": True}
    design = {
        "residual": {"kind": "parallel"},
        "norm": {"kind": "layer"},
        "layers": [
            {"mixer": {"position": {"kind": "rope", "rotary_dim": 4, "layout": "interleaved"}}, "feedforward": mlp}
        ],
    }
    hidden = torch.full((LENGTH, LENGTH), float("-inf"), dtype=torch.float64).triu(1)

    def call(x: Tensor) -> Tensor:
        mapped: Tensor = layer(x, attention_mask=hidden, position_ids=torch.arange(LENGTH)[None].expand(len(x), -1))[0]
        return mapped

    return design, mapped, call


def vaswani(first: bool) -> tuple[dict[str, Any], Weights, Call]:
    layer = randomised(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True, norm_first=first))
    weights = layer.state_dict()
    roles = {
        "self_attn.out_proj": "mixer.out",
        "linear1": "feedforward.up",
        "linear2": DOWN,
        "norm1": BEFORE,
        "norm2": AFTER,
    }
    mapped: Weights = {}
    for what in ("weight", "bias"):
        mapped |= {f"{ours}.{what}": weights[f"{theirs}.{what}"] for theirs, ours in roles.items()}
        parts = weights[f"self_attn.in_proj_{what}"].chunk(3)
        mapped |= {f"mixer.{name}.{what}": part for name, part in zip("qkv", parts, strict=True)}
    mlp = {"kind": "mlp", "hidden": HIDDEN, "activation": "relu", "bias": True}
    design = {
        "residual": {"kind": "pre_norm" if first else "post_norm"},
        "norm": {"kind": "layer"},
        "layers": [{"mixer": {"bias": True, "causal": False}, "feedforward": mlp}],
    }
    return design, mapped, layer


LAYERS: dict[str, tuple[Callable[[], tuple[dict[str, Any], Weights, Call]], float]] = {
    "OLMo-2": (olmo2, 1e-10),
    "Gemma-2": (gemma2, 1e-10),
    "GPT-NeoX": (gpt_neox, 1e-10),
    "GPT-J": (gptj, 1e-5),  # its scores are float32 whatever the model's dtype
    "torch's encoder, norm last": (lambda: vaswani(False), 1e-10),
    "torch's encoder, norm first": (lambda: vaswani(True), 1e-10),
}


def ours(design: dict[str, Any], weights: Weights) -> Layer:
    layers = [entry | {"mixer": {"kind": "attention", "heads": HEADS, **entry["mixer"]}} for entry in design["layers"]]
    config = parse_config(ModelConfig, DEFAULTS | {"vocab_size": 7, "width": WIDTH} | design | {"layers": layers})
    layer = heddle.build(config, dtype=torch.float64).eval().layers[0]
    assert isinstance(layer, Layer)
    layer.load_state_dict(weights)
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    make, tolerance = LAYERS[name]
    design, weights, theirs = make()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    want = theirs(x).detach()
    got, _ = ours(design, weights)(x, heddle.Layout.causal(2, LENGTH))
    assert float((want - x).std()) > 0.5
    torch.testing.assert_close(got.detach(), want, rtol=0, atol=tolerance)


WRONG = {
    "OLMo-2": {"kind": "pre_norm"},
    "GPT-NeoX": {"kind": "pre_norm"},
    "torch's encoder, norm last": {"kind": "reordered"},
    "torch's encoder, norm first": {"kind": "parallel", "norms": 2},
}


@pytest.mark.parametrize("name", WRONG)
def test_another_wiring_of_the_same_weights_is_told_apart(name: str) -> None:
    design, weights, theirs = LAYERS[name][0]()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    got, _ = ours(design | {"residual": WRONG[name]}, weights)(x, heddle.Layout.causal(2, LENGTH))
    assert float((got - theirs(x)).detach().abs().max()) > 0.1


def gated_norm_errors(seed: int) -> tuple[float, float]:
    """The largest difference of a gated norm and of its gradients, of random widths and ranks, from A.X K2's."""
    draw = random.Random(seed)
    width, rank, eps = draw.randint(2, 12), draw.randint(1, 6), draw.choice((1e-6, 0.1))
    norm = RMSConfig(eps=eps)
    block: Any = PreNormConfig(gate_rank=rank).build(ResidualContext(("mixer",), width, norm)).double()
    module = axk2.AXK2GatedRMSNorm(SimpleNamespace(hidden_size=width, gated_norm_rank=rank, rms_norm_eps=eps))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(1.0 if parameter.dim() < 2 else 0.0, 0.8)
    gate, own = block.gates["mixer"], block.norms["mixer"]
    module.norm, module.mlp.fc1.weight, module.mlp.fc2.weight = (
        ExactRMS(own, 0.0, eps),
        gate.down.weight,
        gate.up.weight,
    )
    x = torch.randn(2, draw.randint(1, 5), width, dtype=torch.float64, requires_grad=True)
    ours = block(x, {"mixer": lambda y: y}) - x
    results, probe, inputs = (ours, module(x)), torch.randn_like(x), [x, *block.parameters()]
    gradients = [torch.autograd.grad((y * probe).sum(), inputs) for y in results]
    largest = max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))
    return float((results[0] - results[1]).detach().abs().max()), largest


def test_gated_norms_are_those_of_axk2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    for seed in range(40):
        assert max(gated_norm_errors(seed)) < 1e-10
    calls(NormGate.forward, "silu", lambda module, x: module.relu(x))(monkeypatch)
    assert max(gated_norm_errors(0)) > 1e-3


def test_a_gate_without_a_norm_is_refused() -> None:
    with pytest.raises(heddle.errors.ConfigError, match="gate_rank: gates every norm"):
        PreNormConfig(gate_rank=2, first_norm=False)
