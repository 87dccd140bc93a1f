"""Softmax attention: every kernel against plain loops, with padding, documents, windows, and queries after a cache."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heddle.errors import ConfigError
from heddle.numerics.attention import softmax
from heddle.numerics.attention.mask import AttentionMask, ScoreModifiers
from heddle.numerics.attention.observer import Observation, notify_observer, observing_attention
from heddle.numerics.attention.softmax import ATTENTION, attention, attention_flops, reference, softmax_weights
from heddle.numerics.dispatch import DeviceSize
from heddle.numerics.kernels import kernels
from heddle.parts.layout import Layout
from tests.numerics.oracle import contiguous_positions, is_visible, loop_attention, loop_weights


class Shape(NamedTuple):
    """Rows, heads, groups, widths of keys and values."""

    batch: int = 2
    heads: int = 4
    groups: int = 2
    d_k: int = 6
    d_v: int = 5


def tail(queries: int, keys: int, window: int | None = None, causal: bool = True) -> AttentionMask:
    """Queries that are the last of consecutive keys."""
    q_positions, k_positions = contiguous_positions(2, queries, keys)
    all_visible = (queries == 1 and (window is None or keys <= window)) or (not causal and window is None)
    return AttentionMask(
        q_positions, k_positions, window=window, causal=causal, contiguous=True, all_visible=all_visible
    )


def packed(window: int | None = None) -> AttentionMask:
    return Layout.packed([[4, 7, 1], [1, 2, 9]]).attention_mask(window, True)


def padded(window: int | None = None, causal: bool = True) -> AttentionMask:
    return Layout.padded([9, 4], side="left").attention_mask(window, causal)


CASES: dict[str, Callable[[], AttentionMask]] = {
    "full": lambda: tail(9, 9),
    "tail": lambda: tail(3, 9),
    "one query": lambda: tail(1, 9),
    "window": lambda: tail(40, 40, window=5),
    "window of one": lambda: tail(20, 20, window=1),
    "window on a tail": lambda: tail(17, 23, window=4),
    "bidirectional": lambda: tail(9, 9, causal=False),
    "bidirectional window": lambda: tail(40, 40, window=3, causal=False),
    "packed": packed,
    "packed with a window": lambda: packed(3),
    "padded": padded,
    "padded with a window": lambda: padded(3),
    "padded and bidirectional": lambda: padded(causal=False),
    "one query of padded rows": lambda: padded().for_queries(slice(8, 9)),
}
CUDA_KERNELS = {"flash", "flex", "products", "varlen"}  # see tests/accelerator
NATIVE = {"native"}  # see test_native.py
KERNELS = [kernel.name for kernel in ATTENTION.kernels if kernel.name not in CUDA_KERNELS | NATIVE]
OPTIONS = {
    "plain": (None, False, False),
    "softcap": (0.4, False, False),
    "sink": (None, True, False),
    "softcap and sink": (0.4, True, False),
    "bias": (None, False, True),
    "bias and sink": (None, True, True),
    "bias, softcap and sink": (0.4, True, True),
}


class Bias:
    """Slopes of the distance, and learned numbers at the first offsets of either sign."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(6)
        self.slopes = torch.tensor([0.7, 0.31, 0.05, 0.003], dtype=dtype)
        self.learned = torch.randn(4, 13, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    def __call__(self, offsets: Tensor, /) -> Tensor:
        steps = offsets.abs().to(self.slopes.dtype)
        return self.learned[:, offsets.clamp(-6, 6) + 6] - self.slopes.view(-1, *(1 for _ in offsets.shape)) * steps


def options(name: str, dtype: torch.dtype = torch.float64) -> ScoreModifiers:
    """The score modifiers of that name for four heads."""
    softcap, sink, score_bias = OPTIONS[name]
    sink_logits = torch.tensor([-1.0, 0.3, 0.9, 2.0], dtype=dtype)
    bias = Bias(torch.promote_types(dtype, torch.float32)) if score_bias else None
    return ScoreModifiers(softcap, sink_logits.requires_grad_() if sink else None, bias)


def graded(modifiers: ScoreModifiers) -> list[Tensor]:
    """The tensors among the modifiers that have a gradient."""
    bias = [modifiers.score_bias.learned] if isinstance(modifiers.score_bias, Bias) else []
    return bias if modifiers.sink is None else [*bias, modifiers.sink]


def draw(mask: AttentionMask, shape: Shape, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = mask.q_positions.shape[1], mask.k_positions.shape[1]
    q = torch.randn(shape.batch, shape.heads, queries, shape.d_k, dtype=torch.float64)
    k = torch.randn(shape.batch, shape.groups, keys, shape.d_k, dtype=torch.float64)
    v = torch.randn(shape.batch, shape.groups, keys, shape.d_v, dtype=torch.float64)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()


@pytest.mark.parametrize("shape", [Shape(), Shape(heads=3, groups=3, d_v=8), Shape(heads=6, groups=1)])
@pytest.mark.parametrize("case", CASES)
def test_reference_equals_plain_loops(case: str, shape: Shape) -> None:
    mask = CASES[case]()
    q, k, v = draw(mask, shape)
    actual = reference(q, k, v, mask, 0.3)
    torch.testing.assert_close(
        actual, loop_attention(q.detach(), k.detach(), v.detach(), mask, 0.3), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_score_modifiers_equal_plain_loops(case: str, option: str) -> None:
    mask, modifiers = CASES[case](), options(option)
    q, k, v = (x.detach() for x in draw(mask, Shape()))
    expected = loop_weights(q, k, mask, 0.9, modifiers)
    with torch.no_grad():
        torch.testing.assert_close(softmax_weights(q, k, mask, 0.9, modifiers), expected, rtol=0, atol=1e-12)
        actual = reference(q, k, v, mask, 0.9, None, modifiers)
    torch.testing.assert_close(actual, loop_attention(q, k, v, mask, 0.9, modifiers), rtol=0, atol=1e-12)


@cache
def supported_cases() -> list[tuple[str, str, str]]:
    """(kernel, case, option) for every kernel that supports a case."""
    return [
        (kernel, case, option)
        for case in CASES
        for kernel in KERNELS[:-1]
        for option in OPTIONS
        if supports(kernel, case, option)
    ]


def supports(kernel: str, case: str, option: str) -> bool:
    mask = CASES[case]()
    try:
        with kernels(attention=kernel), torch.no_grad():
            attention(*draw(mask, Shape()), mask, 0.3, None, options(option))
    except ConfigError as error:
        return "cannot serve here, because" not in str(error)  # any other error fails in the tests below
    return True


def test_every_kernel_supports_some_case() -> None:
    assert {kernel for kernel, _, option in supported_cases() if option == "plain"} == set(KERNELS[:-1])
    assert {kernel for kernel, _, option in supported_cases() if option == "sink"} == set(KERNELS[:-1]) - {"unmasked"}
    assert {kernel for kernel, _, option in supported_cases() if option == "softcap"} == set(KERNELS[:-1]) - {
        "causal",
        "unmasked",
    }
    assert {kernel for kernel, _, option in supported_cases() if option == "bias"} == set(KERNELS[:-1]) - {"causal"}


@pytest.mark.parametrize("kernel", sorted(CUDA_KERNELS))
def test_kernels_of_cuda_do_not_serve_a_cpu(kernel: str) -> None:
    with kernels(attention=kernel), pytest.raises(ConfigError, match=f"attention={kernel}:.*CUDA"):
        attention(*draw(tail(9, 9), Shape()), tail(9, 9), 0.3)


@pytest.mark.parametrize(("kernel", "case", "option"), supported_cases())
def test_kernels_equal_the_reference(kernel: str, case: str, option: str) -> None:
    mask, modifiers = CASES[case](), options(option)
    inputs = draw(mask, Shape())
    sources = [*inputs, *graded(modifiers)]
    expected = reference(*inputs, mask, 0.9, None, modifiers)
    probe = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * probe).sum(), sources)
    with kernels(attention=kernel):
        actual = attention(*inputs, mask, 0.9, None, modifiers)
        with torch.no_grad():
            without_gradients = attention(*inputs, mask, 0.9, None, modifiers)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(without_gradients, expected.detach(), rtol=0, atol=1e-12)
    for actual_gradient, expected_gradient in zip(
        torch.autograd.grad((actual * probe).sum(), sources), expected_gradients, strict=True
    ):
        torch.testing.assert_close(actual_gradient, expected_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kernel", "case", "option"), supported_cases())
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-12), (torch.bfloat16, 1e-3)])
def test_kernels_in_lower_precision(kernel: str, case: str, option: str, dtype: torch.dtype, bound: float) -> None:
    mask, modifiers = CASES[case](), options(option, dtype)
    q, k, v = (x.detach() for x in draw(mask, Shape(), dtype))
    exact = options(option)
    expected = reference(q.double(), k.double(), v.double(), mask, 0.3, None, exact).detach()
    for gradients in (True, False):
        if kernel == "unmasked" and dtype == torch.bfloat16:
            with kernels(attention=kernel), pytest.raises(ConfigError, match="half precision"):
                attention(q, k, v, mask, 0.3, None, modifiers)
            continue
        with kernels(attention=kernel), torch.set_grad_enabled(gradients):
            actual = attention(q, k, v, mask, 0.3, None, modifiers).detach()
        assert actual.dtype == dtype
        assert float((actual.double() - expected).square().mean() / expected.square().mean()) <= bound


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_a_call_without_tokens_is_served_with_every_option(window: int | None, causal: bool, option: str) -> None:
    mask = tail(0, 0, window, causal)
    inputs, modifiers = draw(mask, Shape()), options(option)
    y = attention(*inputs, mask, 0.3, None, modifiers)
    assert y.shape == (2, 4, 0, 5)
    for slope in torch.autograd.grad(y.sum(), [*inputs, *graded(modifiers)], materialize_grads=True):
        assert not bool(slope.any())
    with torch.no_grad():
        assert attention(*inputs, mask, 0.3, None, modifiers).shape == (2, 4, 0, 5)


