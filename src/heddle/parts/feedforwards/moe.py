"""Mixture of experts (Shazeer et al. 2017; DeepSeek-V3 2024): `shared(x) + Σ_i gate_i · expert_i(x)` over the k chosen.

Experts are feed-forwards, `down f(up x)` or `down (f(gate x) ⊙ up x)`, or `gated` with `swiglu_clamped`; how they are
chosen is in numerics/experts/routing.py.
"""

from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from heddle.config import Count, Positive, Rate, refuse
from heddle.errors import ConfigError
from heddle.numerics.experts.mixture import Choices, Weights, experts
from heddle.numerics.experts.routing import Route, Routing, Rule, logits, route, within_capacity
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import Feedforward, FeedforwardConfig, GatedActivation, Mixture, activation, clamps
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Leaf, Linear, fill_normal, together
from heddle.parts.modules.load_balancing import entry
from heddle.parts.modules.router_statistics import enter

Coefficient = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class MoEConfig(FeedforwardConfig):
    """Fields of `moe`: each token meets `top_k` of `experts`, each `hidden` wide, and every shared one.

    `shared` experts are one, as wide as all of them, or `shared_hidden` wide; `shared_gate` multiplies it by
    `sigmoid(w · x)` (Qwen2-MoE); `bias: shared` gives it biases, and the others none (DeepSeek-V2). `limit` and `alpha`
    are those of `gated`. `renormalise` divides the gates of the chosen by their sum (with one, it is always 1, and the
    loss teaches the router nothing). `groups` of which `top_groups` are kept belong to `sigmoid` and
    `softmax_group_max`. `scale` multiplies the gates.

    To choose evenly: `aux_loss` and `z_loss` are coefficients of losses that training adds; with `bias_update` a bias
    that only selects moves by as much each step (0: it stays as it is loaded). `capacity`: in training an expert takes
    at most ⌈capacity · top_k · tokens / experts⌉ choices of a row, the earlier ones; in eval it takes them all.
    """

    experts: Count
    top_k: Count
    hidden: Count
    expert: Literal["mlp", "gated"] = "gated"
    activation: GatedActivation | None = None  # None: gelu for mlp, silu for gated, as in the kinds of these names
    limit: Positive | None = None
    alpha: Positive | None = None
    bias: bool | Literal["shared"] = False
    dropout: Rate = 0.0
    shared: Count | None = None
    shared_hidden: Count | None = None
    shared_gate: bool = False
    routing: Routing = "softmax_topk"
    renormalise: bool = True
    groups: Count | None = None
    top_groups: Count | None = None
    scale: Positive = 1.0
    router_bias: bool = False
    aux_loss: Coefficient | None = None
    z_loss: Coefficient | None = None
    bias_update: Coefficient | None = None
    capacity: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.experts:
            refuse("top_k", f"{self.top_k} is more than experts = {self.experts}; choose fewer, or add experts")
        if self.routing == "topk_softmax" and not self.renormalise:
            refuse("renormalise", "false has no meaning with topk_softmax, whose gates sum to 1; leave it out")
        if self.shared is None and (self.shared_hidden is not None or self.shared_gate):
            name = "shared_gate" if self.shared_hidden is None else "shared_hidden"
            refuse(name, "belongs to shared experts, of which there are none; give shared, or leave it out")
        if self.shared is None and self.bias == "shared":
            refuse("bias", "'shared' belongs to shared experts, of which there are none; give shared, true or false")
        if self.expert == "mlp" and self.activation == "swiglu_clamped":
            refuse("activation", "'swiglu_clamped' needs a gate; choose expert: gated, or another activation")
        clamps(self.activation, self.limit, self.alpha)
        self._check_groups()
        return self

    def _check_groups(self) -> None:
        groups, best = self.groups, self.top_groups
        if self.routing not in ("sigmoid", "softmax_group_max"):
            if groups is not None or best is not None:
                name = "top_groups" if groups is None else "groups"
                refuse(name, f"is not read by {self.routing}; choose sigmoid or softmax_group_max, or leave it out")
            return
        if (groups is None) != (best is None) or (groups is None and self.routing == "softmax_group_max"):
            name = "groups" if groups is None else "top_groups"
            refuse(name, "is missing; give groups and top_groups, or choose a routing without groups")
        if groups is None or best is None:
            return
        if self.experts % groups:
            refuse("groups", f"{groups} does not divide experts = {self.experts}; choose a divisor of it")
        size = self.experts // groups
        if self.routing == "sigmoid" and size < 2:
            refuse("groups", f"{groups} leaves one expert a group, whose two best are asked for; choose fewer groups")
        if best > groups:
            refuse("top_groups", f"{best} is more than groups = {groups}; choose fewer")
        if self.top_k > best * size:
            refuse("top_k", f"{self.top_k} is more than the {best * size} experts of top_groups = {best}; choose fewer")

    def resolved(self) -> Self:
        """Activation, limits and the width of what is shared, as one expert, written out; a single group is none."""
        wide = self.shared_hidden or (None if self.shared is None else self.shared * self.hidden)
        single = self.groups == 1 and self.routing == "sigmoid"
        return self.replace(
            activation=self.chosen_activation,
            shared=None if wide is None else 1,
            shared_hidden=wide,
            groups=None if single else self.groups,
            top_groups=None if single else self.top_groups,
            **clamps(self.activation, self.limit, self.alpha),
        )

    def build(self, width: int) -> "MoE":
        """Make the module."""
        return MoE(self, width)

    @property
    def chosen_activation(self) -> GatedActivation:
        """That of the experts."""
        return self.activation or ("silu" if self.expert == "gated" else "gelu")

    @property
    def rule(self) -> Rule:
        """How experts are chosen."""
        groups = 1 if self.groups is None or self.top_groups is None else self.groups
        return Rule(self.routing, self.top_k, self.renormalise, groups, self.top_groups or 1, self.scale)


