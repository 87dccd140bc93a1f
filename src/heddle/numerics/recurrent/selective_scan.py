"""Mamba's selective scan (Gu & Dao 2023): a decay for each channel and each element of its state.

    S_t = exp(Δ_t A) ⊙ S_{t−1} + Δ_t k_t v_tᵀ,   y_t = S_tᵀ q_t + D v_t,   S [d_k, d_v], A [d_k] < 0

q, k and v are the paper's C, B and x. A head is a channel there, d_v is 1, and all heads share q and k. No product of
matrices replaces the states, so they are computed, in log T steps, each of which merges neighboring tokens in pairs.
Factors are exponentials of Δ A ≤ 0 and their products, so nothing overflows. States are kept for a stretch of tokens at
a time, and computed again in the backward pass. Everything is in at least float32.

Where the states are the output, `h_t = α_t h_{t−1} + g_t v_t` for each channel, `diagonal_recurrence` computes them the
same way.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from heddle.numerics.dispatch import DeviceSize, add_flops
from heddle.numerics.recurrent import ssd
from heddle.numerics.recurrent.fla import CuSeqlens
from heddle.numerics.recurrent.recurrence import RecurrenceKernels, recurrence_operation, run_recurrence

STRETCH = DeviceSize(cpu=2**20, accelerator=2**26)  # numbers of the states that are in memory at once
LEAST_TOKENS = 16  # of a stretch


class ScanInputs(NamedTuple):
    """Inputs of the operation: q, k [B, G, T, d_k], v [B, H, T, d_v], skip (D) [H].

    time_step (Δ ≥ 0) [B, H, T, 1], rate (A < 0) [H, d_k]. Head h reads queries and keys of group h // (H/G). A token
    with a time_step of 0 leaves the state unchanged. call_segment_ids, dtype: as in `ssd.SSDInputs`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    time_step: Tensor
    rate: Tensor
    skip: Tensor
    call_segment_ids: Tensor | None = None
    dtype: torch.dtype | None = None

    @property
    def log_decay(self) -> Tensor:
        """[1, H, 1, d_k], for a time step of 1."""
        return self.rate[None, :, None]

    @property
    def cu_seqlens(self) -> CuSeqlens | None:
        """None: no library is called."""
        return None


