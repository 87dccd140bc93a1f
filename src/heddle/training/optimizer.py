"""What moves the weights: AdamW for every parameter, or Muon for the layers' matrices and AdamW for the rest.

    AdamW (Loshchilov & Hutter 2019):  w ← w − r λ w − r · m̂ / (√v̂ + ε)
    Muon (Jordan et al. 2024):         w ← w − r λ w − 0.2 r √max(out, in) · U,   U = five steps of
        U ← a U + (b U Uᵀ + c (U Uᵀ)²) U   from N / |N|,   N = 0.05 g + 0.95 m,   m ← 0.95 m + 0.05 g

U has singular values near 1. Muon's scale is that of Liu et al. (2025): an update about as large as AdamW's, so that
one learning rate r serves both. r is the rate of the step times the factor of the parameter's path.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.parts.modules.linear import Leaf

Scales = Sequence[tuple[str, float]]  # (path, factor), the last that matches a parameter counts


class Optimizer:
    """Torch's optimizers over the parameters that learn.

    learned: these parameters by name. parts: AdamW, Muon or both; each group has a `factor` of the rate. held: what
    the parts move, by name: parameters, and the slices of stacked matrices as `name.index`.
    """

    def __init__(
        self, learned: dict[str, nn.Parameter], parts: Sequence[torch.optim.Optimizer], held: dict[str, Tensor]
    ) -> None:
        self.learned, self.parts, self.held = learned, parts, held
        self._owner = {id(one): part for part in parts for group in part.param_groups for one in group["params"]}

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """What is kept of earlier steps for each tensor that is moved, by its name."""
        pairs = ((name, self._owner[id(one)].state.get(one)) for name, one in self.held.items())
        return {name: state for name, state in pairs if state}

    def load(self, state: Mapping[str, dict[str, Tensor]]) -> None:
        """Take what `state` gave, instead of what is kept. Names that this optimizer does not move are left out."""
        for name, one in self.held.items():
            if name in state:
                self._owner[id(one)].state[one] = dict(state[name])

    def step(self, rate: float) -> None:
        """Move the weights along their gradients, at the rate times each one's factor."""
        for name, parameter in self.learned.items():
            if name not in self.held and parameter.grad is not None:
                for index, gradient in enumerate(parameter.grad.flatten(0, -3).unbind()):
                    self.held[_slice(name, index)].grad = gradient
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * group["factor"]
            part.step()
            part.zero_grad(set_to_none=True)


def make_optimizer(model: Decoder, weight_decay: float, kind: str = "adamw", scales: Scales = ()) -> Optimizer:
    """AdamW (betas 0.9 and 0.95), or with `muon` Muon (momentum 0.95, Nesterov) for the matrices of the layers.

    What has two or more dims and is no bias decays; what has a factor of 0 does not move at all. Matrices are those
    of `Leaf.maps`; a stack [n, out, in] is n of them. Raises ConfigError as `factors` does.
    """
    factor = factors(model, scales)
    learned = {name: one for name, one in model.named_parameters() if factor.get(name, 0.0) > 0.0}
    matrices = maps(model) if kind == "muon" else frozenset()
    held: dict[str, Tensor] = {}
    groups: dict[bool, dict[tuple[float, float], list[Tensor]]] = {False: {}, True: {}}
    decays = {name for name, one in learned.items() if one.dim() >= 2 and not name.endswith(".bias")}
    for name, one in sorted(learned.items(), key=lambda item: item[0] not in decays):
        mine = {name: one} if name not in matrices or one.dim() == 2 else _slices(name, one)
        held |= mine
        alike = (weight_decay if name in decays else 0.0, factor[name])
        groups[name in matrices].setdefault(alike, []).extend(mine.values())
    adam, muon = (
        [{"params": ones, "weight_decay": decay, "factor": own} for (decay, own), ones in groups[which].items()]
        for which in (False, True)
    )
    parts: list[torch.optim.Optimizer] = []
    if adam:
        fused = model.embed.weight.device.type in ("cpu", "cuda")
        parts.append(torch.optim.AdamW(adam, lr=0.0, betas=(0.9, 0.95), fused=fused))
    if muon:
        parts.append(torch.optim.Muon(muon, lr=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"))
    return Optimizer(learned, parts, held)


def _slice(name: str, index: int) -> str:
    return f"{name}.{index}"


def _slices(name: str, stack: Tensor) -> dict[str, Tensor]:
    """Each matrix of a stack, sharing its storage."""
    return {_slice(name, index): one for index, one in enumerate(stack.detach().flatten(0, -3).unbind())}


def maps(model: Decoder) -> frozenset[str]:
    """The parameters that are matrices of a layer, or stacks of them."""
    leaves = ((path, module) for path, module in model.named_modules() if isinstance(module, Leaf))
    inside = ((path, leaf) for path, leaf in leaves if path.removeprefix("encoder.").startswith("layers."))
    return frozenset(f"{path}.{name}" for path, leaf in inside for name in leaf.maps)


def factors(model: Decoder, scales: Scales) -> dict[str, float]:
    """The factor of each parameter that learns, by name: that of the last path that leads to it, else 1.

    A path is the beginning of a name, such as `layers.0.mixer`; `*` stands for one word of it. Raises ConfigError
    for a path that leads nowhere, and where nothing is left to learn.
    """
    found = {name: 1.0 for name, one in model.named_parameters() if one.requires_grad}
    for path, factor in scales:
        reached = [name for name in found if _leads(path.split("."), name.split("."))]
        if not reached:
            raise ConfigError(
                f"--lr-scale {path}={factor:g}: no parameter that learns is at '{path}'; "
                f"paths begin with {_listing(found)}"
            )
        found |= dict.fromkeys(reached, factor)
    if not any(found.values()):
        raise ConfigError("--lr-scale: every factor is 0, so nothing would learn; leave one above 0")
    return found


def _leads(path: Sequence[str], name: Sequence[str]) -> bool:
    return len(path) <= len(name) and all(a in ("*", b) for a, b in zip(path, name, strict=False))


def _listing(names: Iterable[str]) -> str:
    """The first words of names, layers with their number."""
    return ", ".join(
        dict.fromkeys(".".join(name.split(".")[: 2 if name.startswith("layers.") else 1]) for name in names)
    )
