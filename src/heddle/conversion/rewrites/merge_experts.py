"""Mixtures whose experts are merged into fewer (Li et al. 2024, "Merge, then compress").

Experts whose outputs differ least on a text become groups, by Ward's criterion: merging groups of router mass m and n
costs m n / (m + n) · ‖difference of their mean outputs‖². An expert's hidden channels are permuted to fit those of the
group's expert of most mass, and the weights are averaged with each one's share a_i of the group's mass.

A group's score is the sum of its members'. For a softmax it is a logit log Σ exp(l_i) ≥ Σ a_i l_i + H(a), with equality
where a = softmax(l): the router's rows are averaged, and the entropy H(a) is added to its bias. A sigmoid cannot exceed
1, so that there the number of members multiplies the output.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from heddle.config import DesignError, Width
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.weights import PROJECTIONS, CalibrationText, ConvertedWeights, LayerActivations, Weights
from heddle.numerics.experts.mixture import route, run_experts
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.feedforwards.moe import MoE, MoEConfig

OUTPUT_ELEMENTS = 2**25  # of all experts' outputs in memory
SOFTMAX, LOGITS = ("softmax_topk", "topk_softmax"), ("topk_softmax", "sigmoid_logits")  # LOGITS: that select experts


class MergeExperts(Rewrite):
    """`merge_experts`: into how many each mixture's experts are merged, by what they do on the text.

    top_k: how many of them each token uses; default: as many as before, at most all. Exact for experts that are equal,
    up to the order of their channels, with equal rows of the router, if `top_k` is divided by their number.
    """

    keeps: ClassVar[frozenset[str]] = frozenset({"attention"})
    exact: ClassVar[bool] = False
    text_decides_weights: ClassVar[bool] = True
    targets: ClassVar[Mapping[str, str]] = {"merge_experts": "experts"}
    experts: Width
    top_k: Width | None = None

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if no layer, or not every named one, has more experts whose scores can be added."""
        if self.top_k is not None and self.top_k > self.experts:
            raise DesignError("top_k", f"{self.top_k} is more than the {self.experts} experts that stay; give fewer")
        none = f"no layer has a mixture of more than {self.experts} experts whose scores can be added"
        none = f"{none}; give fewer, or --to keep_experts"
        return _Merged(source, self.change_feedforwards(source.design, self._merged, none), text)

    def _merged(self, mixture: FeedforwardConfig | None, path: str) -> FeedforwardConfig | str:
        if not isinstance(mixture, MoEConfig):
            return "has no experts"
        if mixture.experts <= self.experts:
            return f"has no more than {self.experts} experts"
        if mixture.groups is not None:
            return "has groups of experts"
        if mixture.weighted == "inputs":
            return "puts gates before the experts"
        if mixture.routing == "sparse_mixer" or mixture.router_softcap is not None or mixture.reads_tokens:
            return "has a router whose scores cannot be added"
        top_k = min(mixture.top_k, self.experts) if self.top_k is None else self.top_k
        router_bias = mixture.router_bias or mixture.routing in SOFTMAX
        return mixture.replace(experts=self.experts, top_k=top_k, router_bias=router_bias)


class _Merged(ConvertedWeights):
    @torch.no_grad()
    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer with merged experts, in the order of each group's first one."""
        layer = self.source.layer(index)
        if index not in self.changed:
            return layer
        mixture, merged = (design.layers[index].feedforward for design in (self.source.design, self.design))
        assert isinstance(mixture, MoEConfig)
        assert isinstance(merged, MoEConfig)
        gram, mass = (each.cpu() for each in expert_outputs(self.activations(index)))
        groups = expert_groups(gram, mass, merged.experts)
        shares = _shares(groups, mass)
        sizes = shares.ne(0).sum(1).double()
        entropy = torch.special.entr(shares).sum(1)
        for name in ("router.weight", "router.bias", "router.expert_bias"):
            if f"feedforward.{name}" in layer:
                layer[f"feedforward.{name}"] = shares @ layer[f"feedforward.{name}"].double().cpu()
        if mixture.routing in SOFTMAX:
            layer["feedforward.router.bias"] = layer.get("feedforward.router.bias", 0.0) + entropy
            factors = torch.ones_like(sizes)
        else:
            factors = sizes * (merged.experts / mixture.experts if mixture.renormalize else 1.0)
        if "feedforward.router.expert_bias" in layer and mixture.routing == "softmax_topk":
            layer["feedforward.router.expert_bias"] *= sizes  # it is added to sums of probabilities
        own = {name: layer[f"feedforward.{name}"].double() for name in PROJECTIONS if f"feedforward.{name}" in layer}
        orders = {expert: order for group in groups for expert, order in _orders(own, group, mass).items()}
        for name, value in own.items():
            dim = -1 if name == "down.weight" else 0
            ordered = value if name == "down.bias" else torch.stack(
                [expert.index_select(dim, orders[number]) for number, expert in enumerate(value)]
            )  # fmt: skip
            mean = torch.tensordot(shares.to(value.device), ordered, 1)
            by_expert = factors.to(value.device).view(-1, *[1] * (mean.dim() - 1))
            layer[f"feedforward.{name}"] = mean * by_expert if name.startswith("down") else mean
        return layer


