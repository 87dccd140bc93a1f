"""Experts: every kernel against a loop over single assignments; gradients, errors and FLOPs."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heddle.errors import ConfigError
from heddle.numerics import activations
from heddle.numerics.activations import Activation, glu
from heddle.numerics.dispatch import count_flops, record_choices
from heddle.numerics.experts import mixture
from heddle.numerics.experts.mixture import EXPERTS, experts_flops, run_experts
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights
from heddle.numerics.kernels import kernels
from heddle.numerics.linear import PackedWeightCache, packed_weights
from tests.laws.planting import Plant, calls, constant, operand_dropped

EXPERTS_, WIDTH, HIDDEN = 5, 16, 8
KERNELS = [kernel.name for kernel in EXPERTS.kernels]


TANH, SILU = glu(torch.tanh), glu(functional.silu)


def relu2(up: Tensor, gate: Tensor | None = None, /) -> Tensor:
    first = functional.relu(up if gate is None else gate).square()
    return first if gate is None else first * up


def make_weights(gated: bool, bias: bool, dtype: torch.dtype = torch.float64) -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(EXPERTS_, *shape, generator=generator, dtype=torch.float64).to(dtype) * 0.5

    up, down = draw(HIDDEN, WIDTH), draw(WIDTH, HIDDEN)
    gate = draw(HIDDEN, WIDTH) if gated else None
    if not bias:
        return ExpertWeights(up, down, gate)
    return ExpertWeights(up, down, gate, draw(HIDDEN), draw(WIDTH), draw(HIDDEN) if gated else None)


def make_assignment(
    tokens: int, top_k: int, drop_some: bool = False, with_dropout: bool = False, dtype: torch.dtype = torch.float64
) -> ExpertAssignment:
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(tokens, EXPERTS_, generator=generator)
    scores[:, 3] = -1.0  # expert 3 is selected only if all are
    expert_indices = scores.argsort(-1, descending=True)[:, :top_k]
    if drop_some:
        expert_indices = expert_indices.masked_fill(torch.rand(tokens, top_k, generator=generator) < 0.4, -1)
        expert_indices[:1] = -1
    dropout_mask = (
        (torch.rand(tokens, top_k, HIDDEN, generator=generator) < 0.7).to(dtype) / 0.7 if with_dropout else None
    )
    gates = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64).to(dtype)
    return ExpertAssignment(expert_indices, gates, dropout_mask, not drop_some)


def plain(x: Tensor, assignment: ExpertAssignment, weights: ExpertWeights, activation: Activation) -> Tensor:
    """Compute one assignment at a time."""
    rows = []
    for token in range(len(x)):
        y = torch.zeros_like(x[0])
        for slot, expert in enumerate(assignment.expert_indices[token].tolist()):
            if expert < 0:
                continue
            expert_weights = [None if weight is None else weight[expert] for weight in weights]
            up, down, gate, up_bias, down_bias, gate_bias = expert_weights
            assert up is not None
            assert down is not None
            gated = None if gate is None else gate @ x[token] + (0 if gate_bias is None else gate_bias)
            hidden = activation(up @ x[token] + (0 if up_bias is None else up_bias), gated)
            if assignment.dropout_mask is not None:
                hidden = hidden * assignment.dropout_mask[token, slot]
            y = y + assignment.gates[token, slot] * (down @ hidden + (0 if down_bias is None else down_bias))
        rows.append(y)
    return torch.stack(rows)


def gradients(y: Tensor, learned: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), learned, materialize_grads=True))


def assert_close(actual: Tensor, expected: Tensor, bound: float) -> None:
    """Assert closeness, relative to the largest expected number if that is above 1."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound * max(1.0, float(expected.detach().abs().max())))


CASES = {
    "gated": (True, False, 2, False, False),
    "gated with biases": (True, True, 2, False, False),
    "plain": (False, False, 1, False, False),
    "plain with biases and drops": (False, True, 3, True, False),
    "gated with drops and dropout": (True, True, 3, True, True),
    "all experts": (True, False, 5, False, False),
}


Inputs = tuple[Tensor, ExpertAssignment, ExpertWeights]


