"""Positions: learned tables end where they end, and a table is made once a call."""

import pytest
import torch

from heddle.config import decode
from heddle.errors import ConfigError
from heddle.laws.subject import advance, answer, subject, text
from heddle.model.config import ModelConfig
from heddle.parts.context.layout import Layout
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


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: torch.Tensor, base: float | None) -> torch.Tensor:
    """x [T, d] by complex numbers, pairs of the half layout; a base of None turns nothing."""
    if base is None:
        return x
    half = x.shape[1] // 2
    thetas = torch.tensor([base ** (-2 * i / x.shape[1]) for i in range(half)], dtype=x.dtype)
    angles = torch.arange(len(x))[:, None] * thetas
    pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), dim=1)


BASES = [100.0, 100.0, 100.0, 1000000.0, 100.0, 100.0, 100.0, None]
WINDOWS = [4, 4, 4, None, 4, 4, 4, None]


def test_three_local_layers_to_a_global_one_each_with_its_own_base_are_plain_loops() -> None:
    local = attention(position={"kind": "rope", "base": 100.0}, window=4, kv_heads=2)
    wide = attention(position={"kind": "rope", "base": 1000000.0}, kv_heads=2)
    entries = [layer(local, None, repeat=3), layer(wide, None), layer(local, None, repeat=3)]
    model = subject(decode(ModelConfig, design(*entries, layer(attention(position=None, kv_heads=2), None))))
    tokens = text(model.config, 1, 11)
    x = model.embed.weight[tokens[0]]
    with torch.no_grad():
        for entry, base, window in zip(model.layers, BASES, WINDOWS, strict=True):
            weights = dict(entry.named_parameters())
            y = rms(x, weights["residual.norms.mixer.weight"])
            read = []
            for head in range(4):
                group = slice(head // 2 * 6, head // 2 * 6 + 6)
                q = turned(y @ weights["mixer.q.weight"][head * 6 : head * 6 + 6].T, base)
                k = turned(y @ weights["mixer.k.weight"][group].T, base)
                v = y @ weights["mixer.v.weight"][group].T
                for i in range(11):
                    first = 0 if window is None else max(0, i - window + 1)
                    shares = (k[first : i + 1] @ q[i] / 6**0.5).softmax(0)
                    read.append((i, head, shares @ v[first : i + 1]))
            out = torch.zeros(11, 24, dtype=torch.float64)
            for i, head, value in read:
                out[i, head * 6 : head * 6 + 6] = value
            x = x + out @ weights["mixer.out.weight"].T
        want = rms(x, model.get_parameter("close.norm.weight"))
    torch.testing.assert_close(answer(model, tokens)[0], want, rtol=0, atol=1e-10)
