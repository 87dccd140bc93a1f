"""LoRA (Hu et al. 2021): a frozen projection plus a trained low-rank one: `y = x Wᵀ + c + (alpha / rank) (x Aᵀ) Bᵀ`.

W and c are frozen. A [rank, inputs] starts as normal random numbers and B [outputs, rank] at zero, so that the output
is unchanged at first. Merging replaces W by `W + (alpha / rank) B A`, computed in float64 and rounded once.
"""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder, build
from heddle.numerics.linear import linear
from heddle.numerics.random import ParameterDraws
from heddle.parts.modules.linear import AdaptedLinear, Linear, SelfInitialized, fill_normal

TARGETS = ("layers.*.mixer.q", "layers.*.mixer.v")  # the paper's choice


class LoraLinear(SelfInitialized):
    """Replaces a `Linear`. Of its parameters only `a` and `b` are trained."""

    matrix_parameters = ("a", "b")

    def __init__(self, base: Linear, rank: int, alpha: float) -> None:
        super().__init__()
        outputs, inputs = base.weight.shape
        self.frozen, self.bias = base.weight, base.bias
        self.a = nn.Parameter(base.weight.new_empty(rank, inputs))
        self.b = nn.Parameter(base.weight.new_empty(outputs, rank))
        self.rank, self.alpha = rank, alpha

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Draw A from normal(0, std) and set B to zero: the adapter adds nothing at first."""
        fill_normal(self.a, std, draws("a"))
        nn.init.zeros_(self.b)

    @property
    def scale(self) -> float:
        """The factor of the adapter, alpha / rank."""
        return self.alpha / self.rank

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs] with the adapter added, differentiable. Computed at each access."""
        return self.frozen + self.b @ self.a * self.scale

    @torch.no_grad()
    def merged(self, gather: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """[outputs, inputs]: the sum in float64 on the CPU, rounded once. Entries where zero is added keep their bits.

        gather: as in `merge_lora`.
        """
        a, b = (x if gather is None else gather(x) for x in (self.a, self.b))
        return merged_weight(self.frozen, a, b, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return linear(x, self.frozen, self.bias) + linear(linear(x, self.a), self.b) * self.scale

    def extra_repr(self) -> str:
        """As for a `Linear`, with the rank."""
        return f"{self.frozen.shape[1]}, {self.frozen.shape[0]}, bias={self.bias is not None}, rank={self.rank}"


def add_lora(
    model: Decoder, targets: Sequence[str] = TARGETS, rank: int = 8, alpha: float | None = None, seed: int = 0
) -> Decoder:
    """Return a copy of a model with adapters at the targeted projections. It shares the model's weights, now frozen.

    targets: paths of projections, such as `layers.0.mixer.out`; `*` stands for one part of a path. alpha: None means
    `rank`, which makes the adapters' factor 1. A layer that is visited several times has one adapter, at the path of
    its first visit. Initial values depend on the seed and the path alone. Raises ConfigError
    for a target that matches no projection, or a stack of projections, such as those of experts.
    """
    if rank < 1:
        raise ConfigError(f"lora: rank = {rank} must be at least 1")
    alpha = float(rank) if alpha is None else alpha
    if not 0 < alpha < math.inf:
        raise ConfigError(f"lora: alpha = {alpha} must be a number above 0")
    if adapters(model):
        raise ConfigError("lora: the model already has adapters; merge them first")
    paths = target_projections(model, targets)
    projections = [model.get_submodule(path) for path in paths]
    full = max(min(base.weight.shape) for base in projections if isinstance(base, Linear))
    if rank > full:
        raise ConfigError(f"lora: rank = {rank} is more than the full rank of every projection, {full}; give less")
    adapted = _copy_with_parameters(model, lambda parameter: nn.Parameter(parameter.detach(), requires_grad=False))
    for path in paths:
        parent, _, name = path.rpartition(".")
        base = adapted.get_submodule(path)
        assert isinstance(base, Linear)
        projection = LoraLinear(base, rank, alpha).train(base.training)
        if not base.weight.is_meta:
            projection.init_weights(base.weight.shape[1] ** -0.5, ParameterDraws(seed, path))
        for visit in adapted.visits(parent):
            setattr(adapted.get_submodule(visit), name, projection)
    return adapted


def merge_lora(model: Decoder, gather: Callable[[Tensor], Tensor] | None = None) -> Decoder:
    """Return a plain model that computes the same as a model with adapters. It shares every weight without an adapter.

    A model without adapters is returned unchanged. gather: returns the whole of a tensor that is sharded over ranks.
    """
    if not adapters(model):
        return model
    plain = build(model.config, device="meta")
    plain.imported_config = model.imported_config
    for path, parameter in plain.named_parameters():
        parent, _, name = path.rpartition(".")
        module = model.get_submodule(parent)
        tensor = (
            module.merged(gather) if isinstance(module, LoraLinear) and name == "weight" else module.get_parameter(name)
        )
        setattr(plain.get_submodule(parent), name, nn.Parameter(tensor.detach(), parameter.requires_grad))
    plain.tie()
    return plain.train(model.training)


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight [outputs, inputs] + scale · b a, as `LoraLinear.merged` returns it."""
    wide, a, b = (x.to("cpu", torch.float64) for x in (weight, a, b))
    delta = b @ a * scale
    return torch.where(delta == 0, wide, wide + delta).to(weight)


def adapters(model: Decoder) -> dict[str, LoraLinear]:
    """Return the projections of a model that have an adapter, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLinear)}


