"""Every private name of torch that heddle uses; no other module uses any.

Any version of torch may change them; `tests/test_torch_private.py` has a test for each, which says what would break in
heddle. A name is looked up on use, and modules that torch may not have loaded are imported then.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed import ProcessGroup

Tensors = list[Tensor] | tuple[Tensor, ...]


class LightDispatchMode(TorchDispatchMode):
    """A dispatch mode whose first operation does not import torch's compiler; the compiler may trace into it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# Tensors, modules and operators.

_version_of: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]


def version_counters(tensors: Sequence[Tensor]) -> list[int]:
    """Each tensor's version counter: the number of in-place changes that torch counted."""
    return list(map(_version_of, tensors))


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number unique among live storages, also on the meta device."""
    key: int = storage._cdata
    return key


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is fake: it has a shape and no values, as within `fake_tensors`."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def fake_tensors() -> "FakeTensorMode":
    """Within the block, tensors have shapes and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_watched(module: nn.Module) -> bool:
    """Whether calling the module does more than its class defines: it has hooks, or an instance-level `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def operator_name(operator: Any) -> str:
    """The name of an operator that a dispatch mode sees, such as `aten::add_`, without its overload."""
    name: str = operator._schema.name
    return name


def is_mutable(operator: Any) -> bool:
    """Whether an operator that a dispatch mode sees writes to an argument."""
    return bool(operator._schema.is_mutable)


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode of this thread sees each operator."""
    return torch._C._len_torch_dispatch_stack() > 0


def in_backward_pass() -> bool:
    """Whether this thread runs autograd's backward pass."""
    return torch._C._current_graph_task_id() != -1


# Compilers.


def mark_constant(function: Callable[[], bool]) -> Callable[[], bool]:
    """Let torch's compiler treat a function's result as constant.

    Like `torch.compiler.assume_constant_result`, which imports the whole compiler to set the same mark.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def is_compiler_error(error: BaseException) -> bool:
    """Whether torch's compiler raised an error."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def compiler_cache() -> str:
    """The folder in which torch's compiler keeps what it built."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


# Operators.


def foreach_norm(tensors: Tensors) -> Tensors:
    """The Euclidean norm of each tensor, []."""
    return torch._foreach_norm(tensors)


def foreach_copy_(targets: Tensors, sources: Tensors) -> None:
    """Copy each source to its target."""
    torch._foreach_copy_(targets, sources)


def foreach_mul_(tensors: Tensors, factor: float | Tensor) -> None:
    """Multiply each tensor by one factor."""
    torch._foreach_mul_(tensors, factor)


def foreach_add_(tensors: Tensors, others: Tensors, alpha: float) -> None:
    """Add alpha times the matching entry of `others` to each tensor."""
    torch._foreach_add_(tensors, others, alpha=alpha)


def softmax_gradient(gradient: Tensor, weights: Tensor) -> Tensor:
    """The gradient of scores over the last dim, from softmax's output and its gradient, in the dtype of the output."""
    scores: Tensor = torch._softmax_backward_data(gradient, weights, -1, weights.dtype)
    return scores


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """torch's flash kernel for CUDA: [B, H, T, D] each -> the output, and the logsumexp [B, H, T] of the scores."""
    y, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    return y, logsumexp


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_logsumexp: bool, causal: bool, scale: float
) -> Tensor:
    """torch's efficient kernel for CUDA. A backward pass needs the logsumexp."""
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    y: Tensor = kernel(q, k, v, bias, with_logsumexp, 0.0, causal, scale=scale)[0]
    return y


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, with_logsumexp: bool, scale: float) -> Tensor:
    """cuDNN's kernel of causal attention. A backward pass needs the logsumexp."""
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    y: Tensor = kernel(q, k, v, None, with_logsumexp, 0.0, True, scale=scale)[0]
    return y


def cpu_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's flash kernel for a CPU: the output, and the logsumexp [B, H, T] of the scores."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    y, logsumexp = kernel(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return y, logsumexp


def can_pack_weights(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this CPU support oneDNN's packed weights of float32 or bfloat16."""
    names = ("mkldnn::_linear_pointwise", "mkldnn::_reorder_linear_weight")
    if not all(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU") for name in names):
        return False
    if dtype == torch.float32:
        return True
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    try:  # oneDNN may be restricted to fewer instructions than the CPU has, which torch's check does not see
        pack_weight(torch.zeros(16, 16, dtype=dtype), 1)
    except RuntimeError:
        return False
    return True


def pack_weight(weight: Tensor, rows: int) -> Tensor:
    """weight [out, in] in the layout that oneDNN reads fastest for products with this many rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def onednn_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [N, in] times a weight of `pack_weight`, plus bias [out] -> [N, out]."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return y


def int8_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 x [N, in] times int8 codes [out, in] times scales [out]."""
    y: Tensor = torch.ops.aten._weight_int8pack_mm(x, codes, scales)
    return y


def pack_int4(codes: Tensor) -> Tensor:
    """int32 codes [out, in] from 0 to 15 in the layout of `int4_product`."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed


def int4_product(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    """bfloat16 x [N, in] times codes of `pack_int4`; scales [in / group, out, 2] are steps and the values of code 8."""
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales)
    return y


# Process groups.


def default_store() -> Any:
    """The store of the default process group, which has `clone` besides the methods of `torch.distributed.Store`."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def limit_waits(seconds: float) -> None:
    """Limit how long collectives of every group of gloo or NCCL in this process wait from now on."""
    from torch.distributed import distributed_c10d

    named = getattr(distributed_c10d, "set_timeout", None)  # of torch 2.15
    limit = distributed_c10d._set_pg_timeout if named is None else named
    for group, (backend, _) in distributed_c10d._world.pg_map.items():
        if "gloo" in backend or "nccl" in backend:
            limit(timedelta(seconds=seconds), group)


def resolve_group(name: Any) -> "ProcessGroup":
    """The process group with this name, as functional collectives use it."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def flight_record() -> bytes | None:
    """The collectives of this process that torch's flight recorder traced, as JSON; None without a recorder."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    record: bytes | None = None if dump is None else dump()
    return record


def fake_store() -> Any:
    """A store for groups of the backend "fake", in which other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
