"""Operators in C++ for CPUs: which there are, and which are in use.

Each file `GROUP.cpp` of this folder registers operators in torch's namespace `heddle`; `heddle.extensions` builds and
loads it. The kernel `native` of an operation calls `torch.ops.heddle.NAME`, and rejects calls for which `serves` was
false. Nothing is in use unless `heddle.extensions.install` was called: `heddle.machine` measures what is faster.

To add an operator, write it in a file of this folder, add its name to `OPERATORS` and its race to `races.py`, and give
its operation a kernel `native`, traceable=False, as in `heddle.numerics.norms`.
"""

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from heddle.torch_private import in_dispatch_mode

OPERATORS = {  # operator: the file that holds it, without .cpp
    "adamw": "elementwise",
    "causal_attention": "products",
    "cross_entropy": "elementwise",
    "delta": "recurrent",
    "latent_decode": "latent",
    "linear": "products",
    "norms": "elementwise",
    "rms_norm": "elementwise",
    "rotary": "elementwise",
    "ssd": "recurrent",
    "swiglu": "elementwise",
    "weighted_swiglu_backward": "elementwise",
}
TRACEABLE = ("causal_attention",)  # compiled graphs call them: each has a backward operator, and shapes on "meta"
NOT_IN_USE = "its C++ operator is not in use for these tensors"  # why a native kernel rejects a call

in_use: frozenset[str] = frozenset()  # the operators that `heddle.extensions.install` has loaded
_PLAIN_TENSORS = (Tensor, nn.Parameter)


def serves(operator: str, *tensors: Tensor | None) -> bool:
    """Whether the operator is in use and can read these tensors: on a CPU, with values, outside modes and compilers.

    A graph that is compiled may call those of `TRACEABLE`.
    """
    if operator not in in_use:
        return False
    if is_compiling():
        return operator in TRACEABLE and all(x is None or x.device.type == "cpu" for x in tensors)
    return (
        all(x is None or (type(x) in _PLAIN_TENSORS and x.device.type == "cpu") for x in tensors)
        and not in_dispatch_mode()
    )


def unsupported_dtype(dtype: torch.dtype) -> str | None:
    """Why operators cannot read tensors of a dtype, or None."""
    return None if dtype in (torch.float32, torch.bfloat16, torch.float64) else f"no C++ operator reads {dtype}"
