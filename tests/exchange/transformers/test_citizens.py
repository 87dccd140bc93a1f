"""What tools expect of any model: hooks, offloaded weights, parametrizations, functional calls, exported programs."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn.utils import parametrize

from heddle.exchange.transformers import HeddleForCausalLM
from tests.exchange.transformers.designs import DESIGNS, decoder, model, prompts

TOKENS = torch.tensor(prompts([7, 7]))


@torch.no_grad()
def logits(hf_model: Any) -> Tensor:
    result: Tensor = hf_model(TOKENS, use_cache=False).logits
    return result


def written(hf_model: HeddleForCausalLM) -> Tensor:
    result: Tensor = hf_model.generate(TOKENS, max_new_tokens=4, do_sample=False)
    return result


def note(called: set[str], path: str, *_: Any) -> None:
    """A hook."""
    called.add(path)


def test_every_projection_calls_its_hooks() -> None:
    """Also those that are computed together, or whose weights alone are read."""
    for name in ("gqa", "mla"):
        hf_model = HeddleForCausalLM.from_decoder(copy.deepcopy(decoder(name)))
        called: set[str] = set()
        linears = {path: module for path, module in hf_model.named_modules() if isinstance(module, nn.Linear)}
        for path, module in linears.items():
            module.register_forward_hook(partial(note, called, path))
        torch.testing.assert_close(logits(hf_model), logits(model(name)), rtol=0, atol=1e-10)
        assert called == set(linears)


def check_offload(name: str, folder: Path) -> None:
    """Layers on disk compute what layers in memory do."""
    hf_model = model(name)
    hf_model.save_pretrained(folder / "model")
    places = {f"model.decoder.{part}": "cpu" for part in ("embed", "final_norm", "head")}
    layers = {f"model.decoder.layers.{index}": "disk" for index in range(len(hf_model.heddle_decoder.layers))}
    offloaded = HeddleForCausalLM.from_pretrained(
        folder / "model", device_map=places | layers, offload_folder=folder / "offload"
    )
    assert all(parameter.is_meta for parameter in offloaded.heddle_decoder.layers.parameters())
    torch.testing.assert_close(logits(offloaded), logits(hf_model), rtol=0, atol=1e-10)
    assert torch.equal(written(offloaded), written(hf_model))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in ("gqa", "moe", "hybrid", "mla") else pytest.mark.soak) for name in DESIGNS
])  # fmt: skip
def test_weights_may_lie_on_disk(name: str, tmp_path: Path) -> None:
    check_offload(name, tmp_path)


class Double(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def test_parametrized_and_replaced_weights_are_used() -> None:
    doubled = copy.deepcopy(model("gqa"))
    doubled.heddle_decoder.get_parameter("layers.0.mixer.q.weight").data.mul_(2)
    parametrized = copy.deepcopy(model("gqa"))
    parametrize.register_parametrization(
        parametrized.heddle_decoder.get_submodule("layers.0.mixer.q"), "weight", Double()
    )
    assert torch.equal(logits(parametrized), logits(doubled))
    assert torch.equal(written(parametrized), written(doubled))
    weights = dict(doubled.named_parameters())
    called = torch.func.functional_call(model("gqa"), weights, (TOKENS,), {"use_cache": False}).logits
    torch.testing.assert_close(called, logits(doubled), rtol=0, atol=1e-10)


@pytest.mark.soak
def test_our_class_is_exported_too() -> None:
    hf_model, dims = model("gqa"), {0: Dim("batch", min=1, max=8), 1: Dim("length", min=2, max=99)}
    shapes = {"input_ids": dims, "use_cache": None}
    program = export(hf_model, (TOKENS,), {"use_cache": False}, dynamic_shapes=shapes).module()
    tokens = torch.tensor(prompts([9, 9, 9]))
    expected = hf_model(tokens, use_cache=False).logits
    torch.testing.assert_close(program(tokens, use_cache=False).logits, expected, rtol=0, atol=1e-10)
