"""Equal states: each mixer scales the field that sets its state, and the bytes come out equal or it is refused."""

from typing import Any

import pytest
import torch

from heddle.config import Part, kinds, parse_config
from heddle.errors import ConfigError
from heddle.lab.compare import equal_size
from heddle.lab.compare.equal_size import (
    MAX_STATE_DEVIATION,
    equalize_sizes,
    equalize_states,
    parse_state_context,
    scale_heads,
    scale_state,
    with_state_factor,
)
from heddle.lab.compare.plan import DesignEntry
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.model.size import state_bytes
from heddle.parts.mixers import RecurrentMixer
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.differential_attention import DifferentialAttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from heddle.parts.mixers.linear_attention import LinearAttentionConfig
from heddle.parts.mixers.native_sparse_attention import NativeSparseAttentionConfig
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import equal_size_table
from tests.model.test_overrides import GATED, design, mixer

CONTEXT = 240


def entry(name: str, config: ModelConfig | None = None) -> DesignEntry:
    return DesignEntry(name, name, config or load_config(f"preset:{name}"))


def bytes_of(config: ModelConfig, context: int = CONTEXT, dtype: torch.dtype = torch.float32) -> int:
    return state_bytes(config.replace(vocab_size=2), context, dtype=dtype)


def test_presets_get_the_state_of_the_baseline() -> None:
    names = ["gqa", "mla", "local_global", "linear", "retention", "gated_delta", "hybrid", "hybrid_mla"]
    entries = tuple(entry(f"{name}-tiny") for name in names)
    scaled = equalize_states(entries, "gqa-tiny", CONTEXT)
    assert scaled[0] == entries[0]
    target = bytes_of(entries[0].config)
    for before, after in zip(entries[1:], scaled[1:], strict=True):
        assert abs(bytes_of(before.config) / target - 1) > MAX_STATE_DEVIATION
        assert abs(bytes_of(after.config) / target - 1) < 0.01, after.name
        assert after.config.width == before.config.width
        assert after.scaled_fields
    changed = {after.name.removesuffix("-tiny"): after.scaled_fields for after in scaled}
    assert changed["mla"] == ("layers[0].mixer.kv_rank 56 → 112",)
    assert changed["local_global"][0].startswith("layers[0].layers[0].mixer.window 64 → ")
    assert [field.split()[0] for field in changed["gated_delta"]] == ["layers[0].mixer.head_dim"]


@pytest.mark.parametrize("kind", kinds("mixers"))
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_every_mixer_has_a_field_that_scales_its_state(kind: str, factor: float) -> None:
    """cross_attention has none: what it stores belongs to the encoder output."""
    fields = {"conv_kernel": 33} if kind == "short_conv" else {}  # else the table of positions is most of the state
    config = load_config(design(mixer(kind) | fields, GATED))
    before, after = bytes_of(config, 64), bytes_of(with_state_factor(config, factor), 64)
    if kind == "cross_attention":
        assert after == before
    else:
        assert after / before == pytest.approx(factor, rel=0.3)  # the states of convolutions stay


def test_a_window_is_scaled_and_not_the_heads() -> None:
    config = load_config(design({"kind": "swa", "heads": 4, "window": 20}, GATED))
    mixer_data = with_state_factor(config, 2.0).dump()["layers"][0]["mixer"]
    assert mixer_data == config.dump()["layers"][0]["mixer"] | {"window": 40}


def test_the_context_length_decides() -> None:
    entries = (entry("gqa-tiny"), entry("gated_delta-tiny"))
    short, long = (equalize_sizes(entries, "gqa-tiny", f"state@{length}", 300, 9) for length in (64, 128))
    dims = [scaled[1].config.dump()["layers"][0]["mixer"]["head_dim"] for scaled in (short, long)]
    assert dims[1] / dims[0] == pytest.approx(2, abs=0.2)
    assert equalize_sizes(entries, "gqa-tiny", "state", 300, 64) == short


def test_keys_and_values_of_two_bytes_are_counted_as_such() -> None:
    entries = (entry("gqa-tiny"), entry("linear-tiny"))  # a recurrence stays in float32
    scaled = equalize_states(entries, "gqa-tiny", CONTEXT, torch.bfloat16)
    sizes = [bytes_of(each.config, CONTEXT, torch.bfloat16) for each in scaled]
    assert sizes[1] / sizes[0] == pytest.approx(1, abs=0.02)
    assert scaled[1].config != equalize_states(entries, "gqa-tiny", CONTEXT)[1].config


def test_what_cannot_be_reached_is_refused_in_one_sentence() -> None:
    entries = (entry("gated_delta-tiny"), entry("mha-tiny"))
    with pytest.raises(ConfigError) as caught:
        equalize_states(entries, "gated_delta-tiny", 8192)
    message = str(caught.value)
    assert message.startswith("equal state:")
    assert message.endswith("; choose another baseline or context length, or leave it out")
    assert "\n" not in message
    cross = entry("cross", load_config(design({"kind": "cross_attention", "heads": 4}, GATED)))
    with pytest.raises(ConfigError, match="mixers"):
        equalize_states((entries[0], cross), "gated_delta-tiny", 4096)


