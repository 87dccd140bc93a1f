"""`torch.compile` of our class: the same loss, gradients and text, and no more graph breaks than the page says."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from heddle.exchange.transformers import HeddleConfig, HeddleForCausalLM
from heddle.model.decoder import Layer
from heddle.parts.layout import Layout
from heddle.parts.modules.router_statistics import record_router_statistics
from tests.cases import Data, attention, design, layer
from tests.exchange.transformers.designs import DESIGNS, padded, prompts
from tests.small import dropping

# The compiler reads the .grad of tensors that are not leaves, makes an instance of each autograd function it meets, and
# imports what torch itself has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

ONE_LAYER = design(layer(attention(2, kv_heads=1)))
TOLERANCES = {"eager": 1e-10, "inductor": 1e-6}  # of transformers' loss, in float32, which inductor rounds otherwise


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def built(data: Data) -> HeddleForCausalLM:
    """A model in float64, in training mode."""
    torch.manual_seed(1)
    return HeddleForCausalLM(HeddleConfig(design=data)).double().train()


def rows(length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 61, (2, length), generator=torch.Generator().manual_seed(seed))


def step(model: HeddleForCausalLM, run: Any, **inputs: Any) -> list[Tensor]:
    """The loss, every gradient, and what is counted of experts, with the same noise."""
    model.zero_grad()
    torch.manual_seed(3)
    outputs = run(**inputs, labels=inputs["input_ids"])
    outputs.loss.backward()
    counts = [count.double() for count in model.expert_counts.values()]
    model.expert_counts.clear()
    return [outputs.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), *counts]


def check_steps(
    model: HeddleForCausalLM, all_inputs: list[dict[str, Any]], backend: Any = "eager", tolerance: float = 1e-10
) -> None:
    """Compiled and plain training steps are the same."""
    compiled_model = torch.compile(model, backend=backend)
    for inputs in all_inputs:
        expected = step(model, model, **inputs)
        for actual, want in zip(step(model, compiled_model, **inputs), expected, strict=True):
            torch.testing.assert_close(actual, want, rtol=tolerance, atol=tolerance)


def test_a_training_step_is_one_graph_for_all_lengths() -> None:
    model, counter = built(ONE_LAYER), CompileCounter()
    check_steps(model, [{"input_ids": rows(7)}, {"input_ids": rows(9)}, {"input_ids": rows(70)}], counter)
    assert counter.frame_count == 2, "compiled for the first length, then once for all others"


def test_a_mask_breaks_the_graph_once() -> None:
    counter = CompileCounter()
    check_steps(built(ONE_LAYER), [padded(prompts())], counter)
    assert counter.frame_count == 2, "the decoder, and the head with the loss"


def test_no_entry_of_a_router_is_lost() -> None:
    """The auxiliary loss and the balance of experts need what a router records, also in compiled code."""
    model = built(DESIGNS["moe"]).heddle_decoder
    (feedforward, *_) = (layer.feedforward for layer in model.layers if isinstance(layer, Layer))
    x, layout = torch.randn(1, 4, model.config.width, dtype=torch.float64), Layout.causal(1, 4)
    assert feedforward is not None
    for run in (feedforward, torch.compile(feedforward, backend="eager")):
        with record_router_statistics() as recorder:
            run(x, layout)
        assert len(recorder.entries) == 1


def test_text_is_the_same_when_calls_are_compiled() -> None:
    model, inputs = built(ONE_LAYER).eval(), padded(prompts())
    arguments: dict[str, Any] = {**inputs, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**arguments)
    optimized: Any = torch.compile(model, backend="eager")
    assert torch.equal(optimized.generate(**arguments), expected)
    counter = CompileCounter()
    model.compile(backend=counter)
    assert torch.equal(model.generate(**arguments), expected)
    assert counter.frame_count <= 3, "the head alone is compiled: for prompts, then for single tokens"


@pytest.mark.soak
@pytest.mark.parametrize("backend", TOLERANCES)
@pytest.mark.parametrize("name", [*DESIGNS, "dropping"])
def test_every_kind_of_design(name: str, backend: str) -> None:
    model = built(dropping() if name == "dropping" else DESIGNS[name])
    inputs = padded(prompts())
    packed = {"input_ids": rows(5), "position_ids": torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]])}
    longest = 64 if name == "learned" else 70  # a table of 64 positions
    lengths = [{"input_ids": rows(length)} for length in (7, 9, longest)]
    check_steps(copy.deepcopy(model), [*lengths, inputs, packed], backend, TOLERANCES[backend])
    model.heddle_decoder.checkpointing = True
    check_steps(model, [{"input_ids": rows(7)}], backend, TOLERANCES[backend])
