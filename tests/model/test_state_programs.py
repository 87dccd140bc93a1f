"""Random programs over states (feed, fork, select rows, roll back, replay), compared with the rows' full texts."""

from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from heddle.laws.harness import LawViolation, model_under_test, random_tokens
from heddle.laws.states import ReferenceState
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.parts.layout import Layout
from heddle.parts.position_table import PositionTable
from heddle.parts.states import KVCache
from tests.cases import CASES, case
from tests.laws.planting import Plant, calls, replaced, wrapped

MAX_TOKENS = 40  # of a row


@cache
def model_of(name: str) -> Decoder:
    return model_under_test(case(name))


class Program(RuleBasedStateMachine):
    """Compares every output with that of a call on the full texts. `name` is the case of the design."""

    name: str
    states: Bundle[ReferenceState] = Bundle("states")

    def tokens(self, reference: ReferenceState, length: int, seed: int) -> Tensor:
        return random_tokens(self.model.config, len(reference.rows), length, seed)

    def fits(self, reference: ReferenceState, length: int) -> bool:
        return max(map(len, reference.rows)) + length <= MAX_TOKENS

    @initialize(
        target=states,
        rows=st.integers(1, 3),
        cache_length=st.sampled_from((None, MAX_TOKENS)),
        rollback=st.integers(0, 3),
    )
    def start(self, rows: int, cache_length: int | None, rollback: int) -> ReferenceState:
        self.model = model_of(self.name)
        self.has_rollback = ReferenceState(self.model, 1).state.can_roll_back(1)
        return ReferenceState(self.model, rows, cache_length, rollback if self.has_rollback else 0)

    @rule(reference=states, length=st.integers(0, 9), seed=st.integers(0, 99))
    def feed(self, reference: ReferenceState, length: int, seed: int) -> None:
        if self.fits(reference, length):
            reference.feed(self.tokens(reference, length, seed), "rows")

    @rule(reference=states, lengths=st.lists(st.integers(0, 6), min_size=3, max_size=3), right=st.booleans())
    def feed_padded(self, reference: ReferenceState, lengths: list[int], right: bool) -> None:
        """Rows of different lengths, each continuing its document."""
        lengths = lengths[: len(reference.rows)]
        if max(lengths) and self.fits(reference, max(lengths)):
            padded = Layout.padded(lengths, side="right" if right else "left").positions
            last_tokens = [row[-1] if row else None for row in reference.rows]
            starts = padded.new_tensor([0 if token is None else token.position + 1 for token in last_tokens])[:, None]
            documents = padded.new_tensor([0 if token is None else token.document for token in last_tokens])[:, None]
            layout = Layout(padded.where(padded < 0, padded + starts), documents.expand_as(padded))
            reference.feed(self.tokens(reference, max(lengths), sum(lengths)), "uneven rows", layout)

    @rule(reference=states, first=st.integers(1, 4), second=st.integers(1, 5))
    def feed_packed(self, reference: ReferenceState, first: int, second: int) -> None:
        """Two new documents in each row."""
        if self.fits(reference, first + second):
            packed = Layout.packed([[first, second]] * len(reference.rows))
            tokens_read = [token for row in reference.rows for token in row]
            next_document = max(token.document for token in tokens_read) + 1 if tokens_read else 0
            assert packed.segment_ids is not None
            layout = Layout(packed.positions, packed.segment_ids + next_document, has_padding=False)
            reference.feed(self.tokens(reference, first + second, next_document), "rows of new documents", layout)

    @rule(target=states, reference=states, rows=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def select(self, reference: ReferenceState, rows: list[int]) -> ReferenceState:
        return reference.select([row % len(reference.rows) for row in rows])

    @rule(target=states, reference=states)
    def fork(self, reference: ReferenceState) -> ReferenceState:
        return reference.select(range(len(reference.rows)))

    @precondition(lambda self: self.has_rollback)
    @rule(reference=states, counts=st.lists(st.integers(0, 5), min_size=3, max_size=3), whole_texts=st.booleans())
    def roll_back(self, reference: ReferenceState, counts: list[int], whole_texts: bool) -> None:
        lengths = [len(row) for row in reference.rows]
        counts = lengths if whole_texts else [min(pair) for pair in zip(counts, lengths, strict=False)]
        if reference.state.can_roll_back(max(counts)):
            reference.rollback(counts)

    @rule(target=states, reference=states, length=st.integers(1, 5), seed=st.integers(0, 99))
    def fork_and_replay(self, reference: ReferenceState, length: int, seed: int) -> Any:
        """A fork reads ahead. Then the original reads the same tokens one by one."""
        if not self.fits(reference, length):
            return multiple()
        tokens = self.tokens(reference, length, seed)
        fork = reference.select(range(len(reference.rows)))
        fork.feed(tokens, "a fork")
        for token in tokens.split(1, dim=1):
            reference.feed(token, "the original after its fork")
        return fork


NAMES = ("attention-gqa", "attention-window-2", "attention-window-mixed", "layers-nested", "sinusoidal")
LIMITS = settings(max_examples=6, stateful_step_count=14)


def run(name: str, limits: settings = LIMITS) -> None:
    machine: Any = type("Machine", (Program,), {"name": name})
    run_state_machine_as_test(machine, settings=limits)


def other_mixer_cases() -> list[str]:
    """The first case of every other kind of mixer that has a state and reads no encoder output."""
    names, covered_kinds = [], {"attention"}
    for name in CASES:
        model = model_of(name) if not _kinds(name) <= covered_kinds else None
        if model is not None and model.causal and model.encoder_width is None:
            names.append(name)
            covered_kinds |= _kinds(name)
    return names


def _kinds(name: str) -> set[str]:
    return {layer.mixer.kind for _, layer in case(name).expand() if layer.mixer is not None}


@pytest.mark.parametrize("name", [*NAMES, *other_mixer_cases()])
@pytest.mark.parametrize("examples", [6, pytest.param(24, marks=pytest.mark.nightly)])
def test_programs(name: str, examples: int) -> None:
    run(name, settings(LIMITS, max_examples=examples))


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        (
            "attention-gqa",
            calls(State.select, "index_select", lambda x, dim, rows: x.roll(1).index_select(dim, rows)),
        ),
        (
            "attention-gqa",
            wrapped(
                PositionTable.rolled_back, lambda roll_back, table, tokens, most: roll_back(table, 0 * tokens, most)
            ),
        ),
        ("attention-window-mixed", replaced(KVCache.can_roll_back, lambda cache, tokens, table: True)),
    ],
)
def test_programs_catch_planted_bugs(name: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(LawViolation):
        run(name, settings(LIMITS, max_examples=40, phases=[Phase.generate], report_multiple_bugs=False, database=None))
