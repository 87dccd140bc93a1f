"""RoPE in the other layout computes the same logits."""

from typing import Any, Literal

import pytest
import torch

from heddle.conversion.rewrites import rope_layout
from heddle.conversion.rewrites.rope_layout import RopeLayout
from heddle.errors import ConfigError
from tests.conversion.exactness import converted_model, design, difference, greedy_text, random_text, source_model

PairLayout = Literal["half", "interleaved"]
ROPE = {"kind": "rope", "layout": "half"}
MIXERS: dict[str, dict[str, Any]] = {
    "mha": {"kind": "attention", "heads": 4, "position": ROPE},
    "gqa-biases-head-norm": {
        "kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 6, "bias": True, "qk_norm": "head", "position": ROPE
    },
    "per-head-norm-partial": {
        "kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8, "qk_norm": "per_head",
        "position": ROPE | {"rotary_dim": 4},
    },
    "norm-after-rotation": {
        "kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8, "qk_norm": "per_head",
        "norm_after_rotation": True, "position": ROPE | {"rotary_dim": 6},
    },
    "as-many-heads-as-dims": {
        "kind": "attention", "heads": 8, "kv_heads": 4, "head_dim": 4, "qk_norm": "per_head", "position": ROPE
    },
    "projection-norm": {"kind": "attention", "heads": 2, "head_dim": 8, "qk_norm": "projection", "position": ROPE},
    "latent": {"kind": "latent_attention", "heads": 2, "kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "position": ROPE},
    "latent-queries": {
        "kind": "latent_attention", "heads": 2, "kv_rank": 8, "query_rank": 6, "nope_dim": 6, "rope_dim": 4,
        "bias": True, "position": ROPE,
    },
}  # fmt: skip


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_logits_and_greedy_text_stay(mixer: dict[str, Any], layout: PairLayout) -> None:
    other: PairLayout = "interleaved" if layout == "half" else "half"
    source = source_model(design(mixer | {"position": mixer["position"] | {"layout": layout}}))
    converted = converted_model(source, RopeLayout(layout=other))
    assert difference(source, converted) < 1e-10
    prompt = random_text().batches[0]
    assert torch.equal(greedy_text(source, prompt), greedy_text(converted, prompt))


def test_a_wrong_permutation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_model(design(MIXERS["mha"]))
    monkeypatch.setattr(rope_layout, "new_pair_order", lambda position: torch.arange(position.rotary_dim).flip(0))
    assert difference(source, converted_model(source, RopeLayout(layout="interleaved"))) > 1e-4


def test_the_same_layout_is_refused() -> None:
    source = source_model(design(MIXERS["mha"]))
    with pytest.raises(ConfigError, match=r"RoPE.*half"):
        converted_model(source, RopeLayout(layout="half"))
