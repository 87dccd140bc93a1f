"""Stand-in for `fla.ops.gated_delta_rule`, version 0.5.2."""

from typing import Any

from torch import Tensor

from tests.accelerator.stand_ins.fla.ops.loops import checked, loop


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """g and beta [B, T, HV]: the log decay and the gate of each token. Returns (o, final_state)."""
    sequences = checked(q, k, v, initial_state, cu_seqlens, cu_seqlens_cpu)
    if g.shape != v.shape[:3] or beta.shape != v.shape[:3]:
        raise ValueError(f"g and beta must be [B, T, HV]: {g.shape}, {beta.shape}")
    o, last = loop((q, k, v), g[..., None], beta, scale, initial_state, sequences)
    return o, last if output_final_state else None
