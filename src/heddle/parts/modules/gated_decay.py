"""The decay that recurrent mixers compute from each token, as Mamba-2 does (Dao & Gu 2024).

Δ = softplus(a + b),   log α = −exp(A) Δ
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from heddle.numerics.norms import at_least_float32
from heddle.numerics.philox import ParameterDraws
from heddle.parts.modules.linear import SelfInitialized


class GatedDecay(SelfInitialized):
    """A per head and b per channel, `channels` for each head. `limits`: the least and the greatest Δ."""

    def __init__(self, heads: int, channels: int = 1, limits: Sequence[float] | None = None) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.empty(heads))  # A
        self.bias = nn.Parameter(torch.empty(heads * channels))  # b
        self.limits = limits

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """exp(A) uniform in [1, 16], softplus(b) log-uniform in [0.001, 0.1], as the authors' code does."""
        rate, bias = draws("rate").uniform(0, len(self.rate)), draws("bias").uniform(0, len(self.bias))
        time_step = torch.exp(math.log(1e-3) + bias * math.log(100.0))
        with torch.no_grad():
            self.rate.copy_(torch.log(1.0 + 15.0 * rate))
            self.bias.copy_(time_step + torch.log(-torch.expm1(-time_step)))  # inverse of softplus

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """a [B, T, heads · channels] -> log α and Δ [B, heads, T, channels], in at least float32."""
        rate, bias = at_least_float32(self.rate), at_least_float32(self.bias)
        time_step = _softplus(at_least_float32(a) + bias).unflatten(-1, (len(rate), -1))
        if self.limits is not None:
            time_step = time_step.clamp(*self.limits)
        log_decay = -rate.exp()[:, None] * time_step
        return log_decay.transpose(1, 2), time_step.transpose(1, 2)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)). For its gradient torch's compiler expects other strides than torch's kernel returns."""
    return torch.logaddexp(x, torch.zeros_like(x)) if is_compiling() else functional.softplus(x)
