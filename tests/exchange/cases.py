"""The families and the variants of each that are held against transformers: one line a variant.

A variant is what its config says beside `BASE`; shapes are awkward (head_dim is not width / heads, groups are odd).
"""

from typing import Any, NamedTuple

Fields = dict[str, Any]


class Case(NamedTuple):
    """variants: name -> fields of the config. inert: fields that change nothing in what a trained model computes, so
    that logits must stay when they are changed; every other number of the config must change them, on both sides alike.
    refused: fields of which one side may build no other value, since those beside them say the opposite.
    exact: whether logits are theirs bit for bit, but for the variants `inexact`, and for rows without padding where
    layers have a window, which are computed in blocks. narrow: whether those of padded rows are in bfloat16, too.
    """

    variants: dict[str, Fields]
    inert: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    exact: bool = False
    inexact: frozenset[str] = frozenset()
    narrow: bool = False


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
LONG = scaled(
    "longrope", short_factor=[1.0, 1.1, 1.3, 1.7], long_factor=[1.2, 2.0, 3.5, 6.0],
    original_max_position_embeddings=32, factor=4.0,
)  # fmt: skip
ROUNDED: Fields = {  # of one type of layers: transformers finds no `truncate` in there
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 512,
    "beta_fast": 8.0, "beta_slow": 1.0,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS: Fields = {"use_sliding_window": True, "sliding_window": 7}
# Fields that say again what layer_types says, which transformers always writes and then goes by.
SPELLINGS = frozenset({"use_sliding_window", "max_window_layers"})


def by_type(full: Fields, theta: float) -> Fields:
    """`rope_parameters` of full layers, and of sliding ones with this theta."""
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": theta}}


CASES: dict[str, Case] = {
    "llama": Case(
        {
            "plain": {"num_key_value_heads": 6},
            "llama3-tied-biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, **LLAMA3},
            "one-kv-head-yarn": {"num_key_value_heads": 1, "head_dim": 10, "rms_norm_eps": 1e-3, **YARN},
            "linear-gelu": {"hidden_act": "gelu_pytorch_tanh", **scaled("linear", factor=3.0)},
            "three-kv-heads": {"num_key_value_heads": 3, "attention_dropout": 0.1},
        },
        exact=True,
        narrow=True,
    ),
    "mistral": Case(
        {
            "window": {"sliding_window": 7, "num_key_value_heads": 3},
            "no-window-tied": {"sliding_window": None, "tie_word_embeddings": True, "hidden_act": "gelu"},
            "one-kv-head-longrope": {
                "sliding_window": 9,
                "num_key_value_heads": 1,
                "rms_norm_eps": 1e-3,
                "attention_dropout": 0.1,
                **LONG,
            },
            "window-two-llama3": {"sliding_window": 2, "num_key_value_heads": 6, **LLAMA3},
        },
        inert=frozenset({"rope_parameters.short_factor"}),  # the rows are longer than it is for
        exact=True,
        narrow=True,
    ),
    "qwen2": Case(
        {
            "no-window": {"max_window_layers": 3, "num_key_value_heads": 3},
            "upper-windows-tied-yarn": WINDOWS | YARN | {"max_window_layers": 1, "tie_word_embeddings": True},
            "one-kv-head-types": WINDOWS
            | {
                "max_window_layers": 0,
                "layer_types": [SLIDING, FULL, SLIDING],
                "num_key_value_heads": 1,
                "attention_dropout": 0.1,
                "rms_norm_eps": 1e-3,
                "hidden_act": "gelu_pytorch_tanh",
            },
            "all-windows-linear": WINDOWS | {"max_window_layers": 0, **scaled("linear", factor=3.0)},
        },
        inert=SPELLINGS,
        refused=SPELLINGS,
        exact=True,
        narrow=True,
    ),
    "qwen3": Case(
        {
            "no-window": {"max_window_layers": 3},
            "upper-windows-tied-biases": WINDOWS
            | {
                "max_window_layers": 2,
                "tie_word_embeddings": True,
                "attention_bias": True,
                "num_key_value_heads": 6,
            },
            "one-kv-head-yarn": WINDOWS
            | YARN
            | {
                "max_window_layers": 0,
                "layer_types": [SLIDING, FULL, SLIDING],
                "num_key_value_heads": 1,
                "attention_dropout": 0.1,
                "rms_norm_eps": 1e-3,
                "hidden_act": "gelu",
            },
            "three-kv-heads-llama3": {"max_window_layers": 3, "num_key_value_heads": 3, "head_dim": 10, **LLAMA3},
        },
        inert=SPELLINGS,
        refused=SPELLINGS,
        exact=True,
        narrow=True,
    ),
    "gemma2": Case(
        {
            "plain": {"sliding_window": 7},
            "untied-biases-caps": {
                "sliding_window": 5,
                "tie_word_embeddings": False,
                "attention_bias": True,
                "num_key_value_heads": 1,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 1.5,
                "query_pre_attn_scalar": 11,
            },
            "no-caps-types": {
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "rms_norm_eps": 1e-3,
                "hidden_activation": "silu",
                "sliding_window": 6,
                "layer_types": [FULL, SLIDING, SLIDING],
                "attention_dropout": 0.1,
                "num_key_value_heads": 3,
                **scaled("linear", factor=3.0),
            },
            "three-kv-heads-yarn": {"num_key_value_heads": 3, "sliding_window": 9, **YARN},
        },
        exact=True,
        inexact=frozenset({"no-caps-types"}),  # theirs multiplies one by one what ours gives to a fused kernel
    ),
    "gemma3_text": Case(
        {
            "plain": {"sliding_window": 7, "num_hidden_layers": 7},
            "untied-biases-cap": {
                "sliding_window": 5,
                "tie_word_embeddings": False,
                "attention_bias": True,
                "num_key_value_heads": 1,
                "final_logit_softcapping": 1.5,
                "query_pre_attn_scalar": 11,
                "layer_types": [SLIDING, SLIDING, FULL],
            },
            "two-thetas-linear": {
                "sliding_window": 6,
                "layer_types": [FULL, SLIDING, SLIDING],
                "attention_dropout": 0.1,
                "rms_norm_eps": 1e-3,
                "hidden_activation": "silu",
                "num_key_value_heads": 3,
                "rope_parameters": by_type({"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0}, 70.0),
            },
            "yarn": {
                "sliding_window": 6,
                "layer_types": [FULL, SLIDING, FULL],
                "head_dim": 16,
                "rope_parameters": by_type(ROUNDED, 900.0),
            },
        },
        inert=frozenset({"_sliding_window_pattern"}),
        refused=frozenset({"use_bidirectional_attention"}),
        exact=True,
        narrow=True,
    ),
    "olmo2": Case(
        {
            "plain": {"num_key_value_heads": 6},
            "tied-biases-gelu": {"tie_word_embeddings": True, "attention_bias": True, "hidden_act": "gelu"},
            "one-kv-head-yarn": {"num_key_value_heads": 1, "rms_norm_eps": 1e-3, "attention_dropout": 0.1, **YARN},
            "three-kv-heads-linear": {"num_key_value_heads": 3, "head_dim": 10, **scaled("linear", factor=3.0)},
        },
        exact=True,
        narrow=True,
    ),
    "olmo3": Case(
        {
            "plain": {"sliding_window": 7, "num_hidden_layers": 5},
            "tied-biases-types": {
                "tie_word_embeddings": True,
                "attention_bias": True,
                "hidden_act": "gelu",
                "sliding_window": 5,
                "layer_types": [FULL, SLIDING, SLIDING],
                "num_key_value_heads": 1,
            },
            "yarn": {
                "sliding_window": 9,
                "layer_types": [SLIDING, FULL, FULL],
                "rms_norm_eps": 1e-3,
                "attention_dropout": 0.1,
                "num_key_value_heads": 3,
                "head_dim": 16,
                "rope_parameters": by_type(ROUNDED, 5000.0),
            },
        },
        exact=True,
        narrow=True,
    ),
}
