"""Stand-in for causal-conv1d (github.com/Dao-AILab/causal-conv1d, version 1.6.1, commit 0d2252d).

The function has the library's signature, layouts and checks, and computes a plain loop over the taps on a CPU.
"""

import torch
from torch import Tensor
from torch.nn import functional

__version__ = "1.6.1"


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """x (batch, dim, seqlen) with channels last in memory, weight (dim, width), seq_idx int32 (batch, seqlen)."""
    (batch, dim, length), width = x.shape, weight.shape[1]
    if weight.shape != (dim, width) or not 2 <= width <= 4 or dim % 8:
        raise ValueError(f"weight must be (dim, 2 to 4) with dim a multiple of 8: {weight.shape}")
    if x.stride(1) != 1 or activation is not None or bias is not None or return_final_states:
        raise ValueError("this stand-in takes channels last, and no bias, activation or final states")
    is_index = seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == (batch, length))
    if not is_index or (seq_idx is not None and initial_states is not None):
        raise ValueError("seq_idx must be int32 (batch, seqlen), without initial_states")
    if initial_states is not None and (
        initial_states.shape != (batch, dim, width - 1) or initial_states.stride(1) != 1
    ):
        raise ValueError(f"initial_states must be (batch, dim, width - 1), channels last: {initial_states.shape}")
    before = x.new_zeros(batch, dim, width - 1) if initial_states is None else initial_states
    inputs = torch.cat((before, x), dim=2).double()
    out = torch.zeros_like(x, dtype=torch.float64)
    for tap in range(width):
        term = inputs[:, :, tap : tap + length] * weight[:, tap, None].double()
        if seq_idx is not None:
            earlier = functional.pad(seq_idx, (width - 1, 0), value=-1)[:, tap : tap + length]
            term = term * (earlier == seq_idx)[:, None]
        out = out + term
    return out.to(x.dtype)
