"""Mixture of experts: `y = Σ_j gate_j · down_j f(x)` over the k experts of each token, f as in dense feed-forwards.

Only the selected experts are computed. An assignment is one of the N·k pairs of a token and an expert; an expert index
of −1 means that it is dropped.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from heddle.numerics.activations import Activation
from heddle.numerics.dispatch import Kernel, Operation, add_flops, device_type
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights, SortedExperts, hidden_activation
from heddle.numerics.linear import (
    MAX_PACKED_ROWS,
    PackedMaps,
    cached_pack,
    can_use_packed,
    pack_maps,
    packed_linear,
    uncounted_linear,
    uncounted_linears,
)
from heddle.numerics.norms import at_least_float32, without_autocast

# Experts on an accelerator: a fixed number of launches, and the host reads no row counts.
#
# Assignments are sorted by expert on the device. `grouped` gives torch's grouped product the offsets of each expert's
# rows. `blockwise` serves every dtype and width: rows are padded to blocks of equal size, each of one expert, and a
# batched product multiplies each block with a copy of its expert's weight. With blocks of a quarter of the mean number
# of rows, a quarter more rows are computed, and the copies take at most five times the memory of one stacked weight.

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


class ExpertsFacts(NamedTuple):
    """What decides the kernel. aligned: the rows of all weights start at multiples of 16 bytes."""

    assignments: int
    gradients: bool
    device: str
    dtype: torch.dtype
    aligned: bool


def experts_flops(num_assignments: int, width: int, hidden: int, gated: bool) -> int:
    """FLOPs of the selected experts."""
    return 2 * num_assignments * width * hidden * (3 if gated else 2)


def reference(x: Tensor, assignment: ExpertAssignment, weights: ExpertWeights, activation: Activation) -> Tensor:
    """Loop over all experts: x [N, width] -> [N, width]."""
    y = torch.zeros_like(x)
    for expert in range(weights.up.shape[0]):
        expert_weights = weights.of_expert(expert)
        token, slot = (assignment.expert_indices == expert).nonzero(as_tuple=True)
        gate = None
        if expert_weights.gate is not None:
            gate = functional.linear(x[token], expert_weights.gate, expert_weights.gate_bias)
        hidden = activation(functional.linear(x[token], expert_weights.up, expert_weights.up_bias), gate)
        if assignment.dropout_mask is not None:
            hidden = hidden * assignment.dropout_mask[token, slot]
        gates = assignment.gates[token, slot, None].to(x.dtype)
        out = functional.linear(hidden, expert_weights.down, expert_weights.down_bias) * gates
        y = y.index_add(0, token, out)
    return y


def _per_expert(x: Tensor, assignment: ExpertAssignment, weights: ExpertWeights, activation: Activation) -> Tensor:
    """Loop over the selected experts only. For few assignments, as in decoding."""
    rows_of_expert: dict[int, tuple[list[int], list[int]]] = {}
    for row, row_experts in enumerate(assignment.expert_indices.tolist()):
        for slot, expert in enumerate(row_experts):
            if expert >= 0:
                rows, slots = rows_of_expert.setdefault(expert, ([], []))
                rows.append(row)
                slots.append(slot)
    y, gates, single_token = torch.zeros_like(x), assignment.gates.to(x.dtype), x.shape[0] == 1
    run_expert = _expert_runner(x, weights)
    for expert in sorted(rows_of_expert):
        rows, slots = rows_of_expert[expert]
        dropout_mask = None if assignment.dropout_mask is None else assignment.dropout_mask[rows, slots]
        out = run_expert(x if single_token else x[rows], expert, dropout_mask, activation)
        if single_token:
            y.addcmul_(out, gates[:, slots].sum(1, keepdim=True))  # a table of ids may name an expert twice
        else:
            y.index_add_(0, torch.tensor(rows, device=x.device), out * gates[rows, slots, None])
    return y


def _expert_runner(x: Tensor, weights: ExpertWeights) -> Callable[[Tensor, int, Tensor | None, Activation], Tensor]:
    """A function that runs one expert on rows of x. If possible it packs an expert's weights at their first use."""
    if x.is_meta or not can_use_packed(x, weights.of_expert(0).output_maps):  # the other maps are at least as large

        def run_plain(rows: Tensor, expert: int, dropout_mask: Tensor | None, activation: Activation) -> Tensor:
            expert_weights = weights.of_expert(expert)
            up, *gate = uncounted_linears(rows, expert_weights.input_maps)
            hidden = hidden_activation(up, gate[0] if gate else None, dropout_mask, activation)
            return uncounted_linear(hidden, *expert_weights.output_maps[0])

        return run_plain
    tensors = [weight for weight in weights if weight is not None]
    packed_experts: dict[int, tuple[PackedMaps, PackedMaps]] = cached_pack(tensors, dict)

    def run_packed(rows: Tensor, expert: int, dropout_mask: Tensor | None, activation: Activation) -> Tensor:
        if expert not in packed_experts:
            expert_weights = weights.of_expert(expert)
            packed_experts[expert] = pack_maps(expert_weights.input_maps), pack_maps(expert_weights.output_maps)
        packed_inputs, packed_outputs = packed_experts[expert]
        up, *gate = packed_linear(rows, packed_inputs).split(weights.up.shape[1], dim=1)
        hidden = hidden_activation(up, gate[0] if gate else None, dropout_mask, activation)
        return packed_linear(hidden, packed_outputs)

    return run_packed


