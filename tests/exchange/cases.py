"""The families and the variants of each that are held against transformers: one line a variant.

A variant is what its config says beside `BASE`; shapes are awkward (head_dim is not width / heads, groups are odd).
"""

from typing import Any, NamedTuple

Fields = dict[str, Any]


class Case(NamedTuple):
    """variants: name -> fields of the config. inert: fields that change nothing in what a trained model computes, so
    that logits must stay when they are changed; every other number of the config must change them, on both sides alike.
    exact: whether logits are theirs bit for bit.
    """

    variants: dict[str, Fields]
    inert: frozenset[str] = frozenset()
    exact: bool = False


BASE: Fields = {
    "vocab_size": 97,
    "hidden_size": 42,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Fields of any config that no trained model computes with.
INERT = frozenset(
    """
    initializer_range max_position_embeddings attention_dropout use_cache pretraining_tp bos_token_id eos_token_id
    pad_token_id transformers_version
    """.split()  # noqa: SIM905
)


def scaled(kind: str, **fields: Any) -> Fields:
    """The fields of a RoPE scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **fields}}


LLAMA3 = scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=0.5, truncate=False)

# Their product of all experts takes rows of multiples of 16 bytes. A limit that no number reaches would be read by
# nobody.
GPT_OSS: Fields = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7, "layer_types": None, "swiglu_limit": 1.1,
    "hidden_size": 44, "intermediate_size": 20,
}  # fmt: skip

CASES: dict[str, Case] = {
    "gpt_oss": Case(
        {
            "yarn": {**GPT_OSS, **YARN},
            "no-biases-window-beyond-padding": {
                **GPT_OSS,
                "attention_bias": False,
                "num_key_value_heads": 1,
                "swiglu_limit": 0.7,
                "swiglu_alpha": 0.9,
                "sliding_window": 3,
                "head_dim": 10,
                "rms_norm_eps": 1e-3,
                **scaled("default"),
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
            "every-expert-tied": {
                **GPT_OSS,
                "num_local_experts": 3,
                "num_experts_per_tok": 3,
                "tie_word_embeddings": True,
                "num_key_value_heads": 3,
                "layer_types": ["sliding_attention"] * 3,
                **YARN,
            },
        },
        inert=frozenset({"router_aux_loss_coef", "output_router_logits"}),
    ),
    "llama": Case(
        {
            "plain": {"num_key_value_heads": 6},
            "llama3-tied-biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, **LLAMA3},
            "one-kv-head-yarn": {"num_key_value_heads": 1, "head_dim": 10, "rms_norm_eps": 1e-3, **YARN},
            "linear-gelu": {"hidden_act": "gelu_pytorch_tanh", **scaled("linear", factor=3.0)},
            "three-kv-heads": {"num_key_value_heads": 3, "attention_dropout": 0.1},
        },
    ),
}
