"""Stand-in for `fla.ops.kda`, version 0.5.2."""

from typing import Any

from torch import Tensor

from tests.accelerator.stand_ins.fla.ops.loops import checked, loop


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """g [B, T, HV, K] the log decay of each channel of the key, beta [B, T, HV]. Returns (o, final_state)."""
    sequences = checked(q, k, v, initial_state, cu_seqlens, cu_seqlens_cpu)
    if g.shape != (*v.shape[:3], k.shape[3]) or beta.shape != v.shape[:3] or k.shape[3] > 256:
        raise ValueError(f"g must be [B, T, HV, K] with K ≤ 256 and beta [B, T, HV]: {g.shape}, {beta.shape}")
    o, last = loop((q, k, v), g, beta, scale, initial_state, sequences)
    return o, last if output_final_state else None
