"""Text from a sharded model: the tokens of one process, by as many forward passes on each rank whatever they are."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from heddle.distributed.sharding import shard_model
from heddle.errors import ConfigError
from heddle.generation.decode import Sampler
from heddle.generation.generate import generate, sample_text
from heddle.model.decoder import Decoder, build
from heddle.numerics.linear import packed_weights
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.distributed.ranks import on_ranks

STEPS = 12


def large_model() -> Decoder:
    """Four layers whose weights are large enough to be packed; FSDP gathers each layer's where the last one's were."""
    layer = {"repeat": 4, "mixer": {"kind": "attention", "heads": 2}, "feedforward": {"kind": "gated", "hidden": 512}}
    return build(small.config(small.design(192, layers=[layer])), seed=3)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_ranks_write_the_tokens_of_one_process() -> None:
    settings: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8}
    expected = generate(large_model(), [[1]], **settings)

    def tokens(_: int) -> Any:
        return generate(shard_model(large_model(), init_device_mesh("cpu", (2,))), [[1]], **settings)

    assert on_ranks(2, tokens) == [expected] * 2


@pytest.mark.usefixtures("alone")
def test_weights_that_a_caller_packs_are_those_of_their_layer() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad(), packed_weights():
        expected = large_model()(tokens)[0]
        actual = shard_model(large_model(), init_device_mesh("cpu", (1,)))(tokens)[0]
    torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("end", [0, 3, STEPS])
def test_forward_passes_do_not_depend_on_the_text(end: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text ends at a step that one rank's numbers decide; the ranks that share the passes may find another."""
    tokenizer: Tokenizer = small.corpus(tmp_path).tokenizer
    choose, passes = Sampler.choose, list[int]()

    def ending(sampler: Sampler, logits: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        tokens = choose(sampler, logits, position)
        return torch.where(position == end, tokenizer.eod_id or 0, tokens.masked_fill(tokens == tokenizer.eod_id, 5))

    monkeypatch.setattr(Sampler, "choose", ending)
    model = build(small.config(small.design(vocab_size=tokenizer.vocab_size)))
    expected = sample_text(model, tokenizer, STEPS)
    shard_model(model, init_device_mesh("cpu", (1,)))
    model.register_forward_hook(lambda *_: passes.append(1))
    assert sample_text(model, tokenizer, STEPS) == expected
    assert len(passes) == STEPS


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "setting",
    [{"num_beams": 2}, {"draft_model": None}, {"streams": 1}, {"batch_invariant": True}, {"compile_decoding": True}],
    ids=lambda setting: next(iter(setting)),
)
def test_passes_that_depend_on_the_text_are_refused(setting: dict[str, Any]) -> None:
    model = build(small.config())
    if "draft_model" in setting:
        setting = {"draft_model": build(small.config())}
    generate(model, [[1]], max_new_tokens=2, **setting)
    shard_model(model, init_device_mesh("cpu", (1,)))
    with pytest.raises(ConfigError, match=f"^{next(iter(setting))}: ranks "):
        generate(model, [[1]], max_new_tokens=2, **setting)
