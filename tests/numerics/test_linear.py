"""The linear map: forms agree, and the operations it declares are those torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from heddle.errors import ConfigError
from heddle.numerics.dispatch.flop_counter import counting
from heddle.numerics.kernels import kernels
from heddle.numerics.linear import PACKED_ROWS, Packs, flops, linear, linears, packing, reference


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (1, 7), (1, 1, 7), (3, 7), (2, 5, 7), (0, 7)])
@pytest.mark.parametrize("form", ["matrix", "reference"])
def test_forms(form: str, shape: tuple[int, ...], bias: bool) -> None:
    x, weight, shift = torch.randn(shape), torch.randn(4, 7), torch.randn(4) if bias else None
    want = reference(x.double(), weight.double(), None if shift is None else shift.double())
    torch.testing.assert_close(run(form, x, weight, shift).double(), want, rtol=1e-5, atol=1e-6)


def run(form: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    with kernels(linear=form):
        return linear(x, weight, bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(512,), (1, 1, 512), (3, 512), (2, 5, 512)])
@pytest.mark.parametrize("outputs", [512, 2048])
def test_packed(shape: tuple[int, ...], outputs: int, bias: bool) -> None:
    x, weight, shift = torch.randn(shape), torch.randn(outputs, 512), torch.randn(outputs) if bias else None
    want = reference(x.double(), weight.double(), None if shift is None else shift.double())
    with packing():
        for _ in range(2):
            got = run("packed", x, weight, shift)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


def test_a_weight_changed_in_place_is_packed_anew() -> None:
    x, weight = torch.randn(1, 512), torch.nn.Parameter(torch.randn(512, 512))
    with packing(), torch.no_grad():
        before = run("packed", x, weight, None)
        weight.mul_(2.0)
        torch.testing.assert_close(run("packed", x, weight, None), 2.0 * before)
        weight.data = weight.data * 2.0
        torch.testing.assert_close(run("packed", x, weight, None), 4.0 * before)


@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True), (True, True)])
def test_several_weights_are_one_product_where_packed_copies_serve(biases: tuple[bool, bool]) -> None:
    x, sizes = torch.randn(2, 3, 512), (64, 512)  # the first is too small to be packed alone
    maps = [
        (torch.randn(size, 512), torch.randn(size) if own else None) for size, own in zip(sizes, biases, strict=True)
    ]
    want = [reference(x.double(), weight.double(), None if bias is None else bias.double()) for weight, bias in maps]
    packs: Packs = {}
    with packing(packs), counting() as tally:
        found = linears(x, maps)
    assert len(packs) == 1
    assert tally[0] == flops(6, 512, sum(sizes))
    for got, right in zip([*found, *linears(x, maps)], [*want, *want], strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-4)
    with packing(packs), torch.no_grad():
        maps[0][0].mul_(2.0)
        torch.testing.assert_close(linears(x, maps)[0], reference(x, *maps[0]), rtol=1e-4, atol=1e-3)
        with kernels(linear="reference"):
            assert torch.equal(linears(x, maps)[1], reference(x, *maps[1]))


def test_packed_says_why_it_cannot_serve() -> None:
    large = torch.randn(512, 512)
    with pytest.raises(ConfigError, match="kernel linear=packed: cannot serve here, because packed weights are not"):
        run("packed", torch.randn(1, 512), large, None)
    with packing():
        with pytest.raises(ConfigError, match="gradients are wanted"):
            run("packed", torch.randn(1, 512), large.clone().requires_grad_(), None)
        with pytest.raises(ConfigError, match=f"1 to {PACKED_ROWS} rows, here are 65"):
            run("packed", torch.randn(65, 512), large, None)
        with pytest.raises(ConfigError, match="here are 28"):
            run("packed", torch.randn(1, 7), torch.randn(4, 7), None)
        with pytest.raises(ConfigError, match="float64"):
            run("packed", torch.randn(1, 512).double(), large.double(), None)


def test_flops_are_those_that_torch_counts() -> None:
    x, weight = torch.randn(2, 5, 7), torch.randn(4, 7)
    with FlopCounterMode(display=False) as counter, counting() as tally:
        linear(x, weight)
    assert counter.get_total_flops() == flops(10, 7, 4) == tally[0]


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'matrix'"):
        kernels(linear="matrx").__enter__()
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        kernels(atention="tiles").__enter__()
