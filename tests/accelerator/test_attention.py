"""The attention kernels of CUDA against the reference, with stand-ins for what needs a card, in float64 first."""

import ast
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from heddle.numerics.attention import flex
from heddle.numerics.attention import sdpa as torch_sdpa
from heddle.numerics.attention.flex import (
    block_mask_of,
    flex_attention,
    flex_with_sink,
    mask_mod,
    score_mod,
    visible_blocks,
)
from heddle.numerics.attention.mask import AttentionMask, LinearBias, ScoreModifiers
from heddle.numerics.attention.sdpa import cu_seqlens, flash, longest_document, sdpa, varlen_attention
from heddle.numerics.attention.softmax import attention, masked_products, reference
from heddle.numerics.dispatch import record_choices
from heddle.parts.layout import Layout
from heddle.torch_private import cudnn_attention
from tests.accelerator.pretend import on_device, pretending, values_of
from tests.cases import in_turn
from tests.laws.planting import Plant, assigned, calls, constant, operator, reads
from tests.numerics.test_attention import CASES, OPTIONS, Bias, Shape, draw, graded, options, tail

SCALE = 0.9
SHAPE = Shape(d_k=16, d_v=16)
LONG: dict[str, Callable[[], AttentionMask]] = {  # of several blocks, the last of them not full
    "window": lambda: tail(300, 300, window=40),
    "packed": lambda: Layout.packed([[128, 2, 170], [20, 180, 100]]).attention_mask(None, True),
    "packed window": lambda: Layout.packed([[128, 2, 170], [20, 180, 100]]).attention_mask(90, True),
    "padded left": lambda: Layout.padded([300, 130]).attention_mask(None, True),
    "padded right": lambda: Layout.padded([300, 130], side="right").attention_mask(150, True),
    "bidirectional": lambda: Layout.padded([300, 130]).attention_mask(None, False),
    "bidirectional window": lambda: tail(300, 300, window=30, causal=False),
    "chunk": lambda: tail(150, 300, window=140),
}


class Results(NamedTuple):
    """Values and gradients: of q, k, v, then of the tensors among the modifiers."""

    y: Tensor
    gradients: list[Tensor]


Attend = Callable[[Tensor, Tensor, Tensor, AttentionMask, float, ScoreModifiers], Tensor]


def pretended(mask: AttentionMask) -> AttentionMask:
    """The same mask on the pretended device."""
    values = {part.name: getattr(mask, part.name) for part in fields(mask) if part.init}
    moved_values: dict[str, Any] = {name: on_device(x) for name, x in values.items() if isinstance(x, Tensor)}
    return replace(mask, **moved_values)


def moved(modifiers: ScoreModifiers) -> ScoreModifiers:
    """The same modifiers on the pretended device."""
    bias, sink = modifiers.score_bias, modifiers.sink
    if isinstance(bias, Bias):
        bias.slopes, bias.learned = on_device(bias.slopes), on_device(bias.learned).requires_grad_()
    return ScoreModifiers(modifiers.softcap, None if sink is None else on_device(sink).requires_grad_(), bias)


def on_cuda(attend: Attend, mask: AttentionMask, modifiers: ScoreModifiers, inputs: tuple[Tensor, ...]) -> Results:
    """Values and gradients on the pretended device. The host never waits."""
    with pretending() as log:
        moved_modifiers = moved(modifiers)
        sources = [*(on_device(x).requires_grad_() for x in inputs), *graded(moved_modifiers)]
        y = attend(sources[0], sources[1], sources[2], pretended(mask), SCALE, moved_modifiers)
        weighted = y * on_device(weights_of(y.shape)).to(y.dtype)
        gradients = list(torch.autograd.grad(weighted.sum(), sources)) if y.requires_grad else []
        assert log.report == []
    return Results(values_of(y).detach(), [values_of(x) for x in gradients])


