"""A step that is recorded for a compiler: it changes nothing, holds no value, and finds its packed weights."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.generation import decode
from heddle.generation.decode import PinnedDecoder
from heddle.laws.harness import model_under_test
from heddle.numerics.linear import ProductTable, packed_weights, uncounted_linears
from tests.cases import CASES, case
from tests.generation.loops import is_causal, pinned_decoder

COVERING = ["attention-softcap-sink-window", "latent-hybrid", "kda", "delta-steps"]
ROUTED = [name for name in CASES if "moe" in name]  # the counts of tokens of each expert are read
CAUSAL = [name for name in CASES if is_causal(case(name)) and name not in ROUTED]
REST = [pytest.param(name, marks=pytest.mark.soak) for name in CAUSAL if name not in COVERING]
PROMPT, LIMIT, STEPS = 5, 16, 4


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records run as they are."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)


def copies(decoder: PinnedDecoder) -> list[Tensor]:
    return [tensor.clone() for tensor in decoder.tensors()]


@pytest.mark.parametrize("name", [*COVERING, *REST])
@pytest.mark.usefixtures("uncompiled")
def test_replays_are_eager_steps(name: str) -> None:
    model = model_under_test(case(name))
    eager, recorded = (pinned_decoder(model, PROMPT, LIMIT, LIMIT) for _ in range(2))
    before = copies(recorded)
    step = decode.record_step(recorded.step, recorded.tensors())
    for value, tensor in zip(before, recorded.tensors(), strict=True):
        assert torch.equal(value, tensor)
    for _ in range(STEPS):
        eager.step()
        step()
        for expected, actual in zip(eager.tensors(), recorded.tensors(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    changed = [not torch.equal(value, tensor) for value, tensor in zip(before, recorded.tensors(), strict=True)]
    assert changed[0]  # else nothing was tested: the tokens
    assert changed[1]  # their position


def test_weights_are_packed_in_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [(torch.randn(256, 192), None), (torch.randn(128, 192), torch.randn(128))]
    x, y = torch.randn(1, 192), torch.zeros(1, 384)
    with packed_weights({}):

        def step() -> None:
            y.copy_(torch.cat(list(uncounted_linears(x, weights)), dim=-1))

        step()
        expected, graphs = y.clone(), []

        def uncompiled_graph(graph: Any, **_: Any) -> Any:
            graphs.append(graph)
            return graph

        monkeypatch.setattr(torch, "compile", uncompiled_graph)
        replay = decode.record_step(step, [y])
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert targets.count("heddle.packed_product.default") == 1
    y.zero_()
    replay()
    assert torch.equal(y, expected)
    assert not any("reorder" in target or "mkldnn" in target for target in targets)


READS: dict[str, Any] = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x.sum().item(),
    "__bool__": lambda x: bool(x.any()),
    "__int__": lambda x: int(x.sum()),
    "numpy": lambda x: x.numpy().sum(),
    "index": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("name", READS)
def test_a_step_that_reads_values_is_refused(name: str) -> None:
    x = torch.arange(4)

    def step() -> None:
        READS[name](x)
        x.add_(1)

    with pytest.raises(RuntimeError, match=name):
        decode.record_step(step, [x])
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("uncompiled")
def test_an_integer_index_is_no_read() -> None:
    x, indices = torch.arange(4), torch.tensor([1, 0, 3, 2])

    def step() -> None:
        x.copy_(x[indices])

    decode.record_step(step, [x])()
    assert x.tolist() == [1, 0, 3, 2]


def test_a_table_takes_the_smallest_free_number() -> None:
    first, second = ProductTable(), ProductTable()
    numbers = first.number, second.number
    assert numbers[0] != numbers[1]
    del first
    gc.collect()
    assert ProductTable().number == numbers[0]
