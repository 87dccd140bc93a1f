"""The parameters of a mixture of experts: the router, and one projection of every expert."""

import torch
from torch import Tensor, nn

from heddle.numerics.experts.routing import router_logits
from heddle.numerics.philox import ParameterDraws
from heddle.parts.context.costs import Costs, Quantities, projection
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


def mixture_costs(n: Quantities) -> Costs:
    """The costs of a mixture of experts: the router, `top_k` of `experts` experts, and the shared one."""
    _refuse_mixtures(n)
    gated, all_biased = 1 - n.equals("expert", "mlp"), n.has("bias") - n.equals("bias", "shared")
    shared_hidden = n.default("shared_hidden", n.shared * n.hidden)
    expert = (2 + gated) * n.width * n.hidden + all_biased * ((1 + gated) * n.hidden + n.width)
    experts = Costs(
        parameters=n.experts * expert,
        inactive=(n.experts - n.top_k) * expert,
        flops=2 * n.tokens * n.top_k * n.width * n.hidden * (2 + gated),
    )
    router = projection(n, n.width, n.experts, n.router_bias + n.has("bias_update"))
    shared = projection(n, n.width, (1 + gated) * shared_hidden, n.has("bias"))
    shared += projection(n, shared_hidden, n.width, n.has("bias"))
    return router + experts + shared.scaled(n.has("shared")) + projection(n, n.width, 1).scaled(n.shared_gate)


def _refuse_mixtures(n: Quantities) -> None:
    """State what a mixture cannot be."""
    shared, renormalized = n.has("shared"), n.has("renormalize")
    n.refuse("top_k", n.above(n.top_k, n.experts), "is more than experts; choose fewer")
    n.refuse("renormalize", n.equals("routing", "topk_softmax") * (1 - renormalized), "must be true with topk_softmax")
    n.refuse("shared_hidden", (1 - shared) * n.has("shared_hidden"), "is for shared experts; give shared")
    n.refuse("shared_gate", (1 - shared) * n.shared_gate, "is for shared experts; give shared")
    n.refuse("shared", n.has("shared_hidden") * n.above(n.shared, 1), "must be 1 beside shared_hidden")
    n.refuse("bias", (1 - shared) * n.equals("bias", "shared"), "is for shared experts; give shared")
    clamped = n.equals("activation", "swiglu_clamped")
    n.refuse("activation", n.equals("expert", "mlp") * clamped, "needs a gate; choose expert: gated")
    for name in ("limit", "alpha"):
        n.refuse(name, (1 - clamped) * n.has(name), "is for swiglu_clamped only; leave it out")
    by_group, groups = n.equals("routing", "softmax_group_max"), n.has("groups")
    allowed = n.equals("routing", "sigmoid") + by_group
    n.refuse("groups", (1 - allowed) * groups, "is for sigmoid and softmax_group_max; leave it out")
    n.refuse("top_groups", (1 - allowed) * n.has("top_groups"), "is for sigmoid and softmax_group_max; leave it out")
    n.refuse("groups", (1 - groups) * (n.has("top_groups") + by_group), "is missing; give groups and top_groups")
    n.refuse("top_groups", groups * (1 - n.has("top_groups")), "is missing; give groups and top_groups")
    size = n.experts / n.default("groups", 1)
    n.refuse("groups", n.remainder(n.experts, n.default("groups", 1)), "does not divide experts; choose a divisor")
    n.refuse("groups", groups * n.equals("routing", "sigmoid") * n.above(2, size), "leaves one expert for each group")
    n.refuse("top_groups", groups * n.above(n.top_groups, n.groups), "is more than groups; choose fewer")
    n.refuse("top_k", groups * n.above(n.top_k, n.top_groups * size), "is more than the best groups have; choose fewer")
