"""Mixture of experts (Shazeer et al. 2017; DeepSeek-V3 2024): `shared(x) + Σ_i gate_i · expert_i(x)` over the k chosen.

Experts are feed-forwards: `down f(up x)`, `down (f(gate x) ⊙ up x)`, or `gated` with a clamped SwiGLU. Routing is in
numerics/experts/mixture.py.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import Part, PositiveFloat, PositiveInt, Probability, Width, refuse
from heddle.errors import ConfigError
from heddle.numerics.activations import GATED, Activation, activation
from heddle.numerics.experts.mixture import (
    Route,
    Routing,
    RoutingConfig,
    hashed_experts,
    route,
    router_logits,
    run_experts,
    run_on_weighted_inputs,
    within_capacity,
)
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import (
    ExpertInfo,
    Feedforward,
    FeedforwardConfig,
    GatedActivation,
    activation_settings,
    token_ids,
)
from heddle.parts.layout import Layout
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.eager import eager_on_cpu, layout_dependent
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal, fused_projections
from heddle.parts.modules.router_statistics import RouterStatistics, record
from heddle.parts.norms import NormConfig

# The parameters of a mixture of experts: the router, and one projection of every expert.


class RouterTrunk(SelfInitialized):
    """x -> f(W₂ f(W₁ N(D x + d) + b₁) + b₂) with f = gelu, in at least float32; D is `weight`, N the model's norm."""

    matrix_parameters = ("weight", "first", "second")

    def __init__(self, width: int, rank: int, norm: NormConfig) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(rank, width)), nn.Parameter(torch.empty(rank))
        self.first, self.second = (nn.Parameter(torch.empty(rank, rank)) for _ in range(2))
        self.first_bias, self.second_bias = (nn.Parameter(torch.empty(rank)) for _ in range(2))
        self.norm = norm.build(rank)

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal weights, zero biases."""
        for name in self.matrix_parameters:
            fill_normal(getattr(self, name), std, draws(name))
        for bias in (self.bias, self.first_bias, self.second_bias):
            nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., rank]."""
        h: Tensor = self.norm(router_logits(x, self.weight, self.bias))
        for weight, bias in ((self.first, self.first_bias), (self.second, self.second_bias)):
            h = functional.gelu(router_logits(h, weight, bias))
        return h


