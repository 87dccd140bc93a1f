"""Experts on a CPU: assignments are sorted by expert, and each expert and projection is one product.

For one row, let h = f(up x), y = down h, g its gate and s the gradient of the token's output. Its gradients are

    dg = s · y = (downᵀ s) · h,   dh = g downᵀ s,   d down = s (g h)ᵀ

so y need not be saved, and gates multiply the hidden rows instead of the output rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.errors import ConfigError
from heddle.numerics import native
from heddle.numerics.activations import Activation, is_swiglu
from heddle.numerics.linear import LinearMap
from heddle.numerics.norms import without_autocast

ROW_MULTIPLE = 16  # rows per expert are padded to it: oneDNN spends half a millisecond on each new number of rows


class ExpertWeights(NamedTuple):
    """up and gate [E, hidden, width], down [E, width, hidden], and their biases [E, ...]. A plain MLP has no gate."""

    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_bias: Tensor | None = None

    @property
    def input_maps(self) -> list[LinearMap]:
        """The linear maps of the input: up, and gate if there is one."""
        gated: list[LinearMap] = [] if self.gate is None else [(self.gate, self.gate_bias)]
        return [(self.up, self.up_bias), *gated]

    @property
    def output_maps(self) -> list[LinearMap]:
        """The linear map to the output: down."""
        return [(self.down, self.down_bias)]

    def map(self, change: Callable[[Tensor], Tensor]) -> "ExpertWeights":
        """Apply a function to each weight and bias."""
        optional_weights = (None if weight is None else change(weight) for weight in self[2:])
        return ExpertWeights(change(self.up), change(self.down), *optional_weights)

    def of_expert(self, expert: int) -> "ExpertWeights":
        """The weights of one expert, without the first dimension."""
        return self.map(lambda weight: weight[expert])


class ExpertAssignment(NamedTuple):
    """Which experts compute each token. An assignment is one of the N·k pairs of a token and an expert.

    expert_indices: int64 [N, k], −1 where dropped; the experts of a token are distinct. gates: [N, k].
    dropout_mask: [N, k, hidden], multiplied with the hidden activations. none_dropped: True if no index is −1.
    """

    expert_indices: Tensor
    gates: Tensor
    dropout_mask: Tensor | None = None
    none_dropped: bool = False


class _SortedRows(NamedTuple):
    """M rows sorted by expert. The rows of each expert are padded to a multiple of `ROW_MULTIPLE`.

    assignment: int64 [M], which of the N·k assignments a row computes; arbitrary for padding rows.
    row_of_assignment: int64 [N, k], the row of each assignment; M if it is dropped.
    expert_rows: (expert, its rows, its padding rows), for the experts that have any.
    """

    assignment: Tensor
    row_of_assignment: Tensor
    expert_rows: list[tuple[int, slice, slice]]


def _sort_by_expert(experts: Tensor, num_experts: int) -> _SortedRows:
    """Sort the assignments of experts int64 [N, k], −1 where dropped."""
    flat = experts.reshape(-1)
    sort_keys = torch.where(flat < 0, num_experts, flat)
    order = sort_keys.argsort(stable=True)
    sizes = torch.bincount(sort_keys, minlength=num_experts + 1).tolist()[:num_experts]
    # The number of rows depends on the number of assignments only, so that buffers have the same size in every call.
    max_rows = -(-len(flat) // ROW_MULTIPLE) * ROW_MULTIPLE + num_experts * ROW_MULTIPLE if len(flat) else 0
    expert_rows, row_offsets, start, assigned = [], [], 0, 0
    for expert, size in enumerate(sizes):
        row_offsets.append(start - assigned)
        stop = start + -(-size // ROW_MULTIPLE) * ROW_MULTIPLE
        if size:
            expert_rows.append((expert, slice(start, stop), slice(start + size, stop)))
        start, assigned = stop, assigned + size
    order = order[:assigned]
    row = torch.arange(assigned) + torch.repeat_interleave(torch.tensor(row_offsets), torch.tensor(sizes))
    row_of_assignment, assignment = flat.new_full(flat.shape, max_rows), flat.new_zeros(max_rows)
    row_of_assignment[order], assignment[row] = row, order
    return _SortedRows(assignment, row_of_assignment.view(experts.shape), expert_rows)


def _gather_rows(x: Tensor, assignment: Tensor, top_k: int, expert_rows: list[tuple[int, slice, slice]]) -> Tensor:
    """Copy tokens x [N, width] to the rows of their assignments [M, width]. Padding rows are zero."""
    rows = x.index_select(0, assignment // top_k)
    for _, _, padding in expert_rows:
        rows[padding] = 0.0
    return rows


def _sum_to_tokens(y: Tensor, row_of_assignment: Tensor, gates: Tensor | None = None) -> Tensor:
    """Sum rows y [M + 1, width], weighted by gates if given, to tokens [N, width]. The last row of y is zero."""
    return functional.embedding_bag(row_of_assignment, y, mode="sum", per_sample_weights=gates)


def _empty_rows(rows: int, like: Tensor, width: int) -> Tensor:
    """An uninitialized buffer [rows + 1, width] whose last row is zero."""
    out = like.new_empty(rows + 1, width)
    out[rows] = 0.0
    return out


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.mT, out=out)
    else:
        torch.addmm(bias, x, weight.mT, out=out)


def hidden_activation(up: Tensor, gate: Tensor | None, dropout_mask: Tensor | None, activation: Activation) -> Tensor:
    """The activation of up and gate [..., hidden], with dropout if there is a mask."""
    hidden = activation(up, gate)
    return hidden if dropout_mask is None else hidden * dropout_mask


class SortedExperts(torch.autograd.Function):
    """One product per expert and projection; everything else runs on all rows at once, in buffers of constant size.

    Buffers sized by an expert's rows would have a different size in every call and fragment memory. Each expert's
    gradient is written directly into the gradient of the stacked weight.
    """

    @staticmethod
    def forward(
        ctx: Any, activation: Activation, x: Tensor, assignment: ExpertAssignment, gates: Tensor, *weight_tensors: Any
    ) -> Tensor:
        weights = ExpertWeights(*weight_tensors)
        rows = _sort_by_expert(assignment.expert_indices, weights.up.shape[0])
        num_rows = len(rows.assignment)
        inputs = _gather_rows(x, rows.assignment, assignment.expert_indices.shape[1], rows.expert_rows)
        up = x.new_empty(num_rows, weights.up.shape[1])
        gate = None if weights.gate is None else torch.empty_like(up)
        for expert, expert_slice, _ in rows.expert_rows:
            expert_weights = weights.of_expert(expert)
            _linear(inputs[expert_slice], expert_weights.up, expert_weights.up_bias, up[expert_slice])
            if gate is not None:
                assert expert_weights.gate is not None
                _linear(inputs[expert_slice], expert_weights.gate, expert_weights.gate_bias, gate[expert_slice])
        dropout_mask = assignment.dropout_mask
        if dropout_mask is not None:
            dropout_mask = dropout_mask.flatten(0, 1).index_select(0, rows.assignment)
        hidden, y = hidden_activation(up, gate, dropout_mask, activation), _empty_rows(num_rows, x, x.shape[1])
        for expert, expert_slice, _ in rows.expert_rows:
            expert_weights = weights.of_expert(expert)
            _linear(hidden[expert_slice], expert_weights.down, expert_weights.down_bias, y[expert_slice])
        ctx.activation, ctx.expert_rows = activation, rows.expert_rows
        ctx.save_for_backward(
            inputs, gates, up, gate, dropout_mask, rows.assignment, rows.row_of_assignment, *weight_tensors
        )
        return _sum_to_tokens(y, rows.row_of_assignment, gates.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise ConfigError('experts: this kernel does not support double backward; use kernels(experts="reference")')
        with without_autocast(grad_output):
            return _backward(ctx, grad_output)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    """The gradients of the inputs of `SortedExperts.apply`."""
    inputs, gates, up, gate, dropout_mask, assignment, row_of_assignment, *weight_tensors = ctx.saved_tensors
    weights, needs_grad = ExpertWeights(*weight_tensors), ctx.needs_input_grad[4:]
    row_gates = gates.flatten().index_select(0, assignment)[:, None].to(inputs.dtype)
    grad_rows = _gather_rows(grad_output, assignment, row_of_assignment.shape[1], ctx.expert_rows)
    grad_hidden = torch.empty_like(up)
    for expert, expert_slice, _ in ctx.expert_rows:
        torch.mm(grad_rows[expert_slice], weights.down[expert], out=grad_hidden[expert_slice])
    grad_gates = _empty_rows(len(assignment), gates, 1)
    hidden, row_grads, activation_grads = _hidden_gradients(ctx, up, gate, dropout_mask, grad_hidden, row_gates)
    grad_gates[:-1] = row_grads
    grad_down_bias_rows = grad_rows
    if weights.down_bias is not None:
        grad_down_bias_rows = grad_rows * row_gates
        for expert, expert_slice, _ in ctx.expert_rows:
            grad_gates[expert_slice] += (grad_rows[expert_slice] @ weights.down_bias[expert])[:, None]
    unused_experts = sorted(set(range(len(weights.up))) - {expert for expert, _, _ in ctx.expert_rows})
    pairs = zip(weight_tensors, needs_grad, strict=True)
    gradients = _ExpertGradients(
        *(_empty_gradient(tensor, unused_experts) if needed else None for tensor, needed in pairs)
    )
    grad_inputs = _empty_rows(len(assignment), inputs, inputs.shape[1])
    for expert, expert_slice, _ in ctx.expert_rows:
        expert_weights = weights.of_expert(expert)
        expert_gradients = _ExpertGradients(*(None if tensor is None else tensor[expert] for tensor in gradients))
        _write_gradient(grad_rows[expert_slice], hidden[expert_slice], expert_gradients.down, None)
        if expert_gradients.down_bias is not None:
            torch.sum(grad_down_bias_rows[expert_slice], 0, out=expert_gradients.down_bias)
        _write_gradient(
            activation_grads[0][expert_slice], inputs[expert_slice], expert_gradients.up, expert_gradients.up_bias
        )
        torch.mm(activation_grads[0][expert_slice], expert_weights.up, out=grad_inputs[expert_slice])
        if expert_weights.gate is not None:
            _write_gradient(
                activation_grads[1][expert_slice],
                inputs[expert_slice],
                expert_gradients.gate,
                expert_gradients.gate_bias,
            )
            grad_inputs[expert_slice].addmm_(activation_grads[1][expert_slice], expert_weights.gate)
    return None, _sum_to_tokens(grad_inputs, row_of_assignment), None, grad_gates[:, 0][row_of_assignment], *gradients


def _hidden_gradients(
    ctx: Any, up: Tensor, gate: Tensor | None, dropout_mask: Tensor | None, grad_hidden: Tensor, row_gates: Tensor
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """g h [rows, hidden], dh · h [rows, 1], and the gradients of up and gate (see the formulas above)."""
    swiglu = gate is not None and dropout_mask is None and is_swiglu(ctx.activation)
    if swiglu and native.serves("weighted_swiglu_backward", up) and native.unsupported_dtype(up.dtype) is None:
        hidden, grad_gate, grad_up, sums = torch.ops.heddle.weighted_swiglu_backward(gate, up, grad_hidden, row_gates)
        return hidden, sums, (grad_up, grad_gate)
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (up, gate) if tensor is not None]
        hidden = hidden_activation(inputs[0], None if gate is None else inputs[1], dropout_mask, ctx.activation)
    sums = (grad_hidden * hidden.detach()).sum(1, keepdim=True)
    activation_grads = torch.autograd.grad(hidden, inputs, grad_hidden.mul_(row_gates))
    return hidden.detach().mul_(row_gates), sums, activation_grads


class _ExpertGradients(NamedTuple):
    """Gradients of `ExpertWeights`, or of one expert. None: no gradient is required, or there is no such weight."""

    up: Tensor | None
    down: Tensor | None
    gate: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    gate_bias: Tensor | None


def _empty_gradient(weight: Tensor, unused_experts: list[int]) -> Tensor:
    """An uninitialized gradient, set to zero for experts without rows."""
    gradient = torch.empty_like(weight)
    for expert in unused_experts:
        gradient[expert].zero_()
    return gradient


def _write_gradient(grad_rows: Tensor, inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Write the gradients of one expert's projection into `weight` and `bias`."""
    if weight is not None:
        torch.mm(grad_rows.mT, inputs, out=weight)
    if bias is not None:
        torch.sum(grad_rows, 0, out=bias)
