"""gpt-oss: what absent fields stand for, the fields of the published file, and what the family does not have."""

from typing import Any

from transformers import GptOssConfig

from heddle.exchange.family import families
from heddle.exchange.family_match import HEDDLE, design_from_config, match_family
from heddle.model.config import ModelConfig
from tests.cases import CASES, case
from tests.exchange.cases import GPT_OSS

FAMILY = families()["gpt_oss"]
SMALL: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 97, "hidden_size": 44, "intermediate_size": 20, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 5,
    "num_experts_per_tok": 2,
}  # fmt: skip
# As in the published file, beside sizes.
PUBLISHED: dict[str, Any] = {
    "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 2,
    "hidden_act": "silu", "initial_context_length": 4096, "initializer_range": 0.02,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 131072,
    "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "use_cache": True,
}  # fmt: skip


def design(**changes: Any) -> ModelConfig:
    return design_from_config(SMALL | changes, FAMILY)


def test_absent_fields_are_what_their_class_makes_of_them() -> None:
    assert design() == design_from_config(GptOssConfig(**SMALL).to_dict(), FAMILY)
    windows = [getattr(layer.mixer, "window", None) for _, layer in design().expand()]
    assert windows == [128, None, 128, None]


def test_the_published_file() -> None:
    assert design(**PUBLISHED) == design()


def test_a_loss_of_training_is_taken_where_they_take_it() -> None:
    """By the loss that Mixtral has too: coef · k / L, with 2 of the experts chosen in each of 4 layers."""
    data = design(output_router_logits=True, router_aux_loss_coef=0.05).dump()
    assert {layer["feedforward"]["aux_loss"] for layer in data["layers"]} == {0.05 * 2 / 4}
    assert "aux_loss" not in design(router_aux_loss_coef=0.05).dump()["layers"][0]["feedforward"]


def test_every_design_can_be_held_against_the_family_and_only_its_own_fit() -> None:
    assert not match_family(design(**{**GPT_OSS, "layer_types": ["full_attention"] * 4}), FAMILY).mismatches
    assert all(match_family(case(name), FAMILY).mismatches for name in CASES)


def test_clamped_experts_are_no_other_familys() -> None:
    matches = {
        name: not match_family(design(), family, allow_base_class=False).mismatches
        for name, family in families().items()
        if name != HEDDLE
    }
    assert [name for name, fits in matches.items() if fits] == ["gpt_oss"]
