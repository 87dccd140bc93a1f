"""The loss of Liger, for `kernels(linear_cross_entropy="liger")`: heddle never chooses it itself.

Liger reads the number of targets on the host and has small chunks, but its Triton kernel needs no compilation. The
adapter was never run on a GPU.
"""

import torch
from torch import Tensor

from heddle.numerics.dispatch.libraries import optional_module

MODULE = "liger_kernel.transformers.functional"


def liger_unsupported() -> str | None:
    """Why Liger cannot be called here, or None."""
    return "liger_kernel is not installed" if optional_module(MODULE) is None else None


def liger_loss_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, softcap: float | None
) -> Tensor:
    """Sum of the losses of hidden [N, width] and targets [N], in float32. So are gradients of weights."""
    functions = optional_module(MODULE)
    assert functions is not None
    loss: Tensor = functions.liger_fused_linear_cross_entropy(
        hidden, weight, targets, bias=bias, reduction="sum", softcap=softcap, accum_dtype=torch.float32
    )
    return loss