def expert_outputs(activations: LayerActivations) -> tuple[Tensor, Tensor]:
    """Σ f_i(x) · f_j(x) over the tokens of a text [E, E], and each expert's router mass Σ p_i(x) [E]; float64."""
    mixture = activations.layer.feedforward
    assert isinstance(mixture, MoE)
    inputs = torch.cat(list(activations.inputs_of(mixture)))
    experts, width = mixture.config.experts, inputs.shape[1]
    gate, gate_bias = (None, None) if mixture.gate is None else (mixture.gate.weight, mixture.gate.bias)
    up, down = mixture.up, mixture.down
    weights = ExpertWeights(up.weight, down.weight, gate, up.bias, down.bias, gate_bias)
    gram, mass = (inputs.new_zeros(shape, dtype=torch.float64) for shape in ((experts, experts), (experts,)))
    for x in inputs.split(max(1, OUTPUT_ELEMENTS // (experts * width))):
        mass += route(mixture.router(x), None, mixture.routing_config).probabilities.double().sum(0)
        outputs = []
        for number in range(experts):
            chosen = torch.full((len(x), 1), number, device=x.device)
            assignment = ExpertAssignment(chosen, torch.ones_like(x[:, :1]), None, True)
            outputs.append(run_experts(x, assignment, weights, mixture.activation).double().flatten())
        rows = torch.stack(outputs)
        gram += rows @ rows.T
    return gram, mass


def expert_groups(gram: Tensor, mass: Tensor, count: int) -> list[list[int]]:
    """Groups of experts whose mean outputs differ least, each in ascending order, sorted by their first expert."""
    groups = [[number] for number in range(len(mass))]
    while len(groups) > count:
        shares = _shares(groups, mass)
        products, own = shares @ gram @ shares.T, mass @ shares.ne(0).double().T
        squares = products.diagonal()
        distances = (squares[:, None] + squares - 2 * products).clamp(min=0.0)
        costs = distances * own[:, None] * own / (own[:, None] + own)
        costs[torch.ones_like(costs, dtype=torch.bool).tril()] = torch.inf
        first, second = divmod(int(costs.argmin()), len(groups))
        groups[first] = sorted(groups[first] + groups.pop(second))
    return sorted(groups)


def _shares(groups: list[list[int]], mass: Tensor) -> Tensor:
    """Each expert's share of its group's mass, float64 [groups, experts]."""
    shares = mass.new_zeros(len(groups), len(mass))
    for number, group in enumerate(groups):
        own = mass[group].clamp(min=torch.finfo(mass.dtype).tiny)
        shares[number, group] = own / own.sum()
    return shares


def _orders(weights: Mapping[str, Tensor], group: list[int], mass: Tensor) -> dict[int, Tensor]:
    """Each expert's hidden channels in the order that fits the channels of the group's expert of most mass best."""

    def channels(expert: int) -> Tensor:
        own = {name: weights[name][expert] for name in weights if name != "down.bias"}
        return torch.cat([(x.T if name == "down.weight" else x.view(len(x), -1)) for name, x in own.items()], 1)

    fitted = channels(max(group, key=lambda expert: float(mass[expert])))
    found = {}
    for expert in group:
        order = linear_sum_assignment((fitted @ channels(expert).T).cpu().numpy(), maximize=True)[1]
        found[expert] = torch.from_numpy(order).to(fitted.device)
    return found
