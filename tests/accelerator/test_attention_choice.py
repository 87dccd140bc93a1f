"""Which attention kernel CUDA gets: no T × S memory, no plan for each new length, and the dtypes that torch gets."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heddle.model.load_config import load_config
from heddle.model.size import build_distinct_layers, measure_kernel_choices
from heddle.numerics.attention import softmax, tiled
from heddle.numerics.attention.mask import AttentionMask, LinearBias, ScoreModifiers
from heddle.numerics.attention.sdpa import _efficient, sdpa
from heddle.numerics.attention.softmax import ATTENTION, attention
from heddle.numerics.dispatch import record_choices
from heddle.parts.layout import Layout
from tests.accelerator import attention_stand_ins, pretend
from tests.accelerator import budget_rows as calls
from tests.accelerator.budgets import count
from tests.accelerator.pretend import DEVICE, on_device, pretending, values_of
from tests.accelerator.test_attention import moved, pretended
from tests.cases import in_turn
from tests.laws import planting
from tests.numerics.test_attention import CASES, Shape, draw, options, tail

NARROW, WIDE = torch.bfloat16, torch.float32
LENGTH = 4096


def long_tail(queries: int, keys: int) -> Callable[[], AttentionMask]:
    return lambda: tail(queries, keys)


MASKS: dict[str, Callable[[], AttentionMask]] = {
    "rows": long_tail(96, 96),
    "chunk": long_tail(96, 200),
    "token": long_tail(1, 200),
    "window": lambda: tail(96, 96, window=20),
    "packed": lambda: Layout.packed([[40, 56], [96]]).attention_mask(None, True),
    "packed window": lambda: Layout.packed([[40, 56], [96]]).attention_mask(9, True),
    "padded": lambda: Layout.padded([96, 40]).attention_mask(None, True),
    "both sides": lambda: tail(96, 96, causal=False),
}
CHOICES = {  # by mask: (bfloat16 in training, without gradients, float32 in training)
    "rows": ("causal", "flash", "flex"),
    "chunk": ("flex", "flex", "flex"),
    "token": ("flash", "flash", "flex"),
    "window": ("flex", "flex", "flex"),
    "packed": ("varlen", "varlen", "flex"),
    "packed window": ("varlen", "varlen", "flex"),
    "padded": ("flex", "flex", "flex"),
    "both sides": ("flash", "flash", "flex"),
}
MODIFIED = ["softcap", "sink", "bias", "bias, softcap and sink"]


def choice(name: str, dtype: torch.dtype, gradients: bool, modifiers: ScoreModifiers | None = None) -> str:
    """The kernel that a call gets on CUDA. Meta tensors: nothing is computed."""
    mask = MASKS[name]()
    q, k, v = (x.detach().to("meta", dtype).requires_grad_() for x in draw(mask, Shape(d_k=64, d_v=64)))
    with record_choices("cuda") as choices, torch.set_grad_enabled(gradients):
        ATTENTION.choose(softmax.attention_facts(q, k, v, mask, False, modifiers or ScoreModifiers()))
    return choices[0].kernel


@pytest.mark.parametrize("name", MASKS)
def test_the_kernel_of_each_call(name: str) -> None:
    kernels = [choice(name, NARROW, True), choice(name, NARROW, False), choice(name, WIDE, True)]
    assert tuple(kernels) == CHOICES[name]
    assert choice("token", WIDE, False) == "products"


@pytest.mark.parametrize("option", MODIFIED)
@pytest.mark.parametrize("name", MASKS)
def test_modified_scores_get_flex_in_training_and_products_for_a_token(name: str, option: str) -> None:
    for dtype in (NARROW, WIDE):
        assert choice(name, dtype, True, options(option, dtype)) == "flex"
    if option != "sink":
        assert choice(name, NARROW, False, options(option, NARROW)) == ("products" if name == "token" else "flex")


def test_a_card_without_the_flash_kernel_gets_no_t_by_s_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "_card_runs_flash", lambda: False)
    kernels = {choice(name, torch.float16, gradients) for name in MASKS for gradients in (True, False)}
    assert kernels == {"flex", "products"}


MODIFIERS: dict[str, Callable[[], ScoreModifiers]] = {
    "plain": ScoreModifiers,
    "softcap": lambda: ScoreModifiers(softcap=30.0),
    "sink": lambda: ScoreModifiers(sink=calls.fake(2, dtype=WIDE)),
    "slopes": lambda: ScoreModifiers(score_bias=LinearBias(calls.fake(2, dtype=WIDE, gradients=False))),
}
LAYOUTS: dict[str, Callable[[], Layout]] = {
    "rows": lambda: Layout.causal(1, LENGTH, device=DEVICE),
    "packed": calls.packed,
    "padded": calls.padded,
}


EACH_CALL = [
    (*call, dtype)
    for number, call in enumerate(product(MODIFIERS, LAYOUTS))
    for dtype in ((NARROW, WIDE) if number % 2 else (WIDE, NARROW))
]  # by day in one dtype, in the night in the other, too


@pytest.mark.parametrize(("modified", "layout", "dtype"), in_turn(EACH_CALL, turn=0, turns=2))
def test_no_tensor_of_t_by_s_elements(
    modified: str, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads of one group, 4,096 tokens, forward and backward: not even a mask of one byte a pair."""
    assert largest(modified, layout, dtype, monkeypatch) < LENGTH * LENGTH


