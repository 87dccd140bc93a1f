"""Positions: learned tables end where they end, and a table is made once a call."""

import pytest
import torch

from heddle.config import decode
from heddle.errors import ConfigError
from heddle.laws.subject import advance, answer, subject, text
from heddle.model.config import ModelConfig
from heddle.parts.layout import Layout
from heddle.parts.positions import rope
from tests.cases import CASES, alone, attention, design, layer

LEARNED = decode(
    ModelConfig, design(layer(attention(position=None)), embedding={"position": {"kind": "learned", "length": 8}})
)
BEYOND = "^embedding.position: position 8 is beyond the 8 learned ones; shorten the text or train with a larger length$"


@pytest.mark.parametrize(
    "layout",
    [
        None,
        Layout.padded([9, 2]),
        Layout.packed([[9]]),
        Layout(torch.arange(9)[None], has_padding=False),
    ],
)
def test_a_position_beyond_the_learned_ones_is_refused(layout: Layout | None) -> None:
    model = subject(LEARNED)
    with pytest.raises(ConfigError, match=BEYOND):
        answer(model, text(LEARNED, 1 if layout is None else layout.batch, 9), layout)


def test_a_state_meets_the_end_of_the_learned_positions() -> None:
    model = subject(LEARNED)
    tokens = text(LEARNED, 1, 9)
    _, state = advance(model, model.init_state(1), tokens[:, :8])
    with pytest.raises(ConfigError, match=BEYOND):
        advance(model, state, tokens[:, 8:])


def test_packed_documents_may_be_longer_than_the_table_together() -> None:
    answer(subject(LEARNED), text(LEARNED, 1, 12), Layout.packed([[4, 8]]))


def test_one_table_serves_all_layers_and_both_of_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    make = rope.table

    def counted(
        positions: torch.Tensor, thetas: list[float], dtype: torch.dtype, amplitude: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(thetas)
        return make(positions, thetas, dtype, amplitude)

    monkeypatch.setattr(rope, "table", counted)
    config = decode(ModelConfig, alone(kv_heads=2))
    answer(subject(config), text(config, 2, 5))
    assert len(calls) == 1
    mixed = decode(ModelConfig, CASES["rope-mixed"])
    answer(subject(mixed), text(mixed, 2, 5))
    assert len(calls) == 3
