"""Recurrences by libraries: the adapters against stand-ins that have the libraries' signatures and compute loops.

Choices are made as on CUDA, and tensors are on the CPU. Inputs are exact in bfloat16, so results differ by the rounding
of the output.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.laws.harness import model_under_test, random_tokens
from heddle.model.size import kernel_choices
from heddle.numerics.dispatch import record_choices
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent import convolution as conv_library
from heddle.numerics.recurrent import fla
from heddle.numerics.recurrent.causal_sums import causal_means, causal_sums
from heddle.numerics.recurrent.chunked_sums import CallLayout
from heddle.numerics.recurrent.convolution import (
    ConvolutionFacts,
    Taps,
    causal_conv1d,
    find_input_indices,
    find_tokens_near_starts,
)
from heddle.numerics.recurrent.gated_delta import DeltaInputs, gated_delta_rule
from heddle.numerics.recurrent.recurrence import RecurrenceFacts
from heddle.numerics.recurrent.ssd import SSDInputs, state_space_duality
from heddle.parts.layout import Layout
from heddle.parts.states import call_cu_seqlens
from tests.cases import case
from tests.laws.planting import Plant, assigned, calls, condition, result

BATCH, HEADS, GROUPS, LENGTH, D_K, D_V = 2, 4, 2, 11, 6, 5
DOCUMENTS = [[3, 1, 7], [11]]
TOLERANCE = 2e-2  # bfloat16 has 8 bits


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries are found in the folder of stand-ins."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))


def exact(*shape: int) -> Tensor:
    """Normal numbers that bfloat16 holds, in float32."""
    return torch.randn(shape).bfloat16().float()


def delta_inputs(channels: int, documents: bool) -> DeltaInputs:
    q, k = (exact(BATCH, GROUPS, LENGTH, D_K) / 4 for _ in range(2))
    layout = Layout.packed(DOCUMENTS) if documents else None
    with record_choices("cuda"):
        bounds = None if layout is None else call_cu_seqlens(layout)
    return DeltaInputs(
        q,
        k,
        exact(BATCH, HEADS, LENGTH, D_V),
        -torch.randn(BATCH, HEADS, LENGTH, channels).square(),
        torch.rand(BATCH, HEADS, LENGTH),
        None if layout is None else layout.call_segment_ids,
        bounds,
        torch.bfloat16,
    )


def ssd_inputs(documents: bool) -> SSDInputs:
    q, k, v, log_decay, beta, ids, bounds, dtype, _ = delta_inputs(1, documents)
    time_step = torch.full_like(beta, 0.5)[..., None]
    return SSDInputs(q, k, v, log_decay, time_step, torch.randn(HEADS), ids, bounds, dtype)


Run = Callable[[], tuple[Tensor, Tensor | None]]


def with_gradients(inputs: DeltaInputs | SSDInputs) -> list[Tensor]:
    return [x.requires_grad_() for x in inputs[:5]]


def results(run: Run, tensors: list[Tensor]) -> list[Tensor | None]:
    """The output and the state of a call, and the gradients of the inputs."""
    y, state = run()
    probe = torch.linspace(-1.0, 1.0, y.numel()).view_as(y)
    return [y, state, *torch.autograd.grad((y * probe).sum(), tensors, allow_unused=True)]


def assert_near(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def compare(operation: str, kernel: str, run: Run, tensors: list[Tensor]) -> None:
    """The library is chosen, and gives what the reference gives."""
    with record_choices("cuda") as choices:
        actual = results(run, tensors)
    assert [choice.kernel for choice in choices if choice.operation == operation] == [kernel]
    with kernels(**{operation: "reference"}):
        expected = results(run, tensors)
    assert_near(actual, expected)


def check_delta(channels: int, documents: bool, has_state: bool) -> None:
    inputs = delta_inputs(channels, documents)
    state = exact(BATCH, HEADS, D_K, D_V) if has_state else None
    tensors = with_gradients(inputs)
    compare("delta", "fla", lambda: gated_delta_rule(inputs, state), tensors)


CALLS = [(False, False), (False, True), (True, False)]


def check_all(check: Callable[[bool, bool], None]) -> None:
    for documents, has_state in CALLS:
        check(documents, has_state)


@pytest.mark.parametrize(("documents", "has_state"), CALLS)
@pytest.mark.parametrize("channels", [1, D_K])
def test_the_gated_delta_rule(channels: int, documents: bool, has_state: bool) -> None:
    check_delta(channels, documents, has_state)


@pytest.mark.parametrize(("documents", "has_state"), CALLS)
def test_state_space_duality(documents: bool, has_state: bool) -> None:
    inputs = ssd_inputs(documents)
    state = exact(BATCH, HEADS, D_K, D_V) if has_state else None
    compare("ssd", "fla", lambda: state_space_duality(inputs, state), with_gradients(inputs))


@pytest.mark.parametrize(("documents", "has_state"), CALLS)
@pytest.mark.parametrize("decay", ["none", "fixed", "learned", "padding"])
def test_causal_sums(decay: str, documents: bool, has_state: bool) -> None:
    q, k = (exact(BATCH, HEADS, LENGTH, D_K).div(4).requires_grad_() for _ in range(2))
    v = torch.randn(BATCH, HEADS, LENGTH, D_V).bfloat16().requires_grad_()
    rates = None if decay == "none" else -torch.linspace(0.0, 1.0, HEADS)
    layout = Layout.packed(DOCUMENTS) if documents else Layout.causal(BATCH, LENGTH)
    with record_choices("cuda"):
        bounds = call_cu_seqlens(layout)
    is_token, counts = torch.ones(BATCH, LENGTH), None
    if decay == "padding":
        is_token = torch.rand(BATCH, LENGTH) > 0.3
        counts = is_token.cumsum(1)
    if decay == "learned" and rates is not None:
        rates.requires_grad_()
    call = CallLayout(counts, layout.call_segment_ids, bounds)
    state = exact(BATCH, HEADS, D_K, D_V) if has_state else torch.zeros(BATCH, HEADS, D_K, D_V)
    sources = [q, k, v, *([rates] if rates is not None and rates.requires_grad else [])]

    def run() -> tuple[Tensor, Tensor]:
        y, after = causal_sums(q, k * is_token[:, None, :, None], v, rates, call, state if has_state else None)
        return y, state if after is None else after

    with record_choices("cuda") as choices:
        got = results(run, sources)
    assert [choice.kernel for choice in choices] == ["fla"]
    with kernels(causal_sums="reference"):
        want = results(run, sources)
    assert_near(got, want)


def test_causal_means_divide_sums_by_the_library() -> None:
    q, k = (exact(BATCH, HEADS, LENGTH, D_K).abs() + 0.5 for _ in range(2))
    v = torch.randn(BATCH, HEADS, LENGTH, D_V).bfloat16()
    with record_choices("cuda") as choices:
        y, _ = causal_means(q, k, v, CallLayout())
    assert [(choice.operation, choice.kernel) for choice in choices] == [
        ("causal_means", "quotient"),
        ("causal_sums", "fla"),
    ]
    assert_near([y], [causal_means(q, k, v, CallLayout())[0]])


def tensors_with(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Plant:
    """Other tensors in the call of fla."""
    return calls(
        fla.fla_delta_rule, "_run", lambda run, name, tensors, *rest: run(name, tensors | change(tensors), *rest)
    )


@pytest.mark.parametrize(
    "plant",
    [
        tensors_with(lambda tensors: {"g": tensors["beta"], "beta": tensors["g"]}),
        tensors_with(lambda tensors: {"q": tensors["k"], "k": tensors["q"]}),
        tensors_with(lambda tensors: {"g": tensors["g"].exp()}),
    ],
    ids=["decays and beta", "queries and keys", "a decay that is no logarithm"],
)
def test_a_swapped_argument_of_the_delta_rule_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_delta(1, False, False)


def without(name: str) -> Callable[..., Any]:
    """The call of a library without one of its tensors."""
    return lambda call, function, tensors: call(function, {key: x for key, x in tensors.items() if key != name})


@pytest.mark.parametrize(
    "plant",
    [
        assigned(fla._run, "arguments", lambda state: None, nth=2),
        assigned(fla._run, "y", lambda y: y.reshape(y.shape[1], y.shape[0], *y.shape[2:]).transpose(0, 1)),
        calls(fla._run, "call_library", without("cu_seqlens_cpu")),
        calls(fla._run, "searchsorted", lambda torch, *ends: torch.searchsorted(*ends) - 1),
    ],
    ids=["no state", "rows of tokens", "no lengths for the host", "the state of the document before"],
)
def test_a_wrong_call_of_fla_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        check_all(lambda documents, has_state: check_delta(1, documents, has_state))


def test_a_scale_that_fla_adds_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    calls(fla._call, "library", lambda function, *, scale, **arguments: function(**arguments))(monkeypatch)
    with pytest.raises(AssertionError):
        check_delta(1, False, False)


FACTS = RecurrenceFacts(8, True, device="cuda", dtype=torch.bfloat16, key_width=64)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (FACTS, None),
        (FACTS._replace(device="cpu"), "it runs on CUDA only"),
        (
            FACTS._replace(dtype=torch.float32),
            "it computes in half precision, but the projections are in torch.float32",
        ),
        (FACTS._replace(key_width=320), "keys are 320 wide, more than 256"),
        (FACTS._replace(tokens=1), "one token is one step of the recurrence"),
        (FACTS._replace(has_documents=True), "it does not combine packed documents with a state or padding"),
        (FACTS._replace(has_documents=True, has_cu_seqlens=True), None),
        (
            FACTS._replace(has_documents=True, has_cu_seqlens=True, has_state=True),
            "it does not combine packed documents with a state or padding",
        ),
    ],
)
def test_why_fla_is_not_chosen(facts: RecurrenceFacts, reason: str | None) -> None:
    assert fla.fla_unsupported(facts) == reason


@pytest.mark.parametrize(
    ("triton", "capability", "wrong"),
    [
        ("3.3.1", (9, 0), False),
        ("3.4.0", (9, 0), True),
        ("3.6.0+git12", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("4.0", (9, 0), False),
        ("3.6.0", (8, 0), False),
        ("3.6.0", (10, 0), False),
    ],
)
def test_versions_of_triton_that_compile_wrong_gradients(triton: str, capability: tuple[int, int], wrong: bool) -> None:
    assert fla.miscompiles(triton, capability) == wrong


def test_gradients_that_triton_compiles_wrongly_are_left_to_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "gradients_miscompiled", lambda: True)

    def chosen(run: Run) -> list[str]:
        with record_choices("cuda") as calls:
            run()
        return [call.kernel for call in calls]

    for channels, kernel in ((1, "batched"), (D_K, "fla")):
        inputs = delta_inputs(channels, False)
        assert chosen(partial(gated_delta_rule, inputs, None)) == ["fla"]
        trained = inputs._replace(q=inputs.q.requires_grad_())
        assert chosen(partial(gated_delta_rule, trained, None)) == [kernel]
    q, k, v = (exact(BATCH, HEADS, LENGTH, D_K).bfloat16().requires_grad_() for _ in range(3))
    log_decay = -torch.rand(HEADS)
    for learned, kernel in ((False, "fla"), (True, "batched")):
        decay = log_decay.requires_grad_(learned)
        assert chosen(lambda: causal_sums(q, k, v, decay, CallLayout())) == [kernel]  # noqa: B023


def check_convolution(dtype: torch.dtype, documents: bool, has_state: bool) -> None:
    channels, kernel_size = 16, 3
    layout = Layout.packed(DOCUMENTS) if documents else Layout.causal(BATCH, LENGTH)
    ids, taps = layout.call_segment_ids, None
    if ids is not None:
        starts = find_tokens_near_starts(DOCUMENTS, kernel_size, ids.device)
        taps = Taps(find_input_indices(ids >= 0, ids, kernel_size), starts, ids)
    x, weight = exact(BATCH, LENGTH, channels).to(dtype), exact(channels, kernel_size)
    state = exact(BATCH, kernel_size - 1, channels).to(dtype) if has_state else None
    sources = [x.requires_grad_(), weight.requires_grad_(), *([state.requires_grad_()] if state is not None else [])]
    compare("convolution", "causal_conv1d", lambda: (causal_conv1d(x, weight, state, taps), None), sources)


@pytest.mark.parametrize(("documents", "has_state"), CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_short_convolution(dtype: torch.dtype, documents: bool, has_state: bool) -> None:
    check_convolution(dtype, documents, has_state)


@pytest.mark.parametrize(
    "plant",
    [
        calls(conv_library.run_conv, "call_library", without("seq_idx")),
        calls(conv_library.run_conv, "to", lambda state, dtype: state.flip(1).to(dtype)),
        result(conv_library.run_conv, lambda y: y.flip(1)),
    ],
    ids=["no documents", "a state in reverse", "a result in reverse"],
)
def test_a_wrong_call_of_causal_conv1d_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_all(lambda documents, has_state: check_convolution(torch.float32, documents, has_state))


CONVOLUTION_FACTS = ConvolutionFacts(8, True, False, False, device="cuda", dtype=torch.bfloat16, channels=16)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (CONVOLUTION_FACTS, None),
        (CONVOLUTION_FACTS._replace(device="mps"), "it runs on CUDA only"),
        (CONVOLUTION_FACTS._replace(dtype=torch.float64), "it supports dtypes up to float32, not torch.float64"),
        (
            CONVOLUTION_FACTS._replace(channels=12),
            "it needs kernel size 2 to 4 and a multiple of 8 channels, not 4 and 12",
        ),
        (
            CONVOLUTION_FACTS._replace(kernel_size=5),
            "it needs kernel size 2 to 4 and a multiple of 8 channels, not 5 and 16",
        ),
        (CONVOLUTION_FACTS._replace(taps=True), "it does not combine packed documents with a state or padding"),
        (CONVOLUTION_FACTS._replace(taps=True, packed=True), None),
    ],
)
def test_why_causal_conv1d_is_not_chosen(facts: ConvolutionFacts, reason: str | None) -> None:
    assert conv_library.conv_unsupported(facts) == reason


@pytest.mark.parametrize(
    "name", ["delta-key-heads", "delta-steps", "kda-own-widths", "mamba2-groups", "retention-rope-gate"]
)
def test_models_pass_documents_and_their_dtype(name: str) -> None:
    """A model in bfloat16 whose mixers call the library, on packed rows, is as near to float64 as without it."""
    config = case(name)
    layout = Layout.packed([[9, 1, 6], [16]])
    tokens = random_tokens(config, 2, 16)
    model = model_under_test(config, torch.bfloat16)
    with torch.no_grad():
        exact_output = copy.deepcopy(model).to(torch.float64)(tokens, layout)[0]
        plain = model(tokens, layout)[0]
        with record_choices("cuda") as choices, kernels(attention="reference"):
            got = model(tokens, replace(layout, cache={}))[0]
    assert "fla" in {choice.kernel for choice in choices}
    errors = [float((x.double() - exact_output).square().mean()) for x in (got, plain)]
    assert errors[0] <= 4 * errors[1] + 1e-6 * float(exact_output.square().mean())


@pytest.mark.parametrize("name", ["delta", "kda", "mamba2", "mamba2-groups", "retention-plain", "linear-attention-elu"])
@pytest.mark.parametrize("cached_tokens", [-1, 0, 40])
def test_show_asks_the_libraries_for_nothing(name: str, cached_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels cannot run on tensors without values: only the shapes of the results are given."""
    config = case(name)
    expected = {choice.kernel for choice in kernel_choices(config, 24, cached_tokens, torch.bfloat16, "cuda")}
    assert "fla" in expected

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Triton takes no meta tensors")

    names = [*fla.FUNCTIONS.items(), ("causal_conv1d_fn", conv_library.MODULE)]
    for function, module in names:
        monkeypatch.setattr(import_module(module), function, refuse)
    assert {choice.kernel for choice in kernel_choices(config, 24, cached_tokens, torch.bfloat16, "cuda")} == expected
    with monkeypatch.context() as patch:
        condition(fla._run, "is_meta", False)(patch)
        with pytest.raises(RuntimeError, match="no meta tensors"):
            kernel_choices(config, 24, cached_tokens, torch.bfloat16, "cuda")


@pytest.mark.parametrize("documents", [False, True])
def test_the_shapes_without_values_are_those_of_the_results(documents: bool) -> None:
    inputs = delta_inputs(1, documents)
    with record_choices("cuda"):
        state = torch.zeros(BATCH, HEADS, D_K, D_V)
        results = fla.fla_delta_rule(inputs, state)
        bounds = inputs.cu_seqlens
        values: dict[str, Any] = {name: x.to("meta") for name, x in inputs._asdict().items() if isinstance(x, Tensor)}
        values["cu_seqlens"] = None if bounds is None else (bounds[0].to("meta"), bounds[1].to("meta"))
        shapes = fla.fla_delta_rule(inputs._replace(**values), state.to("meta"))
    assert [(x.shape, x.dtype) for x in shapes] == [(x.shape, x.dtype) for x in results]
