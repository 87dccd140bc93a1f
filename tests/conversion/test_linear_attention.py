"""Full attention to linear attention with a learned feature map: what is taken over."""

from typing import Any

import torch

from heddle.conversion.rewrites.linear_attention import LinearAttentionReplacement
from heddle.conversion.weights import ModelWeights
from heddle.parts.mixers.linear_attention import LinearAttentionConfig
from tests.conversion.exactness import design, random_text, source_model

GQA = {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 6, "value_dim": 5}
START: dict[str, Any] = {"fit_steps": 1, "fit_learning_rate": 1e-300}  # the weights before the fit


def converted(mixer: dict[str, Any], **fields: Any) -> tuple[LinearAttentionConfig, dict[str, torch.Tensor]]:
    """The new mixer of the second layer, and its layer's parameters before the fit."""
    rewrite = LinearAttentionReplacement(**START, **fields)
    weights = rewrite.apply(ModelWeights(source_model(design(mixer))), random_text())
    config = weights.design.layers[1].mixer
    assert isinstance(config, LinearAttentionConfig)
    return config, weights.layer(1)


def test_projections_start_from_attention_and_the_map_near_the_identity() -> None:
    config, new = converted(GQA)
    assert config == LinearAttentionConfig(
        heads=4, head_dim=6, value_dim=5, feature_map="learned", key_feature_map="learned"
    )
    old = ModelWeights(source_model(design(GQA))).layer(1)
    for name in ("mixer.q.weight", "mixer.out.weight"):
        assert torch.equal(new[name], old[name]), name
    for name, dim in (("mixer.k.weight", 6), ("mixer.v.weight", 5)):
        assert torch.equal(new[name], old[name].view(2, dim, -1)[[0, 0, 1, 1]].flatten(0, 1)), name
    for name in ("mixer.q_map.weight", "mixer.k_map.weight"):
        assert float((new[name] - torch.eye(6)).abs().max()) < 0.1
