"""C++ operators equal the plain way in float64, values and gradients; what cannot be built is named, and not used."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heddle import extensions
from heddle.data.samples import Batch
from heddle.extensions import OutOfTimeError
from heddle.laws.harness import LawViolation
from heddle.laws.kernels import kernel_equivalence
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.numerics import native, norms
from heddle.numerics.activations import activation
from heddle.numerics.attention import latent, softmax
from heddle.numerics.attention.latent import LatentAttentionFacts
from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.cross_entropy import OutputHead, loss_sum
from heddle.numerics.dispatch import Kernel, Operation, record_choices
from heddle.numerics.experts import sorted as sorted_experts
from heddle.numerics.experts.mixture import run_experts
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights
from heddle.numerics.kernels import kernels
from heddle.numerics.linear import linear
from heddle.numerics.native.races import RACES
from heddle.numerics.norms import euclidean_norms, rms_norm
from heddle.numerics.rotary import apply_rotary
from heddle.parts.layout import Layout
from heddle.storage.file_io import write_json_file
from heddle.torch_private import LightDispatchMode
from heddle.training import optimizer as optimizer_module
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients
from tests.cases import case
from tests.merged_designs import present_designs

Case = tuple[str, Callable[..., Tensor], list[Tensor]]  # operation, function of the inputs, the inputs
DESIGN = ["vocab_size=64", "width=32", "layers.0.repeat=2"]


@pytest.fixture
def operators() -> None:
    """All operators, built once for all tests of this process."""
    assert extensions.install(native.OPERATORS) == tuple(sorted(native.OPERATORS))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(q.shape[2], dtype=torch.int32)[None].expand(q.shape[0], -1)
    return softmax.attention(q, k.transpose(1, 2), v, AttentionMask(positions, positions, contiguous=True), 0.3)


def _packed_attention(lengths: list[list[int]], window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax.attention(q, k, v, Layout.packed(lengths).attention_mask(window, True), 0.3)


def _loss(targets: Tensor, scale: float, hidden: Tensor, weight: Tensor) -> Tensor:
    return loss_sum(hidden, OutputHead(weight, scale=scale), targets)


def _rotate(table: tuple[Tensor, Tensor], layout: str, x: Tensor) -> Tensor:
    cosines, sines = table
    return apply_rotary(x.transpose(1, 2), cosines, sines, layout)


def _cases() -> Iterator[Case]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).requires_grad_()

    for shape in ((3, 5, 7), (2, 1, 128), (4, 33), (130, 65)):
        for offset in (0.0, 1.0):
            for cast in ("before", "after"):
                norm = partial(rms_norm, eps=1e-6, offset=offset, cast=cast)
                yield "rms_norm", norm, [random(*shape), random(shape[-1])]
        yield "rms_norm", lambda x: rms_norm(x.transpose(0, 1), None, 1e-3), [random(*shape)]
        yield "swiglu", activation("silu"), [random(*shape), random(*shape)]
    for layout in ("half", "interleaved"):
        for batch in (1, 2):
            table = random(batch, 1, 7, 5).detach(), random(batch, 1, 7, 5).detach()
            yield "rotary", partial(_rotate, table, layout), [random(2, 7, 3, 13)]
    for batch, heads, groups, length, dim, values in ((1, 1, 1, 2, 3, 5), (2, 4, 2, 97, 24, 70), (1, 6, 2, 200, 65, 8)):
        q, k = random(batch, heads, length, dim), random(batch, length, groups, dim)
        yield "attention", _attention, [q, k, random(batch, groups, length, values)]
    for window in (None, 5, 70):
        packed = partial(_packed_attention, [[90, 1, 6], [40, 57]], window)
        yield "attention", packed, [random(2, heads, 97, dim) for heads, dim in ((4, 24), (2, 24), (2, 70))]
    targets = torch.randint(101, (37,))
    for scale in (1.0, 1.7):
        yield "linear_cross_entropy", partial(_loss, targets, scale), [random(37, 9), random(101, 9)]
    for rows, inputs_, outputs in ((64, 1, 1), (65, 3, 5), (100, 300, 70), (130, 31, 200), (77, 64, 64)):
        yield "linear", lambda x, w: linear(x.T, w), [random(inputs_, rows), random(outputs, inputs_)]


def _results(run: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    y = run(*inputs)
    gradient = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, gradient)]


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.usefixtures("operators")
def test_operators_equal_the_reference_in_values_and_gradients() -> None:
    torch.set_num_threads(2)
    for operation, run, inputs in _cases():
        with record_choices("cpu") as choices:
            got = _results(run, inputs)
        assert (operation, "native") in [choice[:2] for choice in choices]
        with kernels(**{operation: "reference"}):
            want = _results(run, inputs)
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            assert _error(a, b) < 1e-12, (operation, [x.shape for x in inputs], number)


@pytest.mark.usefixtures("operators")
def test_a_mask_that_forgets_documents_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: queries see the keys of earlier documents."""
    monkeypatch.setattr(AttentionMask, "first_keys", lambda mask: torch.zeros_like(mask.q_positions))
    inputs = [torch.randn(2, heads, 97, 24, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
    run = partial(_packed_attention, [[90, 1, 6], [40, 57]], None)
    got = _results(run, inputs)
    with kernels(attention="reference"):
        want = _results(run, inputs)
    assert all(_error(a, b) > 1e-3 for a, b in zip(got, want, strict=True))


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storage_in_fewer_bits_is_as_exact_as_the_plain_way(dtype: torch.dtype) -> None:
    for operation, run, inputs in _cases():
        if operation == "rotary" or (operation == "linear" and dtype == torch.bfloat16):
            continue  # the table has its dtype; bfloat16 products are oneDNN's
        rounded = [x.detach().to(dtype).requires_grad_() for x in inputs]
        with kernels(**{operation: "reference"}):
            exact = _results(run, [x.detach().double().requires_grad_() for x in rounded])
            plain = _results(run, rounded)
        with kernels(**{operation: "native"}):
            got = _results(run, rounded)
        for a, b, c in zip(got, plain, exact, strict=True):
            assert a.dtype == b.dtype
            assert _error(a, c) < 2 * _error(b, c) + torch.finfo(dtype).eps, (operation, [x.shape for x in inputs])


@pytest.mark.usefixtures("operators")
def test_a_large_vocabulary_adds_no_bias_in_float32() -> None:
    weight, targets = torch.full((2**18, 1), -0.1).index_fill_(0, torch.tensor([0]), 0.0), torch.tensor([0])
    with kernels(linear_cross_entropy="native"):
        loss = _loss(targets, 1.0, torch.ones(1, 1), weight)
    assert abs(loss.item() - weight.double().exp().sum().log().item()) < 1e-5  # 2e-4 if added one by one


def _experts(chosen: Tensor, *inputs: Tensor) -> Tensor:
    x, gates, up, down, gate = inputs
    weights = ExpertWeights(up, down, gate)
    return run_experts(x, ExpertAssignment(chosen, gates), weights, activation("silu"))


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_experts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = torch.rand(70, 5).argsort(1)[:, :3].masked_fill(torch.rand(70, 3) < 0.2, -1)
    shapes = ((70, 9), (70, 3), (5, 33, 9), (5, 9, 33), (5, 33, 9))
    inputs = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    with kernels(experts="reference"):
        exact = _results(partial(_experts, chosen), [x.detach().double().requires_grad_() for x in inputs])
    got = _results(partial(_experts, chosen), inputs)
    native.in_use -= {"weighted_swiglu_backward"}
    plain = _results(partial(_experts, chosen), inputs)
    for a, b, c in zip(got, plain, exact, strict=True):
        assert _error(a, c) < (1e-12 if dtype == torch.float64 else 2 * _error(b, c) + torch.finfo(dtype).eps)
    hidden_gradients = sorted_experts._hidden_gradients

    def biased(*arguments: Any) -> tuple[Tensor, Tensor, Any]:
        hidden, sums, (up, gate) = hidden_gradients(*arguments)
        return hidden, sums, (up, gate * 1.05)

    monkeypatch.setattr(sorted_experts, "_hidden_gradients", biased)
    wrong = _results(partial(_experts, chosen), inputs)[-1]
    assert _error(wrong, exact[-1]) > 2 * _error(plain[-1], exact[-1]) + torch.finfo(dtype).eps


@pytest.mark.usefixtures("operators")
def test_infinities_and_nan_are_as_in_the_plain_way() -> None:
    x = torch.tensor([float("nan"), float("inf"), -1e4, -90.0, -88.0, 0.0, 88.0, 89.5, 1e4])
    with kernels(swiglu="reference"):
        want = activation("silu")(torch.ones_like(x), x)
    got = activation("silu")(torch.ones_like(x), x)
    # at -90, where sigmoid has no normal number, the operator gives 0
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-6, atol=1e-37)


@pytest.mark.usefixtures("operators")
def test_the_law_of_kernels_covers_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("preset:gqa-tiny", DESIGN)
    kernel_equivalence(config)

    def biased(*arguments: object) -> Tensor:
        y: Tensor = norms.RMS_NORM.kernels[-1].run(*arguments)
        return y * (1 + 1e-6)

    first, *others = norms.RMS_NORM.kernels
    planted = Kernel("native", biased, first.unsupported, traceable=False)
    monkeypatch.setattr(norms, "RMS_NORM", Operation("rms_norm", (planted, *others)))
    with pytest.raises(LawViolation, match="chosen kernels"):
        kernel_equivalence(config)


@pytest.mark.usefixtures("operators")
def test_every_option_is_under_the_law_of_kernels_with_all_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in present_designs():
        kernel_equivalence(config)
    selecting = case("latent-indexer")
    kernel_equivalence(selecting)

    def reads_past_selections(facts: LatentAttentionFacts) -> str | None:
        return first.unsupported(facts._replace(most_selected=None))

    first, *others = latent.LATENT.kernels
    planted = (replace(first, unsupported=reads_past_selections), *others)
    monkeypatch.setattr(latent, "LATENT", replace(latent.LATENT, kernels=planted))
    with pytest.raises(LawViolation, match="chunks with a state, chosen kernels"):
        kernel_equivalence(selecting)


def _trained(operators: frozenset[str]) -> dict[str, Tensor]:
    native.in_use = operators
    torch.manual_seed(0)
    model = build(load_config("preset:gqa-tiny", DESIGN)).double().train()
    optimizer = build_optimizer(model, 0.1)
    for seed in range(3):
        tokens = np.random.default_rng(seed).integers(1, 64, (4, 65))
        result = accumulate_gradients(model, Batch(tokens, ((64,),) * 4, np.arange(4)), (0, 0))
        apply_gradients(model, optimizer, result, 1e-3, 0.1)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.usefixtures("operators")
def test_training_steps_give_the_same_weights() -> None:
    got, want = _trained(frozenset(native.OPERATORS)), _trained(frozenset())
    for name, weight in want.items():
        assert _error(got[name], weight) < 1e-10, name


def check_that_numbers_are_seen() -> None:
    """What a step knew of its weights and moments is not taken for those that were written since."""
    model = build(load_config("preset:gqa-tiny", DESIGN)).train()
    optimizer = build_optimizer(model, 0.1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(1e-3, None, torch.tensor(2.0), 1.0)
        assert optimizer.is_finite()
    saved = optimizer.state
    for tensor in (model.embed.weight.detach(), *saved["embed.weight"].values()):
        number = tensor.flatten()[0].clone()
        for wrong in (float("nan"), float("inf")):
            tensor.view(-1)[0] = wrong
            assert bool(optimizer.is_finite()) == (tensor is saved["embed.weight"]["step"])
        tensor.view(-1)[0] = number
        assert optimizer.is_finite()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)  # its square overflows
    optimizer.step(1e-3)
    assert not optimizer.is_finite()


@pytest.mark.usefixtures("operators")
def test_numbers_written_after_a_step_are_seen() -> None:
    check_that_numbers_are_seen()


@pytest.mark.usefixtures("operators")
def test_a_step_that_trusts_what_it_knew_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module.Optimizer, "_versions", lambda self: [])
    with pytest.raises(AssertionError):
        check_that_numbers_are_seen()


