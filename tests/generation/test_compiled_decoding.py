"""Decoding by a compiled step: the text of eager steps, over all lengths of the state that attention reads."""

from functools import partial
from typing import Any

import pytest
import torch

from heddle.errors import ConfigError
from heddle.generation import decode
from heddle.generation.generate import generate
from heddle.laws.harness import model_under_test
from heddle.parts.feedforwards.moe import MoE
from tests.cases import case

pytestmark = [  # of the compiler itself, which instantiates autograd functions and reads .grad of any tensor
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
PROMPTS = [[5, 3, 8, 13, 21, 34, 55, 1], [2], [7, 7, 7, 9]]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 3, "max_new_tokens": 14}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs are traced and run as they are, which takes a second. Returns a list with an item for each graph."""
    graphs: list[int] = []

    def traced(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=traced))
    monkeypatch.setattr(decode, "MIN_LIMIT", 16)
    torch._dynamo.reset()
    # classes of transformers keep this out of graphs for the rest of the process
    experts = getattr(MoE._routed_experts, "_torchdynamo_orig_callable", MoE._routed_experts)
    monkeypatch.setattr(MoE, "_routed_experts", experts)
    return graphs


@pytest.mark.parametrize("name", ["moe", pytest.param("latent-hybrid", marks=pytest.mark.soak)])
def test_the_text_is_that_of_eager_steps(name: str, backend: list[int]) -> None:
    model = model_under_test(case(name))
    assert generate(model, PROMPTS, compile_decoding=True, **SAMPLED) == generate(model, PROMPTS, **SAMPLED)
    assert 1 <= len(backend) <= 2  # one for each limit, which doubles once


@pytest.mark.soak
@pytest.mark.parametrize("name", ["attention-gqa", "delta-hybrid", "mamba", "mamba2"])
def test_the_text_of_generated_kernels(name: str) -> None:
    model = model_under_test(case(name))
    assert generate(model, PROMPTS, compile_decoding=True, **SAMPLED) == generate(model, PROMPTS, **SAMPLED)


def test_a_step_that_reads_a_value_is_refused(backend: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    read_tokens = decode.PinnedDecoder._read_tokens

    def reading(self: decode.PinnedDecoder, state: Any) -> Any:
        self.tokens.sum().item()
        torch._dynamo.graph_break()
        return read_tokens(self, state)

    monkeypatch.setattr(decode.PinnedDecoder, "_read_tokens", reading)
    model = model_under_test(case("attention-gqa"))
    with pytest.raises(ConfigError, match=r"compile_decoding: torch.compile"):
        generate(model, PROMPTS, compile_decoding=True, **SAMPLED)
    assert backend == []


def test_beams_and_drafts_are_refused() -> None:
    model = model_under_test(case("attention-gqa"))
    with pytest.raises(ConfigError, match="compile_decoding:"):
        generate(model, PROMPTS, num_beams=2, compile_decoding=True)
