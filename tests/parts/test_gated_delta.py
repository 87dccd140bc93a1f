"""The gated delta mixer: initialization, state and errors."""

from typing import Any

import pytest
import torch
from torch.nn import functional

import heddle
from heddle.config import DesignError, parse_config
from heddle.laws.harness import forward_no_grad, forward_with_state, model_under_test, new_state, random_tokens
from heddle.model.config import ModelConfig
from heddle.numerics.random import ParameterDraws
from heddle.numerics.recurrent.gated_delta import gated_delta_rule
from heddle.parts.modules import recurrent
from heddle.parts.modules.recurrent import GatedDecay
from tests.cases import case, delta, design


def config_of(**fields: Any) -> ModelConfig:
    return parse_config(ModelConfig, design(delta(**fields)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_state_has_a_fixed_size(dtype: torch.dtype) -> None:
    model = heddle.build(config_of(heads=6, key_heads=2, head_dim=5, value_dim=3, conv_kernel=3), dtype=dtype)
    item_size = torch.finfo(dtype).bits // 8
    for cache_length in (None, 9, 5000):
        state = model.init_state(2, cache_length)
        assert state.layer_bytes == [2 * (6 * 5 * 3 * max(item_size, 4) + 2 * (2 * 2 * 5 + 6 * 3) * item_size)] * 2
    _, after = forward_with_state(model, state, random_tokens(model.config, 2, 7))
    dtypes = {name.rsplit(".", 1)[-1]: tensor.dtype for name, tensor in after.tensors().items() if "layers" in name}
    assert dtypes == {"recurrent_state": torch.promote_types(dtype, torch.float32), "conv_state": dtype}


def test_parameter_shapes() -> None:
    mixer = heddle.build(config_of(heads=6, key_heads=2, head_dim=5, value_dim=3)).layers[0].mixer
    shapes = {name: tuple(value.shape) for name, value in mixer.named_parameters()}  # type: ignore[union-attr]
    assert shapes == {
        "q.weight": (10, 24),
        "k.weight": (10, 24),
        "v.weight": (18, 24),
        "gate.weight": (18, 24),
        "a.weight": (6, 24),
        "beta.weight": (6, 24),
        "convolution.weight": (38, 4),
        "decay.rate": (6,),
        "decay.bias": (6,),
        "norm.weight": (3,),
        "out.weight": (24, 18),
    }


def test_parameter_shapes_with_several_steps() -> None:
    """Keys, values and β of each step; one query, one decay and one gate a token."""
    mixer = heddle.build(config_of(heads=6, key_heads=2, head_dim=5, value_dim=3, steps=3)).layers[0].mixer
    shapes = {name: tuple(value.shape) for name, value in mixer.named_parameters()}  # type: ignore[union-attr]
    assert shapes["k.weight"] == (30, 24)
    assert shapes["v.weight"] == (54, 24)
    assert shapes["beta.weight"] == (18, 24)
    assert shapes["convolution.weight"] == (10 + 30 + 54, 4)
    assert [shapes[f"{name}.weight"] for name in ("q", "a", "gate")] == [(10, 24), (6, 24), (18, 24)]


def test_one_token_takes_one_kernel_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk pads a token's steps to 32 tokens; the state is the one of a chunk."""
    model = model_under_test(case("delta-steps"))
    tokens = random_tokens(model.config, 2, 5)
    _, state = forward_with_state(model, new_state(model, 2), tokens[:, :4])
    lengths: list[int] = []

    def spy(inputs: Any, state: Any) -> Any:
        lengths.append(inputs.v.shape[2])
        return gated_delta_rule(inputs, state)

    monkeypatch.setattr(recurrent, "gated_delta_rule", spy)
    forward_with_state(model, state, tokens[:, 4:])
    assert lengths == [1, 1, 1] * len(model.layers)


def test_decays_are_initialized_as_in_the_authors_code() -> None:
    decay = GatedDecay(2000)
    decay.init_weights(0.02, ParameterDraws(0, "decay"))
    rate, step = decay.rate.detach().exp(), functional.softplus(decay.bias.detach())
    assert 1.0 <= float(rate.min()) < 1.1 < 15.9 < float(rate.max()) <= 16.01
    assert 0.00099 < float(step.min()) < 0.00102 < 0.098 < float(step.max()) < 0.101
    assert 0.009 < float(step.median()) < 0.011


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 6, "key_heads": 4}, "key_heads: 4"),
        ({"heads": 5}, r"heads: 5.*24.*head_dim"),
        ({"conv_kernel": 0}, r"conv_kernel:.*0"),
        ({"steps": 0}, r"steps:.*0"),
        ({"steps": 2, "preconditioned": True}, "steps: 2 has no definition with preconditioned"),
        ({"conv_kernel": None}, r"conv_kernel:.*integer"),
    ],
)
def test_invalid_fields_raise(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DesignError, match=message):
        heddle.build(config_of(**fields))


def test_a_call_without_tokens_changes_nothing() -> None:
    model = model_under_test(case("delta"))
    tokens = random_tokens(model.config, 2, 9)
    _, state = forward_with_state(model, new_state(model, 2), tokens[:, :5])
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    hidden, state = forward_with_state(model, state, tokens[:, :0])
    assert hidden.shape == (2, 0, 24)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())
    assert forward_no_grad(model, tokens[:, :0]).shape == (2, 0, 24)


def test_autocast_keeps_the_recurrence_in_float32() -> None:
    """Under bfloat16 autocast only projections run in bfloat16, as in a model with bfloat16 weights."""
    exact = model_under_test(case("delta"))
    tokens = random_tokens(exact.config, 2, 70)
    want = forward_no_grad(exact, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = forward_no_grad(exact.float(), tokens)
    assert float((got.double() - want).square().mean() / want.square().mean()) < 1e-2