def weights_of(shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def expected(mask: AttentionMask, modifiers: ScoreModifiers, inputs: tuple[Tensor, ...]) -> Results:
    q, k, v = (x.detach().double().requires_grad_() for x in inputs)
    y = reference(q, k, v, mask, SCALE, None, modifiers)
    return Results(
        y.detach(), list(torch.autograd.grad((y * weights_of(y.shape)).sum(), [q, k, v, *graded(modifiers)]))
    )


def assert_equal(actual: Results, wanted: Results, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual.y.double(), wanted.y, rtol=0, atol=tolerance)
    for got, want in zip(actual.gradients, wanted.gradients, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * max(1.0, float(want.abs().max())))


def in_signature(attend: Callable[..., Tensor]) -> Attend:
    """A kernel without a bias and a softcap, with the arguments of the others."""
    return lambda q, k, v, mask, scale, modifiers: attend(q, k, v, mask, scale, modifiers.sink_per_query(q))


def run_flash(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers) -> Tensor:
    return flash(q, k, v, scale, not mask.all_visible, modifiers.sink_per_query(q))


@pytest.mark.parametrize(
    ("case", "option"),
    in_turn(product([*CASES, *(f"long {name}" for name in LONG)], ["plain", "bias, softcap and sink"]), 1, 3),
)
def test_flex_equals_the_reference(case: str, option: str) -> None:
    mask = LONG[case.removeprefix("long ")]() if case.startswith("long ") else CASES[case]()
    inputs = tuple(x.detach() for x in draw(mask, SHAPE))
    actual = on_cuda(flex_attention, mask, options(option), inputs)
    assert_equal(actual, expected(mask, options(option), inputs))


@pytest.mark.parametrize("option", ["plain", "softcap and sink"])
@pytest.mark.parametrize("case", ["full", "window", "packed with a window", "padded", "padded and bidirectional"])
def test_torchs_own_flex_attention_gives_what_the_stand_in_gives(
    case: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager. It refuses gradients on a CPU, but can compute them; those of tensors in the scores need a compiler."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda q, k, v: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    mask, modifiers = CASES[case](), options(option)
    inputs = draw(mask, SHAPE)
    y = flex_attention(*inputs, mask, SCALE, modifiers)
    gradients = torch.autograd.grad((y * weights_of(y.shape)).sum(), [*inputs, *graded(modifiers)])
    assert_equal(Results(y.detach(), list(gradients)), expected(mask, modifiers, inputs))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_flex_is_one_graph_of_each_kind_for_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda q, k, v: None)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(1)
        run: Callable[..., object] = torch._dynamo.backends.debugging.aot_eager(graph, inputs)
        return run

    monkeypatch.setattr(flex, "flex_with_sink", torch.compile(flex.flex_with_sink, fullgraph=True, backend=backend))
    for lengths in ([[5, 7], [12]], [[3, 9], [1, 11]], [[12], [2, 10]]):
        mask, modifiers = Layout.packed(lengths).attention_mask(4, True), options("bias, softcap and sink")
        inputs = draw(mask, SHAPE)
        y = flex_attention(*inputs, mask, SCALE, modifiers)
        gradients = torch.autograd.grad((y * weights_of(y.shape)).sum(), [*inputs, *graded(modifiers)])
        # The compiled backward pass reads the log-sum-exp in float32.
        assert_equal(Results(y.detach(), list(gradients)), expected(mask, modifiers, inputs), 1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize("causal", [True, False])
def test_a_bias_of_slopes_is_computed_from_the_slopes(causal: bool) -> None:
    mask = replace(LONG["padded left"](), causal=causal)
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.0], dtype=torch.float64)
    q, k, v = (x.detach() for x in draw(mask, SHAPE))
    with pretending():
        modifiers = ScoreModifiers(score_bias=LinearBias(on_device(slopes)))
        y = flex_attention(on_device(q), on_device(k), on_device(v), pretended(mask), SCALE, modifiers)
    wanted = reference(q, k, v, mask, SCALE, None, ScoreModifiers(score_bias=LinearBias(slopes)))
    torch.testing.assert_close(values_of(y), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", ["full", "bidirectional"])
def test_flash_equals_the_reference(case: str) -> None:
    mask, inputs = CASES[case](), tuple(x.detach() for x in draw(CASES[case](), SHAPE))
    assert_equal(on_cuda(run_flash, mask, options("plain"), inputs), expected(mask, options("plain"), inputs))
    with torch.no_grad():
        actual = on_cuda(run_flash, mask, options("sink"), inputs)
    torch.testing.assert_close(actual.y, expected(mask, options("sink"), inputs).y, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "shape", [SHAPE, Shape(heads=6, groups=1, d_k=16, d_v=8), Shape(heads=4, groups=2, d_k=8, d_v=16)]
)
@pytest.mark.parametrize(("window", "causal"), [(None, True), (3, True), (None, False), (2, False)])
def test_varlen_equals_the_reference(window: int | None, causal: bool, shape: Shape) -> None:
    mask = Layout.packed([[4, 7, 1], [1, 2, 9]]).attention_mask(window, causal)
    inputs = tuple(x.detach() for x in draw(mask, shape))
    actual = on_cuda(in_signature(varlen_attention), mask, options("plain"), inputs)
    assert_equal(actual, expected(mask, options("plain"), inputs))


def test_varlen_takes_sinks_without_gradients() -> None:
    mask = CASES["packed"]()
    inputs = tuple(x.detach() for x in draw(mask, SHAPE))
    with torch.no_grad():
        actual = on_cuda(in_signature(varlen_attention), mask, options("sink"), inputs)
    torch.testing.assert_close(actual.y, expected(mask, options("sink"), inputs).y, rtol=0, atol=1e-10)


def test_the_starts_of_documents_are_those_of_the_layout() -> None:
    for layout in (
        Layout.packed([[4, 7, 1], [1, 2, 9]]),
        Layout.of(torch.tensor([[5, 6, 0], [2, 3, 4]]), torch.tensor([[0, 0, 1], [0, 0, 0]])),
        Layout.of(torch.tensor([[5, 6, 7], [2, 3, 4]])),
    ):
        lengths = [size for row in layout.doc_lengths or () for size in row]
        mask = layout.attention_mask(None, True)
        assert cu_seqlens(mask).dtype == torch.int32
        assert cu_seqlens(mask).diff().tolist() == lengths
        assert max(lengths) <= longest_document(mask) < 2 * max(lengths)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "case", ["tail", "one query", "window on a tail", "packed", "padded", "padded and bidirectional"]
)
def test_products_equal_the_reference(case: str, option: str) -> None:
    mask, inputs = CASES[case](), tuple(x.detach() for x in draw(CASES[case](), SHAPE))
    with torch.no_grad():
        actual = on_cuda(masked_products, mask, options(option), inputs)
    torch.testing.assert_close(actual.y, expected(mask, options(option), inputs).y, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sink", [False, True])
def test_the_efficient_kernel_gets_what_it_takes(sink: bool) -> None:
    """Grouped heads of 20 and 12 dims, and a mask of 9 keys: it takes none of them as they are."""
    option = "sink" if sink else "plain"
    mask, modifiers = CASES["padded"](), options(option, torch.float32)
    inputs = tuple(x.detach() for x in draw(mask, Shape(d_k=20, d_v=12), torch.float32))
    visible = mask.materialize()[:, None]
    shown = visible | ~visible.any(-1, keepdim=True)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers) -> Tensor:
        y = sdpa(q, k, v, scale, on_device(shown), sink=modifiers.sink_per_query(q))
        return y.masked_fill(on_device(~visible.any(-1, keepdim=True)), 0.0)

    assert_equal(
        on_cuda(run, mask, modifiers, inputs), expected(mask, options("sink" if sink else "plain"), inputs), 1e-5
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("option", ["plain", "bias, softcap and sink"])
@pytest.mark.parametrize("case", ["full", "one query", "window", "packed", "packed with a window", "padded"])
def test_chosen_kernels_equal_the_reference(case: str, option: str, dtype: torch.dtype, tolerance: float) -> None:
    mask, inputs = CASES[case](), tuple(x.detach() for x in draw(CASES[case](), SHAPE, dtype))
    run: Attend = lambda q, k, v, mask, scale, modifiers: attention(q, k, v, mask, scale, None, modifiers)  # noqa: E731
    actual, wanted = on_cuda(run, mask, options(option, dtype), inputs), expected(mask, options(option), inputs)
    assert_equal(actual, wanted, tolerance)
    with record_choices("cuda") as choices, torch.no_grad():
        alone = on_cuda(run, mask, options(option, dtype), inputs)
    assert [choice.kernel for choice in choices][:1] != ["reference"]
    torch.testing.assert_close(alone.y.double(), wanted.y, rtol=0, atol=tolerance)


BUGS = {
    "the next token in a window": constant(mask_mod, 0, -1, nth=1),
    "every document": operator(mask_mod, ast.BitAnd, ast.BitOr, nth=2),
    "blocks of later keys missed": reads(visible_blocks, "low", lambda _, *, k: k.high + 1, nth=0),
    "blocks whole before they are": reads(visible_blocks, "high", lambda _, *, q: q.low, nth=3),
    "blocks of earlier keys missed": reads(visible_blocks, "low", lambda _, *, q: q.high, nth=2),
    "a score bias of the next offset": assigned(score_mod, "first", lambda first: first + 1),
    "a sink of the other sign": calls(flex_with_sink, "with_sink", lambda share, y, lse, sink: share(y, -lse, sink)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError):
        check_flex(is_sink="sink" in bug)


def check_flex(is_sink: bool) -> None:
    """Tests that run a function of the module."""
    if is_sink:
        with pytest.MonkeyPatch.context() as patch:
            test_torchs_own_flex_attention_gives_what_the_stand_in_gives("full", "softcap and sink", patch)
        return
    for case in ("packed window", "padded right", "bidirectional"):
        test_flex_equals_the_reference(f"long {case}", "bias, softcap and sink")


@pytest.mark.parametrize(
    "plant",
    [
        assigned(varlen_attention, "window", lambda window: (window[0] + 1, window[1]), nth=0),
        calls(varlen_attention, "varlen_attn", lambda run, q, k, v, *rest, **options: run(q, v, k, *rest, **options)),
    ],
    ids=["a window one wider", "keys and values exchanged"],
)
def test_a_wrong_argument_of_varlen_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_varlen_equals_the_reference(3, True, SHAPE)


def test_a_block_that_no_query_needs_is_not_listed() -> None:
    """Of 3 × 3 blocks of 300 tokens, a window of 40 needs 5; the last block of documents, that of its own document."""
    for name, listed in (("window", 5), ("bidirectional window", 7)):
        _, block_mask = block_mask_of(LONG[name]())
        assert int(block_mask.kv_num_blocks.sum() + block_mask.full_kv_num_blocks.sum()) == listed
    _, block_mask = block_mask_of(Layout.packed([[128, 128, 128]]).attention_mask(None, True))
    assert block_mask.full_kv_num_blocks.sum() == 0
    assert block_mask.kv_num_blocks.tolist() == [[[1, 1, 1]]]
    _, block_mask = block_mask_of(tail(384, 384))
    assert block_mask.full_kv_num_blocks[0].tolist() == [[0, 1, 2]]


def run_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers) -> Tensor:
    return sdpa(q, k, v, scale, causal=not mask.all_visible)


@pytest.mark.parametrize("groups", [2, 4])
def test_cudnn_takes_values_of_another_width(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, the only kind of number that it takes; keys and values are not padded."""
    mask = tail(19, 19)
    inputs = tuple(x.detach() for x in draw(mask, Shape(groups=groups, d_k=24, d_v=16), torch.bfloat16))
    wanted = expected(mask, ScoreModifiers(), inputs)
    widths, cudnn = list[int](), torch_sdpa._cudnn

    def counted(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        widths.append(v.shape[-1])
        return cudnn(q, k, v, scale)

    monkeypatch.setattr(torch_sdpa, "_cudnn", counted)
    assert_equal(on_cuda(run_sdpa, mask, ScoreModifiers(), inputs), wanted, tolerance=0.05)
    assert widths == [16]
    no_scale = calls(cudnn, "cudnn_attention", lambda kernel, *inputs: kernel(*inputs[:-1], 1.0))
    for plant in (no_scale, constant(cudnn_attention, True, False)):
        with monkeypatch.context() as patch:
            patch.setattr(torch_sdpa, "_cudnn", cudnn)
            plant(patch)
            with pytest.raises(AssertionError):
                assert_equal(on_cuda(run_sdpa, mask, ScoreModifiers(), inputs), wanted, tolerance=0.05)