def test_a_padded_query_of_an_empty_state_is_served_with_a_sink() -> None:
    """torch's kernel for the CPU divides by the number of keys: the process ends."""
    q, no_keys = torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 0, 4)
    mask = AttentionMask(torch.tensor([[-1]]), torch.zeros(1, 0, dtype=torch.int64))
    with torch.no_grad():
        assert not attention(q, no_keys, no_keys, mask, 0.3, None, ScoreModifiers(sink=torch.zeros(2))).any()


@pytest.mark.parametrize("kernel", ["tiles", "reference"])
def test_a_query_without_visible_keys_gives_zeros_and_no_gradient(kernel: str) -> None:
    mask = padded()
    q, k, v = draw(mask, Shape())
    with kernels(attention=kernel):
        y = attention(q, k, v, mask, 0.3)
    y.sum().backward()
    sees_nothing = mask.q_positions < 0
    assert bool(sees_nothing.any())
    assert y.detach().transpose(1, 2)[sees_nothing].abs().max() == 0
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.transpose(1, 2)[sees_nothing].abs().max() == 0


@pytest.mark.parametrize("kernel", ["tiles", "reference"])
def test_contents_of_unused_slots_have_no_effect(kernel: str) -> None:
    mask = padded()
    q, k, v = (x.detach() for x in draw(mask, Shape()))
    unused = (mask.k_positions < 0)[:, None, :, None]
    bad_k, bad_v = (x.masked_fill(unused, float("nan")) for x in (k, v))
    is_token = (mask.q_positions >= 0)[:, None, :, None]
    with kernels(attention=kernel):
        clean = attention(q, k, v, mask, 0.3)
        poisoned = attention(q, bad_k, bad_v, mask, 0.3)
    assert torch.equal(torch.where(is_token, poisoned, 0.0), torch.where(is_token, clean, 0.0))


