"""The vocabulary loss as on an accelerator: few large chunks, and one graph."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heddle.numerics import cross_entropy
from heddle.numerics.cross_entropy import OutputHead, TeacherOutput, distillation_sums, loss_sum
from heddle.numerics.dispatch import DeviceSize, record_choices
from heddle.numerics.kernels import kernels

TOKENS, WIDTH, VOCABULARY = 300, 6, 11


def draws(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def loss_and_gradients(kernel: str = "fused", **head_fields: Any) -> list[Tensor]:
    """The loss as on CUDA, and the gradients of hidden, weight and bias."""
    hidden, weight, bias = (draws(*shape).requires_grad_() for shape in ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (11,)))
    targets = torch.arange(TOKENS) * 7 % VOCABULARY
    head = OutputHead(weight, bias, **head_fields)
    with record_choices("cuda"), kernels(linear_cross_entropy=kernel):
        loss = loss_sum(hidden, head, targets) * 0.37
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))]


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
    with record_choices("cuda"), Products() as products:
        loss_and_gradients()
    assert products.updates == 3  # chunks of 128 tokens: the multiple below 140


@pytest.mark.parametrize("head_fields", [{}, {"softcap": 2.0}, {"scale": 0.5}])
def test_the_loss_of_an_accelerator_is_that_of_the_reference(head_fields: dict[str, Any]) -> None:
    pairs = zip(loss_and_gradients(**head_fields), loss_and_gradients("reference", **head_fields), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


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


@pytest.mark.parametrize("kernel", ["chunked", "reference"])
def test_small_chunks_and_full_logits_are_never_chosen(kernel: str) -> None:
    with record_choices("cuda") as choices:
        loss_sum(draws(4, WIDTH), OutputHead(draws(VOCABULARY, WIDTH)), torch.arange(4))
    assert kernel not in {choice.kernel for choice in choices}
