"""Random programs over states (read, fork, choose rows, take back, replay), held against the rows' plain texts."""

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
from heddle.parts.context.layout import Layout
from tests.cases import CASES, case
from tests.laws.planting import plant

LONGEST = 40  # tokens a row


@cache
def model_of(name: str) -> Decoder:
    return model_under_test(case(name))


class Program(RuleBasedStateMachine):
    """Every answer on the way is compared with that of the whole texts; `name` is the design."""

    name: str
    twins: Bundle[ReferenceState] = Bundle("twins")

    def tokens(self, twin: ReferenceState, length: int, seed: int) -> Tensor:
        return random_tokens(self.model.config, len(twin.rows), length, seed)

    def room(self, twin: ReferenceState, length: int) -> bool:
        return max(map(len, twin.rows)) + length <= LONGEST

    @initialize(
        target=twins, rows=st.integers(1, 3), capacity=st.sampled_from((None, LONGEST)), slack=st.integers(0, 3)
    )
    def start(self, rows: int, capacity: int | None, slack: int) -> ReferenceState:
        self.model = model_of(self.name)
        self.returns = ReferenceState(self.model, 1).state.can_roll_back(1)
        return ReferenceState(self.model, rows, capacity, slack if self.returns else 0)

    @rule(twin=twins, length=st.integers(0, 9), seed=st.integers(0, 99))
    def read(self, twin: ReferenceState, length: int, seed: int) -> None:
        if self.room(twin, length):
            twin.feed(self.tokens(twin, length, seed), "rows")

    @rule(twin=twins, lengths=st.lists(st.integers(0, 6), min_size=3, max_size=3), right=st.booleans())
    def read_padded(self, twin: ReferenceState, lengths: list[int], right: bool) -> None:
        """Uneven rows, each going on in its document."""
        lengths = lengths[: len(twin.rows)]
        if max(lengths) and self.room(twin, max(lengths)):
            padded = Layout.padded(lengths, side="right" if right else "left").positions
            last = [row[-1] if row else None for row in twin.rows]
            ahead = padded.new_tensor([0 if one is None else one.position + 1 for one in last])[:, None]
            documents = padded.new_tensor([0 if one is None else one.document for one in last])[:, None]
            layout = Layout(padded.where(padded < 0, padded + ahead), documents.expand_as(padded))
            twin.feed(self.tokens(twin, max(lengths), sum(lengths)), "uneven rows", layout)

    @rule(twin=twins, first=st.integers(1, 4), second=st.integers(1, 5))
    def read_packed(self, twin: ReferenceState, first: int, second: int) -> None:
        """Two new documents in each row."""
        if self.room(twin, first + second):
            packed = Layout.packed([[first, second]] * len(twin.rows))
            newest = max(one.document for row in twin.rows for one in row) + 1 if any(twin.rows) else 0
            assert packed.segment_ids is not None
            layout = Layout(packed.positions, packed.segment_ids + newest, has_padding=False)
            twin.feed(self.tokens(twin, first + second, newest), "rows of new documents", layout)

    @rule(target=twins, twin=twins, rows=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def choose(self, twin: ReferenceState, rows: list[int]) -> ReferenceState:
        return twin.select([row % len(twin.rows) for row in rows])

    @rule(target=twins, twin=twins)
    def fork(self, twin: ReferenceState) -> ReferenceState:
        return twin.select(range(len(twin.rows)))

    @precondition(lambda self: self.returns)
    @rule(twin=twins, backs=st.lists(st.integers(0, 5), min_size=3, max_size=3), everything=st.booleans())
    def take_back(self, twin: ReferenceState, backs: list[int], everything: bool) -> None:
        lengths = [len(row) for row in twin.rows]
        backs = lengths if everything else [min(pair) for pair in zip(backs, lengths, strict=False)]
        if twin.state.can_roll_back(max(backs)):
            twin.rollback(backs)

    @rule(target=twins, twin=twins, length=st.integers(1, 5), seed=st.integers(0, 99))
    def guess_and_replay(self, twin: ReferenceState, length: int, seed: int) -> Any:
        """A fork reads ahead and is left; what it read is read again by the original, token by token."""
        if not self.room(twin, length):
            return multiple()
        tokens = self.tokens(twin, length, seed)
        guess = twin.select(range(len(twin.rows)))
        guess.feed(tokens, "a fork")
        for token in tokens.split(1, dim=1):
            twin.feed(token, "the original after its fork")
        return guess


NAMES = ("attention-gqa", "attention-window-2", "attention-window-mixed", "layers-nested", "sinusoidal")
FEW = settings(max_examples=12, stateful_step_count=14)


def run(name: str, limits: settings = FEW) -> None:
    machine: Any = type("Machine", (Program,), {"name": name})
    run_state_machine_as_test(machine, settings=limits)


def others() -> list[str]:
    """The first case of every other kind of mixer that keeps a state and reads no memory."""
    found, known = [], {"attention"}
    for name in CASES:
        model = model_of(name) if not _kinds(name) <= known else None
        if model is not None and model.causal and model.encoder_width is None:
            found.append(name)
            known |= _kinds(name)
    return found


def _kinds(name: str) -> set[str]:
    return {layer.mixer.kind for _, layer in case(name).expand() if layer.mixer is not None}


@pytest.mark.parametrize("name", [*NAMES, *others()])
def test_programs(name: str) -> None:
    run(name)


@pytest.mark.parametrize(
    ("name", "place", "old", "new"),
    [
        ("attention-gqa", "model.state:State.select", "x: x.index_select", "x: x.roll(1).index_select"),
        (
            "attention-gqa",
            "parts.context.position_table:PositionTable.rolled_back",
            "newest = self.token_counts - tokens,",
            "newest = self.token_counts - 0,",
        ),
        ("layers-nested", "parts.context.kv_cache:KVCache.can_roll_back", "tokens <= table.rollback_left", "True"),
    ],
)
def test_programs_find_bugs(name: str, place: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, place, old, new)
    with pytest.raises(LawViolation):
        run(name, settings(FEW, max_examples=40, phases=[Phase.generate], report_multiple_bugs=False, database=None))