def test_large_scores_in_half_precision() -> None:
    mask = tail(4, 4)
    q, k, v = (torch.full((2, 2, 4, 64), 90.0, dtype=torch.float16) for _ in range(3))
    assert bool(attention(q, k, v, mask, 0.125).isfinite().all())
    assert bool(reference(q, k, v, mask, 0.125).isfinite().all())


def test_weights_sum_to_one_over_visible_keys() -> None:
    mask = padded(3)
    q, k, _ = draw(mask, Shape())
    weights = softmax_weights(q, k, mask, 0.3)
    visible = torch.tensor([[[is_visible(mask, b, t, s) for s in range(9)] for t in range(9)] for b in range(2)])
    assert torch.equal(weights > 0, visible[:, None].expand_as(weights))
    torch.testing.assert_close(weights.sum(-1), visible.any(-1)[:, None].double().expand(2, 4, 9), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [None, "reference"])
def test_an_observer_receives_the_weights_and_results_do_not_change(kernel: str | None) -> None:
    mask, modifiers = padded(3), options("softcap and sink")
    q, k, v = (x.detach() for x in draw(mask, Shape()))
    observations: list[Observation] = []
    with kernels(**({} if kernel is None else {"attention": kernel})), torch.no_grad():
        expected = attention(q, k, v, mask, 0.9, None, modifiers)
        with observing_attention(observations.append):
            actual = attention(q, k, v, mask, 0.9, None, modifiers)
        attention(q, k, v, mask, 0.9, None, modifiers)
    assert torch.equal(actual, expected)
    assert [observation.groups for observation in observations] == [2]
    torch.testing.assert_close(observations[0].weights, loop_weights(q, k, mask, 0.9, modifiers), rtol=0, atol=1e-12)


