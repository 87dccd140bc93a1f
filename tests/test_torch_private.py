"""Each private name of torch does what heddle needs of it. A docstring says what is lost where a test fails."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional

from heddle import torch_private
from heddle.torch_private import LightDispatchMode, TorchDispatchMode

Q, K, V = torch.randn(3, 1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
SCALE = 0.25


class Operators(TorchDispatchMode):
    """Notes the name of each operator, and whether it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((torch_private.operator_name(function), torch_private.is_mutable(function)))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def group() -> Iterator[HashStore]:
    """The store of a process group of one rank."""
    store = HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    distributed.destroy_process_group()


def test_a_dispatch_mode_sees_operators() -> None:
    """`heddle plan` counts them, `heddle show` answers them by shape, and a diverged training looks for NaN in them."""
    with Operators() as operators:
        torch.ones(2).add_(1.0)
    assert operators.seen == [("aten::ones", False), ("aten::add_", True)]


def test_a_light_dispatch_mode_imports_no_compiler() -> None:
    """`heddle show` and dry runs take a second longer: torch wraps a mode's method in one that imports the compiler."""

    def dispatch(self: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))

    modes: list[Any] = [
        type("Mode", (base,), {"__torch_dispatch__": dispatch}) for base in (LightDispatchMode, TorchDispatchMode)
    ]
    light, other = modes
    assert light.__torch_dispatch__ is dispatch
    assert other.__torch_dispatch__ is not dispatch


def test_trees_have_leaves() -> None:
    """Arguments of operators are not searched for tensors."""
    assert torch_private.tree_leaves(((1, [2]), {"a": 3})) == [1, 2, 3]
    assert torch_private.tree_map(lambda x: x + 1, ((1, [2]), {"a": 3})) == ((2, [3]), {"a": 4})


def test_version_counters_count_changes_in_place() -> None:
    """Generation goes on with packed copies of weights that have changed."""
    x, y = torch.zeros(2), nn.Parameter(torch.zeros(2))
    before = torch_private.version_counters([x, y])
    x.add_(1.0)
    assert torch_private.version_counters([x, y]) == [before[0] + 1, before[1]]


def test_storage_keys_tell_storages_apart() -> None:
    """The planner counts shared memory twice, or none of it on the meta device."""
    x, y = torch.empty(2, device="meta"), torch.empty(2, device="meta")
    keys = [torch_private.storage_key(tensor.untyped_storage()) for tensor in (x, x[1:], y)]
    assert keys[0] == keys[1] != keys[2]


def test_fake_tensors_are_known() -> None:
    """Dry runs and compiled losses read values that are not there."""
    with torch_private.fake_tensors():
        assert torch_private.is_fake(torch.zeros(2))
    assert not torch_private.is_fake(torch.zeros(2))


def test_hooks_of_a_module_are_seen() -> None:
    """Fused projections pass by hooks, LoRA adapters and offloaded weights."""
    modules = [nn.Linear(2, 2) for _ in range(4)]
    modules[1].register_forward_hook(lambda *_: None)
    modules[2].register_forward_pre_hook(lambda *_: None)
    modules[3].forward = lambda x: x  # type: ignore[assignment, method-assign]
    assert [torch_private.is_watched(module) for module in modules] == [False, True, True, True]


def test_the_backward_pass_is_known() -> None:
    """A diverged training says that the loss, and not the backward pass, made the first NaN."""
    x, seen = torch.ones((), requires_grad=True), list[bool]()
    y = x * 2
    y.register_hook(lambda _: seen.append(torch_private.in_backward_pass()))
    y.backward()
    assert (seen, torch_private.in_backward_pass()) == ([True], False)


def test_a_dispatch_mode_is_known() -> None:
    """Operators in C++ run within modes, which see nothing of what they compute."""
    with Operators():
        assert torch_private.in_dispatch_mode()
    assert not torch_private.in_dispatch_mode()


def test_the_compiler_calls_a_function_that_is_constant() -> None:
    """Compiled models trace the import of optional libraries, and fail."""
    calls = []

    @torch_private.mark_constant
    def is_there() -> bool:
        calls.append(sys.modules.get("no such module"))
        return True

    compiled = torch.compile(lambda x: x + is_there(), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == compiled(torch.zeros(1)).item() == 1
    assert calls == [None]


def test_errors_of_the_compiler_are_known() -> None:
    """`heddle generate --compile` ends with a traceback where the compiler refuses a design."""
    with pytest.raises(RuntimeError) as raised:
        torch.compile(lambda x: torch._dynamo.graph_break(), backend="eager", fullgraph=True)(torch.zeros(1))
    assert torch_private.is_compiler_error(raised.value)
    assert not torch_private.is_compiler_error(RuntimeError())


def test_the_folder_of_the_compiler_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library that a killed process left half written would make every later compilation fail."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert torch_private.compiler_cache() == str(tmp_path)


def test_norms_of_many_tensors() -> None:
    """A training does not see weights that are not finite."""
    assert [norm.item() for norm in torch_private.foreach_norm([torch.tensor([3.0, 4.0]), torch.ones(1)])] == [5.0, 1.0]


def test_copies_to_many_tensors() -> None:
    """Trainings in bf16-params and with Muon fail."""
    targets = [torch.zeros(2), torch.zeros(1, dtype=torch.bfloat16)]
    torch_private.foreach_copy_(targets, [torch.ones(2), torch.full((1,), 2.0)])
    assert [target.tolist() for target in targets] == [[1.0, 1.0], [2.0]]


@pytest.mark.parametrize("factor", [3.0, torch.tensor(3.0)])
def test_products_of_many_tensors(factor: float | Tensor) -> None:
    """Trainings with Muon fail."""
    tensors = [torch.ones(2), torch.ones(1)]
    torch_private.foreach_mul_(tensors, factor)
    assert [tensor.tolist() for tensor in tensors] == [[3.0, 3.0], [3.0]]


def test_sums_of_many_tensors() -> None:
    """Trainings with Muon fail."""
    tensors = [torch.ones(2), torch.ones(1)]
    torch_private.foreach_add_(tensors, [torch.ones(2), torch.full((1,), 2.0)], alpha=-0.5)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [0.0]]