@pytest.mark.parametrize("modified", ["plain", "sink", "slopes"])
@pytest.mark.parametrize("layout", ["rows", "padded"])
def test_no_tensor_of_t_by_s_elements_without_triton(
    modified: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "has_triton", lambda: False)
    assert largest(modified, layout, WIDE, monkeypatch) < LENGTH * LENGTH * 4 // 2


def test_the_count_sees_a_tensor_of_t_by_s_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "has_triton", lambda: False)
    monkeypatch.setattr(softmax, "MASK_TILE", LENGTH)
    assert largest("slopes", "rows", WIDE, monkeypatch) >= 2 * LENGTH * LENGTH * 4


def largest(modified: str, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of the largest tensor of a layer."""
    for name, size in (("BATCH", 1), ("HEADS", 2), ("KV_HEADS", 1)):
        monkeypatch.setattr(calls, name, size)

    def make() -> Callable[[], Tensor]:
        q, k, v = (calls.fake(1, heads, LENGTH, 64, dtype=dtype) for heads in (2, 1, 1))
        mask, modifiers = LAYOUTS[layout]().attention_mask(None, True), MODIFIERS[modified]()
        return lambda: attention(q, k, v, mask, 0.125, None, modifiers)

    return count(make)[0].largest


def torchs_choices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor | None, bool]]:
    """Collects (queries, mask, is causal) of the calls in which torch chooses a kernel."""
    seen: list[tuple[Tensor, Tensor | None, bool]] = []
    original = functional.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append((q, options["attn_mask"], options["is_causal"]))
        y: Tensor = original(q, k, v, **options)
        return y

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    return seen


@pytest.mark.parametrize("has_triton", [True, False])
def test_torch_chooses_only_for_causal_rows_in_training(has_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan for each new length, and no mask, with which queries of 128 n + 64 tokens got wrong gradients."""
    monkeypatch.setattr(softmax, "has_triton", lambda: has_triton)
    seen, routes = torchs_choices(monkeypatch), []
    for name in MASKS:
        for option, gradients in (("plain", True), ("plain", False), ("sink", True), ("bias and sink", True)):
            mask = MASKS[name]()
            inputs = [x.detach() for x in draw(mask, Shape(d_k=16, d_v=16), NARROW)]
            with pretending(), torch.set_grad_enabled(gradients):
                q, k, v = (on_device(x).requires_grad_(gradients) for x in inputs)
                attention(q, k, v, pretended(mask), 0.9, None, moved(options(option, NARROW)))
            routes += [(name, option, gradients)] * len(seen)
            assert [(mask, causal) for _, mask, causal in seen] == [(None, True)] * len(seen)
            seen.clear()
    assert routes == [("rows", "plain", True)]


def biases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """Collects the dtypes of queries and biases that reach the efficient kernel."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    operator = torch.ops.aten._scaled_dot_product_efficient_attention.default

    def noted(*arguments: Tensor, scale: float) -> tuple[Tensor, ...]:
        seen.append((arguments[0].dtype, arguments[3].dtype))
        return attention_stand_ins.efficient(*arguments, scale=scale)

    monkeypatch.setitem(pretend.OPERATOR_STAND_INS, operator, noted)
    return seen


def run_biased(name: str, dtype: torch.dtype, autocast: bool) -> None:
    mask = MASKS[name]()
    with pretending(), torch.autocast(DEVICE.type, NARROW, enabled=autocast):
        q, k, v = (on_device(x.detach()).requires_grad_() for x in draw(mask, Shape(d_k=16, d_v=16), dtype))
        y = attention(q, k, v, pretended(mask), 0.9, None, moved(options("bias", dtype)))
        assert y.dtype == (NARROW if autocast else dtype)
        y.sum().backward()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["rows", "chunk", "token", "packed", "padded"])
def test_a_bias_has_the_dtype_of_the_queries(name: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where FlexAttention, which computes scores in float32, is not there."""
    monkeypatch.setattr(softmax, "has_triton", lambda: False)
    seen = biases(monkeypatch)
    run_biased(name, WIDE if autocast else NARROW, autocast)
    assert seen
    assert set(seen) == {(NARROW, NARROW)}


def test_a_bias_of_another_dtype_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "has_triton", lambda: False)
    planting.calls(_efficient, "to", lambda mask, dtype: mask)(monkeypatch)
    with pytest.raises(RuntimeError, match=r"torch.float32.*torch.bfloat16"):
        run_biased("padded", NARROW, False)


