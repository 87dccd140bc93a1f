"""Latent attention: every kernel against plain loops, with tiles, caches, padding and packing; its cost."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heddle import extensions
from heddle.laws.harness import LawViolation
from heddle.laws.kernels import kernel_equivalence
from heddle.model.load_config import load_config
from heddle.numerics import native
from heddle.numerics.attention import latent
from heddle.numerics.attention.latent import LATENT, LatentAttentionFacts, latent_attention_facts
from heddle.numerics.attention.mask import NO_MODIFIERS, AttentionMask, ScoreModifiers
from heddle.numerics.dispatch import DeviceSize, count_flops, record_choices
from heddle.numerics.kernels import kernels
from heddle.parts.layout import Layout
from tests.cases import CASES as DESIGNS
from tests.numerics.largest_tensor import LargestTensor
from tests.numerics.oracle import contiguous_positions, loop_attention

KERNELS = {kernel.name: kernel.run for kernel in LATENT.kernels if kernel.name != "native"}  # which has its own tests
HEADS, NOPE, ROPE, RANK, VALUE = 3, 7, 4, 6, 5
SCALE = 0.3


def tail(queries: int, keys: int, batch: int = 2) -> AttentionMask:
    """Queries that are the last of consecutive keys."""
    q_positions, k_positions = contiguous_positions(batch, queries, keys)
    return AttentionMask(q_positions, k_positions, contiguous=True, all_visible=queries == 1)


def ragged(queries: int) -> AttentionMask:
    """Queries at the end of rows of 9 and 4 tokens with unused key slots. One query sees no key."""
    k_positions = torch.stack((torch.arange(9), torch.where(torch.arange(9) < 4, torch.arange(9), -1)))
    q_positions = torch.stack((torch.arange(9 - queries, 9), torch.arange(4 - queries, 4)))
    return AttentionMask(q_positions, k_positions, may_have_padding=True)


CASES = {
    "full": lambda: tail(9, 9),
    "tail": lambda: tail(4, 9),
    "one query": lambda: tail(1, 9),
    "no query": lambda: tail(0, 9),
    "padded": lambda: Layout.padded([9, 4]).attention_mask(None, True),
    "ragged": lambda: ragged(5),
    "packed": lambda: Layout.packed([[4, 5], [1, 8]]).attention_mask(None, True),
}


def draw(mask: AttentionMask, rope: int = ROPE, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    (batch, queries), keys = mask.q_positions.shape, mask.k_positions.shape[1]
    shapes = [
        (batch, HEADS, queries, NOPE),
        (batch, HEADS, queries, rope),
        (batch, 1, keys, RANK + rope),
        (HEADS * NOPE, RANK),
        (HEADS * VALUE, RANK),
    ]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def by_loops(inputs: list[Tensor], mask: AttentionMask, modifiers: ScoreModifiers = NO_MODIFIERS) -> Tensor:
    """The paper's equations: keys and values of each head and token, then plain attention."""
    q_nope, q_rope, latents, k_up, v_up = inputs
    batch, _, keys, _ = latents.shape
    k = torch.zeros(batch, HEADS, keys, NOPE + q_rope.shape[3], dtype=torch.float64)
    v = torch.zeros(batch, HEADS, keys, VALUE, dtype=torch.float64)
    for b in range(batch):
        for h in range(HEADS):
            for s in range(keys):
                c, k_rope = latents[b, 0, s, :RANK], latents[b, 0, s, RANK:]
                k[b, h, s] = torch.cat((k_up[h * NOPE : (h + 1) * NOPE] @ c, k_rope))
                v[b, h, s] = v_up[h * VALUE : (h + 1) * VALUE] @ c
    return loop_attention(torch.cat((q_nope, q_rope), dim=-1), k, v, mask, SCALE, modifiers)