def test_weights_are_not_computed_without_an_observer() -> None:
    calls: list[str] = []

    def compute() -> Observation:
        calls.append("called")
        return Observation(torch.zeros(1, 1, 1, 1), 1)

    notify_observer(compute)
    assert calls == []
    with observing_attention(lambda observation: None):
        notify_observer(compute)
    assert calls == ["called"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["unmasked", "folded", "tiles", "reference"])
def test_a_bias_far_from_the_first_position_is_not_rounded(kernel: str, dtype: torch.dtype) -> None:
    """After 3,000 keys, slope · j alone or a bias in bfloat16 would have rounding errors above the difference."""
    if kernel == "unmasked" and dtype == torch.bfloat16:
        return
    mask = tail(1, 3000)
    q, k, v = (x.detach() for x in draw(mask, Shape(), dtype))
    modifiers = options("bias", dtype)
    expected = loop_weights(q[:1].double(), k[:1, :, -200:].double(), tail(1, 200), 0.3, options("bias"))
    expected = torch.einsum("bgrts,bgsd->bgrtd", expected.unflatten(1, (2, 2)), v[:1, :, -200:].double()).flatten(1, 2)
    with kernels(attention=kernel), torch.no_grad():
        actual = attention(q, k, v, mask, 0.3, None, modifiers)[:1]
    near = slice(0, 2)  # heads whose weights beyond 200 keys are below 1e-20
    error = float((actual[:, near].double() - expected[:, near]).square().mean() / expected[:, near].square().mean())
    assert error <= (1e-12 if dtype == torch.float32 else 1e-4)


def test_a_bias_of_many_queries_is_built_one_tile_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "MAX_BIAS_ELEMENTS", DeviceSize(4 * 40 * 17, 0))
    mask, modifiers = tail(40, 40), options("bias and sink")
    q, k, v = (x.detach() for x in draw(mask, Shape()))
    bias_sizes: list[int] = []
    bias = ScoreModifiers.bias

    def counted(self: ScoreModifiers, tile_mask: AttentionMask) -> Tensor | None:
        result = bias(self, tile_mask)
        bias_sizes.append(0 if result is None else result.numel())
        return result

    monkeypatch.setattr(ScoreModifiers, "bias", counted)
    with kernels(attention="tiles"), torch.no_grad():
        actual = attention(q, k, v, mask, 0.3, None, modifiers)
    assert bias_sizes == [4 * 40 * 17, 4 * 40 * 17, 4 * 40 * 6]
    torch.testing.assert_close(actual, reference(q, k, v, mask, 0.3, None, modifiers).detach(), rtol=0, atol=1e-12)


def test_flops_are_those_that_torch_counts() -> None:
    shape = Shape()
    mask = tail(9, 9, causal=False)
    q, k, v = (x.detach() for x in draw(mask, shape))
    with FlopCounterMode(display=False) as counter:
        reference(q, k, v, mask, 0.3)
    assert counter.get_total_flops() == attention_flops(9 * 9, shape.batch, shape.heads, shape.d_k + shape.d_v)