@pytest.mark.usefixtures("operators")
def test_norms_of_many_tensors() -> None:
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((1,), (3, 70001), (7, 5))]
    tensors.append(torch.randn(9, 4, dtype=torch.float64).T)
    want = torch.stack([x.norm() for x in tensors])
    assert _error(euclidean_norms(tensors), want) < 1e-14
    assert not euclidean_norms([torch.tensor([1.0, float("nan")])]).isfinite().any()


@pytest.mark.usefixtures("operators")
def test_second_derivatives_are_refused() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(rms_norm(x, None, 1e-6).sum(), x)
    assert not gradient.requires_grad
    with pytest.raises(RuntimeError, match="rms_norm: its C\\+\\+ operator has no second derivatives"):
        torch.autograd.grad(rms_norm(x, None, 1e-6).sum(), x, create_graph=True)


@pytest.mark.usefixtures("operators")
def test_only_plain_tensors_with_values_are_served() -> None:
    x = torch.randn(3)
    assert native.serves("rms_norm", x, None)
    assert not native.serves("rms_norm", torch.empty(3, device="meta"))
    assert not native.serves("rms_norm", x.as_subclass(_OwnTensor))
    with LightDispatchMode():
        assert not native.serves("rms_norm", x)
    extensions.install(())
    assert not native.serves("rms_norm", x)


