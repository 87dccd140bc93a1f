"""Bugs that a law must catch on a case: of all laws in test_planted.py, of one kind in the test of the kind."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from heddle.laws import LAWS, DoesNotApply, LawViolation
from heddle.laws.options import Behavior, Option, changes, has_effect, options
from tests.cases import case
from tests.laws.planting import Plant, wrapped


class Bug(NamedTuple):
    """With the plant, the law is violated on the case; with an option, only the fields of this name are checked."""

    description: str
    law: str
    case: str
    plant: Plant
    option: str = ""


def inputs_with(kernel: Any, change: Callable[[Any], dict[str, Any]]) -> Plant:
    """Other inputs of a recurrence, for one of its kernels."""
    return wrapped(kernel, lambda run, inputs, state: run(inputs._replace(**change(inputs)), state))


REFUSALS = {  # the law does not apply, and a bug is a refusal, or a declaration, that is missing
    ("chunked_decoding", "attention-bidirectional"),
    ("cross_attention", "attention-mha"),
    ("multi_token_prediction", "attention-bidirectional"),
    ("token_permutation", "short-convolution"),
}


def check_without_bugs(bugs: Sequence[Bug]) -> None:
    """Raise if a case violates the law of a bug by itself, or the law says nothing.

    For the night: by day every law runs on designs with every option of the cases.
    """
    for law, name in dict.fromkeys((bug.law, bug.case) for bug in bugs if not bug.option):
        with pytest.raises(DoesNotApply) if (law, name) in REFUSALS else contextlib.nullcontext():
            LAWS[law].check(case(name))


def fields_with_effect(bug: Bug, effect: Callable[[Option, Behavior], bool | None]) -> bool:
    """Whether all fields that the bug is about have an effect; None says that every other value is refused."""
    behavior = Behavior(case(bug.case))
    fields = [option for option in options(behavior.config) if option.name == bug.option]
    assert fields
    return all(effect(option, behavior) is not False for option in fields)


def each(bugs: Sequence[Bug]) -> pytest.MarkDecorator:
    """A test of each bug."""
    return pytest.mark.parametrize("bug", bugs, ids=[f"{bug.law}: {bug.description}" for bug in bugs])


def assert_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bug, the law does not hold on the case. Without it, see `check_without_bugs`."""
    if bug.option:
        assert fields_with_effect(bug, has_effect)
        bug.plant(monkeypatch)
        assert not fields_with_effect(bug, changes)
        return
    bug.plant(monkeypatch)
    with pytest.raises(LawViolation):
        LAWS[bug.law].check(case(bug.case))
