"""Experts on a CPU: rows of choices sorted by expert, one product an expert and projection.

With h = f(up x), y = down h and the gate g of a row, and s what flows back into the token's answer, a row has

    to g: s · y = (downᵀ s) · h,   to h: g downᵀ s,   to down: s (g h)ᵀ

so that y is not kept, and gates multiply hidden rows instead of rows of the stream.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.errors import ConfigError
from heddle.numerics.activations import Activation
from heddle.numerics.linear import Map
from heddle.numerics.norms import without_autocast

ALIKE = 16  # rows: oneDNN prepares half a millisecond for each number of rows that it has not met


class Weights(NamedTuple):
    """up and gate [E, hidden, width], down [E, width, hidden], their biases [E, ...]; no gate: a plain MLP."""

    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_bias: Tensor | None = None

    @property
    def into(self) -> list[Map]:
        """The maps of x: up, and gate if there is one."""
        gated: list[Map] = [] if self.gate is None else [(self.gate, self.gate_bias)]
        return [(self.up, self.up_bias), *gated]

    @property
    def out_of(self) -> list[Map]:
        """The map of what is hidden."""
        return [(self.down, self.down_bias)]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        """Each of them changed."""
        others = (None if weight is None else change(weight) for weight in self[2:])
        return Weights(change(self.up), change(self.down), *others)

    def of(self, expert: int) -> "Weights":
        """Those of one expert, without their first dimension."""
        return self.each(lambda weight: weight[expert])


class Choices(NamedTuple):
    """experts int64 [N, k], −1 where dropped; their gates [N, k]; keep [N, k, hidden], by which hidden is multiplied.

    No expert stands twice in a row. all_kept: that none is dropped, known without looking.
    """

    experts: Tensor
    gates: Tensor
    keep: Tensor | None = None
    all_kept: bool = False


class _Rows(NamedTuple):
    """M rows, sorted by expert, each expert's as many as a multiple of `ALIKE`.

    choice int64 [M], among the N·k, any where a row is unused; place int64 [N, k]: the row of each choice, M where it
    is dropped; pieces: (expert, its rows, those of them that are unused), of the experts that have any.
    """

    choice: Tensor
    place: Tensor
    pieces: list[tuple[int, slice, slice]]


def _sort(experts: Tensor, number: int) -> _Rows:
    flat = experts.reshape(-1)
    named = torch.where(flat < 0, number, flat)
    order = named.argsort(stable=True)
    sizes = torch.bincount(named, minlength=number + 1).tolist()[:number]
    most = -(-len(flat) // ALIKE) * ALIKE + number * ALIKE if len(flat) else 0  # whatever the sizes are
    pieces, moved, start, taken = [], [], 0, 0
    for expert, size in enumerate(sizes):
        moved.append(start - taken)
        stop = start + -(-size // ALIKE) * ALIKE
        if size:
            pieces.append((expert, slice(start, stop), slice(start + size, stop)))
        start, taken = stop, taken + size
    order = order[:taken]
    row = torch.arange(taken) + torch.repeat_interleave(torch.tensor(moved), torch.tensor(sizes))
    place, choice = flat.new_full(flat.shape, most), flat.new_zeros(most)
    place[order], choice[row] = row, order
    return _Rows(choice, place.view(experts.shape), pieces)


def _spread(x: Tensor, choice: Tensor, top_k: int, pieces: list[tuple[int, slice, slice]]) -> Tensor:
    """Tokens x [N, width] to the rows of their choices [M, width], zero where an expert's row is unused."""
    made = x.index_select(0, choice // top_k)
    for _, _, unused in pieces:
        made[unused] = 0.0
    return made


def _summed(y: Tensor, place: Tensor, gates: Tensor | None = None) -> Tensor:
    """Rows y [M + 1, width], the last of them zero, gathered to tokens [N, width]."""
    return functional.embedding_bag(place, y, mode="sum", per_sample_weights=gates)


def _open(rows: int, like: Tensor, width: int) -> Tensor:
    """[rows + 1, width] to be written; only the last row is set, to zero."""
    made = like.new_empty(rows + 1, width)
    made[rows] = 0.0
    return made


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.mT, out=out)
    else:
        torch.addmm(bias, x, weight.mT, out=out)


def hidden_of(up: Tensor, gate: Tensor | None, keep: Tensor | None, activation: Activation) -> Tensor:
    hidden = activation(up, gate)
    return hidden if keep is None else hidden * keep