class Router(Leaf):
    """A number for each expert; `balance`, which no gradient teaches, is added where experts are chosen."""

    maps = ("weight",)

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, width))
        self.bias = nn.Parameter(torch.empty(config.experts)) if config.router_bias else None
        balanced = config.bias_update is not None
        self.balance = nn.Parameter(torch.empty(config.experts), requires_grad=False) if balanced else None

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Normal weights, zero biases."""
        fill_normal(self.weight, std, generator)
        for bias in (self.bias, self.balance):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., experts], in at least float32."""
        return logits(x, self.weight, self.bias)


class Stack(Leaf):
    """The projections of all experts: weight [experts, outputs, inputs], bias [experts, outputs]."""

    maps = ("weight",)

    def __init__(self, number: int, inputs: int, outputs: int, bias: bool, last: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(number, outputs)) if bias else None
        self.last = last

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Normal weights, zero biases."""
        fill_normal(self.weight, std * (self.branch_scale if self.last else 1.0), generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Shared(nn.Module):
    """The expert that every token meets."""

    def __init__(self, config: MoEConfig, width: int, hidden: int) -> None:
        super().__init__()
        bias = bool(config.bias)
        self.gate = Linear(width, hidden, bias) if config.expert == "gated" else None
        self.up = Linear(width, hidden, bias)
        self.down = Linear(hidden, width, bias, last=True)
        self.activation = activation(config.chosen_activation, config.limit, config.alpha)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, width] -> the same shape."""
        up, *gate = together(x, self.up, *([] if self.gate is None else [self.gate]))
        y: Tensor = self.down(self.dropout(self.activation(up, *gate)))
        return y


class MoE(Feedforward):
    """The module."""

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        number, hidden, bias = config.experts, config.hidden, config.bias is True
        self.config, self.rule = config, config.rule
        self.router = Router(config, width)
        self.gate = Stack(number, width, hidden, bias) if config.expert == "gated" else None
        self.up = Stack(number, width, hidden, bias)
        self.down = Stack(number, hidden, width, bias, last=True)
        wide = config.shared_hidden or (config.shared or 0) * hidden
        self.shared = Shared(config, width, wide) if wide else None
        self.shared_gate = Linear(width, 1) if config.shared_gate else None
        self.activation = activation(config.chosen_activation, config.limit, config.alpha)
        self.dropout = Dropout(config.dropout)

    @property
    def mixture(self) -> Mixture:
        """Its experts."""
        stacks = [stack for stack in (self.gate, self.up, self.down) if stack is not None]
        weights = tuple(parameter for stack in stacks for parameter in stack.parameters())
        rule, config = self.rule, self.config
        return Mixture(self.router, weights, config.experts, rule.top_k, rule.groups, config.capacity)

    @property
    def idle_parameters(self) -> int:
        """Those of the experts that a token does not meet."""
        one = sum(weight[0].numel() for weight in self.mixture.weights)
        return (self.config.experts - self.rule.top_k) * one

    @torch.no_grad()
    def balance(self, loads: Tensor) -> None:
        """Experts above the mean of loads [experts] become less likely, those below it more."""
        bias, step = self.router.balance, self.config.bias_update
        if bias is not None and step:
            bias.add_(torch.sign(loads.sum() - loads * self.config.experts).to(bias.dtype), alpha=step)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> the same shape; padding meets the shared experts alone.

        Raises ConfigError in training with a state and a capacity.
        """
        y = self._mixed(x, self.router(x), layout)
        if self.shared is None:
            return y
        common = self.shared(x)
        return y + (common if self.shared_gate is None else common * self.shared_gate(x).sigmoid())

    @eager
    def _mixed(self, x: Tensor, numbers: Tensor, layout: Layout) -> Tensor:
        found = route(numbers, self.router.balance, self.rule)
        real = None if layout.padding is None else ~layout.padding
        kept = self._kept(found, real, layout)
        losses = (self.config.aux_loss or 0.0, self.config.z_loss or 0.0) if self.training else (0.0, 0.0)
        enter(lambda: entry(self, numbers, found, kept, layout, losses))
        choices = found.choices if kept is None else found.choices.masked_fill(~kept, -1)
        keep = None
        if self.dropout.active:
            keep = self.dropout(x.new_ones(*choices.shape, self.config.hidden)).flatten(0, 1)
        chosen = Choices(choices.flatten(0, 1), found.gates.flatten(0, 1), keep, kept is None)
        weights = Weights(
            self.up.weight,
            self.down.weight,
            None if self.gate is None else self.gate.weight,
            self.up.bias,
            self.down.bias,
            None if self.gate is None else self.gate.bias,
        )
        return experts(x.flatten(0, 1), chosen, weights, self.activation).view(x.shape)

    def _kept(self, found: Route, real: Tensor | None, layout: Layout) -> Tensor | None:
        """bool [B, T, k]: the choices of real tokens, within the capacity; None: all."""
        kept = None if real is None else real[..., None].expand(found.choices.shape)
        if self.config.capacity is None or not self.training:
            return kept
        if layout.past is not None:
            raise ConfigError(
                "capacity: in training, an expert's room depends on the whole row; call model.eval() to carry a state"
            )
        room = within_capacity(found.choices, real, self.config.experts, self.config.capacity)
        return room if kept is None else room & kept
