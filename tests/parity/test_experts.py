"""Blocks of experts of transformers with random weights in float64: the same answers, gradients and balancing loss."""

import importlib
import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from heddle.config import parse_config
from heddle.numerics.experts.mixture import route
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import Feedforward, FeedforwardConfig
from heddle.parts.feedforwards.moe import RouterTrunk
from heddle.parts.layout import Layout
from heddle.parts.modules.router_statistics import record_router_statistics
from heddle.parts.norms.rms import RMSConfig
from tests.laws.planting import calls
from tests.parity.reference import ExactRMS, compute_in_float64

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import (
        DeepseekV2Config,
        DeepseekV3Config,
        GptOssConfig,
        Lfm2MoeConfig,
        Llama4TextConfig,
        MixtralConfig,
        Qwen2MoeConfig,
        Qwen3MoeConfig,
    )
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeSparseMoeBlock
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    from transformers.models.zaya.modeling_zaya import ZayaRouter

WIDTH, HIDDEN, EXPERTS, TOP_K = 20, 12, 8, 3
BALANCING = ("e_score_correction_bias", "expert_bias")  # names of their biases that only choose
SIZES: dict[str, Any] = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN}


def sizes(**options: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_attention_heads": 2,
        "num_experts_per_tok": TOP_K,
        "experts_implementation": "eager",
        **options,
    }


def mixtral() -> nn.Module:
    return MixtralSparseMoeBlock(MixtralConfig(**sizes(num_local_experts=EXPERTS, intermediate_size=HIDDEN)))


def qwen2(renormalize: bool) -> nn.Module:
    return Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**sizes(
        num_experts=EXPERTS, moe_intermediate_size=HIDDEN, shared_expert_intermediate_size=15,
        norm_topk_prob=renormalize)))  # fmt: skip


def qwen3(renormalize: bool) -> nn.Module:
    return Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes(
        num_experts=EXPERTS, moe_intermediate_size=HIDDEN, norm_topk_prob=renormalize)))  # fmt: skip


def deepseek2(method: str) -> nn.Module:
    return DeepseekV2Moe(DeepseekV2Config(**sizes(
        num_local_experts=EXPERTS, n_routed_experts=EXPERTS, moe_intermediate_size=HIDDEN, n_shared_experts=2,
        topk_method=method, n_group=4, topk_group=2, routed_scaling_factor=16.0)))  # fmt: skip


def deepseek3(renormalize: bool) -> nn.Module:
    return DeepseekV3MoE(DeepseekV3Config(**sizes(
        num_local_experts=EXPERTS, n_routed_experts=EXPERTS, moe_intermediate_size=HIDDEN, n_shared_experts=2,
        n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=renormalize)))  # fmt: skip


def lfm2() -> nn.Module:
    return Lfm2MoeSparseMoeBlock(Lfm2MoeConfig(**sizes(
        num_experts=EXPERTS, moe_intermediate_size=HIDDEN, routed_scaling_factor=1.5)))  # fmt: skip


def llama4() -> nn.Module:
    return Llama4TextMoe(Llama4TextConfig(**sizes(num_local_experts=EXPERTS, intermediate_size=HIDDEN)))


