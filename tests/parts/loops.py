"""A part beside the plain loop of its paper: random weights, and errors of outputs, states and gradients."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from heddle.laws.harness import normal_tensor
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer
from heddle.parts.position_table import PositionTable
from heddle.parts.states import StateSpec

M = TypeVar("M", bound=nn.Module)


def with_large_weights(module: M, draw: random.Random) -> M:
    """The module in float64, with random values in every parameter."""
    module.double()
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(normal_tensor(tuple(parameter.shape), generator) * 0.7)
    return module


def gradient_error(actual: Tensor, expected: Tensor, probe: Tensor, inputs: Sequence[Tensor]) -> float:
    """The largest difference of the gradients of `inputs`."""
    gradients = [torch.autograd.grad((y * probe).sum(), inputs) for y in (actual, expected)]
    return max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))


def mixer_errors(
    mixer: Mixer, loop: Callable[[Tensor, Mixer], Tensor], width: int, lengths: list[int], draw: random.Random
) -> tuple[float, float]:
    """Of the outputs, and of the gradients of x and of all weights, for packed documents of these lengths.

    The outputs are those of one call and of calls with a state, a few tokens each, over the documents after the first.
    """
    total, generator = sum(lengths), torch.Generator().manual_seed(draw.randrange(10**6))
    x, probe = normal_tensor((total, width), generator).requires_grad_(), normal_tensor((total, width), generator)
    expected = torch.cat([loop(document, mixer) for document in x.split(lengths)])
    actual = mixer(x[None], Layout.packed([lengths]))[0][0]
    errors = [float((actual - expected).detach().abs().max())]
    with torch.no_grad():
        table, start = PositionTable.empty(1, mixer.lookback, None, "cpu"), lengths[0]
        state = mixer.init_state(StateSpec(1, None, torch.float64, "cpu"))
        for piece in x[lengths[0] :].split(draw.choice((1, 2, 3))):
            table, layout = table.extend(table.next_layout(len(piece)))
            y, state = mixer(piece[None], layout, state)
            errors.append(float((y[0] - expected[start : start + len(piece)]).abs().max()))
            start += len(piece)
    return max(errors), gradient_error(actual, expected, probe, [x, *mixer.parameters()])
