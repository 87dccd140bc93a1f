"""An update of bfloat16 weights makes the host wait nowhere, and its bits are those of the CPU."""

import pytest
import torch

from heddle.model.decoder import Decoder, build
from heddle.model.initialization import cast_parameters
from heddle.numerics.random import RandomStream, stochastic_round
from heddle.training.optimizer import Optimizer, build_optimizer
from tests import small
from tests.accelerator.pretend import moved, on_device, pretending, values_of


def model() -> Decoder:
    decoder = build(small.config())
    cast_parameters(decoder, torch.bfloat16)
    return decoder


def draw_gradients(decoder: Decoder, on_gpu: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    for parameter in decoder.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
        parameter.grad = on_device(gradient) if on_gpu else gradient


def step(optimizer: Optimizer, found_inf: torch.Tensor) -> None:
    for parameter, weight in zip(optimizer.trainable.values(), optimizer.take_gradients(), strict=True):
        assert parameter.grad is None
        assert weight.grad is not None
    optimizer.step(1e-2, found_inf)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_float32_copies_are_updated_without_a_wait(kind: str) -> None:
    decoder = model()
    optimizer = build_optimizer(decoder, 0.1, kind)
    draw_gradients(decoder, on_gpu=False)
    step(optimizer, torch.tensor(0.0))
    with pretending() as log:
        accelerated = model()
        moved(accelerated)
        device_optimizer = build_optimizer(accelerated, 0.1, kind)
        for is_bad in (0.0, 1.0):
            draw_gradients(accelerated, on_gpu=True)
            flag = on_device(torch.tensor(is_bad))
            log.clear()
            step(device_optimizer, flag)
            assert log.report == []
        after = [values_of(parameter.detach()) for parameter in accelerated.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, decoder.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(after, model().parameters(), strict=True))


def test_stochastic_rounding_draws_the_bits_of_the_cpu_without_a_wait() -> None:
    numbers, stream = torch.randn(1000, generator=torch.Generator().manual_seed(4)), RandomStream.of("weights")
    with pretending() as log:
        on_gpu = on_device(numbers)
        log.clear()
        rounded = values_of(stochastic_round(on_gpu, stream))
        assert log.report == []
    assert torch.equal(rounded, stochastic_round(numbers, stream))