V2: dict[str, Any] = {"renormalize": False, "scale": 16.0, "shared": 2}
GROUPS: dict[str, Any] = {"groups": 4, "top_groups": 2}
V2_GROUPS: dict[str, Any] = {"routing": "softmax_group_max", **GROUPS}
V3: dict[str, Any] = {"routing": "sigmoid", "scale": 2.5, "shared": 2, "bias_update": 0.001, **GROUPS}
BLOCKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "mixtral": (mixtral, {}),
    "mixtral, chosen first": (mixtral, {"routing": "topk_softmax"}),  # the same function
    "qwen2": (lambda: qwen2(False), {"renormalize": False, "shared": 1, "shared_hidden": 15, "shared_gate": True}),
    "qwen2, renormalised": (lambda: qwen2(True), {"shared": 1, "shared_hidden": 15, "shared_gate": True}),
    "qwen3": (lambda: qwen3(True), {}),
    "qwen3, not renormalised": (lambda: qwen3(False), {"renormalize": False}),
    "deepseek v2": (lambda: deepseek2("greedy"), V2),
    "deepseek v2, groups": (lambda: deepseek2("group_limited_greedy"), V2 | V2_GROUPS),
    "deepseek v3": (lambda: deepseek3(True), V3),
    "deepseek v3, not renormalised": (lambda: deepseek3(False), {**V3, "renormalize": False}),
    "lfm2": (lfm2, {"routing": "sigmoid", "renormalize_eps": 1e-6, "scale": 1.5, "bias_update": 0.0}),
    "llama4": (llama4, {"routing": "sigmoid", "renormalize": False, "weighted": "inputs", "shared": 1}),
}  # fmt: skip
WRONG: dict[str, dict[str, Any]] = {
    "mixtral": {"renormalize": False},
    "qwen2": {"renormalize": True},
    "deepseek v2, groups": {"routing": "softmax_topk", "groups": None, "top_groups": None},
    "deepseek v3": {"groups": None, "top_groups": None},
    "deepseek v3, not renormalised": {"scale": 1.0},
    "lfm2": {"renormalize_eps": 0.1},
    "llama4": {"weighted": None},
}


def theirs(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(5)
    block = make().double().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.4)
        for name, buffer in block.named_buffers():
            assert name.endswith(BALANCING)
            buffer.uniform_(0.0, 0.4)
    return block


def ours(block: Any, fields: dict[str, Any]) -> Feedforward:
    config = parse_config(FeedforwardConfig, {"kind": "moe", **SIZES, **fields})  # type: ignore[type-abstract]
    part = config.build(BuildContext(WIDTH, RMSConfig())).double().eval()
    rows = [block.experts.gate_up_proj, block.experts.down_proj]
    if isinstance(block, Llama4TextMoe):
        rows = [weight.mT for weight in rows]
    gate, up = rows[0].chunk(2, dim=1)
    router = getattr(block, "gate", None) or block.router
    weights = {"router.weight": router.weight, "gate.weight": gate, "up.weight": up, "down.weight": rows[1]}
    for name, value in block.state_dict().items():
        if name.endswith(BALANCING) and "bias_update" in fields:
            weights["router.expert_bias"] = value
        elif name == "shared_expert_gate.weight":
            weights["shared_gate.weight"] = value
        elif name.startswith("shared_expert"):
            weights[f"shared.{name.split('.')[1].removesuffix('_proj')}.weight"] = value
    part.load_state_dict(weights)
    return part