def _sorted(x: Tensor, assignment: ExpertAssignment, weights: ExpertWeights, activation: Activation) -> Tensor:
    y: Tensor = SortedExperts.apply(activation, x, assignment, assignment.gates, *weights)
    return y


def _per_expert_unsupported(facts: ExpertsFacts) -> str | None:
    if facts.gradients:
        return "gradients are required"
    if facts.device != "cpu":
        return "it reads the expert indices, which would synchronize with the device"
    if facts.assignments > MAX_PACKED_ROWS:
        return f"it takes up to {MAX_PACKED_ROWS} assignments, not {facts.assignments}"
    return None


def _sorted_unsupported(facts: ExpertsFacts) -> str | None:
    return None if facts.device == "cpu" else "it reads the number of rows of each expert on the host"


def _grouped_unsupported(facts: ExpertsFacts) -> str | None:
    if facts.dtype not in (torch.float32, torch.bfloat16):
        return f"torch's grouped product does not support {facts.dtype}"
    if facts.device not in ("cpu", "cuda"):
        return f"torch has no grouped product for {facts.device}"
    if facts.dtype != torch.bfloat16 and (facts.device == "cuda" or is_compiling()):
        return "torch's grouped product reads the offsets on the host unless rows are in bfloat16"
    if not facts.assignments:
        return "the call has no tokens"
    return None if facts.aligned else "rows of a weight are not aligned to 16 bytes"


EXPERTS = Operation(
    "experts",
    (
        Kernel("per_expert", _per_expert, _per_expert_unsupported, traceable=False),
        Kernel("sorted", _sorted, _sorted_unsupported, traceable=False),
        Kernel("grouped", grouped, _grouped_unsupported),
        Kernel("blockwise", blockwise, lambda facts: None),
        Kernel("reference", reference, lambda facts: None, traceable=False),
    ),
)


def run_experts(x: Tensor, assignment: ExpertAssignment, weights: ExpertWeights, activation: Activation) -> Tensor:
    """x [N, width] -> [N, width]: the outputs of each token's experts, weighted by their gates and summed."""
    hidden, width = weights.up.shape[1:]
    add_flops(experts_flops(assignment.expert_indices.numel(), width, hidden, weights.gate is not None))
    device_kind = x.device.type
    autocast = torch.amp.is_autocast_available(device_kind) and torch.is_autocast_enabled(device_kind)
    if autocast and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_kind)
        weights = weights.map(lambda weight: weight.to(dtype))
        x = x.to(dtype)
    if assignment.dropout_mask is not None:
        assignment = assignment._replace(dropout_mask=assignment.dropout_mask.to(x.dtype))
    tensors = (x, assignment.gates, *weights)
    facts = ExpertsFacts(
        assignments=assignment.expert_indices.numel(),
        gradients=torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors),
        device=device_type(x),
        dtype=x.dtype,
        aligned=width * x.element_size() % 16 == 0 and hidden * x.element_size() % 16 == 0,
    )
    kernel = EXPERTS.choose(facts)
    if x.is_meta:  # the number of rows per expert is unknown
        return x.new_empty(x.shape)
    with without_autocast(x):
        y: Tensor = kernel.run(x, assignment, weights, activation)
    return y


