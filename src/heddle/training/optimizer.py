"""The optimizer: AdamW for every parameter, or Muon for the layers' weight matrices and AdamW for the rest.

    AdamW (Loshchilov & Hutter 2019):  w ← w − r λ w − r · m̂ / (√v̂ + ε)
    Muon (Jordan et al. 2024):         w ← w − r λ w − 0.2 r √max(out, in) · U,   U = five steps of
        U ← a U + (b U Uᵀ + c (U Uᵀ)²) U   from N / |N|,   N = 0.05 g + 0.95 m,   m ← 0.95 m + 0.05 g

U has singular values near 1. Muon's update is scaled as in Liu et al. (2025): it is about as large as AdamW's, so one
learning rate r serves both. r is the learning rate of the step times the factor of the parameter's path.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.parts.modules.linear import SelfInitialized

LearningRateScales = Sequence[tuple[str, float]]  # (path, factor); the last path that matches a parameter counts
EPSILON = 1e-8  # AdamW's ε


class ParameterScale(NamedTuple):
    """Factors of a parameter's initial standard deviation, of its learning rate, and of AdamW's ε.

    Weight decay is divided by the learning rate's factor, so that the rate times the decay stays.
    """

    initial_std: float = 1.0
    learning_rate: float = 1.0
    epsilon: float = 1.0


_GroupOptions = tuple[tuple[str, float], ...]  # what the tensors of a parameter group share


class Optimizer:
    """One or two torch optimizers over the trainable parameters.

    trainable: the parameters by name. optimizers: AdamW, Muon or both; each parameter group has a `factor` of the
    learning rate. updated_tensors: what they update, by name: parameters, and for stacked matrices each slice, as
    `name.index`.
    """

    def __init__(
        self,
        trainable: dict[str, nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        updated_tensors: dict[str, Tensor],
    ) -> None:
        self.trainable, self.optimizers, self.updated_tensors = trainable, optimizers, updated_tensors
        self._optimizer_of = {
            id(tensor): optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        }

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer state (moments, step counts) of each updated tensor, by the tensor's name."""
        states = {
            name: self._optimizer_of[id(tensor)].state.get(tensor) for name, tensor in self.updated_tensors.items()
        }
        return {name: state for name, state in states.items() if state}

    def load_state(self, state: Mapping[str, dict[str, Tensor]]) -> None:
        """Load what `state` returned. Names that this optimizer does not update are ignored."""
        for name, tensor in self.updated_tensors.items():
            if name in state:
                self._optimizer_of[id(tensor)].state[tensor] = dict(state[name])

    def step(self, learning_rate: float) -> None:
        """Update the weights, each at the learning rate times its factor, and clear the gradients."""
        for name, parameter in self.trainable.items():
            if name not in self.updated_tensors and parameter.grad is not None:
                for index, gradient in enumerate(parameter.grad.flatten(0, -3).unbind()):
                    self.updated_tensors[_slice_name(name, index)].grad = gradient
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["factor"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def build_optimizer(
    model: Decoder,
    weight_decay: float,
    kind: str = "adamw",
    lr_scale: LearningRateScales = (),
    scales: Mapping[str, ParameterScale] | None = None,
) -> Optimizer:
    """Build AdamW (betas 0.9 and 0.95); kind 'muon' adds Muon (momentum 0.95, Nesterov) for the layers' matrices.

    Weight decay applies to parameters with two or more dims that are not biases. Parameters with a factor of 0 are
    frozen. A stack of matrices [n, out, in] counts as n matrices. scales: further factors, by parameter. Raises
    ConfigError as `learning_rate_factors` does.
    """
    factor_by_name = learning_rate_factors(model, lr_scale)
    trainable = {name: parameter for name, parameter in model.named_parameters() if factor_by_name.get(name, 0.0) > 0.0}
    matrices = matrix_parameters(model) if kind == "muon" else frozenset()
    updated_tensors: dict[str, Tensor] = {}
    adamw_groups: dict[_GroupOptions, list[Tensor]] = {}
    muon_groups: dict[_GroupOptions, list[Tensor]] = {}
    decayed = {name for name, parameter in trainable.items() if parameter.dim() >= 2 and not name.endswith(".bias")}
    for name, parameter in sorted(trainable.items(), key=lambda item: item[0] not in decayed):
        is_stack = name in matrices and parameter.dim() > 2
        tensors = _slices(name, parameter) if is_stack else {name: parameter}
        updated_tensors |= tensors
        scale = (scales or {}).get(name, ParameterScale())
        decay = weight_decay / scale.learning_rate if name in decayed else 0.0
        options = (("weight_decay", decay), ("factor", factor_by_name[name] * scale.learning_rate))
        if name in matrices:
            muon_groups.setdefault(options, []).extend(tensors.values())
        else:
            adamw_groups.setdefault((*options, ("eps", EPSILON * scale.epsilon)), []).extend(tensors.values())
    optimizers: list[torch.optim.Optimizer] = []
    if adamw_groups:
        fused = model.embed.weight.device.type in ("cpu", "cuda")
        optimizers.append(torch.optim.AdamW(_param_groups(adamw_groups), lr=0.0, betas=(0.9, 0.95), fused=fused))
    if muon_groups:
        adjust = "match_rms_adamw"
        optimizers.append(torch.optim.Muon(_param_groups(muon_groups), lr=0.0, momentum=0.95, adjust_lr_fn=adjust))
    return Optimizer(trainable, optimizers, updated_tensors)


def _param_groups(groups: Mapping[_GroupOptions, list[Tensor]]) -> list[dict[str, Any]]:
    return [{"params": tensors, **dict(options)} for options, tensors in groups.items()]


def _slice_name(name: str, index: int) -> str:
    return f"{name}.{index}"


def _slices(name: str, stack: Tensor) -> dict[str, Tensor]:
    """Return each matrix of a stack by name; they share the stack's storage."""
    return {_slice_name(name, index): matrix for index, matrix in enumerate(stack.detach().flatten(0, -3).unbind())}


def matrix_parameters(model: Decoder) -> frozenset[str]:
    """Return the names of the layers' parameters that are matrices, or stacks of matrices."""
    modules = ((path, module) for path, module in model.named_modules() if isinstance(module, SelfInitialized))
    in_layers = ((path, module) for path, module in modules if path.removeprefix("encoder.").startswith("layers."))
    return frozenset(f"{path}.{name}" for path, module in in_layers for name in module.matrix_parameters)


def learning_rate_factors(model: Decoder, lr_scale: LearningRateScales) -> dict[str, float]:
    """Return the learning rate factor of each trainable parameter, by name: that of the last matching path, else 1.

    A path is the beginning of a name, such as `layers.0.mixer`; `*` stands for one word of it. Raises ConfigError
    for a path that matches nothing, and if every factor is 0.
    """
    factor_by_name = {name: 1.0 for name, parameter in model.named_parameters() if parameter.requires_grad}
    for path, factor in lr_scale:
        matches = [name for name in factor_by_name if _path_matches(path.split("."), name.split("."))]
        if not matches:
            raise ConfigError(
                f"lr_scale {path}={factor:g}: no parameter that learns is at '{path}'; "
                f"paths begin with {_first_words(factor_by_name)}"
            )
        factor_by_name |= dict.fromkeys(matches, factor)
    if not any(factor_by_name.values()):
        raise ConfigError("lr_scale: every factor is 0, so nothing would learn; leave one above 0")
    return factor_by_name


def _path_matches(path: Sequence[str], name: Sequence[str]) -> bool:
    return len(path) <= len(name) and all(a in ("*", b) for a, b in zip(path, name, strict=False))


def _first_words(names: Iterable[str]) -> str:
    """Return the first word of each name, of layers with their number, for an error message."""
    return ", ".join(
        dict.fromkeys(".".join(name.split(".")[: 2 if name.startswith("layers.") else 1]) for name in names)
    )