class Sorted(torch.autograd.Function):
    """Products expert by expert, everything else on all rows at once: few calls, and buffers that are always as large.

    Buffers as large as an expert's rows of this call would be of another size in every call: memory would fragment.
    """

    @staticmethod
    def forward(ctx: Any, activation: Activation, x: Tensor, choices: Choices, gates: Tensor, *given: Any) -> Tensor:
        weights = Weights(*given)
        rows = _sort(choices.experts, weights.up.shape[0])
        number = len(rows.choice)
        read = _spread(x, rows.choice, choices.experts.shape[1], rows.pieces)
        up = x.new_empty(number, weights.up.shape[1])
        gate = None if weights.gate is None else torch.empty_like(up)
        for expert, piece, _ in rows.pieces:
            own = weights.of(expert)
            _linear(read[piece], own.up, own.up_bias, up[piece])
            if gate is not None:
                assert own.gate is not None
                _linear(read[piece], own.gate, own.gate_bias, gate[piece])
        keep = None if choices.keep is None else choices.keep.flatten(0, 1).index_select(0, rows.choice)
        hidden, y = hidden_of(up, gate, keep, activation), _open(number, x, x.shape[1])
        for expert, piece, _ in rows.pieces:
            own = weights.of(expert)
            _linear(hidden[piece], own.down, own.down_bias, y[piece])
        ctx.activation, ctx.pieces = activation, rows.pieces
        ctx.save_for_backward(read, gates, up, gate, keep, rows.choice, rows.place, *given)
        return _summed(y, rows.place, gates.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise ConfigError('experts: this form has no second gradient; ask for kernels(experts="reference")')
        with without_autocast(slope):
            return _backward(ctx, slope)


def _backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
    read, gates, up, gate, keep, choice, place, *given = ctx.saved_tensors
    weights, wanted = Weights(*given), ctx.needs_input_grad[4:]
    shares = gates.flatten().index_select(0, choice)[:, None].to(read.dtype)
    back, pulled = _spread(slope, choice, place.shape[1], ctx.pieces), torch.empty_like(up)
    for expert, piece, _ in ctx.pieces:
        torch.mm(back[piece], weights.down[expert], out=pulled[piece])
    with torch.enable_grad():
        inner = [whole.detach().requires_grad_() for whole in (up, gate) if whole is not None]
        hidden = hidden_of(inner[0], inner[1] if gate is not None else None, keep, ctx.activation)
    to_gates = _open(len(choice), gates, 1)
    to_gates[:-1] = (pulled * hidden.detach()).sum(1, keepdim=True)
    felt = back  # by the bias of down
    if weights.down_bias is not None:
        felt = back * shares
        for expert, piece, _ in ctx.pieces:
            to_gates[piece] += (back[piece] @ weights.down_bias[expert])[:, None]
    slopes = torch.autograd.grad(hidden, inner, pulled.mul_(shares))
    hidden = hidden.detach().mul_(shares)
    idle = sorted(set(range(len(weights.up))) - {expert for expert, _, _ in ctx.pieces})
    to = _Slopes(*(_unset(w, idle) if asked else None for w, asked in zip(given, wanted, strict=True)))
    to_rows = _open(len(choice), read, read.shape[1])
    for expert, piece, _ in ctx.pieces:
        own = weights.of(expert)
        into = _Slopes(*(None if w is None else w[expert] for w in to))
        _write(back[piece], hidden[piece], into.down, None)
        if into.down_bias is not None:
            torch.sum(felt[piece], 0, out=into.down_bias)
        _write(slopes[0][piece], read[piece], into.up, into.up_bias)
        torch.mm(slopes[0][piece], own.up, out=to_rows[piece])
        if own.gate is not None:
            _write(slopes[1][piece], read[piece], into.gate, into.gate_bias)
            to_rows[piece].addmm_(slopes[1][piece], own.gate)
    return None, _summed(to_rows, place), None, to_gates[:, 0][place], *to


class _Slopes(NamedTuple):
    """Gradients of `Weights`, or one expert's; None: not wanted, or no such weight."""

    up: Tensor | None
    down: Tensor | None
    gate: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    gate_bias: Tensor | None


def _unset(weight: Tensor, idle: list[int]) -> Tensor:
    """A gradient to be written, zero for experts without rows."""
    made = torch.empty_like(weight)
    for expert in idle:
        made[expert].zero_()
    return made


def _write(slopes: Tensor, inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """The gradient of a projection, into that of its expert."""
    if weight is not None:
        torch.mm(slopes.mT, inputs, out=weight)
    if bias is not None:
        torch.sum(slopes, 0, out=bias)
