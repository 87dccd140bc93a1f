"""What each C++ operator is timed on, against the plain way: float32 training at sizes of small designs."""

from collections.abc import Callable

import torch
from torch import Tensor

from heddle.numerics.norms import rms_norm

ROWS, WIDTH = 1024, 256


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu").requires_grad_()


def _train(outputs: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.enable_grad():
            y = outputs()
        torch.autograd.grad(y, inputs, torch.ones_like(y))

    return run


def _rms_norm() -> Callable[[], None]:
    x, weight = _random(ROWS, WIDTH), _random(WIDTH)
    return _train(lambda: rms_norm(x, weight, 1e-6), x, weight)


RACES: dict[str, Callable[[], Callable[[], None]]] = {"rms_norm": _rms_norm}  # operator: makes what is timed
