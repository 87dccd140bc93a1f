"""LoRA (Hu et al. 2021): a projection as it was, plus what learns: `y = x Wᵀ + c + (alpha / rank) (x Aᵀ) Bᵀ`.

W and c stay as they are, A [rank, inputs] starts at normal numbers and B [outputs, rank] at zero, so that nothing has
changed before the first step. Merged, W becomes `W + (alpha / rank) B A`: computed in float64, rounded once.
"""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder, build, generator_of
from heddle.numerics.linear import linear
from heddle.parts.modules.linear import Leaf, Linear, fill_normal

TARGETS = ("layers.*.mixer.q", "layers.*.mixer.v")  # as in the paper


class LoraLinear(Leaf):
    """The module in a `Linear`'s place; of its parameters only `a` and `b` learn."""

    maps = ("a", "b")

    def __init__(self, base: Linear, rank: int, alpha: float) -> None:
        super().__init__()
        outputs, inputs = base.weight.shape
        self.frozen, self.bias = base.weight, base.bias
        self.a = nn.Parameter(base.weight.new_empty(rank, inputs))
        self.b = nn.Parameter(base.weight.new_empty(outputs, rank))
        self.rank, self.alpha = rank, alpha

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """The adapter alone: what it adds is zero."""
        fill_normal(self.a, std, generator)
        nn.init.zeros_(self.b)

    @property
    def scale(self) -> float:
        """By which the adapter is multiplied."""
        return self.alpha / self.rank

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs] with the adapter and gradients to it, for parts that read it; made anew each time."""
        return self.frozen + self.b @ self.a * self.scale

    @torch.no_grad()
    def merged(self) -> Tensor:
        """[outputs, inputs]: the float64 sum, made on the CPU, rounded once; the same bits where nothing is added."""
        frozen, a, b = (one.to("cpu", torch.float64) for one in (self.frozen, self.a, self.b))
        added = b @ a * self.scale
        return torch.where(added == 0, frozen, frozen + added).to(self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return linear(x, self.frozen, self.bias) + linear(linear(x, self.a), self.b) * self.scale

    def extra_repr(self) -> str:
        """As of a Linear, and the rank."""
        return f"{self.frozen.shape[1]}, {self.frozen.shape[0]}, bias={self.bias is not None}, rank={self.rank}"


def add_lora(
    model: Decoder, targets: Sequence[str] = TARGETS, rank: int = 8, alpha: float | None = None, seed: int = 0
) -> Decoder:
    """A twin of a model whose targeted projections have adapters, which alone learn. It shares the model's weights.

    targets: paths of projections, such as `layers.0.mixer.out`; `*` stands for one word. alpha: None is rank, so that
    adapters are not multiplied. Their start is a function of the seed and the path. Raises ConfigError for a target
    that leads to no projection, or to a stack of them, as of experts.
    """
    if rank < 1:
        raise ConfigError(f"lora: rank = {rank} must be at least 1")
    alpha = float(rank) if alpha is None else alpha
    if not 0 < alpha < math.inf:
        raise ConfigError(f"lora: alpha = {alpha} must be a number above 0")
    if adapters(model):
        raise ConfigError("lora: the model has adapters already; merge them first")
    paths = projections(model, targets)
    twin = _twin(model, lambda one: nn.Parameter(one.detach(), requires_grad=False))
    for path in paths:
        owner, _, name = path.rpartition(".")
        base = twin.get_submodule(path)
        assert isinstance(base, Linear)
        made = LoraLinear(base, rank, alpha).train(base.training)
        if not base.weight.is_meta:
            # Not from where the weight itself was drawn: A would be its first rows.
            made.initialise(base.weight.shape[1] ** -0.5, generator_of(seed, f"{path}.a"))
        setattr(twin.get_submodule(owner), name, made)
    return twin


def merge_lora(model: Decoder) -> Decoder:
    """A plain model that computes what one with adapters does; it shares every weight that none of them changes.

    One without adapters is given back itself.
    """
    if not adapters(model):
        return model
    plain = build(model.config, device="meta")
    for name, parameter in plain.named_parameters():
        owner, _, last = name.rpartition(".")
        held = model.get_submodule(owner)
        tensor = held.merged() if isinstance(held, LoraLinear) and last == "weight" else held.get_parameter(last)
        setattr(plain.get_submodule(owner), last, nn.Parameter(tensor.detach(), parameter.requires_grad))
    plain.tie()
    return plain.train(model.training)


def adapters(model: Decoder) -> dict[str, LoraLinear]:
    """The projections of a model that have an adapter, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLinear)}


def lora_tensors(model: Decoder) -> dict[str, Tensor]:
    """A and B of every adapter by name, `layers.0.mixer.q.a`: the tensors that are trained, not copies."""
    return {f"{path}.{name}": getattr(one, name).detach() for path, one in adapters(model).items() for name in one.maps}


def projections(model: Decoder, targets: Sequence[str]) -> list[str]:
    """The paths of the projections that targets lead to, in the model's order. Raises ConfigError as `add_lora`."""
    found: set[str] = set()
    leaves = {path: module for path, module in model.named_modules() if isinstance(module, Leaf)}
    for target in targets:
        reached = [path for path in leaves if _same(target.split("."), path.split("."))]
        for path in reached:
            if any(leaves[path].get_parameter(name).dim() > 2 for name in leaves[path].maps):
                raise ConfigError(
                    f"lora: '{path}' is a stack of matrices, as of experts, which takes no adapters; leave it out"
                )
        mine = {path for path in reached if isinstance(leaves[path], Linear)}
        if not mine:
            known = ", ".join(dict.fromkeys(_starred(path) for path, one in leaves.items() if isinstance(one, Linear)))
            raise ConfigError(f"lora: no projection is at '{target}'; there are {known}")
        found |= mine
    return [path for path in leaves if path in found]


def _same(target: Sequence[str], path: Sequence[str]) -> bool:
    return len(target) == len(path) and all(a in ("*", b) for a, b in zip(target, path, strict=True))


def _starred(path: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in path.split("."))


def _twin(model: Decoder, change: Callable[[nn.Parameter], nn.Parameter]) -> Decoder:
    """A copy of the modules; each parameter is what `change` makes of it, a shared one once."""
    return copy.deepcopy(model, {id(one): change(one) for one in model.parameters()})
