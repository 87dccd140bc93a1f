"""Numbers that are not finite: no step is counted as taken, nothing moves, and where they arise is named."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from heddle.data.samples import Batch
from heddle.model.decoder import Decoder, build
from heddle.numerics.cross_entropy import loss_sum
from heddle.training import step as step_module
from heddle.training.optimizer import Optimizer, build_optimizer
from heddle.training.step import BatchResult, _stored, accumulate_gradients, apply_gradients, first_non_finite
from tests.cases import CASES, case
from tests.laws.planting import Plant, calls, condition

BAD = (float("nan"), float("inf"), -float("inf"))
SITES, SOAK_SITES = 80, 5000  # of each optimizer
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


class Site(NamedTuple):
    """Where a number is made bad. place: what the origin's sentence must hold."""

    place: str
    plant: Callable[[], Callable[[], object]]  # returns what takes it away again


def stored_site(name: str, tensor: torch.Tensor, element: int, bad: float) -> Site:
    """An element of a weight or of a moment."""

    def plant() -> Callable[[], object]:
        target = tensor.view(-1)[element]
        good = target.clone()
        target.fill_(bad)
        return lambda: target.copy_(good)

    return Site(name, plant)


def bad_element(values: torch.Tensor, element: int, bad: float) -> torch.Tensor:
    """The same values, one of them divided by zero: the operation that makes the first bad number is a division."""
    divisor = torch.ones_like(values)
    divisor.view(-1)[element % values.numel()] = 0.0
    return values.masked_fill(divisor == 0.0, 0.0 if math.isnan(bad) else math.copysign(1.0, bad)) / divisor


def sites(model: Decoder, optimizer: Optimizer, count: int, seed: int = 1) -> Iterator[Site]:
    """Bad numbers in weights and moments (unused rows among them), gradients, results of modules, and the loss."""
    draws = np.random.default_rng(seed)
    stored = {name: value.detach() for name, value in model.named_parameters()}
    for name, values in optimizer.state.items():
        stored |= {f"{name}, {key}": value for key, value in values.items() if value.dim()}
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    unused_row = model.embed.weight.detach()[UNUSED_TOKEN]
    for number in range(count):
        bad, element = BAD[number % len(BAD)], int(draws.integers(2**30))
        kind = ("stored", "row", "stored", "gradient", "result", "loss")[number % 6]
        if kind == "row":
            yield stored_site("embed.weight", unused_row, element % len(unused_row), bad)
            continue
        name = str(draws.choice(sorted({"gradient": trained_names(model), "result": modules}.get(kind, stored))))
        if kind == "stored":
            yield stored_site(name, stored[name], element % stored[name].numel(), bad)
        elif kind == "gradient":
            yield Site("in the backward pass", partial(gradient_hook, model.get_parameter(name), element, bad))
        elif kind == "result":
            yield Site(f"in {name}, operation div", partial(result_hook, modules[name], element, bad))
        else:
            yield Site("in the loss, operation div", partial(loss_hook, bad))


def trained_names(model: Decoder) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def gradient_hook(weight: nn.Parameter, element: int, bad: float) -> Callable[[], object]:
    return weight.register_hook(lambda gradient: bad_element(gradient, element, bad)).remove


def result_hook(module: nn.Module, element: int, bad: float) -> Callable[[], object]:
    return module.register_forward_hook(lambda _module, _inputs, result: bad_element(result, element, bad)).remove


def loss_hook(bad: float) -> Callable[[], object]:
    patch = pytest.MonkeyPatch()
    right = loss_sum
    patch.setattr(step_module, "loss_sum", lambda *arguments: bad_element(right(*arguments), 0, bad))
    return patch.undo


def check_sites(kind: str, count: int, seed: int = 1) -> None:
    """A step with one bad number is skipped, moves nothing, and the number's place is named."""
    model, optimizer = trained("attention-gqa", kind, head={"tied": False})
    for site in sites(model, optimizer, count, seed):
        remove = site.plant()
        before = contents(model, optimizer)
        assert step(model, optimizer), site.place
        after = contents(model, optimizer)
        assert all(torch.equal(before[key].nan_to_num(), after[key].nan_to_num()) for key in before), site.place
        origin = first_non_finite(model, optimizer, lambda: accumulate_gradients(model, batch(model), (0, 0)))
        assert origin is not None, site.place
        assert site.place in origin, (site.place, origin)
        remove()
    assert not step(model, optimizer)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_nothing_moves_and_the_place_is_named_wherever_a_number_is_not_finite(kind: str) -> None:
    check_sites(kind, SITES)


@pytest.mark.parametrize(
    "plant",
    [
        calls(Optimizer.is_finite, "_moments", lambda optimizer: ()),
        calls(Optimizer.is_finite, "values", lambda weights: list(weights.values())[-1:], nth=0),
        condition(apply_gradients, "is_finite", True),
        calls(_stored, "items", lambda tensors: [("a tensor", tensor) for tensor in tensors.values()]),
    ],
    ids=["moments are not read", "weights are not read", "no step is skipped", "the place is not named"],
)
def test_planted_faults_are_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_sites("adamw", 24)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_nothing_moves_at_thousands_of_sites(kind: str) -> None:
    check_sites(kind, SOAK_SITES)


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
        ("head.weight", 3e38, "in the loss, operation"),
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
    assert "in the backward pass below the result of layers.0.mixer" in origin
    assert "operation div" in origin
    handle.remove()
    assert first_non_finite(model, optimizer, compute) is None


@pytest.mark.parametrize(
    "name", [name for name in CASES if "softcap" in name or "sink" in name or "window" in name][:6]
)
def test_masks_are_no_origin(name: str) -> None:
    model, optimizer = trained(name)
    assert first_non_finite(model, optimizer, lambda: accumulate_gradients(model, batch(model), (0, 0))) is None