class _OwnTensor(Tensor):
    """A tensor of another library."""


def test_every_operator_is_timed() -> None:
    assert RACES.keys() == native.OPERATORS.keys()
    for prepare in RACES.values():
        prepare()()


def test_what_cannot_be_built_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path))
    monkeypatch.setattr(extensions, "_loaded", set())
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert extensions.install(["rms_norm"]) == ()
    assert not native.in_use
    want = "C++ operators rms_norm: the plain ways are used, because no C++ compiler was found; install g++, or set CXX"
    assert want in capsys.readouterr().err
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *" -c "*) echo error: out of order >&2; exit 1;; *) exec c++ "$@";; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    extensions._compiler_version.cache_clear()
    assert extensions.install(["rms_norm"]) == ()
    assert "elementwise.cpp could not be built: error: out of order" in capsys.readouterr().err
    extensions._compiler_version.cache_clear()


def test_a_build_that_does_not_end_in_time_is_stopped_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compiler would never end."""
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(extensions, "_loaded", set())
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) echo $$ >> {tmp_path}/began; exec sleep 10000;; *) exec c++ "$@";; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    extensions._compiler_version.cache_clear()

    class Clock:
        """It stands still until the compiler has begun, and then is past the end."""

        @staticmethod
        def perf_counter() -> float:
            return 20.0 if (tmp_path / "began").is_file() else 0.0

    monkeypatch.setattr(extensions, "time", Clock)
    with pytest.raises(OutOfTimeError, match="elementwise"):
        extensions.install(["rms_norm"], 1.0)
    assert not native.in_use
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    stat = Path("/proc", (tmp_path / "began").read_text().strip(), "stat")
    for _ in range(1000):  # a killed process takes a moment to end
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "XZ":
            break
        time.sleep(0.01)
    else:
        pytest.fail("the compiler was not stopped")
    with pytest.raises(OutOfTimeError):  # nothing is begun after the end
        extensions.install(["rms_norm"], 1.0)
    assert len((tmp_path / "began").read_text().split()) == 1
    extensions._compiler_version.cache_clear()


def test_a_damaged_build_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path))
    monkeypatch.setattr(extensions, "_loaded", set())
    built: list[Path] = []

    def build_file(group: str, path: Path, end: float) -> None:
        built.append(path)
        path.write_bytes(b"code")
        write_json_file(extensions._record_of(path), {"code": hashlib.sha256(b"code").hexdigest()})

    monkeypatch.setattr(extensions, "_build", build_file)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    for damage in (b"code", b"cod", b""):
        extensions._loaded.clear()
        extensions.install(["rms_norm"])
        built[-1].write_bytes(damage)
    extensions._loaded.clear()
    extensions.install(["rms_norm"])
    assert len(built) == 3  # the first, and after each damage
