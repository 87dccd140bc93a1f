"""Positions: the end of learned tables, and rotary tables that are built once per call."""

import pytest
import torch

from heddle.config import DesignError, parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import forward_no_grad, forward_with_state, model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.numerics.rotary import rotary_table
from heddle.parts.layout import Layout
from heddle.parts.positions import rope
from heddle.parts.positions.learned import Learned
from heddle.parts.positions.relative_bias import RelativeBiasConfig
from heddle.parts.positions.sinusoidal import SinusoidalConfig
from tests.cases import CASES, alone, attention, design, layer
from tests.laws.planting import calls
from tests.parts.loops import decoder_loop

LEARNED = parse_config(
    ModelConfig, design(layer(attention(position=None)), embedding={"position": {"kind": "learned", "length": 8}})
)
BEYOND = r"^embedding.position:"


@pytest.mark.parametrize(
    "layout",
    [
        None,
        Layout.padded([9, 2]),
        Layout.packed([[9]]),
        Layout(torch.arange(9)[None], has_padding=False),
    ],
)
def test_a_position_beyond_the_learned_table_is_refused(layout: Layout | None) -> None:
    model = model_under_test(LEARNED)
    with pytest.raises(ConfigError, match=BEYOND):
        forward_no_grad(model, random_tokens(LEARNED, 1 if layout is None else layout.batch, 9), layout)


def test_a_state_beyond_the_learned_table_is_refused() -> None:
    model = model_under_test(LEARNED)
    tokens = random_tokens(LEARNED, 1, 9)
    _, state = forward_with_state(model, model.init_state(1), tokens[:, :8])
    with pytest.raises(ConfigError, match=BEYOND):
        forward_with_state(model, state, tokens[:, 8:])


def test_packed_documents_may_together_exceed_the_learned_table() -> None:
    forward_no_grad(model_under_test(LEARNED), random_tokens(LEARNED, 1, 12), Layout.packed([[4, 8]]))


def test_one_rotary_table_serves_queries_and_keys_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    make = rotary_table

    def counted(
        positions: torch.Tensor, inv_freq: list[float], dtype: torch.dtype, attention_factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(inv_freq)
        return make(positions, inv_freq, dtype, attention_factor)

    monkeypatch.setattr(rope, "rotary_table", counted)
    config = parse_config(ModelConfig, alone(kv_heads=2))
    forward_no_grad(model_under_test(config), random_tokens(config, 2, 5))
    assert len(calls) == 1
    mixed = parse_config(ModelConfig, CASES["rope-mixed"])
    forward_no_grad(model_under_test(mixed), random_tokens(mixed, 2, 5))
    assert len(calls) == 3


def test_local_and_global_layers_with_different_bases_equal_plain_loops() -> None:
    local = attention(position={"kind": "rope", "base": 100.0}, window=4, kv_heads=2)
    wide = attention(position={"kind": "rope", "base": 1000000.0}, kv_heads=2)
    entries = [layer(local, None, repeat=3), layer(wide, None), layer(local, None, repeat=3)]
    model = model_under_test(
        parse_config(ModelConfig, design(*entries, layer(attention(position=None, kv_heads=2), None)))
    )
    tokens = random_tokens(model.config, 1, 11)
    want = decoder_loop(model, list(model.embed.weight[tokens[0]])).detach()
    torch.testing.assert_close(forward_no_grad(model, tokens)[0], want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("width", [4, 6])
def test_sinusoids_pair_the_dims_of_any_even_width(width: int) -> None:
    assert parse_config(SinusoidalConfig, {}).build(width) is not None
    with pytest.raises(DesignError, match="is odd"):
        parse_config(SinusoidalConfig, {}).build(width - 1)


def test_buckets_of_both_directions_are_halved() -> None:
    """Four of eight for each direction, of which two are single distances."""
    config = parse_config(RelativeBiasConfig, {"buckets": 8, "max_distance": 2})
    with pytest.raises(DesignError, match="2 buckets"):
        config.build(2, causal=False)
    assert config.replace(max_distance=3).build(2, causal=False) is not None


@pytest.mark.parametrize("bug", [None, "no offset"])
def test_rows_before_the_offset_are_read_by_no_token(bug: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug is not None:
        no_offset = calls(Learned.forward, "clamp", lambda x, *, self, **limit: x.clamp(**limit) - self.offset)
        no_offset(monkeypatch)
    position = {"kind": "learned", "length": 5, "offset": 2}
    model = model_under_test(parse_config(ModelConfig, design(layer(None), embedding={"position": position})))
    tokens, layout = random_tokens(model.config, 2, 5), Layout.padded([5, 3])
    rows = model.get_parameter("embed.position.weight")
    assert rows.shape == (7, 24)
    want = model.embed.weight[tokens] + rows[layout.positions.clamp(min=0) + 2]
    got = model.embed(tokens, layout)
    assert torch.equal(got, want.masked_fill(layout.positions[..., None] < 0, 0.0)) == (bug is None)
    with pytest.raises(ConfigError, match=r"^embedding\.position:"):
        model(random_tokens(model.config, 1, 6))
