"""bfloat16 parameters: float32 copies take the updates, or stochastic rounding keeps them without copies."""

from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.model.decoder import Decoder, build
from heddle.model.initialization import cast_parameters
from heddle.training import optimizer as master_weights
from heddle.training.optimizer import Optimizer, build_optimizer
from heddle.training.settings import OPTIMIZERS
from heddle.training.step import BatchResult, apply_gradients
from tests import small

RATE, DECAY = 1e-5, 0.1  # far below the spacing of bfloat16


def model(dtype: torch.dtype = torch.float32, **fields: Any) -> Decoder:
    """Weights that bfloat16 has, in any dtype."""
    decoder = build(small.config(small.design(**fields)), seed=1)
    cast_parameters(decoder, torch.bfloat16)
    cast_parameters(decoder, dtype)
    return decoder


def draw_gradients(decoder: Decoder, seed: int) -> None:
    """Gradients that bfloat16 has."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().to(parameter.dtype)


def trained(decoder: Decoder, optimizer: Optimizer, steps: range) -> Decoder:
    for step in steps:
        optimizer.key = (0, step)
        draw_gradients(decoder, step)
        optimizer.step(RATE)
    return decoder


def weights(decoder: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_copies_are_trained_as_float32_weights_are(kind: str) -> None:
    plain, decoder = model(), model(torch.bfloat16)
    trained(plain, build_optimizer(plain, DECAY, kind), range(5))
    optimizer = build_optimizer(decoder, DECAY, kind)
    trained(decoder, optimizer, range(5))
    copies = optimizer.masters.copies
    assert copies.keys() == dict(decoder.named_parameters()).keys()
    assert all(torch.equal(weight, copies[name]) for name, weight in weights(plain).items())
    assert all(torch.equal(copies[name].bfloat16(), weight) for name, weight in weights(decoder).items())
    assert all(parameter.grad is None for parameter in decoder.parameters())


def moved(stochastic: bool, steps: int = 40) -> float:
    """How far the mean weight of the embedding moves under a constant gradient, in rates."""
    decoder = model(torch.bfloat16)
    before = weights(decoder)["embed.weight"]
    optimizer = build_optimizer(decoder, 0.0, stochastic_rounding=stochastic)
    for step in range(steps):
        optimizer.key = (0, step)
        for parameter in decoder.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(RATE)
    return float((before.double() - weights(decoder)["embed.weight"].double()).mean()) / RATE / steps


def test_small_updates_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's update under a constant gradient is the rate; bfloat16 alone rounds most of them away."""
    assert moved(stochastic=False) == pytest.approx(1.0, abs=0.05)
    assert moved(stochastic=True) == pytest.approx(1.0, abs=0.05)
    monkeypatch.setattr(master_weights, "stochastic_round", lambda values, stream, first: values.bfloat16())
    assert moved(stochastic=True) < 0.8


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_loaded_state_continues_with_the_same_bits(kind: str, stochastic: bool) -> None:
    """Copies are part of the state, and stochastic rounding draws from seed, step and name alone."""
    whole = model(torch.bfloat16)
    trained(whole, build_optimizer(whole, DECAY, kind, stochastic_rounding=stochastic), range(6))
    cut = model(torch.bfloat16)
    first = build_optimizer(cut, DECAY, kind, stochastic_rounding=stochastic)
    trained(cut, first, range(3))
    assert any("master" in state for state in first.state.values()) is not stochastic
    state = {name: {key: value.clone() for key, value in values.items()} for name, values in first.state.items()}
    for forgotten in ((), ("master",)):
        resumed = model(torch.bfloat16)
        resumed.load_state_dict(cut.state_dict())
        second = build_optimizer(resumed, DECAY, kind, stochastic_rounding=stochastic)
        kept = {name: {k: v.clone() for k, v in values.items() if k not in forgotten} for name, values in state.items()}
        second.load_state(kept)
        trained(resumed, second, range(3, 6))
        equal = all(torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(resumed).values(), strict=True))
        assert equal is (stochastic or not forgotten)


@pytest.mark.parametrize("stochastic", [False, True])
def test_draws_depend_on_the_seed_and_the_step(stochastic: bool) -> None:
    results = []
    for key in ((0, 0), (0, 1), (1, 0)):
        decoder = model(torch.bfloat16)
        optimizer = build_optimizer(decoder, DECAY, stochastic_rounding=stochastic)
        optimizer.key = key
        draw_gradients(decoder, 0)
        optimizer.step(RATE)
        results.append(weights(decoder)["embed.weight"])
    assert torch.equal(results[0], results[1]) is torch.equal(results[0], results[2]) is not stochastic


def test_copies_of_stochastic_rounding_hold_no_memory_between_updates() -> None:
    decoder, size = model(torch.bfloat16), sum(parameter.numel() for parameter in model().parameters())
    for stochastic in (False, True):
        optimizer = build_optimizer(decoder, DECAY, stochastic_rounding=stochastic)
        trained(decoder, optimizer, range(1))
        persistent_bytes = sum(copy.untyped_storage().size() for copy in optimizer.masters.copies.values())
        assert persistent_bytes == (0 if stochastic else 4 * size)
        expected = {"weights": 2 * size, "gradients": 2 * size, "optimizer": persistent_bytes + 8 * size}
        assert optimizer.memory() == expected
        moments = [value for state in optimizer.state.values() for key, value in state.items() if key.startswith("exp")]
        assert sum(value.numel() * value.element_size() for value in moments) == 8 * size


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_bad_step_changes_nothing(kind: str, stochastic: bool) -> None:
    decoder = model(torch.bfloat16)
    optimizer = build_optimizer(decoder, DECAY, kind, stochastic_rounding=stochastic)
    trained(decoder, optimizer, range(2))
    before = [*weights(decoder).values(), *state_values(optimizer)]
    draw_gradients(decoder, 3)
    assert apply_gradients(decoder, optimizer, BatchResult(torch.tensor(float("nan"))), RATE, 1.0).skipped
    draw_gradients(decoder, 3)  # the same, skipped by the optimizer itself
    bad = decoder.embed.weight.grad
    assert bad is not None
    bad[0, 0] = float("nan")
    optimizer.step(RATE, torch.tensor(1.0))
    after = [*weights(decoder).values(), *state_values(optimizer)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    trained(decoder, optimizer, range(3, 4))
    assert not torch.equal(before[0], weights(decoder)["embed.weight"])


def state_values(optimizer: Optimizer) -> list[Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


def test_the_norm_is_that_of_float32_gradients() -> None:
    decoder = model(torch.bfloat16)
    optimizer = build_optimizer(decoder, DECAY)
    draw_gradients(decoder, 0)
    squares = sum(
        float(parameter.grad.double().square().sum())
        for parameter in decoder.parameters()
        if parameter.grad is not None
    )
    result = apply_gradients(decoder, optimizer, BatchResult(torch.tensor(1.0)), RATE, 1.0)
    assert result.gradient_norm == pytest.approx(squares**0.5, rel=1e-6)
