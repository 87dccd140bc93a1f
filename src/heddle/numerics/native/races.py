"""What each C++ operator is timed on, against the plain way: float32 training at sizes of small designs."""

from collections.abc import Callable

import torch
from torch import Tensor

from heddle.numerics.norms import rms_norm
from heddle.numerics.recurrent.gated_delta import DeltaInputs, gated_delta_rule
from heddle.numerics.recurrent.ssd import SSDInputs, state_space_duality

ROWS, WIDTH = 1024, 256
HEADS, LENGTH, HEAD_DIM = 4, 512, 64


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


def _recurrent() -> tuple[Tensor, Tensor, Tensor]:
    """Rows [1, heads, T, d] of unit length, logarithms of decays and β in (0, 1), both [1, heads, T]."""
    rows = torch.nn.functional.normalize(_random(1, HEADS, LENGTH, HEAD_DIM).detach(), dim=-1).requires_grad_()
    gates = [_random(1, HEADS, LENGTH).detach().sigmoid() for _ in range(2)]
    return rows, gates[0].neg().requires_grad_(), gates[1].requires_grad_()


def _delta() -> Callable[[], None]:
    x, log_decay, beta = _recurrent()
    inputs = DeltaInputs(x, x, x, log_decay[..., None], beta)
    return _train(lambda: gated_delta_rule(inputs, None)[0], x, log_decay, beta)


def _ssd() -> Callable[[], None]:
    x, log_decay, step = _recurrent()
    inputs = SSDInputs(x, x, x, log_decay[..., None], step[..., None], torch.ones(HEADS, device="cpu"))
    return _train(lambda: state_space_duality(inputs, None)[0], x, log_decay, step)


RACES: dict[str, Callable[[], Callable[[], None]]] = {  # operator: makes what is timed
    "delta": _delta,
    "rms_norm": _rms_norm,
    "ssd": _ssd,
}
