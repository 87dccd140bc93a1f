"""A training step makes the host wait once, where its numbers are read; the tests would see any other wait."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heddle.numerics.attention import sliding_window, tiled
from heddle.numerics.transfer import Constants, HostCopy, tensor_of, to_device
from heddle.parts.layout import Layout
from heddle.parts.modules.linear import Linear
from heddle.training.evaluation.scores import bits_and_bytes, correct_predictions
from heddle.training.optimizer import build_optimizer
from heddle.training.step import BatchResult, accumulate_gradients, apply_gradients, prepare_batch
from tests.accelerator.comparison import CPU, KEY, Step, batch_of, differences, model_of, step_faults
from tests.accelerator.pretend import DEVICE, Pretended, moved, on_device, pretending, values_of
from tests.cases import case
from tests.source import package_sources

X = torch.tensor([3.0, 1.0, 2.0])
WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "item of a truth value": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "copy to the host": lambda x: x.cpu(),
    "copy from pageable memory": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "copy from pageable memory, not blocking": lambda x: X.to(x.device, non_blocking=True),
    "copy from pageable memory, in place": lambda x: x.copy_(X),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "boolean index": lambda x: x[x > 1],
    "boolean index of a write": lambda x: x.index_put_((x > 1,), x[:2].clone()),
    "index from the host": lambda x: x[torch.tensor([0, 2])],
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "bincount": lambda x: x.long().bincount(),
}
QUIET: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + 1).sum(),
    "views": lambda x: x.view(3, 1).expand(3, 2)[1:],
    "masked fill": lambda x: x.index_put_((x > 1,), torch.zeros((), device=x.device)),
    "index": lambda x: x[torch.arange(2, device=x.device)],
    "repeat_interleave of a known size": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "pinned copy": lambda x: to_device(X, x.device),
    "list": lambda x: tensor_of([1.0, 2.0], torch.float32, x.device),
    "constants": lambda x: Constants().tensor((1.0, 2.0), torch.float32, x.device),
    "host copy": HostCopy,
    "single numbers of the host": lambda x: x * torch.tensor(2.0),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_logged(name: str) -> None:
    with pretending() as log:
        WAITS[name](on_device(X))
    assert [wait.what for wait in log.waits][:1] == [re.split(",| of ", name)[0]]


@pytest.mark.parametrize("name", QUIET)
def test_what_does_not_wait_is_not_logged(name: str) -> None:
    with pretending() as log:
        QUIET[name](on_device(X))
    assert log.report == []


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pretending():
        with pytest.raises(RuntimeError, match="different devices"):
            on_device(X) + X
        with pytest.raises(TypeError, match="array"):
            on_device(X).numpy()


def test_a_host_copy_waits_when_it_is_read() -> None:
    with pretending() as log:
        copy = HostCopy(on_device(X) * 2)
        assert log.waits == []
        assert copy.read().tolist() == copy.read().tolist() == [6.0, 2.0, 4.0]
        assert [wait.what for wait in log.waits] == ["event"]


def test_constants_are_made_once_for_each_dtype_and_device() -> None:
    constants = Constants()
    with pretending() as log:
        tensors = [constants.tensor((0.1, 0.2), torch.float64, DEVICE) for _ in range(3)]
        assert len(log.uploads) == 1
        assert all(tensor is tensors[0] for tensor in tensors)
        assert isinstance(tensors[0], Pretended)
    on_cpu = constants.tensor((0.1, 0.2), torch.float32, CPU)
    torch.testing.assert_close(on_cpu, torch.tensor([0.1, 0.2]), rtol=0, atol=0)


def planted(forward: Callable[..., Tensor], fault: Callable[[Tensor], object]) -> Callable[..., Tensor]:
    """The forward method of a module, with a fault after it."""

    def call(self: nn.Module, x: Tensor) -> Tensor:
        y = forward(self, x)
        fault(y)
        return y

    return call


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (lambda y: y.sum().item(), "item"),
        (lambda y: y[y > 0], "boolean index"),
        (lambda y: y.detach().cpu(), "copy to the host"),
        (lambda y: torch.tensor([0.5], device=y.device), "copy from pageable memory"),
    ],
)
def test_a_wait_within_a_training_step_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor], object], what: str
) -> None:
    assert step_faults(case("attention-gqa")) == []
    monkeypatch.setattr(Linear, "forward", planted(Linear.forward, fault))
    assert [f for f in step_faults(case("attention-gqa")) if re.match(rf"\d+ × {what} at parts/", f)]


def test_the_batch_comes_to_the_device_without_a_wait() -> None:
    config = case("attention-gqa")
    with pretending() as log:
        step = Step(config, DEVICE)
        prepared = prepare_batch(batch_of(config, has_labels=True), DEVICE, accumulation_steps=2)
        losses = [accumulate_gradients(step.model, rows, KEY, 2).loss for rows in (step.batch, prepared)]
        assert log.report == []
        assert losses[0].item() == losses[1].item()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_that_is_not_finite_is_skipped_on_the_device(kind: str) -> None:
    with pretending() as log:
        step = Step(case("moe-sigmoid-groups"), DEVICE)
        step.optimizer = build_optimizer(step.model, 0.1, kind)
        step.take()
        before = {name: value.clone() for name, value in values_of(step.weights()).items()}
        moments = {
            (name, key): value.clone()
            for name, state in values_of(step.optimizer.state).items()
            for key, value in state.items()
        }
        good = accumulate_gradients(step.model, step.batch, KEY)
        bad = BatchResult(good.loss * torch.inf, good.aux_loss, good.router_metrics)
        log.clear()
        result = apply_gradients(step.model, step.optimizer, bad, 1e-3, 1.0)
        assert log.report == []
        assert result.skipped
        assert differences(step.weights(), before) == []
        for (name, key), value in moments.items():
            assert torch.equal(values_of(step.optimizer.state[name][key]), value), (name, key)
        assert all(parameter.grad is None for parameter in step.model.parameters())
        step.take()
        assert not step.read().skipped
        assert differences(step.weights(), before) != []


def rounding(name: str, device: torch.device) -> tuple[float, ...]:
    """What bfloat16 changes of the loss and of the gradients' norm in a training step."""
    exact, narrow = Step(case(name), CPU), Step(case(name), device, torch.bfloat16)
    exact.take()
    narrow.take()
    return tuple(abs(a - b) for a, b in zip(narrow.read()[:2], exact.read()[:2], strict=True))