@pytest.fixture(params=["one tile", "tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with tiles that hold all keys and queries, and with tiles of only a few."""
    if request.param == "tiles":
        monkeypatch.setattr(latent, "MIN_TILE", 2)
        monkeypatch.setattr(latent, "MAX_TILE_ELEMENTS", DeviceSize(72, 72))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("rope", [ROPE, 0])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_equals_plain_loops(kernel: str, case: str, rope: int) -> None:
    mask = CASES[case]()
    inputs = [x.detach() for x in draw(mask, rope)]
    actual = KERNELS[kernel](*inputs, mask, SCALE)
    torch.testing.assert_close(actual, by_loops(inputs, mask), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", list(KERNELS)[:-1])
def test_gradients_equal_those_of_the_reference(kernel: str, case: str) -> None:
    mask = CASES[case]()
    inputs = draw(mask)
    expected = KERNELS["reference"](*inputs, mask, SCALE)
    probe = torch.randn_like(expected)
    gradients = torch.autograd.grad((KERNELS[kernel](*inputs, mask, SCALE) * probe).sum(), inputs)
    for actual_gradient, expected_gradient in zip(
        gradients, torch.autograd.grad((expected * probe).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(actual_gradient, expected_gradient, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sink_takes_its_share_of_every_softmax(kernel: str) -> None:
    """Values against plain loops, and gradients against those of the reference."""
    for make in CASES.values():
        mask, sink = make(), torch.tensor([0.4, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
        inputs = draw(mask)
        y = KERNELS[kernel](*inputs, mask, SCALE, sink)
        with torch.no_grad():
            expected = by_loops(inputs, mask, ScoreModifiers(sink=sink))
        torch.testing.assert_close(y.detach(), expected, rtol=0, atol=1e-12)
        reference, probe = KERNELS["reference"](*inputs, mask, SCALE, sink), torch.randn_like(y)
        gradients = (torch.autograd.grad((each * probe).sum(), [*inputs, sink]) for each in (y, reference))
        for actual_gradient, expected_gradient in zip(*gradients, strict=True):
            torch.testing.assert_close(actual_gradient, expected_gradient, rtol=0, atol=1e-12)


def test_the_operator_takes_no_sink() -> None:
    facts = facts_of([x.detach() for x in draw(tail(1, 9))])._replace(native=True)
    native_kernel = next(kernel for kernel in LATENT.kernels if kernel.name == "native")
    assert native_kernel.unsupported(facts) is None
    assert "sink" in str(native_kernel.unsupported(facts._replace(sink=True)))


@pytest.mark.parametrize("queries", range(1, 10))
def test_absorbed_equals_expanded_at_every_split(queries: int) -> None:
    mask = tail(queries, 9)
    inputs = draw(mask)
    with torch.no_grad():
        actual, expected = (KERNELS[kernel](*inputs, mask, SCALE) for kernel in ("absorbed", "expanded"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["full", "tail", "one query", "ragged"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-12), (torch.bfloat16, 1e-3)])
def test_kernels_in_lower_precision(kernel: str, case: str, dtype: torch.dtype, bound: float) -> None:
    mask = CASES[case]()
    inputs = [x.detach() for x in draw(mask, dtype=dtype)]
    expected = KERNELS["reference"](*(x.double() for x in inputs), mask, SCALE)
    actual = KERNELS[kernel](*inputs, mask, SCALE)
    assert actual.dtype == dtype
    assert float((actual.double() - expected).square().mean() / expected.square().mean()) <= bound


@pytest.mark.parametrize("kernel", list(KERNELS)[:-1])
def test_kernels_under_autocast(kernel: str) -> None:
    mask = tail(4, 9)
    inputs = draw(mask, dtype=torch.float32)
    inputs[0], inputs[1], inputs[2] = (x.bfloat16() for x in inputs[:3])  # the dtype of projections under autocast
    expected = KERNELS["reference"](*(x.detach().double() for x in inputs), mask, SCALE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = KERNELS[kernel](*inputs, mask, SCALE)
    assert actual.dtype == torch.bfloat16
    assert float((actual.detach().double() - expected).square().mean() / expected.square().mean()) <= 1e-3
    assert bool(torch.autograd.grad(actual.float().sum(), inputs[3])[0].isfinite().all())


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("kernel", KERNELS)
def test_unused_slots_have_no_effect_and_a_query_without_keys_gives_zeros(kernel: str) -> None:
    mask = ragged(5)
    inputs = [x.detach() for x in draw(mask)]
    clean = KERNELS[kernel](*inputs, mask, SCALE)
    inputs[2] = inputs[2].masked_fill((mask.k_positions < 0)[:, None, :, None], float("nan"))
    assert torch.equal(KERNELS[kernel](*inputs, mask, SCALE), clean)
    sees_nothing = (mask.q_positions < 0)[:, None, :, None].expand_as(clean)
    assert bool(sees_nothing.any())
    assert clean[sees_nothing].abs().max() == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_flops_are_those_that_torch_counts(kernel: str) -> None:
    """With one query no pair is masked, so torch counts the same products."""
    mask = tail(1, 40)
    inputs = [x.detach() for x in draw(mask)]
    with count_flops() as flops, kernels(attention="reference"), FlopCounterMode(display=False) as counter:
        KERNELS[kernel](*inputs, mask, SCALE)
    assert counter.get_total_flops() == flops[0]


def facts_of(inputs: list[Tensor]) -> LatentAttentionFacts:
    q_nope, q_rope, latents, k_up, v_up = inputs
    return latent_attention_facts(q_nope, q_rope, latents, k_up, v_up)


def chosen_kernel(queries: int, keys: int, heads: int = 12) -> str:
    """The kernel chosen for latents of width 256 + 32 and heads of width 64."""
    shapes = [(1, heads, queries, 64), (1, heads, queries, 32), (1, 1, keys, 288), (heads * 64, 256), (heads * 64, 256)]
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    with record_choices("cpu"):
        return LATENT.first_supported(facts_of(inputs)).name


@pytest.mark.parametrize(
    ("queries", "keys", "kernel"),
    [
        (1, 1, "expanded"),
        (512, 512, "expanded"),
        (100_000, 100_000, "expanded"),  # without a state, latents are expanded like the projections of other mixers
        (1, 2, "absorbed"),
        (1, 32_768, "absorbed"),
        (64, 32_768, "absorbed"),
        (512, 1024, "expanded"),
        (512, 32_768, "tiled"),
    ],
)
def test_the_kernel_is_chosen_by_shapes(queries: int, keys: int, kernel: str) -> None:
    assert chosen_kernel(queries, keys) == kernel


def test_a_chunk_after_a_long_state_never_expands_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "MIN_TILE", 16)
    for name in ("MAX_TILE_ELEMENTS", "MAX_EXPANDED_ELEMENTS"):
        monkeypatch.setattr(latent, name, DeviceSize(2**13, 2**13))
    largest_tensor = {}
    for keys in (1024, 4096):
        mask = tail(256, keys, batch=1)
        shapes = [(1, 3, 256, 8), (1, 3, 256, 4), (1, 1, keys, 36), (3 * 8, 32), (3 * 8, 32)]
        inputs = [torch.randn(shape) for shape in shapes]
        assert LATENT.first_supported(facts_of(inputs)).name == "tiled"
        with LargestTensor() as largest:
            LATENT.first_supported(facts_of(inputs)).run(*inputs, mask, SCALE)
        largest_tensor[keys] = largest.elements
    assert largest_tensor[4096] == largest_tensor[1024] <= 2**13 + 256 * 3 * 12  # queries and outputs are not tiled
    with LargestTensor() as largest:
        KERNELS["expanded"](*inputs, mask, SCALE)
    assert largest.elements >= 4096 * 3 * 12


# The operator in C++.


@pytest.fixture
def _operator() -> Iterator[None]:
    assert extensions.install(["latent_decode"]) == ("latent_decode",)
    yield
    extensions.install([])


def long_case(queries: int, keys: int, dtype: torch.dtype) -> tuple[list[Tensor], AttentionMask]:
    """Three rows of which two have unused slots, which hold NaN, and a window; sizes that no vector divides."""
    k_positions = torch.arange(keys).repeat(3, 1)
    k_positions[1, : keys // 3] = -1
    k_positions[2] = -1
    q_positions = torch.arange(keys - queries, keys).repeat(3, 1)
    mask = AttentionMask(q_positions, k_positions, window=max(queries, keys // 2), may_have_padding=True)
    generator = torch.Generator().manual_seed(keys)
    shapes = [(3, 5, queries, 6), (3, 5, queries, 3), (3, 1, keys, 20 + 3), (5 * 6, 20), (5 * 7, 20)]
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    inputs[2] = inputs[2].masked_fill((k_positions < 0)[:, None, :, None], float("nan"))
    return inputs, mask


def by_the_operator(inputs: list[Tensor], mask: AttentionMask) -> Tensor:
    q_nope, q_rope, latents, k_up, v_up = inputs
    with kernels(latent="native"), torch.no_grad():
        return latent.latent_attention(q_nope, q_rope, latents, k_up, v_up, mask, SCALE)


@pytest.mark.usefixtures("_operator")
@pytest.mark.parametrize("queries", [1, 2, 8])
@pytest.mark.parametrize("keys", [40, 97, 700])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_reading_equals_the_reference(queries: int, keys: int, dtype: torch.dtype, threads: int) -> None:
    inputs, mask = long_case(queries, keys, dtype)
    wide = [x.double() for x in inputs]
    expected = KERNELS["reference"](*wide, mask, SCALE)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        actual = by_the_operator(inputs, mask)
        columns = [torch.stack((x, x), dim=-1)[..., 0] for x in inputs]  # none is contiguous
        assert torch.equal(by_the_operator(columns, mask), actual)
        visible = AttentionMask(mask.q_positions[:1, -1:], mask.k_positions[:1], all_visible=True)
        one = [x[:1, :, -1:] for x in inputs[:2]] + [inputs[2][:1, :, :keys], *inputs[3:]]
        last = by_the_operator(one, visible)
    finally:
        torch.set_num_threads(before)
    whole = KERNELS["reference"](*(x.double() for x in one), visible, SCALE)
    bound = {torch.float64: 1e-25, torch.float32: 1e-11, torch.bfloat16: 1e-5}[dtype]
    for got, want in ((actual, expected), (last, whole)):
        assert got.dtype == dtype
        assert float((got.double() - want).square().mean() / want.square().mean()) <= bound


@pytest.mark.usefixtures("_operator")
def test_what_the_operator_does_not_serve() -> None:
    inputs, _ = long_case(2, 97, torch.float32)

    def rejected(inputs: list[Tensor]) -> str | None:
        return LATENT.kernels[0].unsupported(facts_of(inputs))

    assert rejected(inputs) is None
    assert rejected([inputs[0].requires_grad_(), *inputs[1:]]) == native.NOT_IN_USE
    assert rejected([*inputs[:2], inputs[2].bfloat16(), *inputs[3:]]) == native.NOT_IN_USE
    assert rejected(long_case(9, 97, torch.float32)[0]) == "it takes up to 8 queries, not 9"
    assert "no more FLOPs" in str(rejected(long_case(2, 2, torch.float32)[0]))
    inputs, _ = long_case(2, 97, torch.float32)
    q_nope, q_rope, latents, k_up, v_up = inputs
    facts = latent_attention_facts(q_nope, q_rope, latents, k_up, v_up, most_selected=6)
    assert LATENT.kernels[0].unsupported(facts) is not None


@pytest.mark.usefixtures("_operator")
def test_the_law_of_kernels_sees_an_operator_that_forgets_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(DESIGNS["latent-low-rank-query"])
    kernel_equivalence(config)
    right = torch.ops.heddle.latent_decode

    def forgets_a_key(*arguments: Any) -> Tensor:
        *tensors, visible, scale = arguments
        tensors[2] = tensors[2].clone()
        tensors[2][:, :, -1] = 0
        wrong: Tensor = right(*tensors, visible, scale)
        return wrong

    monkeypatch.setattr(torch.ops.heddle, "latent_decode", forgets_a_key)
    with pytest.raises(LawViolation, match="chunks with a state"):
        kernel_equivalence(config)
