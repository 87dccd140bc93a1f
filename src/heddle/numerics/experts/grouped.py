"""Experts on an accelerator: a fixed number of launches, and the host reads no row counts.

Assignments are sorted by expert on the device. `grouped` gives torch's grouped product the offsets of each expert's
rows. `blockwise` serves every dtype and width: rows are padded to blocks of equal size, each of one expert, and a
batched product multiplies each block with a copy of its expert's weight. With blocks of a quarter of the mean number of
rows, a quarter more rows are computed, and the copies take at most five times the memory of one stacked weight.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.activations import Activation
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights, hidden_activation
from heddle.numerics.norms import at_least_float32

BLOCKS_PER_EXPERT = 4  # on average, without the last one, which is not full
BLOCK_MULTIPLE = 16  # rows of a block are a multiple of it
MIN_BLOCK_ROWS = 64  # copying the weight takes longer than multiplying fewer rows


class _Rows(NamedTuple):
    """Rows that experts compute. A row computes one assignment or none.

    assignment: int64 [M], which of the N·k assignments a row computes; unused: bool [M], True if it computes none.
    row: int64 [N·k], the row of each assignment; dropped: bool [N·k]. None: there are no such rows or assignments.
    """

    assignment: Tensor
    unused: Tensor | None
    row: Tensor
    dropped: Tensor | None


class _MoveRows(torch.autograd.Function):
    """Copy rows by an index, and gradients back by the inverse index: no two threads add to one number.

    Rows where `absent` is True become zero, as do their gradients. An input row has `copies` adjacent gradient rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, absent: Tensor | None, inverse: tuple[Tensor, Tensor | None], copies: int
    ) -> Tensor:
        ctx.inverse, ctx.copies = inverse, copies
        return _take(x, index, absent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad = _take(gradients[0], *ctx.inverse)
        return grad if ctx.copies == 1 else grad.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None, None


def _take(x: Tensor, index: Tensor, absent: Tensor | None) -> Tensor:
    rows = x.index_select(0, index)
    return rows if absent is None else rows.masked_fill(absent[:, None], 0.0)


def _to_rows(x: Tensor, rows: _Rows, top_k: int) -> Tensor:
    """Tokens x [N, width] -> the rows of their assignments [M, width]. Unused rows are zero."""
    y: Tensor = _MoveRows.apply(x, rows.assignment // top_k, rows.unused, (rows.row, rows.dropped), top_k)
    return y


def _to_tokens(y: Tensor, rows: _Rows, gates: Tensor) -> Tensor:
    """Rows [M, width] -> their sums per token [N, width], weighted by gates [N, k]."""
    out = _MoveRows.apply(y, rows.row, rows.dropped, (rows.assignment, rows.unused), 1)
    return torch.bmm(gates[:, None].to(out.dtype), out.unflatten(0, (-1, gates.shape[1]))).squeeze(1)


def _counts(flat_experts: Tensor, num_experts: int) -> Tensor:
    """The number of assignments of each expert, int64 [experts]."""
    counts = flat_experts.new_zeros(num_experts)
    return counts.scatter_add_(0, flat_experts.clamp(min=0), (flat_experts >= 0).to(counts.dtype))


def _order(flat_experts: Tensor, num_experts: int, none_dropped: bool) -> Tensor:
    """The assignments sorted by expert, int64 [N·k]. Dropped ones come last."""
    sort_keys = flat_experts if none_dropped else torch.where(flat_experts < 0, num_experts, flat_experts)
    return sort_keys.argsort(stable=True)


def grouped(x: Tensor, assignment: ExpertAssignment, weights: ExpertWeights, activation: Activation) -> Tensor:
    """One grouped product of all experts per projection. The offsets of their rows stay on the device.

    torch's product leaves arbitrary values in the rows after the last offset, which are the dropped assignments.
    """
    flat = assignment.expert_indices.reshape(-1)
    order = _order(flat, weights.up.shape[0], assignment.none_dropped)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    dropped = None if assignment.none_dropped else flat < 0
    rows = _Rows(order, None if dropped is None else dropped.index_select(0, order), row, dropped)
    offsets = _counts(flat, weights.up.shape[0]).cumsum(0).int()

    def expert_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = functional.grouped_mm(inputs, weight.mT, offs=offsets)
        return y if bias is None else zero_unused(y + bias.index_select(0, flat.index_select(0, order).clamp(min=0)))

    def zero_unused(y: Tensor) -> Tensor:  # this also stops their gradients
        return y if rows.unused is None else y.masked_fill(rows.unused[:, None], 0.0)

    inputs = _to_rows(x, rows, assignment.expert_indices.shape[1])
    gate = None if weights.gate is None else expert_linear(inputs, weights.gate, weights.gate_bias)
    up = expert_linear(inputs, weights.up, weights.up_bias)
    hidden = hidden_activation(up, gate, _dropout_rows(assignment, rows), activation)
    return _to_tokens(zero_unused(expert_linear(hidden, weights.down, weights.down_bias)), rows, assignment.gates)


def _dropout_rows(assignment: ExpertAssignment, rows: _Rows) -> Tensor | None:
    mask = assignment.dropout_mask
    return None if mask is None else mask.flatten(0, 1).index_select(0, rows.assignment)


class _BlockLinear(torch.autograd.Function):
    """rows [blocks, m, in], weight [experts, out, in], bias, the expert of each block -> [blocks, m, out].

    The copies of the weights are not saved for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, expert_of_block: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, expert_of_block)
        block_weights = weight.index_select(0, expert_of_block).mT
        if bias is None:
            return rows @ block_weights
        return torch.baddbmm(bias.index_select(0, expert_of_block)[:, None], rows, block_weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, expert_of_block = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        (grad,) = gradients

        def sum_blocks(block_grads: Tensor) -> Tensor:
            wide = at_least_float32(block_grads)
            total = wide.new_zeros(weight.shape[0], *wide.shape[1:])
            return total.index_add(0, expert_of_block, wide).to(weight.dtype)

        return (
            grad @ weight.index_select(0, expert_of_block) if needs_rows else None,
            sum_blocks(grad.mT @ rows) if needs_weight else None,
            sum_blocks(grad.sum(1)) if needs_bias else None,
            None,
        )


def blockwise(x: Tensor, assignment: ExpertAssignment, weights: ExpertWeights, activation: Activation) -> Tensor:
    """One batched product of blocks of rows per projection."""
    flat, num_experts = assignment.expert_indices.reshape(-1), weights.up.shape[0]
    if not len(flat):
        return x.clone()
    block_size = block_rows(len(flat), num_experts)
    num_blocks = min(len(flat), (len(flat) + num_experts * (block_size - 1)) // block_size)
    rows, expert_of_block = _rows_in_blocks(flat, num_experts, assignment.none_dropped, (num_blocks, block_size))

    def expert_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _BlockLinear.apply(inputs.unflatten(0, (num_blocks, block_size)), weight, bias, expert_of_block)
        return y.flatten(0, 1)

    inputs = _to_rows(x, rows, assignment.expert_indices.shape[1])
    gate = None if weights.gate is None else expert_linear(inputs, weights.gate, weights.gate_bias)
    up = expert_linear(inputs, weights.up, weights.up_bias)
    hidden = hidden_activation(up, gate, _dropout_rows(assignment, rows), activation)
    return _to_tokens(expert_linear(hidden, weights.down, weights.down_bias), rows, assignment.gates)


def block_rows(num_assignments: int, num_experts: int) -> int:
    """Rows of a block: a quarter of an expert's mean number of rows, if they are many."""
    size = max(MIN_BLOCK_ROWS, num_assignments // (BLOCKS_PER_EXPERT * num_experts))
    return size - size % BLOCK_MULTIPLE if size > BLOCK_MULTIPLE else size


def _rows_in_blocks(
    flat_experts: Tensor, num_experts: int, none_dropped: bool, shape: tuple[int, int]
) -> tuple[_Rows, Tensor]:
    """Rows in blocks of one expert each, shape (blocks, rows of a block), and the expert of each block, int64."""
    num_blocks, block_size = shape
    num_rows, device = num_blocks * block_size, flat_experts.device
    counts = _counts(flat_experts, num_experts)
    blocks = (counts + (block_size - 1)) // block_size
    last_block = blocks.cumsum(0)
    # Blocks that are left over get an expert that has rows: the weights of others may be anything, and 0 · NaN is NaN.
    expert_of_block = torch.searchsorted(last_block, torch.arange(num_blocks, device=device), right=True)
    expert_of_block = torch.minimum(expert_of_block, flat_experts.amax().clamp(min=0))
    # The rows of an expert start at its first block; in the sorted order they start at the sum of the counts before.
    shift = (last_block - blocks) * block_size - (counts.cumsum(0) - counts)
    order = _order(flat_experts, num_experts, none_dropped)
    sorted_row = torch.arange(len(order), device=device) + shift.index_select(0, flat_experts[order].clamp(min=0))
    dropped = None
    if not none_dropped:
        dropped = flat_experts < 0
        sorted_row = sorted_row.masked_fill(dropped.index_select(0, order), num_rows)
    assignment = order.new_full((num_rows + 1,), -1).scatter_(0, sorted_row, order)[:-1]
    row = torch.empty_like(order).scatter_(0, order, sorted_row).clamp(max=num_rows - 1)
    return _Rows(assignment.clamp(min=0), assignment < 0, row, dropped), expert_of_block