class Router(SelfInitialized):
    """The logits of the experts. `expert_bias` is added only where experts are selected and gets no gradient.

    With a trunk, the logits are computed from its output. The first dimension of the router's own parameters is the
    expert.
    """

    matrix_parameters = ("weight",)

    def __init__(self, experts: int, width: int, bias: bool, balanced: bool, trunk: RouterTrunk | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.weight = nn.Parameter(torch.empty(experts, width if trunk is None else len(trunk.bias)))
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
        return router_logits(x if self.trunk is None else self.trunk(x), self.weight, self.bias)


class ExpertTable(SelfInitialized):
    """The experts of each token id: `experts` [ids, k], numbers of experts, which have no gradient."""

    matrix_parameters = ()

    def __init__(self, ids: int, top_k: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.experts = nn.Parameter(torch.empty(ids, top_k), requires_grad=False)

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Experts of the hash, with a seed of its own for each table."""
        seed, (ids, top_k) = draws("experts").key % 2**16, self.experts.shape
        chosen = hashed_experts(torch.arange(ids, device="cpu"), self.num_experts, top_k, seed)
        with torch.no_grad():
            self.experts.copy_(chosen)

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids int64 [B, T] -> their experts, int64 [B, T, k]. Row t is of every id that is t modulo the rows."""
        return self.experts[tokens % len(self.experts)].round().clamp(0, self.num_experts - 1).long()


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


# The statistics that a mixture of experts records: expert counts, and the losses that balance them.
#
# The balance loss of Switch (Fedus et al. 2021) is `E · Σ_i f_i P_i` for each sequence (a document of a row), without
# padding: f_i is the share of the sequence's choices that went to expert i, P_i the expert's mean router probability.
# It is 1 for perfect balance. Each sequence is weighted by its number of tokens, so the loss is a sum over tokens and
# does not depend on how rows are split between calls. The same holds for the z-loss `(log Σ_i exp(l_i))²` (Zoph et al.
# 2022).


def compute_router_statistics(
    mixture: Feedforward,
    logits: Tensor,
    route: Route,
    accepted: Tensor | None,
    layout: Layout,
    losses: tuple[float, float],
) -> RouterStatistics:
    """The statistics of one call with router logits [B, T, experts].

    accepted: bool [B, T, k], False for choices of padding and beyond the capacity; None: all are True. losses: the
    coefficients of the balance loss and of the z-loss; a loss with coefficient 0 is not computed.
    """
    padding = layout.padding
    is_token = torch.ones_like(layout.positions, dtype=torch.bool) if padding is None else ~padding
    tokens = is_token.sum()
    chosen = torch.zeros_like(logits, dtype=torch.int64).scatter_(-1, route.expert_indices, 1) * is_token[..., None]
    dropped = torch.zeros_like(tokens) if accepted is None else tokens * route.expert_indices.shape[-1] - accepted.sum()
    with torch.no_grad():
        entropy = torch.special.entr(route.probabilities.double()).sum(-1).masked_fill(~is_token, 0.0).sum()
    loss = None
    aux, z = losses
    if aux:
        loss = aux * balance_loss(route.probabilities, chosen, layout.call_segment_ids)
    if z:
        squares = logits.logsumexp(-1).square().masked_fill(~is_token, 0.0).sum()
        loss = z * squares if loss is None else loss + z * squares
    return RouterStatistics(mixture, loss, chosen.sum((0, 1)), dropped, entropy, tokens)


def balance_loss(probabilities: Tensor, chosen: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Σ over sequences of `tokens · E · Σ_i f_i P_i`.

    probabilities [B, T, experts]; chosen int64 [B, T, experts], 1 where a token that is not padding chose an expert;
    segment_ids int64 [B, T].
    """
    batch, length, experts = chosen.shape
    probabilities = probabilities.masked_fill(~chosen.any(-1, keepdim=True), 0.0)  # 0 at padding, which chose none
    if segment_ids is None:
        counts, mass = chosen.sum(1), probabilities.sum(1)
    else:
        slots = length + 1  # the segment ids of a row are counted up from 0 or 1
        rows = torch.arange(batch, device=chosen.device)[:, None] * slots + segment_ids

        def sums(x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            return flat.new_zeros(batch * slots, *flat.shape[1:]).index_add(0, rows.flatten(), flat)

        counts, mass = sums(chosen), sums(probabilities)
    shares = counts.to(mass.dtype) / counts.sum(-1, keepdim=True).clamp(min=1)
    return experts * (shares * mass).sum()


Coefficient = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
DEFAULT_TOLERANCE = 0.02  # of `sparse_mixer`, as in Phi-3.5-MoE


class MoEConfig(FeedforwardConfig):
    """Fields of `moe`. Each token uses `top_k` of `experts` experts, each `hidden` wide, and all shared experts.

    The `shared` experts are built as one expert, as wide as all of them together. With `shared: 1` that one may be
    `shared_hidden` wide instead. `shared_gate` multiplies it by `sigmoid(w · x)` (Qwen2-MoE). `bias: shared` gives
    biases to this expert only (DeepSeek-V2). With `shared_limit: false` it has silu without `limit`, in the place of
    `swiglu_limited` (Hy V4, 2026). `limit` and `alpha` are as in `gated`. `renormalize` divides the gates of
    the chosen experts by their sum, plus `renormalize_eps` (LFM2: 1e-6); with `top_k: 1` and no eps the gate is then
    always 1, and the loss gives the router no gradient. `weighted: inputs` multiplies the input of an expert by its
    gate, not the output: `expert_i(gate_i · x)` (Llama 4). With `groups`, only experts of the best `top_groups` groups
    are chosen (`sigmoid` and `softmax_group_max` only). `scale` multiplies the gates. `sigmoid_logits` adds the
    balancing bias to logits (Kolibri, 2026). `shared_scale` multiplies the shared experts (Cohere, 2026).
    `output_norm` norms the sum of all experts with the model's norm (A.X K1, 2026). With `sparse_mixer` the gate of an
    expert is a softmax over the logits that `router_tolerance` leaves beside it (Phi-3.5-MoE, Liu et al. 2024).
    `router_softcap` bounds logits l by `cap · tanh(l / cap)` (Laguna, 2026). `router_rank` r makes the router
    read f(W₂ f(W₁ N(D x + d) + b₁) + b₂), of r elements, in the place of x, with f = gelu and the model's norm N
    (ZAYA1, 2025).

    With `selection: hash` a fixed hash of the token's id selects the experts, and `routing` gives only their gates
    (Roller et al. 2021). `hash_seed` gives other experts, for other layers. With `table` the experts of each of
    `id_range` ids stand in a table among the weights, which starts as a hash (the first layers of DeepSeek V4, 2026).

    Load balancing: `aux_loss` and `z_loss` are coefficients of losses that training adds. With `bias_update`, a bias
    that is added only for the selection moves by this much each step (0: it stays as loaded). With
    `capacity_factor`, in training, an expert takes at most ⌈capacity_factor · top_k · tokens / experts⌉ choices of a
    row and drops later ones; in eval mode it takes all.
    """

    aliases = ("mixture_of_experts",)
    data_dependent = ("capacity_factor",)
    later_fields = (
        *("weighted", "router_rank", "router_softcap", "shared_scale", "selection", "hash_seed", "output_norm"),
        *("router_tolerance", "id_range", "shared_limit"),
    )

    experts: Width
    top_k: Width
    hidden: PositiveInt
    expert: Literal["mlp", "gated"] = "gated"
    activation: GatedActivation | None = None  # default: gelu for mlp, silu for gated
    limit: PositiveFloat | None = None
    alpha: PositiveFloat | None = None
    bias: bool | Literal["shared"] = False
    dropout: Probability = 0.0
    shared: Width | None = None
    shared_hidden: PositiveInt | None = None
    shared_gate: bool = False
    shared_scale: PositiveFloat | None = None  # default: 1
    shared_limit: bool = True  # `limit` is of the shared expert, too
    routing: Routing = "softmax_topk"
    selection: Literal["scores", "hash", "table"] = "scores"  # of experts: by the router, or by the ids of tokens
    hash_seed: Annotated[int, Field(ge=0, lt=2**16)] = 0
    id_range: PositiveInt | None = None  # rows of the table
    renormalize: bool = True
    renormalize_eps: PositiveFloat | None = None
    weighted: Literal["outputs", "inputs"] = "outputs"
    groups: Width | None = None
    top_groups: Width | None = None
    scale: PositiveFloat = 1.0
    router_bias: bool = False
    router_rank: Width | None = None  # of the layers before the router
    router_softcap: PositiveFloat | None = None
    router_tolerance: PositiveFloat | None = None  # of sparse_mixer; default: 0.02
    output_norm: bool = False
    aux_loss: Coefficient | None = None
    z_loss: Coefficient | None = None
    bias_update: Coefficient | None = None
    capacity_factor: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.experts:
            refuse("top_k", f"{self.top_k} is more than experts = {self.experts}; choose fewer, or add experts")
        if self.routing == "topk_softmax" and not self.renormalize:
            refuse("renormalize", "false has no effect with topk_softmax, whose gates sum to 1; leave it out")
        if self.router_tolerance is not None and self.routing != "sparse_mixer":
            refuse("router_tolerance", f"is not used by {self.routing}; choose sparse_mixer, or leave it out")
        if self.renormalize_eps is not None and (self.routing == "topk_softmax" or not self.renormalize):
            why = "topk_softmax, a softmax over the chosen experts" if self.renormalize else "renormalize: false"
            refuse("renormalize_eps", f"is added to a sum that {why}, does not divide by; leave it out")
        if self.shared is None and self.shared_scale is not None:
            refuse("shared_scale", "is for shared experts, but there are none; give shared, or leave it out")
        if not self.shared_limit and (self.shared is None or self.activation != "swiglu_limited"):
            what = "there is no shared expert" if self.shared is None else "activation is not swiglu_limited"
            refuse("shared_limit", f"false leaves a limit out, but {what}; leave it out")
        if self.shared is None and (self.shared_hidden is not None or self.shared_gate):
            name = "shared_gate" if self.shared_hidden is None else "shared_hidden"
            refuse(name, "is for shared experts, but there are none; give shared, or leave it out")
        if self.shared is not None and self.shared > 1 and self.shared_hidden is not None:
            reason = f"{self.shared} has no effect with shared_hidden = {self.shared_hidden}"
            refuse("shared", f"{reason}, the width of the shared experts together; set it to 1, or drop shared_hidden")
        if self.shared is None and self.bias == "shared":
            refuse("bias", "'shared' is for shared experts, but there are none; give shared, or choose true or false")
        if self.router_rank == 1:
            refuse("router_rank", "1 leaves the router's norm one number, so at most its sign survives; give more")
        if self.expert == "mlp" and self.activation in GATED:
            refuse("activation", f"'{self.activation}' needs a gate; choose expert: gated, or another activation")
        activation_settings(self.activation, self.limit, self.alpha)
        self._check_groups()
        self._check_selection()
        return self

    def _check_selection(self) -> None:
        by = self.selection
        for name, value, user in (("hash_seed", self.hash_seed, "hash"), ("id_range", self.id_range, "table")):
            if value and by != user:
                refuse(name, f"{value} does nothing without selection: {user}; give it, or leave this out")
        if by == "scores":
            return
        if by == "table" and self.id_range is None:
            refuse("id_range", "is missing; with selection: table give the number of ids, such as vocab_size")
        if self.groups is not None or self.routing == "sigmoid_logits":
            name = "routing" if self.groups is None else "groups"
            refuse(name, f"selects experts by scores, but selection is {by}; choose another routing, without groups")
        if self.bias_update is not None:
            refuse("bias_update", f"moves a selection by scores, but selection is {by}; leave it out")
        if self.top_k == self.experts:
            refuse("selection", f"{by} selects all experts if top_k = {self.top_k}; choose fewer, or leave it out")
        if self.top_k == 1 and self.renormalize_eps is None and (self.renormalize or self.routing == "topk_softmax"):
            refuse("top_k", f"1 makes the gate 1, so with {by} nothing reads the router; give renormalize: false")

    def _check_groups(self) -> None:
        groups, top_groups = self.groups, self.top_groups
        if self.routing not in ("sigmoid", "softmax_group_max"):
            if groups is not None or top_groups is not None:
                name = "top_groups" if groups is None else "groups"
                refuse(name, f"is not used by {self.routing}; choose sigmoid or softmax_group_max, or leave it out")
            return
        if (groups is None) != (top_groups is None) or (groups is None and self.routing == "softmax_group_max"):
            name = "groups" if groups is None else "top_groups"
            refuse(name, "is missing; give groups and top_groups, or choose a routing without groups")
        if groups is None or top_groups is None:
            return
        if self.experts % groups:
            refuse("groups", f"{groups} does not divide experts = {self.experts}; choose a divisor of it")
        size = self.experts // groups
        if self.routing == "sigmoid" and size < 2:
            reason = f"{groups} leaves one expert per group, but a group is ranked by its two best"
            refuse("groups", f"{reason}; choose fewer groups")
        if top_groups > groups:
            refuse("top_groups", f"{top_groups} is more than groups = {groups}; choose fewer")
        if self.top_k > top_groups * size:
            reason = f"{self.top_k} is more than the {top_groups * size} experts of top_groups = {top_groups}"
            refuse("top_k", f"{reason}; choose fewer")

    def resolved(self, context: BuildContext) -> Self:
        """Activation, its limits and the width of the shared expert written out. A single group becomes None."""
        shared_hidden = self.shared_hidden or (None if self.shared is None else self.shared * self.hidden)
        single_group = self.groups == 1 and self.routing == "sigmoid"
        return self.replace(
            activation=self.expert_activation,
            shared=None if shared_hidden is None else 1,
            shared_hidden=shared_hidden,
            groups=None if single_group else self.groups,
            top_groups=None if single_group else self.top_groups,
            router_tolerance=self.routing_config.tolerance if self.routing == "sparse_mixer" else None,
            **activation_settings(self.activation, self.limit, self.alpha),
        )

    @property
    def reads_tokens(self) -> bool:
        """Whether ids of tokens select experts."""
        return self.selection != "scores"

    @property
    def active_hidden(self) -> int:
        """Hidden channels of the chosen and of the shared experts."""
        return self.top_k * self.hidden + (self.shared_hidden or (self.shared or 0) * self.hidden)

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """2 of 8 experts (Mixtral), half as wide as the previous feed-forward: a token uses the same number."""
        expert = {"expert": previous.kind} if previous.kind in get_args(cls.model_fields["expert"].annotation) else {}
        hidden = super().default_fields(previous, width).get("hidden")
        return {} if hidden is None else {"experts": 8, "top_k": 2, "hidden": max(1, hidden // 2), **expert}

    def build(self, context: BuildContext) -> "MoE":
        """Build the module."""
        return MoE(self, context)

    @property
    def expert_activation(self) -> GatedActivation:
        """The activation of the experts."""
        return self.activation or ("silu" if self.expert == "gated" else "gelu")

    @property
    def activation_function(self) -> Activation:
        """The activation of the experts, with its settings."""
        return activation(self.expert_activation, activation_settings(self.activation, self.limit, self.alpha))

    @property
    def routing_config(self) -> RoutingConfig:
        """How experts are chosen, for `numerics.experts.mixture.route`."""
        groups = 1 if self.groups is None or self.top_groups is None else self.groups
        top_groups, eps = self.top_groups or 1, self.renormalize_eps
        tolerance = self.router_tolerance or DEFAULT_TOLERANCE
        return RoutingConfig(self.routing, self.top_k, self.renormalize, groups, top_groups, self.scale, eps, tolerance)


class SharedExpert(nn.Module):
    """The shared expert, which every token uses."""

    def __init__(self, config: MoEConfig, width: int, hidden: int) -> None:
        super().__init__()
        bias = bool(config.bias)
        self.gate = Linear(width, hidden, bias, value_projection=True) if config.expert == "gated" else None
        self.up = Linear(width, hidden, bias, value_projection=True)
        self.down = Linear(hidden, width, bias, output_projection=True)
        self.activation = config.activation_function if config.shared_limit else activation("silu")
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, width] -> the same shape."""
        up, *gate = fused_projections(x, self.up, *([] if self.gate is None else [self.gate]))
        y: Tensor = self.down(self.dropout(self.activation(up, *gate)))
        return y


class MoE(Feedforward):
    input_projections: Sequence[str] = ("router", "gate", "up", "shared.gate", "shared.up", "shared_gate")

    def __init__(self, config: MoEConfig, context: BuildContext) -> None:
        super().__init__()
        width, experts, hidden, bias = context.width, config.experts, config.hidden, config.bias is True
        self.config, self.routing_config = config, config.routing_config
        trunk = None if config.router_rank is None else RouterTrunk(width, config.router_rank, context.norm)
        self.router = Router(experts, width, config.router_bias, config.bias_update is not None, trunk)
        if trunk is not None:
            self.input_projections = ("router.trunk", *type(self).input_projections[1:])
        self.table = None if config.id_range is None else ExpertTable(config.id_range, config.top_k, experts)
        self.gate = ExpertLinear(experts, width, hidden, bias, False) if config.expert == "gated" else None
        self.up = ExpertLinear(experts, width, hidden, bias, False)
        self.down = ExpertLinear(experts, hidden, width, bias, output_projection=True)
        shared_hidden = config.shared_hidden or (config.shared or 0) * hidden
        self.shared = SharedExpert(config, width, shared_hidden) if shared_hidden else None
        self.shared_gate = Linear(width, 1) if config.shared_gate else None
        self.output_norm = context.norm.build(width) if config.output_norm else None
        self.activation = config.activation_function
        self.dropout = Dropout(config.dropout)

    @property
    def expert_info(self) -> ExpertInfo:
        """Router and parameters of the experts."""
        projections = [projection for projection in (self.gate, self.up, self.down) if projection is not None]
        weights = tuple(parameter for projection in projections for parameter in projection.parameters())
        routing, config = self.routing_config, self.config
        sizes, factor = (config.experts, routing.top_k, routing.groups), config.capacity_factor
        return ExpertInfo(self.router, weights, *sizes, factor, hashed=config.reads_tokens)

    @property
    def inactive_parameters(self) -> int:
        """Number of parameters in the experts that are not chosen for a token."""
        per_expert = sum(weight[0].numel() for weight in self.expert_info.weights)
        return (self.config.experts - self.routing_config.top_k) * per_expert

    @torch.no_grad()
    def update_expert_bias(self, expert_counts: Tensor) -> None:
        """Lower the bias of experts that were chosen more often than the mean; raise it for the others."""
        bias, step = self.router.expert_bias, self.config.bias_update
        if bias is not None and step:
            bias.add_(torch.sign(expert_counts.sum() - expert_counts * self.config.experts).to(bias.dtype), alpha=step)

    def forward(self, x: Tensor, layout: Layout, state: None = None) -> tuple[Tensor, None]:
        """x [B, T, width] -> ([B, T, width], no state). Padding passes through the shared expert only.

        Raises ConfigError if a capacity factor is used in training mode with a state.
        """
        logits, cap = self.router(x), self.config.router_softcap
        chosen = self._by_ids(layout) if self.config.reads_tokens else None
        y = self._routed_experts(x, logits if cap is None else cap * (logits / cap).tanh(), layout, chosen)
        if self.shared is not None:
            shared: Tensor = self.shared(x)
            shared = shared if self.config.shared_scale is None else self.config.shared_scale * shared
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        return y if self.output_norm is None else self.output_norm(y), None

    @layout_dependent
    def _by_ids(self, layout: Layout) -> Tensor:
        """The experts of each token by its id, int64 [B, T, k]."""
        config, ids = self.config, token_ids(layout, f"selection: {self.config.selection}")
        if self.table is not None:
            chosen: Tensor = self.table(ids)
            return chosen
        return hashed_experts(ids, config.experts, config.top_k, config.hash_seed)

    @eager_on_cpu
    def _routed_experts(self, x: Tensor, logits: Tensor, layout: Layout, chosen: Tensor | None) -> Tensor:
        choice = route(logits, self.router.expert_bias, self.routing_config, chosen)
        is_token = None if layout.padding is None else ~layout.padding
        accepted = self._accepted(choice, is_token, layout)
        if self.training or not torch.compiler.is_compiling():  # a compiled decode step has no recorder
            self._record(logits, choice, accepted, layout)
        indices = choice.expert_indices if accepted is None else choice.expert_indices.masked_fill(~accepted, -1)
        dropout_mask = None
        if self.dropout.active:
            dropout_mask = self.dropout(x.new_ones(*indices.shape, self.config.hidden)).flatten(0, 1)
        assignment = ExpertAssignment(indices.flatten(0, 1), choice.gates.flatten(0, 1), dropout_mask, accepted is None)
        gate, gate_bias = (None, None) if self.gate is None else (self.gate.weight, self.gate.bias)
        weights = ExpertWeights(self.up.weight, self.down.weight, gate, self.up.bias, self.down.bias, gate_bias)
        run = run_experts if self.config.weighted == "outputs" else run_on_weighted_inputs
        return run(x.flatten(0, 1), assignment, weights, self.activation).view(x.shape)

    @layout_dependent  # a recorder has a different number of entries in each layer
    def _record(self, logits: Tensor, choice: Route, accepted: Tensor | None, layout: Layout) -> None:
        losses = (self.config.aux_loss or 0.0, self.config.z_loss or 0.0) if self.training else (0.0, 0.0)
        record(lambda: compute_router_statistics(self, logits, choice, accepted, layout, losses))

    def _accepted(self, choice: Route, is_token: Tensor | None, layout: Layout) -> Tensor | None:
        """bool [B, T, k]: the choices of tokens that are not padding, within the experts' capacity; None: all."""
        accepted = None if is_token is None else is_token[..., None].expand(choice.expert_indices.shape)
        if self.config.capacity_factor is None or not self.training:
            return accepted
        if layout.cache_view is not None:
            reason = "in training the capacity of an expert depends on the whole row"
            raise ConfigError(f"capacity_factor: {reason}; call model.eval() to carry a state")
        within = within_capacity(choice.expert_indices, is_token, self.config.experts, self.config.capacity_factor)
        return within if accepted is None else within & accepted