def test_designs_that_become_one_are_refused() -> None:
    entries = (entry("mqa-tiny"), entry("mha-tiny"))
    message = r"^equal state:.*layers\[0\]\.mixer\.kv_heads"
    with pytest.raises(ConfigError, match=message):
        equalize_states(entries, "mqa-tiny", CONTEXT)


@pytest.mark.parametrize(
    "text", ["state@", "state@0", "state@x", "state@1e3", f"state@{10**12}", "state@" + "9" * 5000]
)
def test_a_context_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"state@N.*state@4096"):
        parse_state_context(text, 256)


def test_other_kinds_of_size_are_not_states() -> None:
    assert [parse_state_context(kind, 5) for kind in ("state", "state@7", "flops", "states")] == [5, 7, None, None]


def test_a_mixer_that_scales_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: gated_delta without its knob is refused."""
    monkeypatch.setattr(equal_size, "_state_changes", lambda mixer, values, factor, width: {})
    with pytest.raises(ConfigError, match="mixers"):
        equalize_states((entry("gqa-tiny"), entry("gated_delta-tiny")), "gqa-tiny", CONTEXT)


def test_the_table_shows_what_was_changed() -> None:
    report: dict[str, Any] = reports.make_report() | {"equal_size": "state@300"}
    for index, each in enumerate(report["designs"]):
        each |= {"equal_state_bytes": 1000 + index, "scaled_fields": ["layers[0].mixer.kv_heads 4 → 2"][:index]}
    table = equal_size_table(report)
    assert table.header == ["design", "changed", "state bytes at 300 tokens", "deviation"]
    assert table.rows[0][1:] == ["nothing", "1.00 kB", "baseline"]
    assert table.rows[1][1:] == ["layers[0].mixer.kv_heads 4 → 2", "1.00 kB", "+0.1%"]


# Which fields of a mixer change, kind by kind, against numbers worked out by hand.

WIDTH = 64
CONVOLVED = {"of": ["q"], "conv_kernel": 5}


@pytest.mark.parametrize(
    ("kind", "fields", "factor", "changed"),
    [
        # keys of 64 / 4 = 16 dims become 8, and values stay 16 wide
        (GatedDeltaConfig, {"heads": 4}, 0.5, {"head_dim": 8, "value_dim": 16}),
        (GatedDeltaConfig, {"heads": 4, "head_dim": 8}, 0.5, {"head_dim": 4, "value_dim": 8}),
        (LinearAttentionConfig, {"heads": 4}, 2.0, {"head_dim": 32, "value_dim": 16}),
        # a latent of 24 and a rotated key of 8: half of 32 less 8
        (LatentAttentionConfig, {"heads": 4, "kv_rank": 24, "nope_dim": 8, "rope_dim": 8}, 0.5, {"kv_rank": 8}),
        (LatentAttentionConfig, {"heads": 4, "kv_rank": 24, "nope_dim": 8}, 0.5, {"kv_rank": 12}),
        (LatentAttentionConfig, {"heads": 4, "kv_rank": 64, "nope_dim": 8}, 0.5, {"kv_rank": 32}),
        (NativeSparseAttentionConfig, {"heads": 4, "window": 9}, 0.5, {"kv_heads": 2}),  # it stores all tokens
        # a window beside the last tokens of a convolution, which stay
        (AttentionConfig, {"heads": 4, "window": 2, "short_convolution": CONVOLVED}, 2.0, {"window": 4}),
        (DifferentialAttentionConfig, {"heads": 4}, 0.5, {"kv_heads": 2}),
        (DifferentialAttentionConfig, {"heads": 4, "window": 10}, 0.5, {"window": 5}),
    ],
)
def test_a_state_is_scaled_by_its_own_fields(
    kind: type[Any], fields: dict[str, Any], factor: float, changed: dict[str, Any]
) -> None:
    config = parse_config(kind, fields)
    scaled = scale_state(config, factor, WIDTH)
    assert isinstance(scaled, Part)
    assert scaled == config.replace(**changed)


def test_heads_are_scaled_to_divisors() -> None:
    """Four of eight heads, halved and doubled, keep their widths; a third more takes eight narrower ones."""
    assert scale_heads(4, 0.5, 8, (16, 16)) == (2, 16, 16)
    assert scale_heads(4, 2.0, 8, (16, 16)) == (8, 16, 16)
    number, key_dim, value_dim = scale_heads(4, 1.5, 8, (16, 16))
    assert number == 8
    assert key_dim + value_dim == 24


def test_a_recurrent_mixer_reads_no_earlier_token_again() -> None:
    assert RecurrentMixer.lookback.fget(None) == 0  # type: ignore[attr-defined]
