"""Presets: each builds and has the size of its name."""

import pytest

from heddle.model import presets
from heddle.model.load_config import load_config
from heddle.model.size import size

PARAMETER_RANGES = {"tiny": (1e6, 2e6), "small": (11e6, 18e6), "medium": (80e6, 120e6)}


@pytest.mark.parametrize("name", presets.names())
def test_preset(name: str) -> None:
    config = load_config(f"preset:{name}")
    kind, _, size_name = name.rpartition("-")
    if config.vocab_size is None:
        config = config.replace(vocab_size=4096)
    sizes = size(config, context_length=512)
    low, high = PARAMETER_RANGES[size_name]
    assert low <= sizes.active_parameters <= high
    full = size(load_config(f"preset:mha-{size_name}", [f"vocab_size={config.vocab_size}"]), context_length=512)
    assert sizes.active_parameters <= 1.01 * full.parameters
    assert sizes.active_parameters >= 0.8 * full.parameters
    assert (sizes.parameters > sizes.active_parameters) == (kind == "moe")
    assert (sizes.state_bytes < full.state_bytes) == (kind != "mha")


@pytest.mark.parametrize(("name", "full_layers"), [("tiny", [2, 5]), ("small", [2, 5]), ("medium", [3, 7, 11])])
def test_a_hybrid_has_full_attention_last_of_three_or_four_layers(name: str, full_layers: list[int]) -> None:
    mixers = [layer.mixer for _, layer in load_config(f"preset:hybrid-{name}").expand()]
    assert [
        index for index, mixer in enumerate(mixers) if mixer is not None and mixer.kind == "attention"
    ] == full_layers


def test_a_token_uses_three_experts_of_nine() -> None:
    """Two of eight that are chosen, and the shared one, each a third as wide as the dense feed-forward."""
    dense, mixture = (load_config(f"preset:{kind}-medium").layers[0].feedforward for kind in ("gqa", "moe"))
    assert dense is not None
    assert mixture is not None
    fields, hidden = mixture.dump(), dense.dump()["hidden"]
    assert (fields["experts"], fields["top_k"], fields["shared"]) == (8, 2, 1)
    assert 0 <= hidden - 3 * fields["hidden"] < 24