def run_on_weighted_inputs(
    x: Tensor, assignment: ExpertAssignment, weights: ExpertWeights, activation: Activation
) -> Tensor:
    """x [N, width] -> [N, width]: the experts' outputs for `gate · x`, summed without a weight."""
    tokens, chosen = assignment.gates.shape
    rows = (x[:, None] * assignment.gates[..., None].to(x.dtype)).flatten(0, 1)
    single = ExpertAssignment(
        assignment.expert_indices.reshape(-1, 1),
        torch.ones_like(assignment.gates).view(-1, 1),
        None if assignment.dropout_mask is None else assignment.dropout_mask.flatten(0, 1)[:, None],
        assignment.none_dropped,
    )
    return run_experts(rows, single, weights, activation).view(tokens, chosen, x.shape[1]).sum(1)


# Routing (Shazeer et al. 2017; Fedus et al. 2021; DeepSeek-V2 and V3): the experts of each token, and their gates.
#
# Let l be the router's logits and s the scores: softmax(l), sigmoid(l), sqrt(softplus(l)) or l itself. A token selects
# the k experts with the largest s + b, or with `sigmoid_logits` the largest l + b. The balancing bias b is used for
# selection only. Of equal scores the lowest index wins, on every device: `torch.topk` guarantees no order, a stable
# sort does. With groups, the best groups are selected first, then experts of these groups. The gates are the scores s
# of the selected experts, or renormalized to sum to 1, computed as
#
#     softmax over the selected experts, l_i − log Σ_selected exp(l_j)      (with log s for l, where s is no softmax)
#
# which never divides zero by zero. With `renormalize_eps` ε they are s / (Σ_selected s + ε). Everything is computed in
# at least float32.
#
# `sparse_mixer` (Liu et al. 2024, arXiv 2409.12136, in inference): experts are selected by l, one by one. The gate of
# expert i is a softmax over the logits that are near its own, (l_i − l_j) / max(|l_j|, l_i) ≤ `tolerance`, without the
# experts before it. Their training samples experts; here they are selected as in inference.


Routing = Literal[
    "softmax_topk", "topk_softmax", "sigmoid", "sigmoid_logits", "softmax_group_max", "sparse_mixer", "sqrt_softplus"
]  # fmt: skip
SIGMOID = ("sigmoid", "sigmoid_logits")
BY_LOGITS = ("topk_softmax", "sparse_mixer")


class RoutingConfig(NamedTuple):
    """How experts are selected. groups: number of equal groups of adjacent experts; the best `top_groups` are used.

    A group's score is the sum of its two best experts with `sigmoid` (DeepSeek-V3), else its best one (DeepSeek-V2).
    """

    routing: Routing
    top_k: int
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    renormalize_eps: float | None = None
    tolerance: float = 0.0  # of sparse_mixer


