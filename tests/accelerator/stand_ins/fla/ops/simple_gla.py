"""Stand-in for `fla.ops.simple_gla`, version 0.5.2."""

from typing import Any

from torch import Tensor

from tests.accelerator.stand_ins.fla.ops.loops import checked, loop


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """g [B, T, H] or g_gamma [H], which gets no gradient: the log decay. All heads are H. Returns (o, final_state)."""
    sequences = checked(q, k, v, initial_state, cu_seqlens, cu_seqlens_cpu)
    if v.shape[2] != q.shape[2] or (g is not None and (g.shape != v.shape[:3] or g_gamma is not None)):
        raise ValueError(f"all must have the same heads, and g or g_gamma be given: {q.shape}, {v.shape}")
    if g_gamma is not None:
        g = g_gamma.detach().expand(v.shape[:3])
    o, last = loop((q, k, v), None if g is None else g[..., None], None, scale, initial_state, sequences)
    return o, last if output_final_state else None