def compared(name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> float:
    """The largest difference of answers and gradients of the input."""
    block = theirs(BLOCKS[name][0])
    part = ours(block, {key: value for key, value in fields.items() if value is not None})
    x = torch.randn(3, 17, WIDTH, dtype=torch.float64, requires_grad=True)
    got, _ = part(x, Layout.causal(3, 17))
    with monkeypatch.context() as patch:
        compute_in_float64(patch, importlib.import_module(type(block).__module__))
        want = block(x)
        want = (want[0] if isinstance(want, tuple) else want).view(x.shape)
    assert float(want.detach().std()) > 0.1
    slope = torch.randn_like(want)
    actual, expected = (torch.autograd.grad(y, x, slope)[0] for y in (got, want))
    return max(float((a - b).abs().max()) for a, b in ((got.detach(), want.detach()), (actual, expected)))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(name, BLOCKS[name][1], monkeypatch) < 1e-10


@pytest.mark.parametrize("name", WRONG)
def test_another_design_is_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(name, {**BLOCKS[name][1], **WRONG[name]}, monkeypatch) > 1e-3


def test_the_router_of_gpt_oss() -> None:
    config = GptOssConfig(hidden_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    torch.manual_seed(1)
    router = GptOssTopKRouter(config).double()
    nn.init.normal_(router.weight)
    nn.init.normal_(router.bias)
    data = {"kind": "moe", **SIZES, "routing": "topk_softmax", "router_bias": True}
    part: Any = parse_config(FeedforwardConfig, data).build(BuildContext(WIDTH, RMSConfig())).double()  # type: ignore[type-abstract]
    part.router.load_state_dict(router.state_dict())
    x = torch.randn(50, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        _, want, chosen = router(x)
        routed = route(part.router(x), None, part.routing_config)
    assert torch.equal(routed.expert_indices, chosen)
    torch.testing.assert_close(routed.gates, want, rtol=0, atol=1e-12)


def zaya_errors(seed: int) -> tuple[float, float]:
    """The largest difference of gates and logits, and of their gradients, from the router of ZAYA1's first layer.

    Their expert without a feed-forward is here one more expert, which the bias keeps from being chosen.
    """
    draw = random.Random(seed)
    width, rank, experts, eps = draw.randint(2, 9), draw.randint(2, 6), draw.randint(2, 6), draw.choice((1e-5, 0.1))
    top_k = draw.randint(1, experts)
    sizes = {"hidden_size": width, "router_hidden_size": rank, "num_experts": experts, "num_experts_per_tok": top_k}
    module: Any = ZayaRouter(SimpleNamespace(**sizes, rms_norm_eps=eps), 0).double()
    data = {
        "kind": "moe",
        "experts": experts + 1,
        "top_k": top_k,
        "hidden": 2,
        "renormalize": False,
        "bias_update": 0.0,
    }
    slot: Any = FeedforwardConfig
    part: Any = parse_config(slot, data | {"router_rank": rank}).build(BuildContext(width, RMSConfig(eps=eps))).double()
    router, trunk, layers = part.router, part.router.trunk, module.router_mlp
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in (*router.parameters(),):
            parameter.normal_(0.0, 0.9)
        router.expert_bias.copy_(torch.rand(experts + 1))[-1] = -9.0
        module.balancing_biases.copy_(router.expert_bias)
    layers.norm = ExactRMS(trunk.norm, 0.0, eps)
    for linear, weight, bias in (
        (module.down_proj, trunk.weight, trunk.bias),
        (layers.fc1, trunk.first, trunk.first_bias),
        (layers.fc2, trunk.second, trunk.second_bias),
        (layers.out_proj, router.weight, None),
    ):
        linear.weight, linear.bias = weight, bias
    x = torch.randn(2, 5, width, dtype=torch.float64, requires_grad=True)
    logits = router(x)
    routed = route(logits, router.expert_bias, part.routing_config)
    their_logits, gates, chosen, _ = module(x)
    assert torch.equal(routed.expert_indices.flatten(0, 1), chosen)
    results = [(logits.flatten(0, 1), routed.gates.flatten(0, 1)), (their_logits, gates)]
    probes = [torch.randn_like(each) for each in results[0]]
    inputs = [x, *(parameter for parameter in router.parameters() if parameter.requires_grad)]
    slopes = [
        torch.autograd.grad(sum((y * probe).sum() for y, probe in zip(pair, probes, strict=True)), inputs)
        for pair in results
    ]
    errors = [[float((a - b).detach().abs().max()) for a, b in zip(*pair, strict=True)] for pair in (results, slopes)]
    return max(errors[0]), max(errors[1])


def test_layers_before_the_router_are_those_of_zaya(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(40):
        assert max(zaya_errors(seed)) < 1e-9
    calls(RouterTrunk.forward, "gelu", lambda module, x: module.gelu(x, approximate="tanh"))(monkeypatch)
    assert max(zaya_errors(0)) > 1e-5


def test_their_balancing_loss() -> None:
    """Theirs is ours times k, for one sequence: its shares are of tokens, ours of choices."""
    block = theirs(mixtral)
    part = ours(block, {"aux_loss": 1.0}).train()
    x = torch.randn(1, 31, WIDTH, dtype=torch.float64)
    with record_router_statistics() as recorder:
        part(x, Layout.causal(1, 31))
    numbers = (x @ block.gate.weight.T).flatten(0, 1)
    want: Any = load_balancing_loss_func((numbers,), EXPERTS, TOP_K)
    (entry,) = recorder.entries
    assert entry.aux_loss is not None
    assert float(entry.aux_loss.detach() / 31) == pytest.approx(want.item() / TOP_K, rel=1e-6)  # theirs sums in float32
