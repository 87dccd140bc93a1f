"""Planted bugs, each of a kind that models of transformers had: the checks of this folder catch each of them."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from heddle.errors import HeddleError
from heddle.exchange.transformers.cache import HeddleCacheLayer
from heddle.exchange.transformers.masks import _unpadded_layout, layout_from_inputs
from heddle.exchange.transformers.modeling import HeddleForCausalLM, init_missing_weights, scaled_aux_loss
from tests.exchange.transformers.test_cache import check_crop, check_crop_of_padding, check_rows
from tests.exchange.transformers.test_classes import check_experts, check_folders, check_start
from tests.exchange.transformers.test_generate import check_beams, check_greedy, check_taken_back
from tests.exchange.transformers.test_masks import check_packed, check_padded
from tests.laws.planting import Plant, assigned, calls, condition, operand_dropped, operator, replaced


class Bug(NamedTuple):
    """With the plant, the check fails on its arguments."""

    what: str
    check: Callable[..., None]
    arguments: tuple[Any, ...]
    plant: Plant


# fmt: off
BUGS = [
    Bug("a rejected token stays", check_taken_back, ("gqa",), operator(HeddleCacheLayer.crop, ast.Gt, ast.Lt, nth=1)),
    Bug("one column too few removed", check_crop, ("gqa",),
        assigned(HeddleCacheLayer._roll_back, "token_counts", lambda counts: counts - 1)),
    Bug("a fork forgets what it shall read again", check_crop, ("hybrid",),
        calls(HeddleCacheLayer._roll_back, "_truncate", lambda *_: [])),
    Bug("a fork made too late", check_crop, ("hybrid",), condition(HeddleCacheLayer.run_decoder, "fork", True, nth=0)),
    Bug("pending tokens forgotten when more are removed", check_crop, ("linear",),
        calls(HeddleCacheLayer.crop, "max", lambda _, zero, left, *, pending_length: pending_length, nth=1)),
    Bug("padding removed as tokens", check_crop_of_padding, ("gqa",),
        condition(HeddleCacheLayer._roll_back, "is_token", True)),
    Bug("padding that was removed still counts", check_crop_of_padding, ("gqa",),
        assigned(HeddleCacheLayer.crop, "is_token", lambda cropped, *, self: self.is_token)),
    Bug("beams keep each other's state", check_beams, ("hybrid",),
        replaced(HeddleCacheLayer.reorder_cache, lambda layer, beam_idx: None)),
    Bug("a fork of other rows", check_rows, ("hybrid",),
        calls(HeddleCacheLayer.select_rows, "select", lambda fork, rows: fork, nth=1)),
    Bug("inputs of other rows read again", check_rows, ("linear",),
        assigned(HeddleCacheLayer.select_rows, "inputs_since_fork", lambda _, *, self: self.inputs_since_fork)),
    Bug("the mask of padding dropped at the first call", check_greedy, ("gqa",),
        calls(HeddleForCausalLM.prepare_inputs_for_generation, "prepare_inputs_for_generation",
              lambda parent, input_ids, **options:
              parent.prepare_inputs_for_generation(input_ids, **options | {"attention_mask": None}))),
    Bug("positions count padding", check_padded, ("learned", "left"),
        calls(layout_from_inputs, "cumsum", lambda is_token, dim: torch.ones_like(is_token).cumsum(dim))),
    Bug("padding seen", check_padded, ("mla", "left"), assigned(layout_from_inputs, "is_token", torch.ones_like)),
    Bug("documents that see the one before", check_packed, ("linear",),
        condition(_unpadded_layout, "is_start", True, nth=0)),
    Bug("loaded weights overwritten", check_folders, ("gqa",),
        calls(init_missing_weights, "getattr", lambda *_: False)),
    Bug("a seed of its own", check_start, ("gqa", 7), calls(init_missing_weights, "initial_seed", lambda torch: 0)),
    Bug("experts balanced by accumulated calls", check_experts, (2,), operand_dropped(scaled_aux_loss, "share")),
    Bug("expert counts of the last call only", check_experts, (2,),
        calls(HeddleForCausalLM.forward, "get", lambda *_: 0, nth=1)),
]
# fmt: on


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = (*bug.arguments, tmp_path / "folder") if bug.check is check_folders else bug.arguments
    with monkeypatch.context() as patch:
        bug.plant(patch)
        with pytest.raises((AssertionError, HeddleError, ValueError, IndexError, RuntimeError)):
            bug.check(*arguments)


@pytest.mark.parametrize("bug", {bug.check.__name__: bug for bug in BUGS}.values(), ids=lambda bug: bug.check.__name__)
def test_without_the_bug_the_check_holds(bug: Bug, tmp_path: Path) -> None:
    bug.check(*bug.arguments, *((tmp_path / "folder",) if bug.check is check_folders else ()))
