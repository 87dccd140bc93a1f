"""The optimizer: AdamW for every parameter, or Muon for the layers' weight matrices and AdamW for the rest.

    AdamW (Loshchilov & Hutter 2019):  w ← w − r λ w − r · m̂ / (√v̂ + ε)
    Muon (Jordan et al. 2024):         w ← w − r λ w − 0.2 r √max(out, in) · U,   U = five steps of
        U ← a U + (b U Uᵀ + c (U Uᵀ)²) U   from N / |N|,   N = 0.05 g + 0.95 m,   m ← 0.95 m + 0.05 g

U has singular values near 1. Muon's update is scaled as in Liu et al. (2025): it is about as large as AdamW's, so one
learning rate r serves both. r is the learning rate of the step times the factor of the parameter's path.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heddle.distributed.ranks import held_rows, local_part
from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.parts.modules.linear import SelfInitialized
from heddle.training.eager_optimizer import EagerAdamw
from heddle.training.master_weights import MasterWeights, memory_of
from heddle.training.muon import StackedMuon
from heddle.training.state_buffers import share_buffers

LearningRateScales = Sequence[tuple[str, float]]  # (path, factor); the last path that matches a parameter counts
EPSILON = 1e-8  # AdamW's ε
_UNFUSED = ("mps", "meta")  # without the fused AdamW, or never run with it


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
    learning rate. updated_tensors: what they update, by name: parameters, or the float32 copies of bfloat16 ones, and
    for stacked matrices each slice, as `name.index`. masters: these copies. key: (seed, step) of the next update, from
    which stochastic rounding draws.
    """

    def __init__(
        self,
        trainable: dict[str, nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        updated_tensors: dict[str, Tensor],
        masters: MasterWeights,
    ) -> None:
        self.trainable, self.optimizers, self.updated_tensors = trainable, optimizers, updated_tensors
        self.masters, self.key = masters, (0, 0)
        self._buffers: list[Tensor] = []  # they hold the moments of so many updated tensors:
        self._states_in_buffers = 0
        self._weights: dict[str, nn.Parameter] = {**trainable, **masters.copies}
        self._optimizer_of = {
            id(tensor): optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        }

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state (moments, step counts, `master` copies) of each updated tensor, by the tensor's name."""
        states = {
            name: dict(self._optimizer_of[id(tensor)].state.get(tensor) or {})
            for name, tensor in self.updated_tensors.items()
        }
        for name, copy in self.masters.state.items():
            states.setdefault(name, {})["master"] = copy
        return {name: state for name, state in states.items() if state}

    def load_state(self, state: Mapping[str, dict[str, Tensor]]) -> None:
        """Load what `state` returned. Names that this optimizer does not update are ignored."""
        self.masters.load_state({name: values["master"] for name, values in state.items() if "master" in values})
        for name, tensor in self.updated_tensors.items():
            values = {key: value for key, value in state.get(name, {}).items() if key != "master"}
            if values:
                self._optimizer_of[id(tensor)].state[tensor] = values
        self._states_in_buffers = 0
        self._share_buffers()

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` takes `found_inf`: each update is skipped on the device, without a wait of the host."""
        return all(isinstance(part, StackedMuon) or part.defaults["fused"] for part in self.optimizers)

    def memory(self) -> dict[str, int]:
        """Return the bytes of the trainable weights, of their gradients, and of copies and moments between steps."""
        weights = memory_of(self.trainable.values())
        moments = sum(
            memory_of(group["params"]) * (1 if isinstance(part, StackedMuon) else 2)
            for part in self.optimizers
            for group in part.param_groups
        )
        return {"weights": weights, "gradients": weights, "optimizer": memory_of(self.masters.state.values()) + moments}

    def is_finite(self) -> Tensor:
        """Whether all weights, their float32 copies and moments on this rank are finite, bool []; nothing is read.

        A row of the embedding that no text uses counts too. Numbers whose squares overflow count as not finite.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in (*map(local_part, self.trainable.values()), *self._moments()):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        with torch.no_grad():
            norms = [norm.float() for tensors in by_dtype.values() for norm in torch._foreach_norm(tensors)]
            return torch.stack(norms).isfinite().all()

    def _moments(self) -> list[Tensor]:
        """Tensors that hold all moments and float32 copies of this rank."""
        return [*self._buffers, *map(local_part, self.masters.state.values())]

    def _share_buffers(self) -> None:
        """Let one buffer hold many moments, once an update or a load has added some."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        if len(states) != self._states_in_buffers:
            self._buffers, self._states_in_buffers = share_buffers(states), len(states)

    def take_gradients(self) -> list[nn.Parameter]:
        """Return the tensors whose gradients are to be clipped, before a step: float32 copies get theirs here."""
        self.masters.take_gradients()
        return list(self._weights.values())

    def step(self, learning_rate: float, found_inf: Tensor | None = None) -> None:
        """Update the weights, each at the learning rate times its factor, and clear the gradients.

        found_inf: float32 [] on the weights' device. 1 leaves weights, moments and step counts as they are, whatever
        the gradients; needs `skips_on_device`.
        """
        assert found_inf is None or self.skips_on_device
        for name, weight in zip(self._weights, self.take_gradients(), strict=True):
            if name not in self.updated_tensors and weight.grad is not None:
                for slice_name, gradient in _slices(name, weight.grad).items():
                    self.updated_tensors[slice_name].grad = gradient
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["factor"]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # where torch's fused optimizers read it
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._share_buffers()
        self.masters.write_back(self.key)
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Drop all gradients, as after a step that is skipped."""
        self.masters.discard_gradients()
        for parameter in self.trainable.values():
            parameter.grad = None


def build_optimizer(
    model: Decoder,
    weight_decay: float,
    kind: str = "adamw",
    lr_scale: LearningRateScales = (),
    scales: Mapping[str, ParameterScale] | None = None,
    stochastic_rounding: bool = False,
) -> Optimizer:
    """Build AdamW (betas 0.9 and 0.95); kind 'muon' adds Muon (momentum 0.95, Nesterov) for the layers' matrices.

    Weight decay applies to parameters with two or more dims that are not biases. Parameters with a factor of 0 are
    frozen. A stack of matrices [n, out, in] counts as n matrices. scales: further factors, by parameter. bfloat16
    parameters have float32 copies, with stochastic_rounding only during an update; moments are float32. Raises
    ConfigError as `learning_rate_factors` does.
    """
    factor_by_name = learning_rate_factors(model, lr_scale)
    trainable = {name: parameter for name, parameter in model.named_parameters() if factor_by_name.get(name, 0.0) > 0.0}
    matrices = matrix_parameters(model) if kind == "muon" else frozenset()
    masters = MasterWeights(trainable, stochastic_rounding)
    updated_tensors: dict[str, Tensor] = {}
    adamw_groups: dict[_GroupOptions, list[Tensor]] = {}
    muon_groups: dict[_GroupOptions, list[Tensor]] = {}
    decayed = {name for name, parameter in trainable.items() if parameter.dim() >= 2 and not name.endswith(".bias")}
    for name, parameter in sorted(trainable.items(), key=lambda item: item[0] not in decayed):
        is_stack, weight = name in matrices and parameter.dim() > 2, masters.copies.get(name, parameter)
        tensors = _slices(name, weight) if is_stack else {name: weight}
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
        fused = model.embed.weight.device.type not in _UNFUSED
        optimizers.append(EagerAdamw(_param_groups(adamw_groups), lr=0.0, betas=(0.9, 0.95), fused=fused))
    if muon_groups:
        adjust = "match_rms_adamw"
        optimizers.append(StackedMuon(_param_groups(muon_groups), lr=0.0, momentum=0.95, adjust_lr_fn=adjust))
    masters.free()
    return Optimizer(trainable, optimizers, updated_tensors, masters)


def _param_groups(groups: Mapping[_GroupOptions, list[Tensor]]) -> list[dict[str, Any]]:
    return [{"params": tensors, **dict(options)} for options, tensors in groups.items()]


def _slice_name(name: str, index: int) -> str:
    return f"{name}.{index}"


def _slices(name: str, stack: Tensor) -> dict[str, Tensor]:
    """Return each matrix of a stack by name, of a sharded one those on this rank; they share the stack's storage."""
    matrices = local_part(stack.detach()).flatten(0, -3)
    first = held_rows(stack).start * math.prod(stack.shape[1:-2])
    return {_slice_name(name, first + index): matrix for index, matrix in enumerate(matrices.unbind())}


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