def lora_tensors(model: Decoder) -> dict[str, Tensor]:
    """Return A and B of every adapter by name, `layers.0.mixer.q.a`. They are the trained tensors, not copies."""
    return {
        f"{path}.{name}": getattr(adapter, name).detach()
        for path, adapter in adapters(model).items()
        for name in adapter.matrix_parameters
    }


def target_projections(model: Decoder, targets: Sequence[str]) -> list[str]:
    """Return the paths of the projections that match, in the model's order. Raises ConfigError as `add_lora`."""
    selected: set[str] = set()
    modules = {path: module for path, module in model.own_modules() if isinstance(module, SelfInitialized)}
    linear_paths = [path for path, module in modules.items() if isinstance(module, Linear)]
    for target in targets:
        matches = [path for path in modules if _matches(target.split("."), path.split("."))]
        for path in matches:
            if isinstance(modules[path], AdaptedLinear):
                raise ConfigError(f"lora: '{path}' has adapters of its visits (adapter_rank) already; leave it out")
            if any(modules[path].get_parameter(name).dim() > 2 for name in modules[path].matrix_parameters):
                raise ConfigError(
                    f"lora: '{path}' is a stack of matrices, as experts have, and cannot take an adapter; leave it out"
                )
        projections = set(matches).intersection(linear_paths)
        if not projections and model.visits(target)[0] != target:
            raise ConfigError(f"lora: '{target}' has the weights of an earlier layer; name '{model.visits(target)[0]}'")
        if not projections:
            known = ", ".join(dict.fromkeys(_with_wildcards(path) for path in linear_paths))
            raise ConfigError(f"lora: no projection matches '{target}'; choices: {known}")
        selected |= projections
    return [path for path in modules if path in selected]


def _matches(target: Sequence[str], path: Sequence[str]) -> bool:
    return len(target) == len(path) and all(a in ("*", b) for a, b in zip(target, path, strict=True))


def _with_wildcards(path: str) -> str:
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def _copy_with_parameters(model: Decoder, change: Callable[[nn.Parameter], nn.Parameter]) -> Decoder:
    """Copy the modules and replace each parameter by `change(parameter)`. A shared parameter stays shared."""
    return copy.deepcopy(model, {id(parameter): change(parameter) for parameter in model.parameters()})
