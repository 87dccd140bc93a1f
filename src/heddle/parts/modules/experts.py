"""The parameters of a mixture of experts: the router, and one projection of every expert."""

import torch
from torch import Tensor, nn

from heddle.numerics.experts.routing import router_logits
from heddle.numerics.philox import ParameterDraws
from heddle.parts.modules.linear import SelfInitialized, fill_normal


class Router(SelfInitialized):
    """The logits of the experts. `expert_bias` is added only where experts are selected and gets no gradient."""

    matrix_parameters = ("weight",)

    def __init__(self, experts: int, width: int, bias: bool, balanced: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.bias = nn.Parameter(torch.empty(experts)) if bias else None
        self.expert_bias = nn.Parameter(torch.empty(experts), requires_grad=False) if balanced else None

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal weights, zero biases."""
        fill_normal(self.weight, std, draws("weight"))
        for bias in (self.bias, self.expert_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., experts], in at least float32."""
        return router_logits(x, self.weight, self.bias)


class ExpertLinear(SelfInitialized):
    """One projection of every expert: weight [experts, outputs, inputs], bias [experts, outputs].

    output_projection: the last one of the expert, else one to its hidden channels.
    """

    matrix_parameters = ("weight",)

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool, output_projection: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None
        self.output_projection = output_projection

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal weights, zero biases."""
        scale = self.output_scale if self.output_projection else self.value_scale
        fill_normal(self.weight, std * scale, draws("weight"))
        if self.bias is not None:
            nn.init.zeros_(self.bias)
