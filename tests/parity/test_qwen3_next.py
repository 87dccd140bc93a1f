"""Qwen3-Next's linear layers in transformers with random weights: the same outputs, padded and by the state too."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.config import parse_config
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer
from heddle.parts.mixers.gated_delta import GatedDeltaConfig
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.position_table import PositionTable
from heddle.parts.states import StateSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

WIDTH, EPS = 42, 1e-4
SHAPES = [(4, 4, 8, 8, 4), (6, 2, 10, 7, 4), (3, 1, 5, 12, 2)]  # heads, key_heads, head_dim, value_dim, conv_kernel


def theirs(heads: int, key_heads: int, head_dim: int, value_dim: int, kernel: int) -> Any:
    config = Qwen3NextConfig(
        hidden_size=WIDTH,
        linear_num_value_heads=heads,
        linear_num_key_heads=key_heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=value_dim,
        linear_conv_kernel_dim=kernel,
        num_hidden_layers=4,
        rms_norm_eps=EPS,
    )
    torch.manual_seed(7)
    module = Qwen3NextGatedDeltaNet(config, 0).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():  # far from their start, where mistakes would hide
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.dim() > 1 else 0.7))
            if name == "A_log":
                parameter.sub_(1.5)
    return module


def ours(module: Any) -> Mixer:
    """The mixer with their weights: theirs are fused, group by group of value heads that share a key head."""
    groups, repeats = module.num_k_heads, module.num_v_heads // module.num_k_heads
    fields = {
        "heads": module.num_v_heads,
        "key_heads": groups,
        "head_dim": module.head_k_dim,
        "value_dim": module.head_v_dim,
        "conv_kernel": module.conv_kernel_size,
        "norm": {"kind": "rms", "eps": EPS},
    }
    mine = parse_config(GatedDeltaConfig, fields).build(BuildContext(WIDTH, RMSConfig(offset=1.0)))
    keys, values = module.head_k_dim, repeats * module.head_v_dim
    q, k, v, gate = module.in_proj_qkvz.weight.view(groups, -1, WIDTH).split([keys, keys, values, values], dim=1)
    beta, a = module.in_proj_ba.weight.view(groups, -1, WIDTH).split(repeats, dim=1)
    named = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "a": a}
    weights = {f"{name}.weight": value.flatten(0, 1) for name, value in named.items()}
    weights |= {
        "convolution.weight": module.conv1d.weight[:, 0],
        "decay.rate": module.A_log,
        "decay.bias": module.dt_bias,
        "norm.weight": module.norm.weight,
        "out.weight": module.out_proj.weight,
    }
    mine.load_state_dict(weights)
    return mine.eval()


def inputs(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(11))


def close(got: Tensor, want: Tensor) -> None:
    assert float(want.std()) > 0.1, "outputs this small would agree whatever the module does"
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_at_once_and_by_the_state(shape: tuple[int, int, int, int, int]) -> None:
    module = theirs(*shape)
    mine, x = ours(module), inputs(2, 75)
    want = module(x)
    close(mine(x, Layout.causal(2, 75))[0], want)
    table, out = PositionTable.empty(2, 0, None, "cpu"), []
    state = mine.init_state(StateSpec(2, None, torch.float32, "cpu"))
    for part in x.split([40, 1, 1, 3, 1, 29], dim=1):
        table, layout = table.extend(table.next_layout(part.shape[1]))
        y, state = mine(part, layout, state)
        out.append(y)
    close(torch.cat(out, dim=1), want)


@torch.no_grad()
def test_padded_on_the_left() -> None:
    module, layout = theirs(*SHAPES[1]), Layout.padded([23, 9, 2])
    mine, x, real = ours(module), inputs(3, 23), layout.positions >= 0
    close(mine(x, layout)[0][real], module(x, attention_mask=real.long())[real])


@pytest.mark.parametrize("wrong", ["norm", "groups", "taps"])
@torch.no_grad()
def test_another_design_is_told_apart(wrong: str) -> None:
    module = theirs(*SHAPES[1])
    mine, x = ours(module), inputs(1, 20)
    weights = mine.state_dict()
    if wrong == "norm":
        weights["norm.weight"] = weights["norm.weight"] + 1.0
    elif wrong == "groups":  # value heads that take turns at the key heads
        weights["v.weight"] = weights["v.weight"].unflatten(0, (3, 2, -1)).transpose(0, 1).flatten(0, 2)
    else:
        weights["convolution.weight"] = weights["convolution.weight"].flip(1)
    mine.load_state_dict(weights)
    assert float((mine(x, Layout.causal(1, 20))[0] - module(x)).abs().max()) > 1e-3
