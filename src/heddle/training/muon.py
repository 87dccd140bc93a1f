"""Muon over stacks: matrices of one shape are updated together, in a few launches instead of two dozen each.

Of matrices that are sharded over ranks, each is orthogonalized on one rank, its owner.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heddle.distributed.owners import compute_on_owners, owner_count
from heddle.distributed.ranks import local_part
from heddle.numerics.dispatch.device_size import DeviceSize
from heddle.training.eager_optimizer import EagerOptimizer

STACK_ELEMENTS = DeviceSize(cpu=2**16, accelerator=2**28)  # a CPU multiplies larger matrices faster one by one
SMALLEST_NORM = 1e-7  # torch's default


class StackedMuon(EagerOptimizer, torch.optim.Muon):
    """torch's Muon, with its settings, its numbers and a momentum for each matrix.

    found_inf: 0 or 1, float32 [] on the device; 1 leaves weights and momenta as they are. None: gradients are finite.
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
        torch._foreach_copy_(momenta, _unstack(after))
        weights = [local_part(matrix) for matrix in matrices]
        torch._foreach_mul_(weights, decay)
        torch._foreach_add_(weights, _unstack(update), alpha=-_adjusted(rate, group, matrices[0].shape))

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
    """[n, rows, columns], or the matrix itself if there is no other."""
    return torch.stack(list(matrices)) if len(matrices) > 1 else matrices[0]


def _unstack(stack: Tensor) -> tuple[Tensor, ...]:
    return tuple(stack.unbind()) if stack.dim() == 3 else (stack,)


def _stacks(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices of one shape, dtype, device and placement: for each owner at most STACK_ELEMENTS, or one matrix."""
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
    """The rate of matrices of a shape. `match_rms_adamw` makes an update about as large as AdamW's."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return float(learning_rate * 0.2 * max(rows, columns) ** 0.5)
    return float(learning_rate * max(1.0, rows / columns) ** 0.5)
