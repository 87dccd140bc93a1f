"""The linear map: kernels agree, and its FLOPs are those that torch counts."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from heddle.errors import ConfigError
from heddle.numerics.dispatch import count_flops, record_choices
from heddle.numerics.kernels import kernels
from heddle.numerics.linear import (
    MAX_PACKED_ROWS,
    PackedWeightCache,
    _facts,
    linear,
    linear_flops,
    linears,
    packed_weights,
    reference,
)
from tests.laws.planting import condition


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (1, 7), (1, 1, 7), (3, 7), (2, 5, 7), (0, 7)])
@pytest.mark.parametrize("kernel", ["matrix", "reference"])
def test_kernels(kernel: str, shape: tuple[int, ...], bias: bool) -> None:
    x, weight, shift = torch.randn(shape), torch.randn(4, 7), torch.randn(4) if bias else None
    expected = reference(x.double(), weight.double(), None if shift is None else shift.double())
    torch.testing.assert_close(run(kernel, x, weight, shift).double(), expected, rtol=1e-5, atol=1e-6)


def run(kernel: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    with kernels(linear=kernel):
        return linear(x, weight, bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(512,), (1, 1, 512), (3, 512), (2, 5, 512)])
@pytest.mark.parametrize("outputs", [512, 2048])
def test_packed(shape: tuple[int, ...], outputs: int, bias: bool) -> None:
    x, weight, shift = torch.randn(shape), torch.randn(outputs, 512), torch.randn(outputs) if bias else None
    expected = reference(x.double(), weight.double(), None if shift is None else shift.double())
    with packed_weights():
        for _ in range(2):
            actual = run("packed", x, weight, shift)
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_weight_changed_in_place_is_packed_again() -> None:
    x, weight = torch.randn(1, 512), torch.nn.Parameter(torch.randn(512, 512))
    with packed_weights(), torch.no_grad():
        before = run("packed", x, weight, None)
        weight.mul_(2.0)
        torch.testing.assert_close(run("packed", x, weight, None), 2.0 * before)
        weight.data = weight.data * 2.0
        torch.testing.assert_close(run("packed", x, weight, None), 4.0 * before)


def test_a_weight_where_another_was_freed_is_packed_anew() -> None:
    """As FSDP frees and gathers weights: the first one is alive, and its memory has become another's."""
    x, first, others = torch.randn(1, 512), torch.randn(512, 512), list[torch.Tensor]()
    with packed_weights():
        run("packed", x, first, None)
        address = first.data_ptr()
        first.untyped_storage().resize_(0)
        while not others or others[-1].data_ptr() != address:
            assert len(others) < 64
            others.append(torch.randn(512, 512))
        torch.testing.assert_close(run("packed", x, others[-1], None), x @ others[-1].T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True), (True, True)])
def test_several_weights_are_one_product_if_packed(biases: tuple[bool, bool]) -> None:
    x, sizes = torch.randn(2, 3, 512), (64, 512)  # the first is too small to be packed alone
    linear_maps = [
        (torch.randn(size, 512), torch.randn(size) if has_bias else None)
        for size, has_bias in zip(sizes, biases, strict=True)
    ]
    expected = [
        reference(x.double(), weight.double(), None if bias is None else bias.double()) for weight, bias in linear_maps
    ]
    cache: PackedWeightCache = {}
    with packed_weights(cache), count_flops() as flops:
        outputs = linears(x, linear_maps)
    assert len(cache) == 1
    assert flops[0] == linear_flops(6, 512, sum(sizes))
    for actual_output, expected_output in zip(
        [*outputs, *linears(x, linear_maps)], [*expected, *expected], strict=True
    ):
        torch.testing.assert_close(actual_output.double(), expected_output, rtol=1e-5, atol=1e-4)
    with packed_weights(cache), torch.no_grad():
        linear_maps[0][0].mul_(2.0)
        torch.testing.assert_close(linears(x, linear_maps)[0], reference(x, *linear_maps[0]), rtol=1e-4, atol=1e-3)
        with kernels(linear="reference"):
            assert torch.equal(linears(x, linear_maps)[1], reference(x, *linear_maps[1]))


def test_packed_gives_the_reason_why_it_does_not_support_a_call() -> None:
    large = torch.randn(512, 512)
    with pytest.raises(ConfigError, match="kernel linear=packed:"):
        run("packed", torch.randn(1, 512), large, None)
    with packed_weights():
        with pytest.raises(ConfigError, match="gradients are required"):
            run("packed", torch.randn(1, 512), large.clone().requires_grad_(), None)
        with pytest.raises(ConfigError, match=f"{MAX_PACKED_ROWS} rows.*65"):
            run("packed", torch.randn(65, 512), large, None)
        with pytest.raises(ConfigError, match="not 28"):
            run("packed", torch.randn(1, 7), torch.randn(4, 7), None)
        with pytest.raises(ConfigError, match="float64"):
            run("packed", torch.randn(1, 512).double(), large.double(), None)


def test_flops_are_those_that_torch_counts() -> None:
    x, weight = torch.randn(2, 5, 7), torch.randn(4, 7)
    with FlopCounterMode(display=False) as counter, count_flops() as flops:
        linear(x, weight)
    assert counter.get_total_flops() == linear_flops(10, 7, 4) == flops[0]


def test_errors_suggest_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'matrix'"):
        kernels(linear="matrx").__enter__()
    with pytest.raises(ConfigError, match="'attention'"):
        kernels(atention="tiles").__enter__()


@pytest.mark.parametrize("rows", [1, 4, MAX_PACKED_ROWS])
def test_packed_weights_are_never_used_on_another_device(rows: int) -> None:
    x, weight = torch.randn(rows, 512), torch.randn(2048, 512)
    for device, kernel in (("cuda", "matrix"), ("mps", "matrix"), ("cpu", "packed")):
        cache: PackedWeightCache = {}
        with record_choices(device) as choices, packed_weights(cache):
            linear(x, weight)
            linears(x, [(weight, None), (weight, None)])
        assert {choice.kernel for choice in choices} == {kernel}
        assert bool(cache) == (device == "cpu")


class Quantized(torch.Tensor):
    """A type of other programs, such as torchao's: it is multiplied by its own function, and cannot be joined."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.cat or "reorder" in str(function):
            raise NotImplementedError(f"{function} of a quantized weight")
        return super().__torch_function__(function, types, args, kwargs)


@torch.no_grad()
def test_weights_of_another_type_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = torch.randn(1, 256), [torch.randn(256, 256), torch.randn(128, 256)]
    maps = [(weight.as_subclass(Quantized), None) for weight in weights]
    with packed_weights():
        for y, weight in zip(linears(x, maps), weights, strict=True):
            torch.testing.assert_close(y.as_subclass(torch.Tensor), x @ weight.T, rtol=0, atol=1e-4)
        condition(_facts, "type", True)(monkeypatch)
        with pytest.raises(NotImplementedError, match="of a quantized weight"):
            linears(x, maps)
