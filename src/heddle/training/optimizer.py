"""The optimizer: AdamW for every parameter, or Muon for the layers' weight matrices and AdamW for the rest.

    AdamW (Loshchilov & Hutter 2019):  w ← w − r λ w − r · m̂ / (√v̂ + ε)
    Muon (Jordan et al. 2024):         w ← w − r λ w − 0.2 r √max(out, in) · U,   U = five steps of
        U ← a U + (b U Uᵀ + c (U Uᵀ)²) U   from N / |N|,   N = 0.05 g + 0.95 m,   m ← 0.95 m + 0.05 g

U has singular values near 1. Muon's update is scaled as in Liu et al. (2025): it is about as large as AdamW's, so one
learning rate r serves both. r is the learning rate of the step times the factor of the parameter's path.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heddle.distributed.ranks import as_sharded, held_rows, local_part, whole
from heddle.distributed.sharding import compute_on_owners, owner_count
from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.numerics import native
from heddle.numerics.dispatch import DeviceSize
from heddle.numerics.norms import euclidean_norms
from heddle.numerics.random import RandomStream, stochastic_round
from heddle.parts.mixers import Mixer
from heddle.parts.modules.linear import SelfInitialized
from heddle.torch_private import foreach_add_, foreach_copy_, foreach_mul_, version_counters

# Optimizers that start without torch's compiler.
#
# torch wraps some methods of its optimizers to keep them out of compiled graphs, and imports the compiler for that:
# more than a second before the first step. These optimizers are never compiled, and call the unwrapped methods.


class EagerOptimizer(torch.optim.Optimizer):
    """Base, before torch's own class, of an optimizer that is never part of a compiled graph."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch does."""
        inspect.unwrap(super().add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, or set them to zero."""
        inspect.unwrap(super().zero_grad)(self, set_to_none)


class EagerAdamw(EagerOptimizer, torch.optim.AdamW):
    """torch's AdamW, with the same numbers."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)

    @torch.no_grad()
    def native_step(self, clip: float) -> bool:
        """`step` by the C++ operator, with gradients times `clip`: equal up to rounding.

        Returns whether all weights and moments are finite afterwards.
        """
        are_finite = True
        for group in self.param_groups:
            weights, names = group["params"], ("exp_avg", "exp_avg_sq", "step")
            gradients, moments = [weight.grad for weight in weights], [self.state[weight] for weight in weights]
            states = ([moment[name] for moment in moments] for name in names)
            factors = clip, group["lr"], *group["betas"], group["eps"], group["weight_decay"]
            are_finite &= torch.ops.heddle.adamw_(weights, gradients, *states, *factors)
        return are_finite

    @property
    def is_native(self) -> bool:
        """Whether the C++ operator can take the next step: on a CPU, once all tensors have gradients and moments."""
        weights = [weight for group in self.param_groups for weight in group["params"]]
        return native.serves("adamw", *weights) and all(
            weight.dtype in (torch.float32, torch.float64)
            and weight.is_contiguous()
            and weight.grad is not None
            and weight.grad.dtype == weight.dtype
            and weight.grad.is_contiguous()
            and "exp_avg" in self.state.get(weight, ())
            for weight in weights
        )


# Muon over stacks: matrices of one shape are updated together, in a few kernel launches instead of two dozen each.
#
# A matrix that is sharded over ranks is orthogonalized on one rank, its owner.


STACK_ELEMENTS = DeviceSize(cpu=2**16, accelerator=2**28)  # a CPU multiplies larger matrices faster one by one
SMALLEST_NORM = 1e-7  # torch's default


class StackedMuon(EagerOptimizer, torch.optim.Muon):
    """torch's Muon with the same settings, results and per-matrix momentum, over stacks of matrices.

    found_inf: 0 or 1, float32 [] on the device; 1 leaves weights and momenta unchanged. None: gradients are finite.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            first = 0
            for stack in _stacks(matrices):
                self._update(stack, group, first)
                first += len(stack) if owner_count(stack[0]) > 1 else 0  # ranks hold different whole matrices
        return loss

    def _update(self, matrices: Sequence[Tensor], group: dict[str, Any], first: int) -> None:
        """Update matrices of one shape, [rows, columns] each; `first` counts the sharded ones before them."""
        momenta = [local_part(self._momentum(matrix)) for matrix in matrices]
        gradient, momentum = _stack([local_part(_gradient(matrix)) for matrix in matrices]), _stack(momenta)
        if self.found_inf is None:
            after = momentum.lerp_(gradient, 1 - group["momentum"])
        else:
            after = momentum.lerp(gradient, 1 - group["momentum"])
        direction = gradient.lerp(after, group["momentum"]) if group["nesterov"] else after
        compute = partial(_orthogonalize, coefficients=group["ns_coefficients"], steps=group["ns_steps"])
        parts = direction.bfloat16().view(len(matrices), *direction.shape[-2:])
        update = compute_on_owners(matrices[0], parts, compute, first).view_as(direction).to(momentum.dtype)
        rate, decay = group["lr"], 1 - group["lr"] * group["weight_decay"]
        if self.found_inf is not None:
            is_bad = self.found_inf > 0
            after, update = torch.where(is_bad, momentum, after), update.masked_fill(is_bad, 0.0)
            decay = momentum.new_full((), decay).masked_fill(is_bad, 1.0)
        foreach_copy_(momenta, _unstack(after))
        weights = [local_part(matrix) for matrix in matrices]
        foreach_mul_(weights, decay)
        foreach_add_(weights, _unstack(update), alpha=-_adjusted(rate, group, matrices[0].shape))

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum_buffer"]
        return momentum


def _gradient(matrix: Tensor) -> Tensor:
    assert matrix.grad is not None
    return matrix.grad


def _stack(matrices: Sequence[Tensor]) -> Tensor:
    """[n, rows, columns], or the matrix itself if there is only one."""
    return torch.stack(list(matrices)) if len(matrices) > 1 else matrices[0]


def _unstack(stack: Tensor) -> tuple[Tensor, ...]:
    return tuple(stack.unbind()) if stack.dim() == 3 else (stack,)


def _stacks(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield matrices of one shape, dtype, device and placement: per owner at most STACK_ELEMENTS, or one matrix."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device, int], list[Tensor]] = {}
    for matrix in matrices:
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device, owner_count(matrix)), []).append(matrix)
    for stack in alike.values():
        count = max(1, STACK_ELEMENTS.on(stack[0]) // stack[0].numel()) * owner_count(stack[0])
        yield from (stack[first : first + count] for first in range(0, len(stack), count))


def _orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Newton–Schulz steps of each of the matrices [n, rows, columns], bfloat16."""
    if len(matrices) == 1:  # a product is faster than a batch of one product
        return _orthogonalize_stack(matrices[0], coefficients, steps)[None]
    return _orthogonalize_stack(matrices, coefficients, steps)


def _orthogonalize_stack(matrices: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    a, b, c = coefficients
    add_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        square = x @ x.mT
        x = add_product(x, add_product(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _adjusted(learning_rate: float, group: dict[str, Any], shape: torch.Size) -> float:
    """The learning rate for a shape. `match_rms_adamw` makes an update about as large as AdamW's."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return float(learning_rate * 0.2 * max(rows, columns) ** 0.5)
    return float(learning_rate * max(1.0, rows / columns) ** 0.5)


# float32 copies of bfloat16 parameters, which the optimizer updates: small updates would be lost in bfloat16.
#
# The copies persist between steps (Micikevicius et al. 2018), or exist only during an update: then the new weights are
# rounded stochastically, and only the parameters are stored.


class MasterWeights:
    """The float32 copies of all bfloat16 parameters among `parameters`, by name; other dtypes have none.

    Sharded parameters have sharded copies, with the same rounding as in one process. stochastic: the copies use no
    memory between updates, and `write_back` rounds stochastically.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], stochastic: bool = False) -> None:
        self.parameters = {name: value for name, value in parameters.items() if value.dtype == torch.bfloat16}
        self.copies = {name: nn.Parameter(value.detach().float()) for name, value in self.parameters.items()}
        self.stochastic = stochastic

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the copies that outlive an update, by name."""
        return {} if self.stochastic else {name: copy.detach() for name, copy in self.copies.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        with torch.no_grad():
            for name in self.state.keys() & state.keys():
                self.copies[name].copy_(state[name])

    def take_gradients(self) -> None:
        """Move the parameters' gradients to their copies, in float32. Copies without memory are filled first."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            copy = self.copies[name]
            if self.stochastic:
                own = local_part(copy.detach())
                own.untyped_storage().resize_(own.numel() * own.element_size())
                own.copy_(local_part(parameter.detach()))
            copy.grad, parameter.grad = parameter.grad.float(), None

    def write_back(self, key: tuple[int, int]) -> None:
        """Round the copies into the parameters. key: (seed, step), the key of stochastic rounding."""
        if not self.parameters:
            return
        with torch.no_grad():
            if not self.stochastic:
                weights, copies = self.parameters.values(), self.copies.values()
                foreach_copy_([local_part(x) for x in weights], [local_part(x) for x in copies])
                return
            for name, parameter in self.parameters.items():
                own = local_part(self.copies[name].detach())
                if own.untyped_storage().size():
                    stream = RandomStream.of("stochastic rounding", *key, name)
                    local_part(parameter.detach()).copy_(stochastic_round(own, stream, _first_element(parameter)))
        self.free()

    def discard_gradients(self) -> None:
        """Drop the gradients that `take_gradients` moved, as after a skipped step."""
        for copy in self.copies.values():
            copy.grad = None
        self.free()

    def free(self) -> None:
        """Free the memory of copies that exist only during an update. Tensors that share it stay valid."""
        for copy in self.copies.values() if self.stochastic else ():
            local_part(copy.detach()).untyped_storage().resize_(0)


def _first_element(parameter: Tensor) -> int:
    """The index, in the whole parameter, of this rank's first element."""
    if as_sharded(parameter) is None:
        return 0
    first_row: int = held_rows(parameter).start
    return first_row * (parameter.numel() // max(1, len(parameter)))


def memory_of(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# Moments of small tensors share one contiguous buffer, so that one pass checks many of them.


SMALL = 2**18  # elements; for larger tensors the pass costs more than the call
ALIGNMENT = 16  # elements: each moment begins where a cache line does


def share_buffers(states: Iterable[dict[str, Tensor]]) -> list[Tensor]:
    """Move the small moments of an optimizer on a CPU into one buffer per dtype; `states` then holds views of it.

    Returns the tensors that hold all moments on this rank: the buffers, and every other moment.
    """
    small: dict[torch.dtype, list[tuple[dict[str, Tensor], str]]] = defaultdict(list)
    tensors = []
    for state in states:
        for name, moment in state.items():
            if not moment.dim():  # a count of steps
                continue
            if moment.device.type == "cpu" and moment.numel() <= SMALL and as_sharded(moment) is None:
                small[moment.dtype].append((state, name))
            else:
                tensors.append(local_part(moment))
    for dtype, moments in small.items():
        sizes = [-(-state[name].numel() // ALIGNMENT) * ALIGNMENT for state, name in moments]
        buffer = torch.zeros(sum(sizes), dtype=dtype)
        for (state, name), part in zip(moments, buffer.split(sizes), strict=True):
            state[name] = part[: state[name].numel()].view(state[name].shape).copy_(state[name])
        tensors.append(buffer)
    return tensors


LearningRateScales = Sequence[tuple[str, float]]  # (path, factor); the last matching path wins
EPSILON = 1e-8  # AdamW's ε
_UNFUSED = ("mps", "meta")  # no fused AdamW, or never run with it


class ParameterScale(NamedTuple):
    """Factors of a parameter's initial standard deviation, of its learning rate, and of AdamW's ε.

    Weight decay is divided by the learning rate's factor, so that rate times decay stays the same.
    """

    initial_std: float = 1.0
    learning_rate: float = 1.0
    epsilon: float = 1.0


_GroupOptions = tuple[tuple[str, float], ...]  # what the tensors of a parameter group share


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm [] of all elements of some tensors; of whole ones if they are sharded."""
    if tensors and native.serves("norms", *tensors):
        norm: Tensor = euclidean_norms(tensors).norm()
        return norm
    return whole(nn.utils.get_total_norm(tensors))


class Optimizer:
    """One or two torch optimizers over the trainable parameters.

    trainable: the parameters by name. optimizers: AdamW, Muon or both; each parameter group has a `factor` of the
    learning rate. updated_tensors: the tensors they update, by name: parameters, or the float32 copies of bfloat16
    parameters, and each slice of stacked matrices as `name.index`. masters: these copies. key: (seed, step) of the next
    update, the key of stochastic rounding.
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
        self._buffers: list[Tensor] = []  # hold the moments of this many updated tensors:
        self._states_in_buffers = 0
        self._finite_versions: list[tuple[int, int]] | None = None  # of weights and moments known to be finite
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
        self._states_in_buffers, self._finite_versions = 0, None
        self._share_buffers()

    @property
    def skips_on_device(self) -> bool:
        """Return whether `step` takes `found_inf`, which skips updates on the device without a host synchronization."""
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
        """Return whether all weights, float32 copies and moments on this rank are finite: bool [], on the device.

        Unused rows of the embedding count too. Numbers that overflow when squared count as non-finite. The last step's
        result is reused if torch's version counters show no write since.
        """
        if self._finite_versions is not None and self._finite_versions == self._versions():
            return torch.ones((), dtype=torch.bool, device="cpu")
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in (*map(local_part, self.trainable.values()), *self._moments()):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        with torch.no_grad():
            return torch.cat([euclidean_norms(tensors).float() for tensors in by_dtype.values()]).isfinite().all()

    def _versions(self) -> list[tuple[int, int]]:
        """The address and the version counter of each weight and moment."""
        tensors = [*self.trainable.values(), *self._moments()]
        return list(zip((tensor.data_ptr() for tensor in tensors), version_counters(tensors), strict=True))

    def _moments(self) -> list[Tensor]:
        """Tensors that hold all moments and float32 copies of this rank."""
        return [*self._buffers, *map(local_part, self.masters.state.values())]

    def _share_buffers(self) -> None:
        """Move moments into shared buffers, once an update or a load has added some."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        if len(states) != self._states_in_buffers:
            self._buffers, self._states_in_buffers = share_buffers(states), len(states)

    def take_gradients(self) -> list[nn.Parameter]:
        """Return the tensors with the gradients to clip before a step; moves gradients to the float32 copies."""
        self.masters.take_gradients()
        return list(self._weights.values())

    def step(
        self,
        learning_rate: float,
        found_inf: Tensor | None = None,
        norm: Tensor | None = None,
        max_norm: float = math.inf,
    ) -> None:
        """Update the weights, each at the learning rate times its factor, and clear the gradients.

        found_inf: float32 [] on the weights' device. 1 leaves weights, moments and step counts unchanged, whatever the
        gradients; needs `skips_on_device`. norm: of all gradients, which are first scaled so that it is at most
        `max_norm`.
        """
        assert found_inf is None or self.skips_on_device
        weights, clip = self.take_gradients(), 1.0
        adamw = self.optimizers[0] if len(self.optimizers) == 1 else None
        is_native = found_inf is None and isinstance(adamw, EagerAdamw) and adamw.is_native
        if norm is not None and is_native:
            clip = min(1.0, max_norm / (float(norm) + 1e-6))  # as torch's function
        elif norm is not None:
            nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
        for name, weight in zip(self._weights, weights, strict=True):
            if name not in self.updated_tensors and weight.grad is not None:
                for slice_name, gradient in _slices(name, weight.grad).items():
                    self.updated_tensors[slice_name].grad = gradient
        are_finite = False
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["factor"]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # where torch's fused optimizers read it
            if is_native and isinstance(optimizer, EagerAdamw):
                are_finite = optimizer.native_step(clip)
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._share_buffers()
        self._finite_versions = self._versions() if are_finite else None
        self.masters.write_back(self.key)
        self.discard_gradients()

    # QK-clip (MuonClip; Kimi Team 2025, "Kimi K2", algorithm 1). With S the largest logit of a head in the step, over
    # all queries and visible keys, before any softcap and bias, and γ = min(1, τ / S):
    #
    #     W_q ← √γ W_q,   W_k ← √γ W_k;   W_q ← γ W_q where the keys have other readers

    def check_logits(self, model: Decoder, limit: float) -> None:
        """Raise ConfigError if QK-clip cannot scale the logits of an attention, or if there is none."""
        trained, attentions = {id(weight) for weight in self.trainable.values()}, 0
        for path, mixer in model.named_modules():
            rows = mixer.logit_rows if isinstance(mixer, Mixer) else None
            if rows is None:
                continue
            if not isinstance(rows, str) and any(id(part.projection.weight) not in trained for part in rows):
                rows = "has weights of q or k that are not trained"
            if isinstance(rows, str):
                raise ConfigError(f"qk_clip {limit:g}: {path} {rows}; leave qk_clip out")
            attentions += 1
        if not attentions:
            raise ConfigError(f"qk_clip {limit:g}: the design has no attention; leave qk_clip out")

    @torch.no_grad()
    def clip_logits(
        self, model: Decoder, largest: Mapping[str, Tensor], limit: float, is_applied: Tensor | None = None
    ) -> None:
        """Scale weights and biases of q and k so that the logits in `largest` [H], by path, would be at most `limit`.

        is_applied: bool [] on the device; False changes nothing.
        """
        names = {id(parameter): name for name, parameter in self.trainable.items()}
        for path, logits in largest.items():
            mixer = model.get_submodule(path)
            rows = mixer.logit_rows if isinstance(mixer, Mixer) else None
            assert rows is not None
            assert not isinstance(rows, str)
            factor = limit / logits.clamp(min=limit)
            factor = factor if is_applied is None else torch.where(is_applied, factor, 1.0)
            for projection, parts in rows:
                per_head = torch.cat([(factor**power)[:, None].expand(-1, count) for count, power in parts], dim=1)
                for parameter in (projection.weight, projection.bias):
                    if parameter is None:
                        continue
                    copy = None if self.masters.stochastic else self.masters.copies.get(names[id(parameter)])
                    weight = parameter if copy is None else copy
                    weight.mul_(per_head.flatten().view(-1, *(1 for _ in weight.shape[1:])))
                    if copy is not None:
                        parameter.copy_(copy)

    def discard_gradients(self) -> None:
        """Drop all gradients, as after a skipped step."""
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
    parameters have float32 copies, only during an update with stochastic_rounding; moments are float32. Raises
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


def _slices(name: str, stack: Tensor) -> dict[str, Tensor]:
    """Return each matrix of a stack by name (of a sharded stack, this rank's); they share the stack's storage."""
    matrices = local_part(stack.detach()).flatten(0, -3)
    first = held_rows(stack).start * math.prod(stack.shape[1:-2])
    return {f"{name}.{first + index}": matrix for index, matrix in enumerate(matrices.unbind())}


STACKS = ("layers.", "multi_token.")


def matrix_parameters(model: Decoder) -> frozenset[str]:
    """Return the names of all matrices and stacks of matrices in layers and multi-token modules."""
    modules = ((path, module) for path, module in model.named_modules() if isinstance(module, SelfInitialized))
    in_layers = ((path, module) for path, module in modules if path.removeprefix("encoder.").startswith(STACKS))
    return frozenset(f"{path}.{name}" for path, module in in_layers for name in module.matrix_parameters)


def learning_rate_factors(model: Decoder, lr_scale: LearningRateScales) -> dict[str, float]:
    """Return the learning rate factor of each trainable parameter, by name: the last matching path's, else 1.

    A path is the beginning of a name, such as `layers.0.mixer`; `*` matches one word. Raises ConfigError for a path
    that matches nothing, and if every factor is 0.
    """
    factor_by_name = {name: 1.0 for name, parameter in model.named_parameters() if parameter.requires_grad}
    for path, factor in lr_scale:
        matches = [name for name in factor_by_name if _path_matches(path.split("."), name.split("."))]
        if not matches:
            raise ConfigError(
                f"lr_scale {path}={factor:g}: no trainable parameter is at '{path}'; "
                f"paths begin with {_first_words(factor_by_name)}"
            )
        factor_by_name |= dict.fromkeys(matches, factor)
    if not any(factor_by_name.values()):
        raise ConfigError("lr_scale: every factor is 0, so nothing would be trained; set one above 0")
    return factor_by_name


def _path_matches(path: Sequence[str], name: Sequence[str]) -> bool:
    return len(path) <= len(name) and all(a in ("*", b) for a, b in zip(path, name, strict=False))


def _first_words(names: Iterable[str]) -> str:
    """Return the first word of each name, with the number for layers, for an error message."""
    return ", ".join(
        dict.fromkeys(".".join(name.split(".")[: 2 if name.startswith("layers.") else 1]) for name in names)
    )