def test_the_gradient_of_softmax() -> None:
    """Attention with a softcap, a bias or a sink cannot be trained on a CPU."""
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    weights, gradient = x.softmax(-1), torch.randn(2, 5, dtype=torch.float64)
    (expected,) = torch.autograd.grad(weights, x, gradient)
    torch.testing.assert_close(torch_private.softmax_gradient(gradient, weights.detach()), expected)


def test_flash_attention_on_a_cpu() -> None:
    """Attention with sinks is slower on a CPU."""
    bias = torch.randn(1, 1, 8, 8)
    y, logsumexp = torch_private.cpu_flash_attention(Q, K, V, bias, False, SCALE)
    torch.testing.assert_close(y, functional.scaled_dot_product_attention(Q, K, V, bias, scale=SCALE))
    torch.testing.assert_close(logsumexp, (Q @ K.mT * SCALE + bias).logsumexp(-1))


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_kernels_of_attention_on_cuda(kernel: str) -> None:
    """Attention fails on a GPU. Here it has no GPU: shapes alone, and the operators by their arguments."""
    q = Q.to("meta", torch.bfloat16)
    if kernel == "flash":
        y, logsumexp = torch_private.flash_attention(q, q, q, True, SCALE)
        assert logsumexp.shape == q.shape[:3]
    elif kernel == "efficient":
        y = torch_private.efficient_attention(q, q, q, q.new_empty(1, 2, 8, 8), True, False, SCALE)
    else:
        y = torch_private.cudnn_attention(q, q, q, True, SCALE)
    assert (y.shape, y.dtype) == (q.shape, q.dtype)


def test_packed_products() -> None:
    """Generation reads weights at half the speed on a CPU."""
    x, weight, bias = torch.randn(3, 64), torch.randn(32, 64), torch.randn(32)
    assert torch_private.can_pack_weights(torch.float32)
    packed = torch_private.pack_weight(weight, 64)
    torch.testing.assert_close(torch_private.onednn_product(x, packed, bias), functional.linear(x, weight, bias))


def test_products_of_8_bits() -> None:
    """`heddle generate --weights int8` fails."""
    x, codes = torch.randn(3, 64).bfloat16(), torch.randint(-127, 128, (32, 64), dtype=torch.int8)
    scales = torch.rand(32).bfloat16()
    expected = x.float() @ (codes.float() * scales.float()[:, None]).T
    torch.testing.assert_close(torch_private.int8_product(x, codes, scales).float(), expected, rtol=1e-2, atol=1e-1)


def test_products_of_4_bits() -> None:
    """`heddle generate --weights int4` fails."""
    x, codes = torch.randn(3, 64).bfloat16(), torch.randint(0, 16, (32, 64), dtype=torch.int32)
    scales = torch.rand(2, 32, 2).bfloat16()
    steps, middles = (part.float().T.repeat_interleave(32, 1) for part in scales.unbind(-1))
    expected = x.float() @ ((codes.float() - 8) * steps + middles).T
    packed = torch_private.pack_int4(codes)
    torch.testing.assert_close(
        torch_private.int4_product(x, packed, 32, scales).float(), expected, rtol=1e-2, atol=1e-1
    )


def test_the_store_of_the_default_group(group: HashStore) -> None:
    """Ranks do not tell each other of failures."""
    torch_private.default_store().clone().set("key", "value")
    assert torch_private.default_store().get("key") == b"value"


@pytest.mark.usefixtures("group")
def test_waits_are_limited() -> None:
    """Ranks wait ten minutes for one that hangs."""
    other = distributed.new_group([0])
    torch_private.limit_waits(7.0)
    groups = [distributed.group.WORLD, other]
    timeouts = [each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups if each]
    assert timeouts == [7.0, 7.0]


def test_groups_have_names(group: HashStore) -> None:
    """`heddle plan` does not know how many ranks a collective has."""
    default = distributed.group.WORLD
    assert default is not None
    assert torch_private.resolve_group(default.group_name).size() == 1


@pytest.mark.usefixtures("group")
def test_the_flight_recorder_names_collectives() -> None:
    """A rank that hangs is named without the collective in which the others wait."""
    distributed.all_reduce(torch.ones(3, 5))
    record = torch_private.flight_record()
    assert record is not None
    newest = json.loads(record)["entries"][-1]
    assert (newest["profiling_name"], newest["input_sizes"]) == ("gloo:all_reduce", [[3, 5]])
    assert newest["collective_seq_id"] > 0


def test_fake_groups_have_ranks_that_do_not_exist() -> None:
    """Dry runs of `heddle plan` fail."""
    distributed.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=64)
    try:
        distributed.all_reduce(torch.ones(2))
        assert distributed.get_world_size() == 64
    finally:
        distributed.destroy_process_group()