class Route(NamedTuple):
    """expert_indices int64 [..., k], best first, their gates [..., k], and all experts' probabilities [..., experts].

    Probabilities sum to 1: the softmax, or other scores divided by their sum. Load-balancing losses use them.
    """

    expert_indices: Tensor
    gates: Tensor
    probabilities: Tensor


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., width], weight [experts, width], bias [experts] -> [..., experts], in at least float32.

    Autocast is disabled: rounded logits could be equal where exact ones differ, and select other experts.
    """
    add_flops(2 * x.numel() * weight.shape[0])
    with without_autocast(x):
        wide = None if bias is None else at_least_float32(bias)
        return functional.linear(at_least_float32(x), at_least_float32(weight), wide)


# Hash routing (Roller et al. 2021; the first layers of DeepSeek V4, 2026): a fixed function of the token's id selects
# experts, and scores only weight them. A token's experts are those with the highest of a 32-bit hash of seed, id and
# expert, so that they differ, and each expert has about as many ids.

WORD = 2**32 - 1
MIXERS = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))  # shifts and factors (Wellons 2018, lowbias32)


def _mixed(x: Tensor) -> Tensor:
    """A permutation of 32-bit numbers, int64, in which every bit depends on every bit."""
    for shift, factor in MIXERS:
        x = (x ^ (x >> shift)) * factor & WORD
    return x


def hashed_experts(tokens: Tensor, experts: int, top_k: int, seed: int) -> Tensor:
    """The experts of token ids int64 [...], int64 [..., k], the highest hash first."""
    codes = _mixed(torch.arange(experts, device=tokens.device) + experts * seed & WORD)
    return stable_topk(_mixed(tokens[..., None] & WORD ^ codes), top_k)


def route(logits: Tensor, balancing_bias: Tensor | None, config: RoutingConfig, chosen: Tensor | None = None) -> Route:
    """logits [..., experts], balancing_bias [experts] (added for selection only) -> the route.

    chosen: int64 [..., k], the experts, if scores do not select them.
    Gates and probabilities are differentiable, expert indices are not.
    """
    with without_autocast(logits):
        logs = dict.fromkeys(SIGMOID, functional.logsigmoid) | {"sqrt_softplus": log_sqrt_softplus}
        log_scores = logs[config.routing](logits) if config.routing in logs else logits
        probabilities = log_scores.softmax(-1)
        score_functions = dict.fromkeys(SIGMOID, logits.sigmoid) | dict.fromkeys(BY_LOGITS, lambda: logits)
        score_functions["sqrt_softplus"] = log_scores.exp
        scores = score_functions.get(config.routing, lambda: probabilities)()
        with torch.no_grad():
            chosen_by = logits if config.routing == "sigmoid_logits" else scores
            biased = chosen_by if balancing_bias is None else chosen_by + balancing_bias.to(scores.dtype)
            expert_indices = select_experts(biased, config) if chosen is None else chosen
        eps = config.renormalize_eps
        if config.routing == "sparse_mixer":
            gates = near_gates(logits, expert_indices, config.tolerance)
            gates = gates / gates.sum(-1, keepdim=True) if config.renormalize and eps is None else gates
        elif eps is None and (config.renormalize or config.routing == "topk_softmax"):
            gates = log_scores.gather(-1, expert_indices).softmax(-1)
        else:
            gates = scores.gather(-1, expert_indices)
        if eps is not None:
            gates = gates / (gates.sum(-1, keepdim=True) + eps)
        return Route(expert_indices, gates if config.scale == 1.0 else gates * config.scale, probabilities)


def log_sqrt_softplus(x: Tensor) -> Tensor:
    """½ log(log(1 + exp(x))), which is x / 2 to the last bit below −40, where softplus may have no bits left."""
    return 0.5 * torch.where(x < -40.0, x, functional.softplus(x.clamp(min=-40.0), threshold=40.0).log())


def near_gates(logits: Tensor, expert_indices: Tensor, tolerance: float) -> Tensor:
    """logits [..., experts], expert_indices int64 [..., k], best first -> the gates of `sparse_mixer` [..., k]."""
    own, others = logits.gather(-1, expert_indices)[..., None], logits[..., None, :]
    selected = expert_indices[..., None] == torch.arange(logits.shape[-1], device=logits.device)
    with torch.no_grad():
        far = (own - others) / torch.maximum(others.abs(), own) > tolerance
        before = selected.cumsum(-2).bool() & ~selected
    near = torch.where(far | before, float("-inf"), others)
    return near.softmax(-1).gather(-1, expert_indices[..., None])[..., 0]


def select_experts(scores: Tensor, config: RoutingConfig) -> Tensor:
    """scores [..., experts] -> the selected experts, int64 [..., k], best first."""
    if config.groups > 1:
        grouped = scores.unflatten(-1, (config.groups, -1))
        group_scores = grouped.sort(-1, descending=True).values[..., : 2 if config.routing == "sigmoid" else 1].sum(-1)
        best_groups = stable_topk(group_scores, config.top_groups)
        selected_groups = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best_groups, True)
        scores = grouped.masked_fill(~selected_groups[..., None], float("-inf")).flatten(-2)
    return stable_topk(scores, config.top_k)


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest of scores [..., n], int64 [..., k], highest first; equal scores in order of index.

    NaN counts as highest. One launch for any k: one per selected expert would dominate a decode step.
    """
    if k == 1:
        return scores.argmax(-1, keepdim=True)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def within_capacity(
    expert_indices: Tensor, is_token: Tensor | None, num_experts: int, capacity_factor: float
) -> Tensor:
    """expert_indices int64 [B, T, k], is_token bool [B, T] -> bool [B, T, k]: True where the expert has capacity left.

    In each row the capacity of an expert is ⌈capacity_factor · k · tokens / num_experts⌉. Earlier tokens come first.
    """
    batch, length, top_k = expert_indices.shape
    assigned = torch.zeros(batch, length, num_experts, dtype=torch.int64, device=expert_indices.device)
    assigned.scatter_(-1, expert_indices, 1)
    tokens = torch.full((batch,), length, device=expert_indices.device)
    if is_token is not None:
        assigned, tokens = assigned * is_token[..., None], is_token.sum(1)
    capacity = (tokens.double() * (capacity_factor * top_k / num_experts)).ceil()
    return assigned.cumsum(1).gather(-1, expert_indices) <= capacity[:, None, None]