def reference(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: state S [B, H, d_k, d_v] -> (S_tᵀ q_t [B, H, T, d_v], the state after the last token)."""
    log_decay = inputs.time_step * inputs.log_decay
    by_token = ssd.SSDInputs(*inputs[:3], log_decay, inputs.time_step, inputs.skip, inputs.call_segment_ids)
    return ssd.reference(by_token, state)


def _step(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token without gradients. The state is updated in place."""
    decay = (inputs.time_step * inputs.rate[:, :, None]).exp()
    if inputs.call_segment_ids is not None:  # a new document starts from a zero state
        decay = decay.masked_fill(inputs.call_segment_ids[:, None, :, None] > 0, 0.0)
    q, k = (x[:, :, 0, None, :, None] for x in (inputs.q, inputs.k))
    by_group = state.mul_(decay).unflatten(1, (q.shape[1], -1))
    by_group.addcmul_(k, (inputs.v * inputs.time_step).unflatten(1, (q.shape[1], -1)))
    return (by_group * q).sum(-2, keepdim=True).flatten(1, 2), state


def _by_halves(decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """Decays and additions [T, ...], and the state before them -> all states [T, ...].

    Neighbors are merged in pairs; the same recurrence over the pairs gives the state before each pair.
    """
    length = len(decay)
    if length == 1:
        return torch.addcmul(added, decay, state)
    if length % 2:
        states = _by_halves(decay[:-1], added[:-1], state)
        return torch.cat((states, torch.addcmul(added[-1:], decay[-1:], states[-1:])))
    (first, second), (to_first, to_second) = ((x[::2], x[1::2]) for x in (decay, added))
    after = _by_halves(first * second, torch.addcmul(to_second, second, to_first), state)
    before = torch.cat((state.expand(after[:1].shape), after[:-1]))
    return torch.stack((torch.addcmul(to_first, first, before), after), dim=1).flatten(0, 1)


class _States(torch.autograd.Function):
    """All states. The gradients of the states are a scan too, from the last token to the first."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
        states = _by_halves(decay, added, state)
        ctx.save_for_backward(decay, states, state)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (gradient,), (decay, states, state) = gradients, ctx.saved_tensors
        of_next = torch.cat((decay[1:], torch.zeros_like(decay[:1])))
        totals = _by_halves(of_next.flip(0), gradient.flip(0), torch.zeros_like(state)).flip(0)
        before = torch.cat((state[None], states[:-1]))
        return (totals * before).sum_to_size(decay.shape), totals, decay[0] * totals[0]


def _stretch(
    q: Tensor, k: Tensor, v: Tensor, time_step: Tensor, rate: Tensor, starts: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Consecutive tokens, first dim: q, k [T, B, G, d_k], v [T, B, G, R, d_v], Δ [T, B, G, R], A [G, d_k, R].

    starts: bool [T, B], whether a new document begins. state [B, G, d_k, R, d_v].
    """
    decay = (time_step[:, :, :, None] * rate).exp()
    if starts is not None:
        decay = decay.masked_fill(starts[:, :, None, None, None], 0.0)
    added = k[..., None, None] * (v * time_step[..., None])[:, :, :, None]
    states: Tensor = _States.apply(decay[..., None], added, state)
    y = q[:, :, :, None] @ states.flatten(4)
    return y.view(v.shape), states[-1].clone()  # not a view of all states


def _document_starts(ids: Tensor | None) -> Tensor | None:
    """call_segment_ids [B, T] -> bool [T, B], whether a new document begins."""
    return None if ids is None else (ids.diff(dim=1, prepend=ids.new_zeros(len(ids), 1)) != 0).T


def _scan(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Stretch by stretch; only the inputs of each are saved for the backward pass."""
    stretch = max(LEAST_TOKENS, STRETCH.on(inputs.v) // max(1, state.numel()))
    if inputs.v.is_meta and not torch.is_grad_enabled():  # a size is asked for, and shapes take no memory
        stretch = inputs.v.shape[2]
    groups, starts = inputs.k.shape[1], _document_starts(inputs.call_segment_ids)
    q, k = (x.permute(2, 0, 1, 3) for x in (inputs.q, inputs.k))
    v, time_step = (x.unflatten(1, (groups, -1)).movedim(3, 0) for x in (inputs.v, inputs.time_step[..., 0]))
    rate = inputs.rate.unflatten(0, (groups, -1)).mT.contiguous()
    current, outputs = state.unflatten(1, (groups, -1)).transpose(2, 3), []
    for first in range(0, len(q), stretch):
        part = slice(first, first + stretch)
        tokens = q[part], k[part], v[part], time_step[part], rate, None if starts is None else starts[part]
        if torch.is_grad_enabled():
            y, current = checkpoint(_stretch, *tokens, current, use_reentrant=False, preserve_rng_state=False)
        else:
            y, current = _stretch(*tokens, current)
        outputs.append(y)
    return torch.cat(outputs).movedim(0, 3).flatten(1, 2), current.transpose(2, 3).flatten(1, 2).contiguous()


SELECTIVE_SCAN = recurrence_operation("selective_scan", RecurrenceKernels(_step, _scan, None, _scan, reference))


def selective_scan(inputs: ScanInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `ssd.run_with_skip`."""
    return ssd.run_with_skip(SELECTIVE_SCAN, inputs, inputs.skip, state)


class DiagonalInputs(NamedTuple):
    """Inputs of `h_t = α_t h_{t−1} + g_t v_t`: v [B, H, T, d], factor (g) and log_decay (log α ≤ 0) [B, H, T, 1].

    A token with zeros for log α and v leaves the state unchanged. call_segment_ids, dtype: as in `ssd.SSDInputs`.
    """

    v: Tensor
    factor: Tensor
    log_decay: Tensor
    call_segment_ids: Tensor | None = None
    dtype: torch.dtype | None = None

    @property
    def k(self) -> Tensor:
        """[B, H, T, 1]: the state has one row, as with keys of one element."""
        return self.log_decay

    @property
    def cu_seqlens(self) -> CuSeqlens | None:
        """None: no library is called."""
        return None


def diagonal_reference(inputs: DiagonalInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: state [B, H, 1, d] -> (h [B, H, T, d], the state after the last token)."""
    starts, outputs, u = _document_starts(inputs.call_segment_ids), [inputs.v[:, :, :0]], inputs.factor * inputs.v
    for t, (added, decay) in enumerate(zip(u.unbind(2), inputs.log_decay.exp().unbind(2), strict=True)):
        if starts is not None:
            state = state.masked_fill(starts[t, :, None, None, None], 0.0)
        state = state * decay[:, :, None] + added[:, :, None]
        outputs.append(state)
    return torch.cat(outputs, dim=2), state


def _diagonal_step(inputs: DiagonalInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token without gradients. The state is updated in place."""
    decay = inputs.log_decay.exp()
    if inputs.call_segment_ids is not None:  # a new document starts from a zero state
        decay = decay.masked_fill(inputs.call_segment_ids[:, None, :, None] > 0, 0.0)
    return state.mul_(decay).addcmul_(inputs.factor, inputs.v).clone(), state


def _diagonal_scan(inputs: DiagonalInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    starts = _document_starts(inputs.call_segment_ids)
    decay, added = (x.movedim(2, 0) for x in (inputs.log_decay.exp(), inputs.factor * inputs.v))
    if starts is not None:
        decay = decay.masked_fill(starts[:, :, None, None], 0.0)
    states: Tensor = _States.apply(decay, added, state[:, :, 0])
    return states.movedim(0, 2), states[-1, :, :, None].clone()  # not a view of all states


DIAGONAL = recurrence_operation(
    "diagonal_recurrence", RecurrenceKernels(_diagonal_step, _diagonal_scan, None, _diagonal_scan, diagonal_reference)
)


def diagonal_recurrence(inputs: DiagonalInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """state [B, H, 1, d] (None: zeros) -> (h [B, H, T, d], the state after the last token). May update it in place."""
    add_flops(2 * inputs.v.numel())
    return run_recurrence(DIAGONAL, inputs, state)
