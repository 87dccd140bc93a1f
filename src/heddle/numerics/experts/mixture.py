"""Experts: `y = Σ_j gate_j · down_j f(x)`, f as in dense feed-forwards, of the k experts a token takes and no other.

A choice is one of the N·k pairs of a token and an expert; a choice of −1 is dropped. Rows of choices are sorted by
expert, so that each expert's product is one over its own rows. Slices of one stacked weight have, under autograd, a
gradient as large as the whole each; here each expert's gradient is written where it belongs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.activations import Activation
from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.dispatch.operation import Form, Operation, device_of
from heddle.numerics.experts.sorted import Choices, Sorted, Weights, hidden_of
from heddle.numerics.linear import PACKED_ROWS, Packed, kept, pack, packed_rows, packs_serve, product, products
from heddle.numerics.norms import without_autocast


class Facts(NamedTuple):
    """What decides the form: choices, gradients wanted, device, dtype, and the narrowest row of a weight in bytes."""

    choices: int
    gradients: bool
    device: str
    dtype: torch.dtype
    aligned: bool


def flops(choices: int, width: int, hidden: int, gated: bool) -> int:
    """Operations of the chosen experts alone."""
    return 2 * choices * width * hidden * (3 if gated else 2)


def reference(x: Tensor, choices: Choices, weights: Weights, activation: Activation) -> Tensor:
    """One expert after the other: x [N, width] -> [N, width]."""
    y = torch.zeros_like(x)
    for expert in range(weights.up.shape[0]):
        own = weights.of(expert)
        token, slot = (choices.experts == expert).nonzero(as_tuple=True)
        gate = None if own.gate is None else functional.linear(x[token], own.gate, own.gate_bias)
        hidden = activation(functional.linear(x[token], own.up, own.up_bias), gate)
        if choices.keep is not None:
            hidden = hidden * choices.keep[token, slot]
        out = functional.linear(hidden, own.down, own.down_bias) * choices.gates[token, slot, None].to(x.dtype)
        y = y.index_add(0, token, out)
    return y


def _few(x: Tensor, choices: Choices, weights: Weights, activation: Activation) -> Tensor:
    """Expert by expert, of those that were chosen."""
    met: dict[int, tuple[list[int], list[int]]] = {}
    for row, chosen in enumerate(choices.experts.tolist()):
        for slot, expert in enumerate(chosen):
            if expert >= 0:
                rows, slots = met.setdefault(expert, ([], []))
                rows.append(row)
                slots.append(slot)
    y, gates, alone = torch.zeros_like(x), choices.gates.to(x.dtype), x.shape[0] == 1
    run = _runner(x, weights)
    for expert in sorted(met):
        rows, slots = met[expert]
        keep = None if choices.keep is None else choices.keep[rows, slots]
        out = run(x if alone else x[rows], expert, keep, activation)
        if alone:
            y.addcmul_(out, gates[:, slots[0], None])
        else:
            y.index_add_(0, torch.tensor(rows, device=x.device), out * gates[rows, slots, None])
    return y


def _runner(x: Tensor, weights: Weights) -> Callable[[Tensor, int, Tensor | None, Activation], Tensor]:
    """One expert on rows of x: by packed copies, made when an expert is first met, where they serve."""
    if x.is_meta or not packs_serve(x, weights.of(0).out_of):  # the others are as large, or larger

        def plain(rows: Tensor, expert: int, keep: Tensor | None, activation: Activation) -> Tensor:
            own = weights.of(expert)
            up, *gate = products(rows, own.into)
            return product(hidden_of(up, gate[0] if gate else None, keep, activation), *own.out_of[0])

        return plain
    copies: dict[int, tuple[Packed, Packed]] = kept([one for one in weights if one is not None], dict)

    def packed(rows: Tensor, expert: int, keep: Tensor | None, activation: Activation) -> Tensor:
        if expert not in copies:
            own = weights.of(expert)
            copies[expert] = pack(own.into), pack(own.out_of)
        into, out_of = copies[expert]
        up, *gate = packed_rows(rows, into).split(weights.up.shape[1], dim=1)
        return packed_rows(hidden_of(up, gate[0] if gate else None, keep, activation), out_of)

    return packed


def _sorted(x: Tensor, choices: Choices, weights: Weights, activation: Activation) -> Tensor:
    y: Tensor = Sorted.apply(activation, x, choices, choices.gates, *weights)
    return y


def _grouped(x: Tensor, choices: Choices, weights: Weights, activation: Activation) -> Tensor:
    """All experts in one product each, their rows told by offsets that stay on the device.

    What torch's product leaves in rows beyond the last offset, those of dropped choices, is anything.
    """
    number, top_k = weights.up.shape[0], choices.experts.shape[1]
    flat = choices.experts.reshape(-1)
    order = torch.where(flat < 0, number, flat).argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    own = flat.index_select(0, order)
    counts = torch.zeros(number, dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat.clamp(min=0), (flat >= 0).int())
    offsets = counts.cumsum(0, dtype=torch.int32)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch._grouped_mm(rows, weight.mT, offs=offsets)
        return y if bias is None else real(y + bias.index_select(0, own.clamp(min=0)))

    def real(rows: Tensor) -> Tensor:  # stops what flows back into the others, too
        return rows if choices.all_kept else rows.masked_fill((own < 0)[:, None], 0.0)

    rows = real(x[:, None].expand(-1, top_k, -1).reshape(len(flat), -1).index_select(0, order))
    keep = None if choices.keep is None else choices.keep.flatten(0, 1).index_select(0, order)
    gate = None if weights.gate is None else linear(rows, weights.gate, weights.gate_bias)
    hidden = hidden_of(linear(rows, weights.up, weights.up_bias), gate, keep, activation)
    y = real(linear(hidden, weights.down, weights.down_bias)).index_select(0, place)
    return torch.bmm(choices.gates[:, None].to(y.dtype), y.unflatten(0, (-1, top_k))).squeeze(1)


def _no_few(facts: Facts) -> str | None:
    if facts.gradients:
        return "gradients are wanted"
    if facts.device != "cpu":
        return "it reads the choices, for which other devices have to be waited for"
    return None if facts.choices <= PACKED_ROWS else f"it takes {PACKED_ROWS} choices, here are {facts.choices}"


def _no_sorted(facts: Facts) -> str | None:
    return None if facts.device == "cpu" else "it reads how often each expert was chosen"


def _no_grouped(facts: Facts) -> str | None:
    if facts.dtype not in (torch.float32, torch.bfloat16):
        return f"torch's grouped product takes no {facts.dtype}"
    if facts.device not in ("cpu", "cuda"):
        return f"torch has no grouped product for {facts.device}"
    if not facts.choices:
        return "there is no token"
    return None if facts.aligned else "rows of a weight do not start at multiples of 16 bytes"


EXPERTS = Operation(
    "experts",
    (
        Form("few", _few, _no_few),
        Form("sorted", _sorted, _no_sorted),
        Form("grouped", _grouped, _no_grouped),
        Form("reference", reference, lambda facts: None),
    ),
)


def experts(x: Tensor, choices: Choices, weights: Weights, activation: Activation) -> Tensor:
    """x [N, width] -> [N, width]: what the chosen experts make of each token, times their gates, summed."""
    hidden, width = weights.up.shape[1:]
    count(flops(choices.experts.numel(), width, hidden, weights.gate is not None))
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        weights = weights.each(lambda weight: weight.to(dtype))
        x = x.to(dtype)
    if choices.keep is not None:
        choices = choices._replace(keep=choices.keep.to(x.dtype))
    learning = (x, choices.gates, *weights)
    facts = Facts(
        choices=choices.experts.numel(),
        gradients=torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in learning),
        device=device_of(x),
        dtype=x.dtype,
        aligned=width * x.element_size() % 16 == 0 and hidden * x.element_size() % 16 == 0,
    )
    form = EXPERTS.choose(facts)
    if x.is_meta:  # how many rows an expert has is known of real tokens only
        return x.new_empty(x.shape)
    with without_autocast(x):
        y: Tensor = form.run(x, choices, weights, activation)
    return y
