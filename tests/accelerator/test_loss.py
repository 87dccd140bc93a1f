"""The vocabulary loss as on an accelerator: few large chunks, one graph, and libraries by the user's choice."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heddle.errors import ConfigError
from heddle.numerics import cross_entropy
from heddle.numerics.cross_entropy import OutputHead, TeacherOutput, distillation_sums, loss_sum
from heddle.numerics.dispatch.device_size import DeviceSize
from heddle.numerics.dispatch.operation import record_choices
from heddle.numerics.kernels import kernels
from heddle.numerics.liger import liger_loss_sum
from tests.accelerator.loss_stand_ins import install_liger
from tests.laws.planting import Plant, calls

TOKENS, WIDTH, VOCABULARY = 300, 6, 11


def draws(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def loss_and_gradients(kernel: str | None = None, head_fields: dict[str, Any] | None = None) -> list[Tensor]:
    """The loss as on CUDA, and the gradients of hidden, weight and bias."""
    hidden, weight, bias = (draws(*shape).requires_grad_() for shape in ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (11,)))
    targets = torch.arange(TOKENS) * 7 % VOCABULARY
    head = OutputHead(weight, bias, **(head_fields or {}))
    with record_choices("cuda"), kernels(**({} if kernel is None else {"linear_cross_entropy": kernel})):
        loss = loss_sum(hidden, head, targets) * 0.37
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))]


def largest_difference(kernel: str, head_fields: dict[str, Any] | None = None) -> float:
    pairs = zip(loss_and_gradients(kernel, head_fields), loss_and_gradients("reference", head_fields), strict=True)
    return max(float((actual - expected).abs().max()) for actual, expected in pairs)


class Products(TorchDispatchMode):
    """Counts the products that write or update the gradient of the weight."""

    updates = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._schema.name in ("aten::addmm_", "aten::addmm", "aten::mm") and result.shape == (VOCABULARY, WIDTH):
            self.updates += 1
        return result


def test_an_accelerator_computes_few_large_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", DeviceSize(11, 140 * 11))
    with record_choices("cuda") as choices, Products() as products:
        loss_and_gradients()
    assert products.updates == 3  # chunks of 128 tokens: the multiple below 140
    assert {choice.kernel for choice in choices if choice.operation == "linear_cross_entropy"} <= {"fused"}


def test_chunks_of_a_large_vocabulary() -> None:
    """32,768 tokens are 8 chunks on an accelerator, and 252 on a CPU."""
    weight = torch.empty(128256, 1, device="meta")
    with record_choices("cuda"):
        assert cross_entropy._chunk_size(weight) == 4096
    with record_choices("cpu"):
        assert cross_entropy._chunk_size(weight) == 130


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_the_loss_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", DeviceSize(200 * 11, 200 * 11))
    teacher = TeacherOutput(draws(TOKENS, 4), OutputHead(draws(VOCABULARY, 4)))

    def objective(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        distilled = distillation_sums(hidden, OutputHead(weight, None, 0.7, 2.0), targets, teacher, 0.3, 0.8)
        return distilled.weighted + loss_sum(hidden, OutputHead(weight), targets)

    gradients = []
    for function in (objective, torch.compile(objective, fullgraph=True, backend="aot_eager")):
        hidden, weight = draws(TOKENS, WIDTH).requires_grad_(), draws(VOCABULARY, WIDTH).requires_grad_()
        gradients.append(torch.autograd.grad(function(hidden, weight, torch.arange(TOKENS) % 11), (hidden, weight)))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_ligers_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="liger_kernel is not installed"):
        loss_and_gradients("liger")
    install_liger(monkeypatch)
    for fields in ({}, {"softcap": 2.0}):
        assert largest_difference("liger", fields) < 1e-10
    with pytest.raises(ConfigError, match="scales its logits"):
        loss_and_gradients("liger", {"scale": 0.5})


def without(name: str) -> Plant:
    """An option of the library's function left out."""

    def call(functions: Any, *inputs: Tensor, **options: Any) -> Tensor:
        del options[name]
        return functions.liger_fused_linear_cross_entropy(*inputs, **options)

    return calls(liger_loss_sum, "liger_fused_linear_cross_entropy", call)


def exchanged(functions: Any, hidden: Tensor, weight: Tensor, *rest: Tensor, **options: Any) -> Tensor:
    return functions.liger_fused_linear_cross_entropy(weight, hidden, *rest, **options)


BUGS = {name: without(name) for name in ("bias", "softcap", "reduction", "accum_dtype")} | {
    "exchanged": calls(liger_loss_sum, "liger_fused_linear_cross_entropy", exchanged)
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_argument_of_liger_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    install_liger(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        assert largest_difference("liger", {"softcap": 2.0}) < 1e-10


@pytest.mark.parametrize("kernel", ["chunked", "liger", "reference"])
def test_libraries_and_full_logits_are_never_chosen(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_liger(monkeypatch)
    with record_choices("cuda") as choices:
        loss_sum(draws(4, WIDTH), OutputHead(draws(VOCABULARY, WIDTH)), torch.arange(4))
    assert kernel not in {choice.kernel for choice in choices}
