"""States of another size: which fields of a mixer change, kind by kind, against numbers worked out by hand."""

from typing import Any

import pytest

from heddle.config import Part, parse_config
from heddle.lab.compare.equal_size import scale_heads, scale_state
from heddle.parts.mixers import RecurrentMixer
from heddle.parts.mixers.differential_attention import DifferentialAttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from heddle.parts.mixers.linear_attention import LinearAttentionConfig

WIDTH = 64


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
