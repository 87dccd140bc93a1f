"""Presets: each builds and has the size of its name."""

import pytest

from heddle.model import presets
from heddle.model.load_config import load_config
from heddle.model.size import size

PARAMETER_RANGES = {"tiny": (1e6, 2e6), "small": (11e6, 18e6), "medium": (80e6, 120e6), "1b": (1.1e9, 1.4e9)}


@pytest.mark.parametrize("name", presets.names())
def test_preset(name: str) -> None:
    config = load_config(f"preset:{name}")
    kind, _, size_name = name.rpartition("-")
    if config.vocab_size is None:
        config = config.replace(vocab_size=4096)
    sizes = size(config, context_length=512)
    low, high = PARAMETER_RANGES[size_name]
    assert low <= sizes.active_parameters <= high
    heads = presets.SIZES[size_name].heads
    overrides = [f"vocab_size={config.vocab_size}", f"layers.0.mixer.kv_heads={heads}"]
    full = size(load_config(f"preset:gqa-{size_name}", overrides), context_length=512)
    assert sizes.active_parameters <= 1.01 * full.parameters
    assert sizes.active_parameters >= 0.8 * full.parameters
    assert (sizes.parameters > sizes.active_parameters) == (kind == "moe")
    assert (sizes.state_bytes < full.state_bytes) == (kind != "mha")


@pytest.mark.parametrize(
    ("name", "full_layers"), [("tiny", [2, 5]), ("small", [2, 5]), ("medium", [3, 7, 11]), ("1b", [3, 7, 11, 15])]
)
def test_a_hybrid_has_full_attention_last_of_three_or_four_layers(name: str, full_layers: list[int]) -> None:
    mixers = [layer.mixer for _, layer in load_config(f"preset:hybrid-{name}").expand()]
    assert [
        index for index, mixer in enumerate(mixers) if mixer is not None and mixer.kind == "attention"
    ] == full_layers


def test_gqa_1b_has_the_parameters_of_llama_3_2_1b() -> None:
    """As published: 1,235,814,400, with a tied head."""
    assert size(load_config("preset:gqa-1b"), context_length=8).parameters == 1_235_814_400


def test_mla_1b_keeps_about_half_of_what_gqa_1b_keeps() -> None:
    grouped, latent = (size(load_config(f"preset:{kind}-1b"), context_length=8) for kind in ("gqa", "mla"))
    assert (grouped.state_bytes_per_token, latent.state_bytes_per_token) == (16 * 2 * 8 * 64 * 4, 16 * (512 + 32) * 4)


def test_a_token_uses_three_experts_of_nine() -> None:
    """Two of eight that are chosen, and the shared one, each a third as wide as the dense feed-forward."""
    dense, mixture = (load_config(f"preset:{kind}-medium").layers[0].feedforward for kind in ("gqa", "moe"))
    assert dense is not None
    assert mixture is not None
    fields, hidden = mixture.dump(), dense.dump()["hidden"]
    assert (fields["experts"], fields["top_k"], fields["shared"]) == (8, 2, 1)
    assert 0 <= hidden - 3 * fields["hidden"] < 24
