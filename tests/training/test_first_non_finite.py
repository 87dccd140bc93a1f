"""Numbers that are not finite: no step is counted as taken, nothing moves, and where they arise is named."""

import numpy as np
import pytest
import torch

from heddle.data.samples import Batch
from heddle.model.decoder import Decoder, build
from heddle.training.non_finite import first_non_finite
from heddle.training.optimizer import Optimizer, build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients
from heddle.training.step_result import BatchResult
from tests.cases import CASES, case

BAD = (float("nan"), float("inf"), -float("inf"))
SITES = 60
UNUSED_TOKEN = 3


def batch(model: Decoder) -> Batch:
    """Two rows without the unused token."""
    tokens = np.random.default_rng(0).integers(UNUSED_TOKEN + 1, model.config.vocab_size, (2, 17))
    return Batch(tokens, ((7, 9), (16,)), np.arange(2))


def trained(name: str, kind: str = "adamw", **fields: object) -> tuple[Decoder, Optimizer]:
    """A model after one step, so that there are moments."""
    model = build(case(name).replace(**fields)).train()
    optimizer = build_optimizer(model, 0.1, kind)
    step(model, optimizer)
    return model, optimizer


def step(model: Decoder, optimizer: Optimizer) -> bool:
    """Take a step; whether it was skipped."""
    gradients = accumulate_gradients(model, batch(model), (0, 0))
    return apply_gradients(model, optimizer, gradients, 1e-3, 1.0).skipped


def contents(model: Decoder, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all weights and of the optimizer's state."""
    state = {f"{key} {name}": value for name, values in optimizer.state.items() for key, value in values.items()}
    return {name: value.clone() for name, value in (*model.state_dict().items(), *state.items())}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_nothing_moves_wherever_a_number_is_not_finite(kind: str) -> None:
    model, optimizer = trained("attention-gqa", kind)
    draws = np.random.default_rng(1)
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    for name, values in optimizer.state.items():
        tensors |= {f"{name}, {key}": value for key, value in values.items() if value.dim()}
    skipped = 0
    for site in range(SITES):
        name = str(draws.choice(sorted(tensors)))
        element = tensors[name].view(-1)[int(draws.integers(tensors[name].numel()))]
        good = element.clone()
        element.fill_(BAD[site % len(BAD)])
        before = contents(model, optimizer)
        skipped += step(model, optimizer)
        after = contents(model, optimizer)
        assert all(torch.equal(before[key].nan_to_num(), after[key].nan_to_num()) for key in before), name
        origin = first_non_finite(model, optimizer, lambda: accumulate_gradients(model, batch(model), (0, 0)))
        assert origin is not None
        assert name in origin
        element.copy_(good)
    assert skipped == SITES
    assert not step(model, optimizer)


def test_a_row_that_no_text_uses_counts() -> None:
    model, optimizer = trained("attention-gqa", head={"tied": False})
    with torch.no_grad():
        model.embed.weight[UNUSED_TOKEN, 0] = torch.inf
    gradients = accumulate_gradients(model, batch(model), (0, 0))
    assert bool(gradients.loss.isfinite())
    assert apply_gradients(model, optimizer, gradients, 1e-3, 1.0).skipped


@pytest.mark.parametrize(
    ("weight", "value", "part"),
    [
        ("layers.1.feedforward.down.weight", 3e37, "in final_norm.norm, operation pow"),  # the square of its output
        ("layers.0.feedforward.up.weight", 3e38, "in layers.0.feedforward"),
        ("head.weight", 3e38, "outside the layers, or in the backward pass, operation"),
    ],
)
def test_the_operation_is_named(weight: str, value: float, part: str) -> None:
    model, optimizer = trained("attention-gqa", head={"tied": False})
    with torch.no_grad():
        model.get_parameter(weight).fill_(value)
    assert step(model, optimizer)
    origin = first_non_finite(model, optimizer, lambda: accumulate_gradients(model, batch(model), (0, 0)))
    assert origin is not None
    assert part in origin
    assert "not finite" in origin
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_is_named_where_the_forward_pass_is_finite() -> None:
    model, optimizer = trained("attention-gqa")
    weight = next(model.layers[0].parameters())
    handle = weight.register_hook(lambda gradient: gradient / 0.0)

    def compute() -> BatchResult:
        return accumulate_gradients(model, batch(model), (0, 0))

    assert step(model, optimizer)
    origin = first_non_finite(model, optimizer, compute)
    assert origin is not None
    assert "in the backward pass, operation div" in origin
    handle.remove()
    assert first_non_finite(model, optimizer, compute) is None


@pytest.mark.parametrize(
    "name", [name for name in CASES if "softcap" in name or "sink" in name or "window" in name][:6]
)
def test_masks_are_no_origin(name: str) -> None:
    model, optimizer = trained(name)
    assert first_non_finite(model, optimizer, lambda: accumulate_gradients(model, batch(model), (0, 0))) is None
