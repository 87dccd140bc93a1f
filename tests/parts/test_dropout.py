"""Dropout and stochastic depth: rate, scale, random keys and sites."""

import pytest
import torch

from heddle.config import parse_config
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.layout import Layout
from heddle.parts.modules.dropout import BranchDropout, Dropout
from tests.cases import attention, design, layer


def drop(module: Dropout | BranchDropout, x: torch.Tensor, step: int = 0) -> torch.Tensor:
    with use_random_key(RandomKey(3, step, torch.arange(len(x)))):
        y: torch.Tensor = module(x)
    return y


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_rate_and_expectation(rate: float) -> None:
    y = drop(Dropout(rate), torch.ones(20, 1000))
    survivors = y > 0
    spread = 4 * (rate * (1 - rate) / y.numel()) ** 0.5
    assert abs(float(survivors.float().mean()) - (1 - rate)) <= spread
    assert bool((y[survivors] == 1 / (1 - rate)).all())
    assert abs(float(y.mean()) - 1) <= spread / (1 - rate)


def test_whole_samples_are_dropped_together() -> None:
    y = drop(Dropout(0.5, per_sample=True), torch.ones(400, 3, 5))
    assert set(y.flatten(1).sum(1).tolist()) == {0.0, 30.0}


def test_off_in_eval_and_at_rate_zero() -> None:
    x = torch.randn(3, 4)
    assert drop(Dropout(0.5).eval(), x) is x
    assert drop(Dropout(0.0), x) is x


def test_a_branch_drops_elements_then_whole_samples() -> None:
    module = BranchDropout(0.25, 0.4)
    module.path.site = 1
    y = drop(module, torch.ones(4000, 2, 6))
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75 / 0.6])
    survivors = (y > 0).flatten(1)
    assert abs(float(survivors.any(1).double().mean()) - 0.6) <= 4 * (0.24 / 4000) ** 0.5
    assert abs(float(survivors[survivors.any(1)].double().mean()) - 0.75) <= 4 * (0.1875 / 12 / 2400) ** 0.5


def test_each_step_draws_another_mask() -> None:
    module, x = Dropout(0.5), torch.ones(4, 100)
    assert torch.equal(drop(module, x, step=1), drop(module, x, step=1))
    assert not torch.equal(drop(module, x, step=1), drop(module, x, step=2))


def model_with(drop_path: float, first: float = 0.0) -> Decoder:
    residual = {"kind": "pre_norm", "drop_path": drop_path, "drop_path_first": first}
    return build(parse_config(ModelConfig, design(layer(attention(), repeat=5), residual=residual)))


def test_every_dropout_has_its_own_site() -> None:
    drops = [module for module in model_with(0.4).modules() if isinstance(module, Dropout)]
    assert [module.site for module in drops] == list(range(len(drops)))


def test_rates_grow_linearly_with_depth() -> None:
    drops = [module for module in model_with(0.4).modules() if isinstance(module, Dropout) and module.per_sample]
    assert [module.rate for module in drops] == pytest.approx([0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4])
    equal = [module for module in model_with(0.3, 0.3).modules() if isinstance(module, Dropout) and module.per_sample]
    assert [module.rate for module in equal] == pytest.approx([0.3] * 10)


def test_the_embedding_drops_elements_of_its_output() -> None:
    config = parse_config(ModelConfig, design(layer(attention()), embedding={"dropout": 0.5}))
    model, tokens = build(config).train(), torch.arange(40).view(2, 20)
    with use_random_key(RandomKey(3, 0, torch.arange(2))):
        dropped = model.embed(tokens, Layout.causal(2, 20))
    whole = model.embed.eval()(tokens, Layout.causal(2, 20))
    zeros = dropped == 0
    assert 0.4 < float(zeros.double().mean()) < 0.6
    assert torch.equal(dropped, (2 * whole).masked_fill(zeros, 0.0))


def test_a_printed_model_shows_its_rates() -> None:
    assert repr(Dropout(0.25, per_sample=True)) == "Dropout(0.25, per_sample)"
