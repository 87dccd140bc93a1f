"""Planted bugs, each of a kind that models of transformers had: the checks of this folder catch each of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from heddle.errors import HeddleError
from tests.exchange.transformers.test_cache import check_crop, check_crop_of_padding, check_rows
from tests.exchange.transformers.test_classes import check_experts, check_folders, check_start
from tests.exchange.transformers.test_generate import check_beams, check_greedy, check_taken_back
from tests.exchange.transformers.test_masks import check_packed, check_padded
from tests.laws.planting import plant


class Bug(NamedTuple):
    """`old` becomes `new` in the function at `place`; the check fails on what it is given."""

    what: str
    check: Callable[..., None]
    arguments: tuple[Any, ...]
    function: str
    old: str
    new: str


LAYER, MASKS, CLASSES = (
    "exchange.transformers.cache:HeddleCacheLayer",
    "exchange.transformers.masks",
    "exchange.transformers.modeling",
)
CAUSAL = f"{CLASSES}:HeddleForCausalLM"

# fmt: off
BUGS = [
    Bug("a rejected token stays", check_taken_back, ("gqa",), f"{LAYER}.crop",
        "if removed > pending_length", "if removed < pending_length"),
    Bug("one column too few removed", check_crop, ("gqa",), f"{LAYER}._roll_back", "length if", "length - 1 if"),
    Bug("a fork forgets what it shall read again", check_crop, ("hybrid",), f"{LAYER}._roll_back",
        "_truncate(self.inputs_since_fork, length_since_fork - length)", "[]"),
    Bug("a fork made too late", check_crop, ("hybrid",), f"{LAYER}.run_decoder", "if self.fork is None and", "if"),
    Bug("pending tokens forgotten when more are removed", check_crop, ("linear",), f"{LAYER}.crop",
        "max(0, pending_length - removed)", "pending_length"),
    Bug("padding removed as tokens", check_crop_of_padding, ("gqa",), f"{LAYER}._roll_back",
        "self.is_token[:, -length:].sum(1)", "length"),
    Bug("padding that was removed still counts", check_crop_of_padding, ("gqa",), f"{LAYER}.crop",
        "self.is_token[:, :remaining]", "self.is_token"),
    Bug("beams keep each other's state", check_beams, ("hybrid",), f"{LAYER}.reorder_cache",
        "self.select_rows(beam_idx)", "pass"),
    Bug("a fork of other rows", check_rows, ("hybrid",), f"{LAYER}.select_rows", "self.fork.select(rows)", "self.fork"),
    Bug("inputs of other rows read again", check_rows, ("linear",), f"{LAYER}.select_rows",
        "self.inputs_since_fork = [inputs.map_tensors(lambda x: x[rows]) for inputs in self.inputs_since_fork]",
        "pass"),
    Bug("the mask of padding dropped at the first call", check_greedy, ("gqa",),
        f"{CAUSAL}.prepare_inputs_for_generation", "past_key_values.get_seq_length() > 0",
        "True; next_sequence_length = next_sequence_length or input_ids.shape[1]; is_first_iteration = False"),
    Bug("positions count padding", check_padded, ("learned", "left"), f"{MASKS}:layout_from_inputs",
        "last_positions + is_token.cumsum(1)",
        "last_positions + is_token.cumsum(1) * 0 + 1 + __import__('torch').arange(length)"),
    Bug("padding seen", check_padded, ("mla", "left"), f"{MASKS}:layout_from_inputs",
        "is_token = visible[:, cached.length :]", "is_token = visible[:, cached.length :] | True"),
    Bug("documents that see the one before", check_packed, ("linear",), f"{MASKS}:_unpadded_layout",
        "if not bool(is_start.any()):", "if True:"),
    Bug("loaded weights overwritten", check_folders, ("gqa",),
        "exchange.transformers.pretrained:init_missing_weights",
        'getattr(p, "_is_hf_initialized", False)', "False"),
    Bug("a seed of its own", check_start, ("gqa", 7), "exchange.transformers.pretrained:init_missing_weights",
        "torch.initial_seed(), is_incomplete", "0, is_incomplete"),
    Bug("experts balanced by accumulated calls", check_experts, (2,), "exchange.transformers.modeling:scaled_aux_loss",
        "* share", "* 1.0"),
    Bug("expert counts of the last call only", check_experts, (2,), f"{CAUSAL}.forward",
        "self.expert_counts.get(entry.mixture, 0) +", ""),
]
# fmt: on


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = (*bug.arguments, tmp_path / "folder") if bug.check is check_folders else bug.arguments
    with monkeypatch.context() as patch:
        plant(patch, bug.function, bug.old, bug.new)
        with pytest.raises((AssertionError, HeddleError, ValueError, IndexError, RuntimeError)):
            bug.check(*arguments)


@pytest.mark.parametrize("bug", {bug.check.__name__: bug for bug in BUGS}.values(), ids=lambda bug: bug.check.__name__)
def test_without_the_bug_the_check_holds(bug: Bug, tmp_path: Path) -> None:
    bug.check(*bug.arguments, *((tmp_path / "folder",) if bug.check is check_folders else ()))
