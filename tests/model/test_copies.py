"""Pickles and copies of models and states go on exactly as the originals."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from heddle.laws.harness import forward_no_grad, forward_with_state, new_state, supports_state
from heddle.model.decoder import Decoder, build
from heddle.model.lora import adapters, add_lora
from heddle.parts.layout import Layout
from tests.cases import case, each_part

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda original: pickle.loads(pickle.dumps(original)),
    "deep": copy.deepcopy,
    "shallow": copy.copy,
}
TOKENS = torch.tensor([[5, 3, 8, 13], [2, 7, 1, 9]])


def built(name: str) -> Decoder:
    return build(case(name), dtype=torch.float64, seed=1).eval()


def check_copies(model: Decoder) -> None:
    """A copy computes the same bits, and its head is tied if that of the original is."""
    expected = forward_no_grad(model, TOKENS)
    for make in COPIES.values():
        other = make(model)
        assert torch.equal(forward_no_grad(other, TOKENS), expected)
        assert (other.head.weight is other.embed.weight) == (model.head.weight is model.embed.weight)
        assert other.config == model.config


@pytest.mark.parametrize("name", each_part())
def test_copies_of_a_model_and_its_state_go_on(name: str) -> None:
    model = built(name)
    check_copies(model)
    if not supports_state(model):
        return
    _, state = forward_with_state(model, new_state(model, 2, cache_length=8), TOKENS)
    copies = [COPIES["pickle"](state), COPIES["deep"](state)]
    expected, _ = forward_with_state(model, state, TOKENS)
    for other in copies:
        assert torch.equal(forward_with_state(model, other, TOKENS)[0], expected)


def test_adapters_are_copied_too() -> None:
    model = add_lora(built("attention-gqa"), rank=2)
    check_copies(model)
    assert list(adapters(COPIES["pickle"](model))) == list(adapters(model))


def test_a_layout_is_pickled() -> None:
    model, layout = built("attention-gqa"), Layout.packed([[1, 3], [4]])
    assert torch.equal(model(TOKENS, COPIES["pickle"](layout))[0], model(TOKENS, layout)[0])
