"""A head with a transform: logits and losses by hand, and states that carry token types from call to call."""

import pytest
import torch
from torch.nn import functional

from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import forward_with_state, model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.numerics.cross_entropy import OutputHead, TeacherOutput, distillation_sums, loss_sum, token_losses
from heddle.parts.layout import Layout
from tests.cases import attention, case, design, layer
from tests.laws.planting import calls

TYPED = design(
    layer(attention()), embedding={"token_types": 3, "norm": True}, head={"transform": "silu", "transform_bias": True}
)


def losses() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The losses by hand [N], and their sums by every function of the loss."""
    model = model_under_test(case("token-types"))
    hidden, head = torch.randn(7, 24, dtype=torch.float64), model.head
    targets = random_tokens(model.config, 1, 7)[0]
    assert head.transform is not None
    assert head.bias is not None
    x = functional.gelu(hidden @ head.transform.dense.weight.T + head.transform.get_parameter("dense.bias"))
    norm = head.transform.norm
    x = functional.layer_norm(x, (24,), norm.get_parameter("weight"), norm.get_parameter("bias"), 1e-5)
    logits = x @ model.embed.weight.T + head.bias
    torch.testing.assert_close(head(hidden), logits, rtol=0, atol=1e-10)
    want, output_head = functional.cross_entropy(logits, targets, reduction="none"), head.output_head
    teacher = TeacherOutput(hidden, output_head)
    sums = distillation_sums(hidden, output_head, targets, teacher, 1.0, 1.0)
    got = [loss_sum(hidden, output_head, targets), token_losses(hidden, output_head, targets).sum(), sums.weighted]
    return want, [*got, sums.divergence + want.sum()]


def test_losses_are_those_of_the_transformed_hidden_states() -> None:
    want, got = losses()
    for number in got:
        torch.testing.assert_close(number, want.sum(), rtol=0, atol=1e-9)


def test_a_loss_without_the_transform_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls(OutputHead.apply_transform, "transform", lambda head, hidden: hidden)(monkeypatch)
    want, got = losses()
    assert all(float((number - want.sum()).detach().abs()) > 1e-3 for number in got[:2])


def test_the_transform_learns() -> None:
    model = model_under_test(case("token-types"))
    loss_sum(torch.randn(5, 24, dtype=torch.float64), model.head.output_head, torch.arange(5)).backward()
    assert model.head.transform is not None
    gradients = [parameter.grad for parameter in model.head.transform.parameters()]
    assert all(gradient is not None and float(gradient.abs().max()) > 0 for gradient in gradients)


def test_a_text_in_pieces_has_the_types_of_its_pieces() -> None:
    model = model_under_test(parse_config(ModelConfig, TYPED))
    tokens, types = random_tokens(model.config, 2, 9), torch.arange(18).view(2, 9) % 3
    whole = model(tokens, Layout.causal(2, 9).with_token_types(types))[0]
    first, state = forward_with_state(
        model, model.init_state(2), tokens[:, :4], Layout.causal(2, 4).with_token_types(types[:, :4])
    )
    rest = Layout.causal(2, 5, start=4).with_token_types(types[:, 4:])
    last, _ = forward_with_state(model, state, tokens[:, 4:], rest)
    torch.testing.assert_close(torch.cat((first, last), 1), whole, rtol=0, atol=1e-10)
    assert float((whole - model(tokens)[0]).detach().abs().max()) > 0.01


def test_a_bias_without_a_transform_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"head\.transform_bias:"):
        load_config(design(layer(attention()), head={"transform_bias": True}))
