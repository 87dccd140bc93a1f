"""The recurrences of flash-linear-attention as loops over tokens, by the documentation of its functions.

q, k [B, T, H, K], v [B, T, HV, V], states [N, HV, K, V]. With `cu_seqlens` [N + 1] there is one row, and the sequences
in it begin from states of their own.
"""

from itertools import pairwise

import torch
from torch import Tensor

STATES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # the dtype of states by that of q


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> list[tuple[int, slice]]:
    """The sequences as (row, tokens). Raises what the library or its kernels would not accept."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in STATES:
        raise TypeError(f"q, k and v must be of one half precision: {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape != k.shape or q.shape[:2] != v.shape[:2] or v.shape[2] % q.shape[2]:
        raise ValueError(f"shapes do not fit: {q.shape}, {k.shape}, {v.shape}")
    if initial_state is not None and initial_state.dtype != STATES[q.dtype]:
        raise TypeError("initial_state must be in float32")
    if cu_seqlens is None:
        sequences = [(row, slice(0, q.shape[1])) for row in range(q.shape[0])]
    else:
        if q.shape[0] != 1:
            raise ValueError("the batch size must be 1 with cu_seqlens")
        if cu_seqlens_cpu is None or cu_seqlens_cpu.tolist() != cu_seqlens.tolist():
            raise ValueError("cu_seqlens_cpu must be cu_seqlens on the host")
        bounds = cu_seqlens_cpu.tolist()
        sequences = [(0, slice(a, b)) for a, b in pairwise(bounds)]
    if initial_state is not None and initial_state.shape[0] != len(sequences):
        raise ValueError(f"{len(sequences)} initial states are needed, here are {initial_state.shape[0]}")
    return sequences


def loop(
    qkv: tuple[Tensor, Tensor, Tensor],
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    sequences: list[tuple[int, slice]],
) -> tuple[Tensor, Tensor]:
    """S ← S exp(g), then S ← S + k (β (v − Sᵀ k))ᵀ, or S + k vᵀ without β; o = Sᵀ q · scale. g [B, T, HV, 1 or K].

    Returns o [B, T, HV, V] in q's dtype, and the last states in float32.
    """
    q, k, v = qkv
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    repeats = v.shape[2] // q.shape[2]
    wide_q, wide_k = (x.double().repeat_interleave(repeats, dim=2) for x in (q, k))
    values, rows, lasts = v.double(), [], []
    for index, (row, tokens) in enumerate(sequences):
        state = torch.zeros(*wide_k.shape[2:], v.shape[-1], dtype=torch.float64)
        if initial_state is not None:
            state = initial_state[index].double()
        for t in range(tokens.start, tokens.stop):
            if log_decay is not None:
                state = state * log_decay[row, t].double().exp()[..., None]
            key, value = wide_k[row, t][..., None], values[row, t][..., None, :]
            if beta is not None:
                value = (value - key.mT @ state) * beta[row, t].double()[:, None, None]
            state = state + key @ value
            rows.append((wide_q[row, t][..., None, :] @ state).squeeze(-2) * scale)
        lasts.append(state)
    return torch.stack(rows).view(v.shape).to(q.dtype), torch.stack(lasts).to(STATES[q.dtype])