def test_other_devices_get_a_bias_of_the_queries_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = torchs_choices(monkeypatch)
    q, k, v = (x.detach() for x in draw(tail(3, 9), Shape(), NARROW))
    bias = torch.zeros(2, 4, 3, 9)
    for device, dtype in (("mps", NARROW), ("cpu", WIDE)):  # a CPU's kernel adds a float32 bias without rounding it
        with record_choices(device):
            sdpa(q, k, v, 0.3, bias)
        assert [mask.dtype for _, mask, _ in seen if mask is not None] == [dtype]
        seen.clear()


@pytest.mark.parametrize("guarded", [True, False])
def test_autocast_rounds_no_score_of_plain_products(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward within autocast of the tensors' own device; without the guards the results differ."""
    if not guarded:
        monkeypatch.setattr(tiled, "without_autocast", lambda x: nullcontext())
    mask = tail(9, 9)
    inputs = [x.detach() for x in draw(mask, Shape(), WIDE)]
    results = []
    for enabled in (False, True):
        with pretending(), torch.autocast(DEVICE.type, NARROW, enabled=enabled):
            q, k, v = (on_device(x).requires_grad_() for x in inputs)
            visible = on_device(mask.materialize()[0])
            outputs = (tiled.masked_attention(q, k, v, 0.9, visible), tiled.causal_attention(q, k, v, 0.9))
            # Without the guards the backward pass would fail: it would mix dtypes.
            gradients = torch.autograd.grad([y.sum() for y in outputs], [q, k, v]) if guarded else ()
            results.append([values_of(x).detach() for x in (*outputs, *gradients)])
    equal = [torch.equal(plain, cast) for plain, cast in zip(*results, strict=True)]
    assert all(equal) if guarded else not any(equal)


def test_a_mask_shares_what_layers_have_in_common() -> None:
    mask = CASES["packed"]()
    assert mask.cached("key", lambda: 1) == mask.cached("key", lambda: 2) == 1
    assert replace(mask, window=3).cached("key", lambda: 2) == 2


@pytest.mark.parametrize(
    ("fields", "kernels"),
    [
        ({}, (["causal"], ["flash"], ["flex"], ["products"])),
        ({"window": 64, "sink": True}, (["flex"], ["flash"], ["flex"], ["products"])),
        ({"softcap": 30.0}, (["flex"], ["products"], ["flex"], ["products"])),
        ({"position": {"kind": "relative_bias"}}, (["flex"], ["products"], ["flex"], ["products"])),
    ],
)
def test_any_machine_can_tell_the_kernels_of_cuda(fields: dict[str, Any], kernels: tuple[list[str], ...]) -> None:
    """In training and for a token, in bfloat16, then in float32: a model without values passes through the kernels."""
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2, **fields}
    design = {"vocab_size": 64, "width": 256, "norm": {"kind": "rms"}, "residual": {"kind": "pre_norm"}}
    layers = [{"repeat": 1, "mixer": mixer, "feedforward": {"kind": "gated", "hidden": 256}}]
    config = load_config({**design, "layers": layers, "head": {"tied": True}})
    for dtype, expected in ((NARROW, kernels[:2]), (WIDE, kernels[2:])):
        model = build_distinct_layers(config, dtype)
        for (queries, cached), names in zip(((1024, -1), (1, 1024)), expected, strict=True):
            choices = measure_kernel_choices(model, queries, cached, "cuda", None)
            assert [choice.kernel for choice in choices if choice.operation == "attention"] == names
