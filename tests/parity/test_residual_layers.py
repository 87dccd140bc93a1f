"""Layers of one residual against torch's encoder layer, and gated norms against A.X K2, random weights in float64."""

import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heddle
from heddle.config import parse_config
from heddle.model.config import ModelConfig
from heddle.parts.build import ResidualContext
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.residuals.pre_norm import NormGate, PreNorm, PreNormConfig
from tests.cases import attention, design, layer
from tests.laws.planting import calls, condition
from tests.parity.reference import ExactRMS
from tests.parts.loops import Errors, errors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers.models.axk2 import modeling_axk2 as axk2

WIDTH, HEADS, HIDDEN, LENGTH = 24, 4, 20, 11
ROLES = {
    "self_attn.out_proj": "mixer.out", "linear1": "feedforward.up", "linear2": "feedforward.down",
    "norm1": "residual.norms.mixer", "norm2": "residual.norms.feedforward",
}  # fmt: skip


def outputs(norm_first: bool, residual: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Those of torch's layer and of ours with its weights and this residual."""
    torch.manual_seed(4)
    theirs = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True, norm_first=norm_first)
    theirs = theirs.double().eval().requires_grad_(False)
    for parameter in theirs.parameters():
        parameter.normal_(0.3 if parameter.dim() < 2 else 0.0, 0.3)
    weights: dict[str, Tensor] = {}
    for what in ("weight", "bias"):
        weights |= {f"{ours}.{what}": theirs.get_parameter(f"{name}.{what}") for name, ours in ROLES.items()}
        parts = theirs.get_parameter(f"self_attn.in_proj_{what}").chunk(3)
        weights |= {f"mixer.{name}.{what}": part for name, part in zip("qkv", parts, strict=True)}
    mlp = {"kind": "mlp", "hidden": HIDDEN, "activation": "relu", "bias": True}
    mixer = attention(HEADS, None, bias=True, causal=False)
    config = parse_config(ModelConfig, design(layer(mixer, mlp), norm={"kind": "layer"}, residual=residual))
    ours = heddle.build(config, dtype=torch.float64).eval().layers[0]
    ours.load_state_dict(weights)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    want, (got, _) = theirs(x), ours(x, heddle.Layout.causal(2, LENGTH))
    assert float((want - x).std()) > 0.5
    return got.detach(), want


@pytest.mark.parametrize(
    ("norm_first", "right", "wrong"),
    [
        (False, {"kind": "post_norm"}, {"kind": "reordered"}),
        (True, {"kind": "pre_norm"}, {"kind": "parallel", "norms": 2}),
    ],
)
def test_layers_are_those_of_torch(norm_first: bool, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    torch.testing.assert_close(*outputs(norm_first, right), rtol=0, atol=1e-10)
    got, want = outputs(norm_first, wrong)
    assert float((got - want).abs().max()) > 0.1


def gated_norm_errors(seed: int) -> Errors:
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
    gate = block.gates["mixer"]
    module.norm = ExactRMS(block.norms["mixer"], 0.0, eps)
    module.mlp.fc1.weight, module.mlp.fc2.weight = gate.down.weight, gate.up.weight
    x = torch.randn(2, draw.randint(1, 5), width, dtype=torch.float64, requires_grad=True)
    ours, theirs = block(x, {"mixer": lambda y: y}) - x, module(x)
    return errors(ours, theirs, [x, *block.parameters()])


def test_gated_norms_are_those_of_axk2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    for seed in range(40):
        assert max(gated_norm_errors(seed)) < 1e-10
    calls(NormGate.forward, "silu", lambda module, x: module.relu(x))(monkeypatch)
    assert max(gated_norm_errors(0)) > 1e-3


@pytest.mark.parametrize("planted", [False, True])
def test_mixtures_alone_have_gates(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which norms of a layer are gated is A.X K2's, for dense and for sparse ones."""
    if planted:
        condition(PreNorm.__init__, "is_dense", False)(monkeypatch)
    config, norm = PreNormConfig(gate_rank=2, gated_feedforwards="mixtures"), RMSConfig()
    small = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4, "n_routed_experts": 2}
    theirs = axk2.AXK2Config(num_hidden_layers=2, mlp_layer_types=["dense", "sparse"], **small)
    for index, kind in enumerate(("gated", "moe")):
        block: Any = config.build(ResidualContext(("mixer", "feedforward"), 8, norm, feedforward=kind))
        layer = axk2.AXK2DecoderLayer(theirs, index)
        norms = {"mixer": layer.input_layernorm, "feedforward": layer.post_attention_layernorm}
        gated = [name for name, each in norms.items() if isinstance(each, axk2.AXK2GatedRMSNorm)]
        assert (list(block.gates) == gated) != (planted and kind == "gated")


def test_gates_of_mixtures_need_a_rank() -> None:
    with pytest.raises(heddle.errors.ConfigError, match="gated_feedforwards: is about gates of norms"):
        PreNormConfig(gated_feedforwards="mixtures")


def test_a_gate_without_a_norm_is_refused() -> None:
    with pytest.raises(heddle.errors.ConfigError, match="gate_rank: gates every norm"):
        PreNormConfig(gate_rank=2, first_norm=False)
