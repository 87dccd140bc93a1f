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
    given: tuple[Any, ...]
    place: str
    old: str
    new: str


LAYER, MASKS, CLASSES = (
    "exchange.transformers.cache:HeddleLayer",
    "exchange.transformers.masks",
    "exchange.transformers.modeling",
)
CAUSAL = f"{CLASSES}:HeddleForCausalLM"

# fmt: off
BUGS = [
    Bug("a rejected guess stays", check_taken_back, ("gqa",), f"{LAYER}.crop", "if gone > held", "if gone < held"),
    Bug("one column too few taken back", check_crop, ("gqa",), f"{LAYER}._go_back", "gone if", "gone - 1 if"),
    Bug("a fork forgets what it shall read again", check_crop, ("hybrid",), f"{LAYER}._go_back",
        "_first(self.calls, read - gone)", "[]"),
    Bug("a fork of too late", check_crop, ("hybrid",), f"{LAYER}.read", "if self.mark is None and", "if"),
    Bug("unread tokens forgotten when more are taken back", check_crop, ("linear",), f"{LAYER}.crop",
        "max(0, held - gone)", "held"),
    Bug("padding taken back as tokens", check_crop_of_padding, ("gqa",), f"{LAYER}._go_back",
        "self.real[:, -gone:].sum(1)", "gone"),
    Bug("padding that was taken back still counts", check_crop_of_padding, ("gqa",), f"{LAYER}.crop",
        "self.real[:, :kept]", "self.real"),
    Bug("beams keep each other's memory", check_beams, ("hybrid",), f"{LAYER}.reorder_cache",
        "self.select(beam_idx)", "pass"),
    Bug("a fork of other rows", check_rows, ("hybrid",), f"{LAYER}.select", "self.mark.select(rows)", "self.mark"),
    Bug("calls of other rows read again", check_rows, ("linear",), f"{LAYER}.select",
        "self.calls = [call.map(lambda x: x[rows]) for call in self.calls]", "pass"),
    Bug("the mask of padding dropped at the first call", check_greedy, ("gqa",),
        f"{CAUSAL}.prepare_inputs_for_generation", "past_key_values.get_seq_length() > 0",
        "True; next_sequence_length = next_sequence_length or input_ids.shape[1]; is_first_iteration = False"),
    Bug("positions count padding", check_padded, ("learned", "left"), f"{MASKS}:read", "last + real.cumsum(1)",
        "last + real.cumsum(1) * 0 + 1 + __import__('torch').arange(length)"),
    Bug("padding seen", check_padded, ("mla", "left"), f"{MASKS}:read", "real = seen[:, past.size :]",
        "real = seen[:, past.size :] | True"),
    Bug("documents that see the one before", check_packed, ("linear",), f"{MASKS}:_plain",
        "if not bool(starts.any()):", "if True:"),
    Bug("loaded weights overwritten", check_folders, ("gqa",), "exchange.transformers.starting:start",
        'getattr(p, "_is_hf_initialized", False)', "False"),
    Bug("a seed of its own", check_start, ("gqa", 7), "exchange.transformers.starting:start",
        "torch.initial_seed(), wanted", "0, wanted"),
    Bug("experts balanced by pieces", check_experts, (2,), "exchange.transformers.outputs:penalty",
        "* ((targets", "* 1.0 or ((targets"),
    Bug("loads of the last piece only", check_experts, (2,), f"{CAUSAL}.forward",
        "self.loads.get(entry.mixture, 0) +", ""),
]
# fmt: on


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = (*bug.given, tmp_path / "folder") if bug.check is check_folders else bug.given
    with monkeypatch.context() as patch:
        plant(patch, bug.place, bug.old, bug.new)
        with pytest.raises((AssertionError, HeddleError, ValueError, IndexError, RuntimeError)):
            bug.check(*given)


@pytest.mark.parametrize("bug", {bug.check.__name__: bug for bug in BUGS}.values(), ids=lambda bug: bug.check.__name__)
def test_without_the_bug_the_check_holds(bug: Bug, tmp_path: Path) -> None:
    bug.check(*bug.given, *((tmp_path / "folder",) if bug.check is check_folders else ()))