def draw(name: str, tokens: int = 11, dtype: torch.dtype = torch.float64) -> Inputs:
    """Random inputs of a case."""
    gated, bias, top_k, drop_some, with_dropout = CASES[name]
    x = torch.randn(tokens, WIDTH).to(dtype)
    return x, make_assignment(tokens, top_k, drop_some, with_dropout, dtype), make_weights(gated, bias, dtype)


def run(kernel: str, inputs: Inputs, activation: Activation) -> Tensor:
    with kernels(experts=kernel):
        return run_experts(*inputs, activation)


def assert_all_close(inputs: Inputs, got: Callable[[], Tensor], want: Callable[[], Tensor], bound: float) -> None:
    """Outputs, and the gradients of all that is learned."""
    x, assignment, weights = inputs
    learned = [x, assignment.gates, *(weight for weight in weights if weight is not None)]
    for value in learned:
        value.requires_grad_()
    actual, expected = got(), want()
    assert_close(actual, expected, bound)
    for one, other in zip(gradients(actual, learned), gradients(expected, learned), strict=True):
        assert_close(one, other, bound)


@pytest.mark.parametrize("kernel", ["sorted", "blockwise", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_and_their_gradients(name: str, kernel: str) -> None:
    inputs = draw(name)
    assert_all_close(inputs, lambda: run(kernel, inputs, relu2), lambda: plain(*inputs, relu2), 1e-12)


@pytest.mark.parametrize("block_rows", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_blocks_of_any_size(name: str, block_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "MIN_BLOCK_ROWS", block_rows)
    test_kernels_and_their_gradients(name, "blockwise")


@pytest.mark.parametrize(
    "plant",
    [
        constant(mixture._rows_in_blocks, True, False),  # a block that starts where one ends is the next expert's
        operand_dropped(mixture._rows_in_blocks, "cumsum"),
        calls(
            mixture._rows_in_blocks,
            "_Rows",
            lambda make, rows, unused, *rest: make(rows, torch.zeros_like(unused), *rest),
        ),
        calls(mixture._MoveRows.backward, "sum", lambda copies, dim: copies.select(dim, 0)),
        calls(mixture._BlockLinear.backward, "index_add", lambda total, *blocks: total.index_copy(*blocks)),
    ],
    ids=["the expert before", "no shift", "unused rows stay", "one copy's gradient", "one block's gradient"],
)
def test_planted_bugs_in_blocks_are_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        test_blocks_of_any_size("gated with biases", 2, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_in_lower_precision(dtype: torch.dtype) -> None:
    """The error is at most twice that of the reference in the same precision."""
    inputs = torch.randn(40, WIDTH).to(dtype)

    def all_gradients(kernel: str, precision: torch.dtype) -> list[Tensor]:
        weights = make_weights(True, True, dtype).map(lambda weight: weight.to(precision).requires_grad_())
        x, assignment = inputs.to(precision).requires_grad_(), make_assignment(40, 3, dtype=precision)
        with kernels(experts=kernel):
            y = run_experts(x, assignment, weights, SILU)
        return gradients(y, [x, *(weight for weight in weights if weight is not None)])

    exact = all_gradients("reference", torch.float64)
    for blockwise, plain_loop, answer in zip(
        all_gradients("blockwise", dtype), all_gradients("reference", dtype), exact, strict=True
    ):
        assert (blockwise - answer).norm() <= 2 * (plain_loop - answer).norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_no_kernel_of_an_accelerator_reads_a_number_of_rows() -> None:
    """In a graph there are no numbers of rows: what reads one cannot be traced."""
    assignment = make_assignment(40, 2)
    for dtype, bound in ((torch.float64, 1e-12), (torch.bfloat16, 0.1)):
        x, weights = torch.randn(40, WIDTH).to(dtype), make_weights(True, True, dtype)
        compiled = torch.compile(run_experts, fullgraph=True, backend="eager")
        assert_close(compiled(x, assignment, weights, TANH), run_experts(x, assignment, weights, TANH), bound)


LIMIT, ALPHA = 0.9, 1.3  # some inputs are above the limit, some below
CLAMPED = activations.activation("swiglu_clamped", {"limit": LIMIT, "alpha": ALPHA})


def scalar(up: float, gate: float) -> float:
    """The clamped SwiGLU of two numbers."""
    clamped_gate = LIMIT if gate > LIMIT else gate
    return (max(-LIMIT, min(up, LIMIT)) + 1) * clamped_gate / (1 + math.exp(-ALPHA * clamped_gate))


def scalars(up: Tensor, gate: Tensor | None = None, /) -> Tensor:
    assert gate is not None
    outputs = [scalar(*pair) for pair in zip(up.flatten().tolist(), gate.flatten().tolist(), strict=True)]
    return up.new_tensor(outputs).view(up.shape)


def test_clamped_swiglu_equals_its_formula_and_its_gradients_finite_differences() -> None:
    up = torch.linspace(-3, 3, 40, dtype=torch.float64)[:, None].expand(40, 40).clone().requires_grad_()
    gate = torch.linspace(-4, 4, 40, dtype=torch.float64).expand(40, 40).clone().requires_grad_()
    actual = CLAMPED(up, gate)
    torch.testing.assert_close(actual, scalars(up, gate), rtol=0, atol=1e-14)
    analytic_gradients = torch.autograd.grad(actual.sum(), (up, gate))
    for index, gradient in enumerate(analytic_gradients):
        step = [1e-6 * (index == 0), 1e-6 * (index == 1)]
        ahead, behind = (scalars(up + sign * step[0], gate + sign * step[1]) for sign in (1, -1))
        torch.testing.assert_close(gradient, (ahead - behind) / 2e-6, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kernel", ["per_expert", "sorted", "blockwise", "reference"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0]])
def test_clamped_experts(name: str, kernel: str) -> None:
    inputs = draw(name, 7)
    assert_close(run(kernel, inputs, CLAMPED), plain(*inputs, scalars), 1e-12)


@pytest.mark.parametrize("kernel", ["sorted", "grouped", "blockwise"])
def test_gradients_of_clamped_experts(kernel: str) -> None:
    dtype, bound = (torch.float32, 1e-4) if kernel == "grouped" else (torch.float64, 1e-12)
    inputs = draw("gated with drops and dropout", dtype=dtype)
    assert_all_close(inputs, lambda: run(kernel, inputs, CLAMPED), lambda: run("reference", inputs, CLAMPED), bound)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_few_tokens(name: str, tokens: int) -> None:
    inputs = draw(name, tokens)
    torch.testing.assert_close(run("per_expert", inputs, TANH), plain(*inputs, TANH), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", CASES)
def test_grouped(name: str, dtype: torch.dtype, bound: float) -> None:
    """The kernel for other devices, run on the CPU here."""
    inputs = draw(name, dtype=dtype)
    assert_all_close(inputs, lambda: run("grouped", inputs, SILU), lambda: run("reference", inputs, SILU), bound)


@pytest.mark.parametrize("kernel", ["sorted", "grouped", "blockwise", "reference"])
def test_an_expert_without_tokens_has_a_gradient_of_zero(kernel: str) -> None:
    weights = make_weights(True, True, torch.float32)
    for weight in weights:
        assert weight is not None
        weight[3] = float("nan")
        weight.requires_grad_()
    x = torch.randn(7, WIDTH, requires_grad=True)
    with kernels(experts=kernel):
        y = run_experts(x, make_assignment(7, 2, dtype=torch.float32), weights, SILU)
    gradients_of_all = torch.autograd.grad(y.sum(), [x, *(weight for weight in weights if weight is not None)])
    assert bool(y.isfinite().all())
    assert bool(gradients_of_all[0].isfinite().all())
    for gradient in gradients_of_all[1:]:
        assert not bool(gradient[3].any())
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("kernel", ["sorted", "blockwise", "reference", "per_expert"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_all_assignments_dropped_or_no_tokens(kernel: str, tokens: int) -> None:
    weights, x = make_weights(True, True), torch.randn(tokens, WIDTH, dtype=torch.float64)
    assignment = ExpertAssignment(torch.full((tokens, 2), -1), torch.ones(tokens, 2, dtype=torch.float64))
    with torch.no_grad(), kernels(experts=kernel):
        assert torch.equal(run_experts(x, assignment, weights, TANH), torch.zeros(tokens, WIDTH, dtype=torch.float64))
    if kernel != "per_expert":
        x.requires_grad_()
        with kernels(experts=kernel):
            y = run_experts(x, assignment, weights, TANH)
        (gradient,) = torch.autograd.grad(y.sum(), [x], materialize_grads=True)
        assert torch.equal(gradient, torch.zeros_like(x))


def test_only_required_gradients_are_computed() -> None:
    weights, x = make_weights(True, False), torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    weights.down.requires_grad_()
    with kernels(experts="sorted"):
        y = run_experts(x, make_assignment(6, 2), weights, TANH)
    y.sum().backward()
    assert weights.down.grad is not None
    assert weights.up.grad is None
    assert x.grad is not None


def test_a_second_gradient_is_refused() -> None:
    weights, x = make_weights(True, False), torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    with kernels(experts="sorted"):
        y = run_experts(x, make_assignment(6, 2), weights, TANH)
    with pytest.raises(ConfigError, match="double backward"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_autocast_multiplies_in_its_dtype_and_gradients_keep_theirs() -> None:
    weights = make_weights(True, True, torch.float32)
    for weight in weights:
        assert weight is not None
        weight.requires_grad_()
    x, assignment = torch.randn(9, WIDTH, requires_grad=True), make_assignment(9, 2, dtype=torch.float32)
    expected = run_experts(x, assignment, weights, SILU)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run_experts(x, assignment, weights, SILU)
        actual.float().sum().backward()
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=0.2)
    assert weights.up.grad is not None
    assert weights.up.grad.dtype == torch.float32


def test_experts_are_packed_once_and_again_after_a_change() -> None:
    weights = ExpertWeights(torch.randn(3, 512, 512), torch.randn(3, 512, 512))
    assignment = ExpertAssignment(torch.tensor([[2, 0]]), torch.rand(1, 2), None, True)
    x = torch.randn(1, 512)
    with torch.no_grad():
        expected = run_experts(x, assignment, weights, TANH)
        cache: PackedWeightCache = {}
        with packed_weights(cache):
            for _ in range(3):
                torch.testing.assert_close(run_experts(x, assignment, weights, TANH), expected, rtol=1e-4, atol=1e-2)
            ((*_, packed_experts),) = cache.values()
            assert sorted(packed_experts) == [0, 2]
            weights.up.mul_(2.0)
            changed = run_experts(x, assignment, weights, TANH)
    with torch.no_grad():
        torch.testing.assert_close(changed, run_experts(x, assignment, weights, TANH), rtol=1e-4, atol=1e-2)


def test_kernels_give_the_reason_why_they_do_not_support_a_call() -> None:
    weights, x = make_weights(True, False), torch.randn(40, WIDTH, dtype=torch.float64)
    for kernel, words in (("grouped", r"torch.float64"), ("per_expert", r"64 assignments.*80")):
        with pytest.raises(ConfigError, match=words), torch.no_grad(), kernels(experts=kernel):
            run_experts(x, make_assignment(40, 2), weights, TANH)
    with pytest.raises(ConfigError, match="gradients are required"), kernels(experts="per_expert"):
        run_experts(x[:1].requires_grad_(), make_assignment(1, 2), weights, TANH)


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [
        ("cpu", torch.float32, "sorted"),
        ("cuda", torch.bfloat16, "grouped"),
        ("cuda", torch.float32, "blockwise"),
        ("cuda", torch.float64, "blockwise"),
    ],
)
def test_the_kernel_depends_on_the_device_and_dtype(device: str, dtype: torch.dtype, kernel: str) -> None:
    weights = make_weights(True, False, dtype).map(lambda weight: weight.to("meta"))
    cpu_assignment = make_assignment(100, 2, dtype=dtype)
    assignment = ExpertAssignment(cpu_assignment.expert_indices.to("meta"), cpu_assignment.gates.to("meta"), None, True)
    with record_choices(device) as recorded:
        run_experts(torch.empty(100, WIDTH, dtype=dtype, device="meta"), assignment, weights, TANH)
    assert [choice.kernel for choice in recorded] == [kernel]


def test_flops_are_those_of_the_selected_experts() -> None:
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    with count_flops() as flops:
        run_experts(x, make_assignment(6, 2), make_weights(True, False), TANH)
        run_experts(x, make_assignment(6, 3), make_weights(False, False), TANH)
    assert flops[0] == experts_flops(12, WIDTH, HIDDEN, True) + experts_flops(18, WIDTH, HIDDEN, False)
    assert flops[0] == 12 * 2 * 3 * WIDTH * HIDDEN + 18 * 2 * 2 * WIDTH * HIDDEN
