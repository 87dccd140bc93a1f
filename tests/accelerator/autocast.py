"""Autocast of the pretended device: products in the narrow dtype and wide functions in float32, as CUDA's policies.

torch has no policies for a backend written in Python. Only the operators that heddle calls are listed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from tests.accelerator.waits import NAME

aten = torch.ops.aten
KEY = "AutocastPrivateUse1"
NARROW = (
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.conv1d.default,
    aten.scaled_dot_product_attention.default,
)
WIDE = (
    aten.exp.default,
    aten.log.default,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
    aten.softplus.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.cumsum.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.layer_norm.default,
)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """CUDA's autocast leaves float64, integers and tensors of other devices as they are."""
    if isinstance(value, Tensor) and value.device.type == NAME and value.is_floating_point():
        return value if value.dtype == torch.float64 else value.to(dtype)
    return [_cast(item, dtype) for item in value] if isinstance(value, list | tuple) else value


def _policy(operator: OpOverload, is_narrow: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME) if is_narrow else torch.float32
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))):
            return operator(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})

    return call


def register() -> list[torch.library.Library]:
    """Register the policies. They are in force as long as the result is alive."""
    others, listed = torch.library.Library("_", "IMPL", KEY), torch.library.Library("aten", "IMPL", KEY)
    others.fallback(torch.library.fallthrough_kernel)
    for operators, is_narrow in ((NARROW, True), (WIDE, False)):
        for operator in operators:
            listed.impl(operator, _policy(operator, is_narrow))
    return [others, listed]