def rounds_too_much(name: str) -> bool:
    """Whether autocast rounds more on the pretended device than on the CPU."""
    with pretending():
        on_pretend = rounding(name, DEVICE)
    return any(error > 2 * bound + 1e-6 for error, bound in zip(on_pretend, rounding(name, CPU), strict=True))


@pytest.mark.parametrize("name", ["attention-softcap", "alibi-softcap-sink-window", "delta", "mamba2", "rwkv7", "moe"])
def test_autocast_rounds_no_more_on_the_device_than_on_the_cpu(name: str) -> None:
    assert not rounds_too_much(name)


def test_a_guard_against_autocast_that_names_the_cpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does nothing on a device: there, scores were rounded to bfloat16 before their softcap."""
    monkeypatch.setattr(tiled, "without_autocast", lambda x: torch.autocast("cpu", enabled=False))
    monkeypatch.setattr(sliding_window, "without_autocast", lambda x: torch.autocast("cpu", enabled=False), False)
    assert rounds_too_much("alibi-softcap-sink-window")


def test_no_guard_against_autocast_names_a_device() -> None:
    pattern = re.compile(r"""autocast\(\s*["']""")
    assert [source.name for source in package_sources() if pattern.search(source.text)] == []


def test_an_evaluation_reads_each_batch_once() -> None:
    batches, sizes = [batch_of(case("attention-gqa"), has_labels=True)] * 3, np.full(61, 2)
    model = model_of(case("attention-gqa"), CPU)
    bits, answers = bits_and_bytes(model, batches, sizes), correct_predictions(model, batches)
    with pretending() as log:
        model = moved(model)
        np.testing.assert_allclose(bits_and_bytes(model, batches, sizes), bits, rtol=1e-12)
        assert correct_predictions(model, batches) == answers
    assert [wait.what for wait in log.waits] == ["tolist"] * 6


def test_a_layout_reaches_the_device_in_one_copy() -> None:
    with pretending() as log:
        layout = Layout.packed([[3, 4], [7]], device=DEVICE)
        assert (len(log.uploads), log.report) == (1, [])
    assert values_of(layout.positions).tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]]
