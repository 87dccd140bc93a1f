"""Mixture of experts: `y = Σ_j gate_j · down_j f(x)` over the k experts of each token, f as in dense feed-forwards.

Only the selected experts are computed. An assignment is one of the N·k pairs of a token and an expert; an expert index
of −1 means that it is dropped.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from heddle.numerics.activations import Activation
from heddle.numerics.dispatch.flop_counter import add_flops
from heddle.numerics.dispatch.operation import Kernel, Operation, device_type
from heddle.numerics.experts.grouped import blockwise, grouped
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights, SortedExperts, hidden_activation
from heddle.numerics.linear import cached_pack, can_use_packed, uncounted_linear, uncounted_linears
from heddle.numerics.norms import without_autocast
from heddle.numerics.packed_product import MAX_PACKED_ROWS, PackedMaps, pack_maps, packed_linear


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
            y.addcmul_(out, gates[:, slots[0], None])
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
        return "gradients are wanted"
    if facts.device != "cpu":
        return "it reads the expert indices, which would synchronize with the device"
    if facts.assignments > MAX_PACKED_ROWS:
        return f"it takes {MAX_PACKED_ROWS} assignments, here are {facts.assignments}"
    return None


def _sorted_unsupported(facts: ExpertsFacts) -> str | None:
    return None if facts.device == "cpu" else "it reads the number of rows of each expert"


def _grouped_unsupported(facts: ExpertsFacts) -> str | None:
    if facts.dtype not in (torch.float32, torch.bfloat16):
        return f"torch's grouped product takes no {facts.dtype}"
    if facts.device not in ("cpu", "cuda"):
        return f"torch has no grouped product for {facts.device}"
    if facts.dtype != torch.bfloat16 and (facts.device == "cuda" or is_compiling()):
        return "torch's grouped product reads the offsets on the host unless rows are in bfloat16"
    if not facts.assignments:
        return "there is no token"
    return None if facts.aligned else "rows of a weight do not start at multiples of 16 bytes"


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
