"""The families and the variants of each that are held against transformers: one line a variant.

A variant is what its config says beside `BASE`; shapes are awkward (head_dim is not width / heads, groups are odd).
"""

from collections.abc import Set
from typing import Any, NamedTuple

Fields = dict[str, Any]


def words(text: str) -> frozenset[str]:
    """The names in a text."""
    return frozenset(text.split())


def without(fields: Fields, *left_out: str) -> Fields:
    """The fields but these."""
    return {name: fields[name] for name in fields if name not in left_out}


class Case(NamedTuple):
    """variants: name -> fields of the config. inert: fields that change nothing in what a trained model computes, so
    that logits must stay when they are changed; every other number of the config must change them, on both sides alike.
    base: fields instead of `BASE`. refused: fields of which one side may build no other value, since those beside them
    say the opposite. fixed: fields that have one value here, and any other is refused by name. live: fields of `INERT`
    that do change something here. Each of these names a field, or that of one variant, `variant:field`. exact: whether
    logits are theirs bit for bit, but for the variants `inexact`, and for rows without padding where layers have a
    window, which are computed in blocks. narrow: whether those of padded rows are in bfloat16, too.
    """

    variants: dict[str, Fields]
    inert: Set[str] = frozenset()
    exact: bool = False
    base: Fields | None = None
    refused: Set[str] = frozenset()
    live: Set[str] = frozenset()
    fixed: Set[str] = frozenset()
    inexact: Set[str] = frozenset()
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
NO_HIDDEN: Fields = without(BASE, "intermediate_size")
# Fields of any config that no trained model computes with.
INERT = words("""
    initializer_range max_position_embeddings attention_dropout use_cache pretraining_tp bos_token_id eos_token_id
    pad_token_id transformers_version
""")


def scaled(kind: str, **fields: Any) -> Fields:
    """The fields of a RoPE scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **fields}}


LLAMA3 = scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
NTK_ALPHA = scaled("dynamic", factor=1.0, alpha=50.0)
YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=0.5, truncate=False)
LONG = scaled(
    "longrope", short_factor=[1.0, 1.1, 1.3, 1.7], long_factor=[1.2, 2.0, 3.5, 6.0],
    original_max_position_embeddings=32, factor=4.0,
)  # fmt: skip
ROUNDED: Fields = {  # of one type of layers: transformers finds no `truncate` in there
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 512,
    "beta_fast": 8.0, "beta_slow": 1.0,
}  # fmt: skip
FULL, SLIDING, CONV = "full_attention", "sliding_attention", "conv"
STATE_SPACES: Fields = without(BASE, "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
STATE_SPACES |= {"chunk_size": 16}
OF_STATE_SPACES = words("""
    time_step_min time_step_max time_step_floor time_step_rank use_mamba_kernels residual_in_fp32
    rescale_prenorm_residual
""")
SCANS: Fields = without(STATE_SPACES, "chunk_size")
OF_SCANS = words("""
    expand residual_in_fp32 time_step_scale time_step_min time_step_max time_step_floor rescale_prenorm_residual
    use_mambapy use_associative_scan
""")
OWN_RANK: Fields = {"use_bias": True, "tie_word_embeddings": False, "time_step_rank": 7, "expand": 3}
OWN_RANK |= {"state_size": 3, "conv_kernel": 2, "use_conv_bias": False, "layer_norm_epsilon": 1e-3}
JAMBA: Fields = {
    "num_hidden_layers": 4, "mamba_d_state": 5, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 5,
    "num_experts_per_tok": 3, "expert_layer_period": 3, "expert_layer_offset": 0,
}  # fmt: skip
OF_JAMBA_DENSE = ("num_experts_per_tok", "expert_layer_period", "expert_layer_offset")
NEMOTRON_DENSE: Fields = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 9,
    "n_groups": 1,
    "ssm_state_size": 5,
    "chunk_size": 16,
}
NEMOTRON = NEMOTRON_DENSE | {"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 15}
OF_LOSSES = {"output_router_logits", "router_aux_loss_coef"}
GRANITE: Fields = {
    "hidden_size": 42, "intermediate_size": 20, "shared_intermediate_size": 15, "mamba_n_heads": 12, "mamba_d_head": 7,
    "mamba_d_state": 5, "mamba_chunk_size": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
    "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 0.6,
}  # fmt: skip
BAMBA: Fields = {
    "mamba_n_heads": 12, "mamba_d_head": 7, "mamba_d_state": 5, "mamba_chunk_size": 16, "attn_layer_indices": [1],
}  # fmt: skip
OF_BAMBA = {"num_logits_to_keep", "z_loss_coefficient"}
FALCON_PLAIN: Fields = {
    "mamba_d_ssm": 42, "mamba_n_heads": 14, "mamba_d_head": 3, "mamba_d_state": 5, "mamba_chunk_size": 16,
}  # fmt: skip
FALCON: Fields = FALCON_PLAIN | {
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.6, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.6], "mlp_multipliers": [0.8, 1.4],
}  # fmt: skip
OF_FALCON = {"mamba_expand", "num_logits_to_keep", "plain:mamba_norm_before_gate"}
OF_NEMOTRON_EXPERTS = words("""
    moe_intermediate_size moe_shared_expert_intermediate_size n_routed_experts num_experts_per_tok routed_scaling_factor
    norm_topk_prob n_group topk_group
""")
GRANITE_DENSE: Fields = GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 15}
# Without Mamba-2 layers, a file says what fits any width.
GRANITE_SOFTMAX: Fields = {name: GRANITE_DENSE[name] for name in GRANITE_DENSE if not name.startswith("mamba_")}
GRANITE_SOFTMAX |= {"mamba_n_heads": 1}
OF_GRANITE_DENSE = {"intermediate_size", "num_experts_per_tok"}
OF_GRANITE_MAMBA = words("""
    mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups mamba_d_conv mamba_conv_bias mamba_proj_bias mamba_expand
    mamba_chunk_size time_step_limit
""")
GRANITE_DENSE_VARIANTS = ("no-experts-all-attention", "projections-with-biases")
OF_GRANITE = (
    OF_LOSSES
    | {f"{variant}:rope_parameters.rope_theta" for variant in ("plain", "projections-with-biases")}
    | {f"no-experts-all-attention:{name}" for name in OF_GRANITE_DENSE | OF_GRANITE_MAMBA}
    | {f"projections-with-biases:{name}" for name in OF_GRANITE_DENSE}
)
OF_NEMOTRON = words("""
    expand num_hidden_layers num_nextn_predict_layers num_logits_to_keep mamba_proj_bias moe_shared_expert_overlap
    output_router_logits n_shared_experts hidden_dropout attention_bias time_step_limit
""")
LINEAR = "linear_attention"
LFM2: Fields = {"block_auto_adjust_ff_dim": False}
OF_LFM2_MOE: Fields = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}
OF_MIMO: Fields = {
    "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "head_dim": 12, "v_head_dim": 9,
    "n_group": 4, "topk_group": 2, "num_key_value_heads": 3,
}  # fmt: skip
OF_LLAMA4: Fields = {
    "intermediate_size_mlp": 36, "intermediate_size": 20, "num_local_experts": 5, "num_experts_per_tok": 1,
    "attention_chunk_size": 12, "floor_scale": 3, "attn_scale": 0.6,
}  # fmt: skip
LFM3_ROPE: Fields = {
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
}
WINDOWS: Fields = {"use_sliding_window": True, "sliding_window": 7}
# Fields that say again what layer_types says, which transformers always writes and then goes by.
SPELLINGS = {"use_sliding_window", "max_window_layers"}


def by_type(full: Fields, theta: float) -> Fields:
    """`rope_parameters` of full layers, and of sliding ones with this theta."""
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": theta}}


GEMMA4: Fields = {
    "num_hidden_layers": 5, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "sliding_window": 6,
    "head_dim": 4, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97,
    "rope_parameters": by_type(
        {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 3000.0, "factor": 2.0}, 70.0
    ),
}  # fmt: skip
GEMMA3N: Fields = {
    "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": 6, "head_dim": 4,
    "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 97, "laurel_rank": 5, "altup_num_inputs": 3,
    "num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "final_logit_softcapping": 1.5,
    "rope_parameters": by_type({"rope_type": "default", "rope_theta": 3000.0}, 70.0),
}  # fmt: skip
GEMMA4_UNIFIED: Fields = without(GEMMA4, "hidden_size_per_layer_input", "vocab_size_per_layer_input")
# Layers of one type have the same heads: one alone cannot change.
OF_GLOBAL_LAYERS = {
    f"per_layer_config.{layer}.{name}" for layer in (1, 2, 4) for name in ("head_dim", "num_key_value_heads")
}
OF_GEMMA4_EXPERTS = {"num_experts", "top_k_experts", "moe_intermediate_size"}


def longrope(original: int, **fields: Any) -> Fields:
    """Phi-3's scaling of 8 dims a head from texts of `original` tokens, which is told at the top too, to 512."""
    table = {"short_factor": [1.0, 1.5, 1.1, 2.0], "long_factor": [1.2, 2.0, 3.5, 4.0], **fields}
    lengths = {"original_max_position_embeddings": original, "max_position_embeddings": 512}
    return scaled("longrope", **table) | lengths


# Of families whose heads are as wide as width / heads, in words of their own.
OWN_BASE: Fields = without(BASE, "num_key_value_heads", "head_dim")
OWN_BASE["hidden_size"] = 48
# Queries that grow with their position, after a few tokens.
GROWING_YARN = scaled(
    "yarn", rope_theta=5.0, factor=4.0, original_max_position_embeddings=8, beta_fast=1.0, beta_slow=0.5, mscale=1.0,
    mscale_all_dim=1.0, llama_4_scaling_beta=0.3,
)  # fmt: skip
BERT_BASE: Fields = OWN_BASE | {"max_position_embeddings": 48, "layer_norm_eps": 1e-4}
BERT_INERT = {"attention_probs_dropout_prob", "hidden_dropout_prob"}
BERT_FIXED = {"is_decoder", "add_cross_attention"}
DISTILBERT_BASE: Fields = {
    **{name: BERT_BASE[name] for name in BERT_BASE if not name.startswith(("num_", "hidden", "inter", "layer"))},
    "dim": 48, "hidden_dim": 52, "n_heads": 6, "n_layers": 3,
}  # fmt: skip
MODERN_BASE: Fields = OWN_BASE | {"local_attention": 14, "norm_eps": 1e-4, "cls_token_id": 2, "sep_token_id": 3}
MODERN_BIASES: Fields = {
    "attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True, "decoder_bias": False,
    "layer_types": [SLIDING, FULL, SLIDING], "hidden_activation": "silu", "classifier_activation": "relu",
    "local_attention": 8,
}  # fmt: skip
MODERN_INERT = words("""
    classifier_dropout embedding_dropout mlp_dropout deterministic_flash_attn initializer_cutoff_factor
    sparse_prediction sparse_pred_ignore_index cls_token_id sep_token_id
""")
GPT_BASE: Fields = {
    "vocab_size": 97,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT_INERT = words("""
    attn_pdrop embd_pdrop resid_pdrop summary_first_dropout summary_use_proj summary_proj_to_labels
""")
# Experts, in a model with a dense layer among theirs.
MIXTRAL: Fields = {"num_experts": 6, "num_experts_per_tok": 2}
LIGHTNING: Fields = MIXTRAL | {"block_size": 16}
MINIMAX_M2: Fields = {"num_local_experts": 6, "num_experts_per_tok": 2}
HALF_TURNED: Fields = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
EXPERTS: Fields = MIXTRAL | {"moe_intermediate_size": 20, "num_hidden_layers": 4}
LATENT: Fields = {
    "num_key_value_heads": 6,
    "head_dim": 8,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "kv_lora_rank": 12,
    "q_lora_rank": 17,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
}
DELTA: Fields = EXPERTS | {
    "rms_norm_eps": 0.1,  # heads whose memory is all but gone are normed by it; less would magnify float32's rounding
    "mlp_only_layers": [1],
    "shared_expert_intermediate_size": 15,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 9,
}
GROUPS: Fields = {"n_group": 4, "topk_group": 2}
SIGMOID: Fields = {
    name: LATENT[name]
    for name in (
        "first_k_dense_replace", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
    )
} | {"num_mtp_layers": 0, **GROUPS}  # fmt: skip
KIMI: Fields = {
    **without(LATENT, "head_dim", "first_k_dense_replace", "n_routed_experts"),
    "num_hidden_layers": 5, "num_experts": LATENT["n_routed_experts"], "rms_norm_eps": 0.1,  # as DELTA
    "linear_num_heads": 3, "linear_head_dim": 6, "linear_conv_kernel_dim": 3,
}  # fmt: skip
# As DELTA, of the later models, whose layers are all dense or all mixtures, with RoPE's sections of images.
DELTA_DENSE: Fields = {name: value for name, value in DELTA.items() if "expert" not in name and "moe" not in name}
DELTA_DENSE.pop("mlp_only_layers")
IMAGES: Fields = {"rope_type": "default", "mrope_section": [1, 1, 0], "mrope_interleaved": True}
DELTA_SPARSE: Fields = DELTA | {"num_experts_per_tok": 3}
DELTA_SPARSE.pop("mlp_only_layers")
OF_IMAGES = {"rope_parameters.mrope_section", "rope_parameters.mrope_interleaved"}
DENSE_AND_SHARED: Fields = EXPERTS | {"shared_expert_intermediate_size": 15}
SOFTMAX_AND_DELTA: Fields = {
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]
}
FACTORS = scaled(
    "yarn",
    factor=8.0,
    original_max_position_embeddings=32,
    beta_fast=4.0,
    beta_slow=0.5,
    truncate=False,
    mscale=1.3,
    mscale_all_dim=0.6,
)
OF_LATENTS = {"num_key_value_heads", "qk_head_dim", "output_router_logits"}

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
V4_ROPE: Fields = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
V4_YARN: Fields = {
    "rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 3.0,
    "beta_slow": 1.0, "attention_factor": 1.0, "partial_rotary_factor": 0.5,
}  # fmt: skip
V4: Fields = {
    **without(BASE, "num_key_value_heads", "intermediate_size"),
    "num_hidden_layers": 4, "layer_types": [SLIDING, CSA, HCA, CSA], "compress_rates": {CSA: 3, HCA: 4},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"], "moe_intermediate_size": 20, "q_lora_rank": 17,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 5, "index_n_heads": 9,
    "rope_theta": 100.0, "compress_rope_theta": 3000.0, "partial_rotary_factor": 0.5,
    "index_head_dim": 6, "index_topk": 4, "sliding_window": 7, "swiglu_limit": 1.5, "hc_eps": 1e-3,
    "rope_parameters": {"main": V4_ROPE, "compress": V4_ROPE | {"rope_theta": 3000.0}},
}  # fmt: skip
V4_INERT = OF_LOSSES - {"output_router_logits"} | {
    "rope_theta", "compress_rope_theta", "partial_rotary_factor", "qk_rope_head_dim", "router_jitter_noise",
    "num_nextn_predict_layers",
}  # fmt: skip
V4_FIXED = words("""
    attention_bias mlp_bias n_shared_experts norm_topk_prob output_router_logits num_key_value_heads
    attention_factor
""")

ERNIE: Fields = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20}
GRANITE_DENSE_ONLY: Fields = {name: GRANITE[name] for name in GRANITE if "multiplier" in name or "scaling" in name}
GRANITE_EXPERTS: Fields = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}
OF_DOTS: Fields = without(SIGMOID, "num_mtp_layers") | {"sliding_window": None}
OF_SOLAR: Fields = without(OF_DOTS, "first_k_dense_replace", "sliding_window")
OF_AFMOE: Fields = {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "sliding_window": 7}
OF_YOUTU: Fields = {
    name: LATENT[name] for name in LATENT if name not in ("head_dim", "moe_intermediate_size", "first_k_dense_replace")
    and "experts" not in name
}  # fmt: skip
OF_GLM_LITE: Fields = OF_YOUTU | OF_SOLAR
INDEXER: Fields = {"index_topk": 6, "index_n_heads": 9, "index_head_dim": 10, "first_k_dense_replace": 1}

INDEXED = "indexed_attention"
GLM5_NEXT: Fields = {
    **BASE, "num_key_value_heads": 6, "num_hidden_layers": 4, "head_dim": 0, "n_routed_experts": 12,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 3, "topk_group": 2,
    "q_lora_rank": 21, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "v_head_dim": 8, "attention_bias": True,
    "index_topk": 12, "index_kpool": 3, "index_n_heads": 7, "index_head_dim": 10, "linear_num_heads": 3,
    "linear_head_dim": 10, "swiglu_limit": 1.1, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
}  # fmt: skip
AXK2: Fields = {
    **BASE, "num_key_value_heads": 6, "num_hidden_layers": 3, "head_dim": 4, "n_routed_experts": 12,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "attention_bias": True,
    "q_lora_rank": 21, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "index_topk": 12, "index_n_heads": 7, "index_head_dim": 10, "gated_norm_rank": 5,
}  # fmt: skip
QWEN4: Fields = {
    **NO_HIDDEN,
    "num_key_value_heads": 3, "num_hidden_layers": 4, "eos_token_id": 7, "linear_num_key_heads": 3,
    "linear_num_value_heads": 6, "linear_key_head_dim": 6, "linear_value_head_dim": 5, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 14, "num_experts_per_tok": 3, "num_experts": 8, "hc_count": 3, "hc_lowrank": 9,
    "ple_layer_ids": [1, 3], "ple_embed_dim": 24, "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 30,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1, "ple_conv_kernel_size": 3, "indexer_n_heads": 5,
    "indexer_kv_heads": 1, "indexer_head_dim": 10, "indexer_budget": 6, "indexer_compress_ratio": 3,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
}  # fmt: skip
OF_MEMORIES = (
    *("ngram_size", "heads_per_ngram", "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "seed"),
    *("ple_embed_dim", "ple_conv_kernel_size", "split_ngram_parts", "eos_token_id"),
)
HY_V4: Fields = {
    **BASE, "num_key_value_heads": 6, "num_hidden_layers": 3, "head_dim": 4, "n_routed_experts": 12,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 3, "topk_group": 2,
    "q_lora_rank": 21, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "index_topk": 12, "index_n_heads": 7, "index_head_dim": 10, "swiglu_limit": 1.1, "attention_bias": True,
}  # fmt: skip
OF_K_EXAONE: Fields = {
    **{name: SIGMOID[name] for name in ("num_experts_per_tok", "moe_intermediate_size", *GROUPS)},
    "num_experts": 16, "num_shared_experts": 2, "sliding_window": 7,
}  # fmt: skip
OF_HY: Fields = {
    "num_experts": 16, "num_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
}  # fmt: skip
# What transformers writes into every table of a config.
OF_INNER_TABLES = (
    "chunk_size_feed_forward", "label2id.LABEL_0", "label2id.LABEL_1", "output_attentions", "output_hidden_states",
    "return_dict",
)  # fmt: skip
# Options of MPT that its class has one value for.
OF_MPT = words("expansion_ratio no_bias alibi alibi_bias_max prefix_lm qk_ln attn_uses_sequence_id")

FLINT: Fields = DENSE_AND_SHARED | {"sliding_window": 7}

OF_OLMO_HYBRID: Fields = {
    "num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, FULL], "linear_conv_kernel_dim": 3,
    "initializer_range": 0.12,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 6,
}  # fmt: skip
# transformers saves the convolutions of q, k and v in thirds of all channels, which only fit where all are as wide.
OF_OLMO_WIDTHS = words("linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim")
OF_INITIAL_DELTA = words("linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor")

# Their product of all experts takes rows of multiples of 16 bytes. A limit that no number reaches would be read by
# nobody.
GPT_OSS: Fields = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7, "layer_types": None, "swiglu_limit": 1.1,
    "hidden_size": 44, "intermediate_size": 20,
}  # fmt: skip
OF_OLMOE: dict[str, Fields] = {
    "plain": MIXTRAL | {"num_key_value_heads": 6},
    "gates-sum-to-one-tied-yarn": MIXTRAL
    | {"norm_topk_prob": True, "tie_word_embeddings": True, "num_key_value_heads": 2, **YARN},
    "biases-one-kv-head": MIXTRAL
    | {"attention_bias": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-3, "num_experts_per_tok": 3},
}

M3_SPARSE = "minimax_m3_sparse"
# No token has an embedding of zeros, for which every block would be as good.
MINIMAX_M3: Fields = MINIMAX_M2 | {
    "dense_intermediate_size": 28, "intermediate_size": 20, "shared_intermediate_size": 15, "index_n_heads": 2,
    "index_head_dim": 10, "index_block_size": 3, "index_topk_blocks": 3, "index_local_blocks": 1, "swiglu_limit": 1.1,
    "swiglu_alpha": 0.9, "pad_token_id": None,
}  # fmt: skip
BAILING: Fields = without(KIMI, "q_lora_rank") | GROUPS | {"num_mtp_layers": 0}
BAILING_INERT = OF_LATENTS | {
    "head_dim", "model_max_length", "short_conv_kernel_size", "layer_group_size", "first_k_dense_replace",
    "mtp_loss_scaling_factor", "num_nextn_predict_layers", "rope_theta",
}  # fmt: skip
PHIMOE: Fields = {"num_local_experts": 6, "router_jitter_noise": 0.3}
MIXED_LONG = scaled(
    "longrope", short_factor=[1.0, 1.1, 1.3, 1.7], long_factor=[1.2, 2.0, 3.5, 6.0],
    original_max_position_embeddings=512, short_mscale=1.2, long_mscale=1.2,
)  # fmt: skip
DBRX: Fields = {"ffn_hidden_size": 20, "moe_num_experts": 6, "moe_top_k": 2}
OF_DBRX = words("""
    max_seq_len emb_pdrop resid_pdrop output_router_logits num_key_value_heads attn_config.attn_pdrop
    ffn_config.hidden_size ffn_config.moe_loss_weight
""") | {f"{table}.{name}" for table in ("attn_config", "ffn_config") for name in OF_INNER_TABLES}
KOLIBRI: Fields = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 15,
}  # fmt: skip
OF_COMPASS_IMAGES = {f"rope_parameters.{SLIDING}.{name}" for name in ("mrope_section", "mrope_interleaved")}
COMMAND: Fields = {
    "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20, "logit_scale": 0.7, "sliding_window": 9,
}  # fmt: skip
LAGUNA: Fields = KOLIBRI | {"sliding_window": 7, "moe_routed_scaling_factor": 1.5}

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
        inert={"router_aux_loss_coef", "output_router_logits"},
    ),
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
        inexact={"one-kv-head-longrope"},  # theirs are computed row by row
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
        inexact={"no-caps-types"},  # theirs multiplies one by one what ours gives to a fused kernel
    ),
    "gemma4_text": Case(
        {
            "plain": GEMMA4
            | {"hidden_size_per_layer_input": 20, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            "values-are-keys": GEMMA4
            | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 1.5}
            | {"use_bidirectional_attention": "vision", "rms_norm_eps": 1e-3},
            "untied-biases-all-keys-shared": GEMMA4
            | {"tie_word_embeddings": False, "attention_bias": True, "hidden_activation": "silu"}
            | {"hidden_size_per_layer_input": 13, "num_kv_shared_layers": 3, "attention_k_eq_v": True}
            | {"layer_types": [SLIDING, FULL, FULL, SLIDING, FULL], "global_head_dim": 4}
            | {"rope_parameters": by_type({"rope_type": "default", "rope_theta": 3000.0}, 70.0)},
        },
        inert=OF_GEMMA4_EXPERTS
        | {f"values-are-keys:{name}" for name in ("vocab_size_per_layer_input", "use_bidirectional_attention")}
        | {"values-are-keys:use_double_wide_mlp"},  # of layers that share keys
        fixed={"enable_moe_block"}
        | {f"{variant}:vocab_size_per_layer_input" for variant in ("plain", "untied-biases-all-keys-shared")},
        # Their class shares keys only beside embeddings of every layer.
        refused=OF_GLOBAL_LAYERS | {"values-are-keys:num_kv_shared_layers"},
        exact=True,
    ),
    "gemma3n_text": Case(
        {
            "plain": GEMMA3N,
            "wide-shared-biases": GEMMA3N
            | {"intermediate_size": [52, 40, 52, 36], "activation_sparsity_pattern": [0.4, 0.3, 0.5, 0.0]}
            | {"attention_bias": True, "num_kv_shared_layers": 2, "altup_num_inputs": 2, "tie_word_embeddings": False}
            | {"vocab_size_per_layer_input": 60, "hidden_activation": "silu"},
        },
        inert={"altup_coef_clip"},
        fixed={"altup_active_idx", "altup_correct_scale"},
    ),
    "gemma4_unified_text": Case(
        {
            "plain": GEMMA4_UNIFIED | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
            "keys-shared-biases-cap": GEMMA4_UNIFIED
            | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "final_logit_softcapping": 1.5}
            | {"attention_bias": True, "layer_types": [SLIDING, FULL, FULL, SLIDING, FULL]},
        },
        inert={"plain:use_double_wide_mlp"},  # of layers that share keys
        refused=OF_GLOBAL_LAYERS,
        exact=True,
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
        inert={"_sliding_window_pattern"},
        refused={"use_bidirectional_attention"},
        exact=True,
        narrow=True,
    ),
    "olmo": Case(
        {
            "plain": {},
            "biases-tied-yarn": {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, **YARN},
            "three-kv-heads-linear-gelu": {"num_key_value_heads": 3, "hidden_act": "gelu", "attention_dropout": 0.1}
            | scaled("linear", factor=3.0),
            "clipped": {"clip_qkv": 0.5},
        },
        exact=True,
        narrow=True,
    ),
    "diffllama": Case(
        {
            "plain": {"num_attention_heads": 8, "rms_norm_eps": 0.1},
            "biases-tied-yarn": {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 0.1, **YARN}
            | {"num_attention_heads": 4, "num_key_value_heads": 4},
            "four-heads-linear-gelu": {"num_attention_heads": 4, "hidden_act": "gelu", "rms_norm_eps": 0.03}
            | scaled("linear", factor=3.0),
        },
        inert={"lambda_std_dev"},
        base=OWN_BASE | {"num_key_value_heads": 2},
    ),
    "nanochat": Case(
        {
            "plain": {"num_key_value_heads": 6},
            "biases-tied-yarn": {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, **YARN},
            "no-cap-silu": {
                "final_logit_softcapping": None,
                "hidden_act": "silu",
                "rms_norm_eps": 1e-2,
                "head_dim": 10,
            },
        },
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
    "gpt2": Case(
        {
            "plain": {},
            "scales-fall-with-depth": {"scale_attn_by_inverse_layer_idx": True, "n_inner": 52, "n_head": 3},
            "unscaled-untied": {"scale_attn_weights": False, "tie_word_embeddings": False, "attn_pdrop": 0.0},
            "silu-eps": {"activation_function": "silu", "layer_norm_epsilon": 1e-2, "resid_pdrop": 0.2},
        },
        inert=GPT_INERT | {"reorder_and_upcast_attn"},
        base=GPT_BASE | {"n_embd": 42},
        refused={"add_cross_attention"},
    ),
    "bert": Case(
        {"plain": {}, "three-types-relu": {"type_vocab_size": 3, "hidden_act": "relu", "layer_norm_eps": 1e-2}},
        inert=BERT_INERT,
        base=BERT_BASE,
        fixed=BERT_FIXED,
        live={"max_position_embeddings"},
    ),
    "roberta": Case(
        {
            "plain": {"pad_token_id": 1, "type_vocab_size": 1},
            "other-padding-two-types-relu": {"pad_token_id": 3, "hidden_act": "relu", "layer_norm_eps": 1e-2},
        },
        inert=BERT_INERT,
        base=BERT_BASE,
        fixed=BERT_FIXED,
        live={"max_position_embeddings", "pad_token_id"},
    ),
    "ernie": Case(
        {"plain": {"type_vocab_size": 3, "hidden_act": "relu"}},
        inert=BERT_INERT | {"task_type_vocab_size"},
        base=BERT_BASE,
        fixed=BERT_FIXED | {"use_task_id"},
        live={"max_position_embeddings"},
    ),
    "roformer": Case(
        {"plain": {}, "three-types-relu": {"type_vocab_size": 3, "hidden_act": "relu", "layer_norm_eps": 1e-2}},
        inert=BERT_INERT,
        base=BERT_BASE,
        fixed=BERT_FIXED | {"rotary_value", "embedding_size"},
    ),
    "megatron-bert": Case(
        {"plain": {"type_vocab_size": 3, "hidden_act": "relu", "layer_norm_eps": 1e-2}},
        inert=BERT_INERT,
        base=BERT_BASE,
        fixed=BERT_FIXED,
        live={"max_position_embeddings"},
    ),
    "bert-generation": Case(
        {"plain": {"is_decoder": True}, "relu": {"is_decoder": True, "hidden_act": "relu", "layer_norm_eps": 1e-2}},
        inert=BERT_INERT,
        base=BERT_BASE | {"max_position_embeddings": 128},
        fixed=BERT_FIXED,
        live={"max_position_embeddings"},
    ),
    **dict.fromkeys(
        ("xlm-roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl"),
        Case(
            {
                "plain": {"pad_token_id": 1, "type_vocab_size": 1},
                "other-padding-relu": {"pad_token_id": 2, "hidden_act": "relu", "layer_norm_eps": 1e-2},
            },
            inert=BERT_INERT,
            base=BERT_BASE,
            fixed=BERT_FIXED,
            live={"max_position_embeddings", "pad_token_id"},
        ),
    ),
    "mpnet": Case(
        {
            "plain": {"pad_token_id": 1},
            "other-padding-three-heads-relu": {"pad_token_id": 3, "num_attention_heads": 3, "hidden_act": "relu"}
            | {"layer_norm_eps": 1e-2},
            "one-layer-untied": {"num_hidden_layers": 1, "tie_word_embeddings": False},
        },
        inert=BERT_INERT,
        base=BERT_BASE,
        fixed={"relative_attention_num_buckets"},
        live={"max_position_embeddings"},
    ),
    "electra": Case(
        {
            "plain": {},
            "three-types-relu": {"type_vocab_size": 3, "hidden_act": "relu", "layer_norm_eps": 1e-2},
        },
        inert=BERT_INERT | {"summary_use_proj", "summary_last_dropout"},
        base=BERT_BASE | {"embedding_size": OWN_BASE["hidden_size"]},
        fixed=BERT_FIXED,
        refused={"hidden_size", "embedding_size"},  # the two are equal
        live={"max_position_embeddings"},
    ),
    "distilbert": Case(
        {"plain": {}, "three-heads-relu": {"activation": "relu", "n_heads": 3}},
        inert={"dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"},
        base=DISTILBERT_BASE,
        live={"max_position_embeddings"},
    ),
    "modernbert-decoder": Case(
        {
            "plain": {},
            "biases-types-silu-untied": MODERN_BIASES
            | {"decoder_bias": True, "tie_word_embeddings": False}
            | {"rope_parameters": by_type({"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}, 100.0)},
        },
        inert=MODERN_INERT | {"local_attention"},
        base=MODERN_BASE | {"bos_token_id": 1},
    ),
    "modernbert": Case(
        {
            "plain": {},
            "biases-types-silu-no-decoder-bias": MODERN_BIASES,
            "untied-every-second-linear": {
                "layer_types": [FULL, SLIDING, FULL],
                "tie_word_embeddings": False,
                "rope_parameters": by_type({"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}, 100.0),
            },
        },
        inert=MODERN_INERT,
        base=MODERN_BASE,
    ),
    "gpt_neox": Case(
        {
            "plain": {"num_attention_heads": 3},
            "two-steps-no-biases": {
                "use_parallel_residual": False,
                "attention_bias": False,
                "hidden_act": "relu",
                "num_attention_heads": 2,
            },
            "half-turned-tied": {
                "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500.0},
                "tie_word_embeddings": True,
                "num_attention_heads": 3,
                "hidden_dropout": 0.1,
            },
            "llama3-all-turned": {
                "rope_parameters": LLAMA3["rope_parameters"] | {"partial_rotary_factor": 1.0},
                "layer_norm_eps": 1e-2,
            },
        },
        inert={"is_decoder", "hidden_dropout", "classifier_dropout"},
        base=OWN_BASE,
    ),
    "gptj": Case(
        {
            "plain": {},
            "tied-all-turned": {"tie_word_embeddings": True, "rotary_dim": 16, "n_head": 3},
            "gelu-eps-hidden": {"activation_function": "gelu", "layer_norm_epsilon": 1e-2, "n_inner": 52},
        },
        inert=GPT_INERT | {"n_positions"},
        base=GPT_BASE | {"n_embd": 48, "rotary_dim": 4},
    ),
    "phi": Case(
        {
            "plain": {},
            "normed-heads": {"qk_layernorm": True, "tie_word_embeddings": True, "resid_pdrop": 0.1},
            "one-kv-head-linear": {
                "num_key_value_heads": 1,
                "head_dim": 10,
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-2,
                "partial_rotary_factor": 0.4,
                "rope_parameters": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.4},
            },
        },
        inert={"embd_pdrop", "resid_pdrop"},
        base=OWN_BASE | {"num_key_value_heads": 2},
        refused={"one-kv-head-linear:qk_layernorm"},  # its norms are as wide as width / heads
    ),
    # The border of longrope is not crossed: heddle chooses once for a whole text, transformers anew at each token.
    "phi3": Case(
        {
            "plain": {},
            "window-part-tied": {
                "sliding_window": 7,
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
                "tie_word_embeddings": True,
            },
            "all-shorter": {**longrope(128), "num_key_value_heads": 6, "rms_norm_eps": 1e-2},
            "all-longer": {**longrope(16, attention_factor=1.3), "num_key_value_heads": 3, "sliding_window": 30},
            "all-longer-factor": {**longrope(16, factor=5.0), "num_key_value_heads": 1},
        },
        inert={
            "embd_pdrop",
            "resid_pdrop",
            "rope_parameters.original_max_position_embeddings",  # the one at the top counts
            "plain:original_max_position_embeddings",
            "window-part-tied:original_max_position_embeddings",
            "all-shorter:rope_parameters.long_factor",
            "all-longer:rope_parameters.short_factor",
            "all-longer-factor:rope_parameters.short_factor",
        },
        base=OWN_BASE | {"num_key_value_heads": 2},
        # There are as many factors as pairs, so that heads keep their width.
        refused={
            f"{variant}:{field}"
            for variant in ("all-shorter", "all-longer", "all-longer-factor")
            for field in ("num_attention_heads", "rope_parameters.partial_rotary_factor")
        },
        live={"all-shorter:max_position_embeddings"},
    ),
    "cohere": Case(
        {
            "plain": {"num_key_value_heads": 6},
            "normed-heads-untied": {"use_qk_norm": True, "tie_word_embeddings": False, "layer_norm_eps": 1e-2},
            "biases-one-kv-head-yarn": {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 10, **YARN},
        },
        base=BASE | {"logit_scale": 0.7},
    ),
    "mixtral": Case(
        {
            "plain": MIXTRAL,
            "window-loss": MIXTRAL | {"num_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7},
            "one-kv-head-tied-yarn": MIXTRAL
            | {"num_key_value_heads": 1, "tie_word_embeddings": True, "hidden_act": "gelu", **YARN},
        },
        inert=OF_LOSSES,
        fixed={"router_jitter_noise"},
    ),
    "minimax": Case(
        {
            "plain": LIGHTNING,
            "linear-first-factors": LIGHTNING
            | {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
            | {"num_hidden_layers": 4, "num_local_experts": 7, "num_experts_per_tok": 3}
            | {"full_attn_alpha_factor": 2.1, "linear_attn_alpha_factor": 2.1, "mlp_alpha_factor": 1.6}
            | {"full_attn_beta_factor": 0.8, "linear_attn_beta_factor": 0.8, "mlp_beta_factor": 1.2},
            "five-heads-tied-window-yarn": LIGHTNING
            | {"num_attention_heads": 5, "num_key_value_heads": 1, "sliding_window": 9}
            | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3, **YARN},
        },
        inert=OF_LOSSES,
        refused={"five-heads-tied-window-yarn:num_key_value_heads"},  # 1 and 5 divide 5
        fixed={"router_jitter_noise"},
    ),
    "minimax_m2": Case(
        {
            "plain": MINIMAX_M2 | {"rope_parameters": HALF_TURNED},
            "one-kv-head-tied-yarn": MINIMAX_M2
            | {"num_local_experts": 9, "num_experts_per_tok": 4, "num_key_value_heads": 1}
            | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3, "attention_dropout": 0.1, **YARN},
            "three-kv-heads-linear-gelu": MINIMAX_M2
            | {"num_local_experts": 3, "num_experts_per_tok": 3, "num_key_value_heads": 3, "head_dim": 10}
            | {"hidden_act": "gelu", **scaled("linear", factor=3.0)},
        },
        inert={"router_aux_loss_coef"},
        fixed={"router_jitter_noise", "output_router_logits"},
    ),
    "minimax_m3_vl_text": Case(
        {
            "plain": MINIMAX_M3
            | {"layer_types": [M3_SPARSE, FULL, M3_SPARSE], "mlp_layer_types": ["sparse", "dense", "sparse"]}
            | {"rope_parameters": HALF_TURNED},
            "one-kv-head-tied-yarn": MINIMAX_M3
            | {"layer_types": [M3_SPARSE] * 3, "index_n_heads": 1, "index_local_blocks": 0, "index_block_size": 2}
            | {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-3, "index_topk_blocks": 5}
            | YARN,
        },
        inert={"router_aux_loss_coef", "rotary_dim", "one-kv-head-tied-yarn:dense_intermediate_size"},
        fixed={"router_jitter_noise", "output_router_logits"},
    ),
    "axk1": Case(
        {
            "plain": OF_GLM_LITE | {"n_routed_experts": 12},
            "by-types-halves": OF_GLM_LITE
            | {"mlp_layer_types": ["sparse", "dense", "sparse"], "rope_interleave": False, "norm_topk_prob": False}
            | {"routed_scaling_factor": 0.75, "rms_norm_eps": 1e-3},
            "yarn-bias-tied": OF_GLM_LITE | FACTORS | {"attention_bias": True, "tie_word_embeddings": True},
        },
        inert=OF_LATENTS,
        fixed={"head_dim"},
    ),
    "bailing_hybrid": Case(
        {
            "plain": BAILING
            | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"], "short_conv_kernel_size": 3}
            | {"layer_types": [LINEAR, FULL, LINEAR, FULL, LINEAR]},
            "unbounded-biases-yarn": BAILING
            | {"kda_safe_gate": False, "attention_bias": True, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
            | {"layer_types": [FULL, LINEAR, LINEAR, FULL], "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}
            | {"num_hidden_layers": 4, "norm_topk_prob": False, "rope_theta": 5000.0, **FACTORS},
        },
        inert=BAILING_INERT | {"unbounded-biases-yarn:kda_lower_bound"},
        fixed={"tie_word_embeddings"},
    ),
    "phimoe": Case(
        {
            "plain": PHIMOE | {"attention_bias": True, "lm_head_bias": True, "sliding_window": 9},
            "longrope-tied": PHIMOE
            | {"tie_word_embeddings": True, "num_key_value_heads": 1, "router_jitter_noise": 0.05, **MIXED_LONG},
        },
        inert=OF_LOSSES
        | {"input_jitter_noise", "longrope-tied:original_max_position_embeddings"}
        | {f"longrope-tied:rope_parameters.{name}" for name in ("original_max_position_embeddings", "long_factor")},
        refused={"rope_parameters.short_mscale", "rope_parameters.long_mscale"},
        fixed={"num_experts_per_tok"},
    ),
    "dbrx": Case(
        {
            "plain": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.6, "rope_theta": 10000.0}, "ffn_config": DBRX},
            "three-key-heads-gelu-yarn": {
                "attn_config": {"kv_n_heads": 3, "clip_qkv": 1.5, "rope_theta": 5000.0},
                "ffn_config": DBRX | {"moe_normalize_expert_weights": None, "ffn_act_fn": {"name": "gelu"}},
                **YARN,
            },
        },
        inert=OF_DBRX,
        base={
            "vocab_size": 97,
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 3,
            "initializer_range": 0.15,
            "pad_token_id": 0,
        },
        fixed={"tie_word_embeddings", "moe_normalize_expert_weights", "is_encoder_decoder"},
    ),
    "emu3_text_model": Case(
        {
            "plain": {"attention_dropout": 0.2, "bos_token_id": 1},
            "biases-tied-yarn": {
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
                "bos_token_id": 1,
            }
            | YARN,
        }
    ),
    "qwen3_moe": Case(
        {
            "dense-between": EXPERTS
            | {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 9, "norm_topk_prob": True},
            "every-second": EXPERTS | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5},
            "biases-tied-linear": EXPERTS
            | {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 10, "num_key_value_heads": 3}
            | {
                "mlp_only_layers": [0, 3],
                "use_sliding_window": True,
                "sliding_window": 11,
                **scaled("linear", factor=3.0),
            },
        },
        inert=OF_LOSSES,
    ),
    "deepseek_v2": Case(
        {
            "greedy": LATENT | {"num_experts_per_tok": 4},
            "groups-yarn": LATENT
            | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0, **GROUPS, **FACTORS},
            "no-query-rank-biases-tied": LATENT
            | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        },
        inert=OF_LATENTS | {"norm_topk_prob"},
        fixed={"head_dim"},
    ),
    "deepseek_v3": Case(
        {
            "plain": LATENT | {"num_mtp_layers": 0, **GROUPS},
            "halves-no-query-rank": LATENT
            | {"num_mtp_layers": 0, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, **GROUPS}
            | {"routed_scaling_factor": 0.75},
            "yarn-bias-tied": LATENT
            | {"num_mtp_layers": 0, "attention_bias": True, "tie_word_embeddings": True, "routed_scaling_factor": 1.5}
            | {"num_experts_per_tok": 2, **GROUPS, **FACTORS},
        },
        inert=OF_LATENTS | {"num_nextn_predict_layers"},
        fixed={"head_dim"},
    ),
    "kimi_linear": Case(
        {
            "plain": KIMI | GROUPS | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]},
            "by-types-biases-no-query-rank": KIMI
            | {"q_lora_rank": None, "attention_bias": True, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
            | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}
            | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"], "num_hidden_layers": 4}
            | {"norm_topk_prob": False, "routed_scaling_factor": 0.75},
            "five-heads-two-groups": KIMI
            | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
            | {"linear_num_heads": 5, "linear_head_dim": 7, "n_group": 2, "q_lora_rank": 11},
        },
        inert=OF_LATENTS | {"head_dim", "model_max_length"},
        refused={"num_hidden_layers", "by-types-biases-no-query-rank:topk_group"},
        fixed={"tie_word_embeddings"},
    ),
    "qwen3_next": Case(
        {
            "plain": DELTA,
            "by-types": DELTA
            | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}
            | {"attention_bias": True, "linear_num_key_heads": 4, "norm_topk_prob": False, "mlp_only_layers": [2]},
            "half-turned-tied": DELTA
            | {"partial_rotary_factor": 0.5, "tie_word_embeddings": True, "linear_conv_kernel_dim": 2}
            | {"full_attention_interval": 2, "decoder_sparse_step": 2, "mlp_only_layers": []},
        },
        inert=OF_LOSSES,
    ),
    "smollm3": Case(
        {
            "by-list-one-kv-head-yarn": WINDOWS
            | YARN
            | {
                "no_rope_layers": [0, 1, 1],
                "layer_types": [FULL, SLIDING, FULL],
                "num_key_value_heads": 1,
                "head_dim": 10,
                "rms_norm_eps": 1e-3,
                "attention_dropout": 0.1,
                "hidden_act": "gelu",
            },
            "plain": {"num_key_value_heads": 6, "num_hidden_layers": 5},
            "windows-untied-biases": WINDOWS
            | LLAMA3
            | {
                "no_rope_layer_interval": 2,
                "tie_word_embeddings": False,
                "attention_bias": True,
                "mlp_bias": True,
            },
        },
        inert=SPELLINGS | {"no_rope_layer_interval"},
        # A 1 becomes 2, which is no layer's.
        refused=SPELLINGS | {"plain:no_rope_layers", "windows-untied-biases:no_rope_layers"},
        exact=True,
        narrow=True,
    ),
    "ministral": Case(
        {
            "window": {"sliding_window": 7, "num_key_value_heads": 3},
            "by-types-tied-yarn": YARN
            | {"sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING], "tie_word_embeddings": True},
            "no-window-one-kv-head": {"layer_types": [FULL] * 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        },
    ),
    "hunyuan_v1_moe": Case(
        {
            "plain": {"num_experts": 6, "moe_topk": 2},
            "biases-tied-alpha": NTK_ALPHA
            | {"num_experts": 5, "moe_topk": 3, "attention_bias": True, "tie_word_embeddings": True},
            "one-kv-head": {"num_experts": 4, "moe_topk": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        },
        inert={"output_router_logits", "eod_token_id", "sep_token_id"} | {"biases-tied-alpha:rope_parameters.factor"},
    ),
    "ernie4_5_moe": Case(
        {
            "plain": ERNIE | {"moe_layer_end_index": 3, "num_hidden_layers": 5},
            "biases-untied-yarn": ERNIE
            | YARN
            | {"use_bias": True, "tie_word_embeddings": False, "moe_num_shared_experts": 1, "num_key_value_heads": 3},
            "every-second": ERNIE
            | {"moe_layer_interval": 2, "moe_layer_end_index": 3, "num_hidden_layers": 5, "num_key_value_heads": 1},
        },
        base=OWN_BASE | {"num_key_value_heads": 2},
        inert=OF_LOSSES | {"moe_norm_min"},
    ),
    "seed_oss": Case(
        {
            "plain": {},
            "all-biases-tied-yarn": YARN
            | {"attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
            "no-biases-llama3": LLAMA3
            | {"attention_bias": False, "num_key_value_heads": 3, "rms_norm_eps": 1e-3, "hidden_act": "gelu"},
        },
        inert={"residual_dropout"},
    ),
    "arcee": Case(
        {
            "plain": {},
            "biases-tied-yarn": YARN | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "one-kv-head-gelu": LLAMA3 | {"num_key_value_heads": 1, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
        },
    ),
    "granite": Case(
        {
            "plain": GRANITE_DENSE_ONLY,
            "biases-tied-yarn": GRANITE_DENSE_ONLY
            | YARN
            | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "logits_scaling": 3.0},
            "one-kv-head": GRANITE_DENSE_ONLY | {"num_key_value_heads": 1, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
        },
    ),
    "granitemoe": Case(
        {
            "plain": GRANITE_DENSE_ONLY | GRANITE_EXPERTS,
            "three-of-six-tied-biases-yarn": GRANITE_DENSE_ONLY
            | GRANITE_EXPERTS
            | YARN
            | {"num_experts_per_tok": 3, "tie_word_embeddings": True, "attention_bias": True},
            "one-kv-head": GRANITE_DENSE_ONLY | GRANITE_EXPERTS | {"num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        },
        inert=OF_LOSSES,
    ),
    "glm": Case(
        {
            "plain": {},
            "no-biases-tied-all-turned": {
                "attention_bias": False,
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
            }
            | scaled("default", partial_rotary_factor=1.0),
            "linear-gelu": {"hidden_act": "gelu", "rms_norm_eps": 1e-3, "num_key_value_heads": 3}
            | scaled("linear", factor=3.0, partial_rotary_factor=0.5),
        },
    ),
    "glm4": Case(
        {
            "plain": {},
            "no-biases-tied-all-turned": {
                "attention_bias": False,
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
            }
            | scaled("default", partial_rotary_factor=1.0),
        },
    ),
    "internlm3": Case(
        {
            "plain": {},
            "biases-tied-yarn": YARN | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "one-kv-head-linear": scaled("linear", factor=3.0)
            | {"num_key_value_heads": 1, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
        },
        refused={"attention_bias", "mlp_bias"},
    ),
    "iquestcoder": Case(
        {
            "plain": {},
            "biases-tied-yarn": YARN | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        },
    ),
    "helium": Case(
        {
            "plain": {},
            "biases-tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
            | {"num_key_value_heads": 1, "rms_norm_eps": 1e-3, "hidden_act": "gelu"},
        },
        base=OWN_BASE | {"num_key_value_heads": 2, "head_dim": 8},
        refused={"head_dim", "hidden_size", "num_attention_heads"},
    ),
    "jais2": Case(
        {
            "plain": {},
            "no-biases-tied-yarn": YARN | {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
            "one-kv-head": {"num_key_value_heads": 1, "hidden_act": "gelu", "layer_norm_eps": 1e-3},
        },
        base=OWN_BASE | {"num_key_value_heads": 2, "head_dim": 12},
    ),
    "vaultgemma": Case(
        {
            "plain": {"sliding_window": 7},
            "untied-biases-caps": {"sliding_window": 5, "tie_word_embeddings": False, "attention_bias": True}
            | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5, "query_pre_attn_scalar": 11},
            "no-caps-types": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 6}
            | {"layer_types": [FULL, SLIDING, SLIDING], "num_key_value_heads": 1, "hidden_activation": "silu"},
        },
        base=OWN_BASE | {"num_key_value_heads": 2, "head_dim": 12},
    ),
    "granitemoeshared": Case(
        {
            "plain": GRANITE_DENSE_ONLY | GRANITE_EXPERTS | {"shared_intermediate_size": 12},
            "no-shared-expert-tied-biases-yarn": GRANITE_DENSE_ONLY
            | GRANITE_EXPERTS
            | YARN
            | {"shared_intermediate_size": 0, "tie_word_embeddings": True, "attention_bias": True},
        },
        inert=OF_LOSSES,
    ),
    "opt": Case(
        {
            "plain": {},
            "no-biases-untied": {"enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"},
        },
        inert={"init_std", "dropout", "layerdrop"},
        base=without(OWN_BASE, "intermediate_size", "initializer_range")
        | {"ffn_dim": 52, "max_position_embeddings": 128, "init_std": 0.15},
        live={"max_position_embeddings"},
        refused={"hidden_size", "num_attention_heads"},
        fixed={"word_embed_proj_dim", "do_layer_norm_before", "_remove_final_layer_norm"}
        | {"layer_norm_elementwise_affine"},
    ),
    "bloom": Case(
        {
            "plain": {},
            "untied-eps": {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-2, "n_head": 2},
        },
        inert={"hidden_dropout", "slow_but_exact"},
        base={"vocab_size": 97, "hidden_size": 48, "n_layer": 3, "n_head": 4, "initializer_range": 0.15}
        | {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
        refused={"hidden_size", "n_head"},
        fixed={"apply_residual_connection_post_layernorm"},
    ),
    "falcon": Case(
        {
            "plain": {"ffn_hidden_size": 52},
            "all-heads-in-turn-biases-untied": {"multi_query": False, "parallel_attn": False, "bias": True}
            | {"tie_word_embeddings": False, **scaled("linear", factor=3.0)},
            "all-heads": {"multi_query": False, "activation": "relu", "layer_norm_epsilon": 1e-3},
            "new": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
            "new-one-norm": {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
        },
        inert={"hidden_dropout", "new:multi_query", "new-one-norm:multi_query"}
        | {f"{name}:num_kv_heads" for name in ("plain", "all-heads-in-turn-biases-untied", "all-heads")},
        base=without(OWN_BASE, "intermediate_size"),
        refused={"hidden_size", "num_attention_heads", "num_ln_in_parallel_attn"}
        | {"new:parallel_attn", "new-one-norm:parallel_attn"},
        fixed={"alibi"},
    ),
    "persimmon": Case(
        {
            "plain": {},
            "no-norms-tied-all-turned": {"qk_layernorm": False, "tie_word_embeddings": True, "hidden_act": "gelu"}
            | scaled("linear", factor=3.0, partial_rotary_factor=1.0),
        },
        inert={"hidden_dropout"},
        base=OWN_BASE,
        refused={"hidden_size", "num_attention_heads"},
    ),
    "openai-gpt": Case(
        {"plain": {"n_embd": 48}, "relu-untied": {"n_embd": 30, "afn": "relu", "tie_word_embeddings": False}},
        inert=GPT_INERT,
        base=GPT_BASE,
    ),
    "aria_text": Case(
        {
            "plain": {"moe_num_experts": 6, "intermediate_size": 20},
            "biases-tied-yarn": {"moe_num_experts": 5, "moe_topk": 3, "intermediate_size": 15, "attention_bias": True}
            | {
                "mlp_bias": True,
                "moe_num_shared_experts": 1,
                "tie_word_embeddings": True,
                "rms_norm_eps": 1e-3,
                **YARN,
            },
        },
    ),
    "gpt_neo": Case(
        {
            "plain": {"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 7},
            "all-local-untied": {"attention_types": [[["local"], 3]], "window_size": 4, "tie_word_embeddings": False}
            | {"intermediate_size": 52, "num_heads": 3, "activation_function": "relu", "layer_norm_epsilon": 1e-2},
        },
        inert={"classifier_dropout", "resid_dropout", "embed_dropout"},
        base={"vocab_size": 97, "hidden_size": 42, "num_layers": 3, "num_heads": 6, "max_position_embeddings": 128}
        | {"initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
        refused={"num_layers"},
        live={"max_position_embeddings"},
    ),
    "gpt_neox_japanese": Case(
        {
            "plain": {"num_attention_heads": 3},
            "half-turned-untied-relu": {"num_attention_heads": 3, "tie_word_embeddings": False, "hidden_act": "relu"}
            | {"intermediate_multiple_size": 2, "layer_norm_eps": 1e-2}
            | {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500.0}},
        },
        inert={"is_decoder", "hidden_dropout"},
        base=without(OWN_BASE, "intermediate_size"),
    ),
    "nemotron": Case(
        {
            "plain": {"initializer_range": 0.1},
            "biases-tied-one-kv-head": {
                "attention_bias": True,
                "initializer_range": 0.1,
                "mlp_bias": True,
                "tie_word_embeddings": True,
            }
            | {"num_key_value_heads": 1, "head_dim": 12, "norm_eps": 1e-2, "hidden_act": "gelu"}
            | scaled("linear", factor=3.0, partial_rotary_factor=0.5),
        },
    ),
    "hyperclovax": Case(
        {
            "plain": GRANITE_DENSE_ONLY,
            "pre-norm-biases-tied-yarn": GRANITE_DENSE_ONLY
            | YARN
            | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "use_post_norm": False},
        },
    ),
    "xglm": Case(
        {
            "plain": {},
            "not-scaled-untied-relu": {"scale_embedding": False, "tie_word_embeddings": False, "pad_token_id": 1}
            | {"activation_function": "relu", "ffn_dim": 36, "attention_heads": 3},
        },
        inert={"dropout", "activation_dropout", "layerdrop", "init_std", "decoder_start_token_id"},
        base={"vocab_size": 97, "d_model": 42, "ffn_dim": 52, "num_layers": 3, "attention_heads": 6, "init_std": 0.1}
        | {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
        refused={"add_cross_attention"},
    ),
    "ctrl": Case(
        {"plain": {}, "untied": {"tie_word_embeddings": False, "n_head": 3, "dff": 36}},
        inert={"resid_pdrop", "embd_pdrop", "n_positions"},
        base={"vocab_size": 97, "n_embd": 42, "n_layer": 3, "n_head": 6, "dff": 52, "initializer_range": 0.1}
        | {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
        fixed={"layer_norm_epsilon"},
    ),
    "kolibri1": Case(
        {
            "plain": KOLIBRI | {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 7},
            "one-kv-head-tied-yarn": KOLIBRI
            | {"layer_types": [FULL, FULL, SLIDING], "sliding_window": 9, "norm_topk_prob": True}
            | {"num_key_value_heads": 1, "head_dim": 16}
            | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3, **YARN},
        },
        inert={"output_router_logits"},
        base=NO_HIDDEN,
    ),
    "laguna": Case(
        {
            "plain": LAGUNA | {"layer_types": [FULL, SLIDING, SLIDING], "num_attention_heads_per_layer": [6, 4, 2]},
            "channels-all-sparse-capped-tied": LAGUNA
            | {"gating": "per-element", "mlp_layer_types": ["sparse", "dense", "sparse"], "tie_word_embeddings": True}
            | {"moe_router_logit_softcapping": 0.9, "num_key_value_heads": 1, "rms_norm_eps": 1e-3}
            | {"layer_types": [SLIDING, FULL, FULL], "rope_parameters": by_type(ROUNDED, 900.0), "head_dim": 16},
        },
        inert=OF_LOSSES | {"num_attention_heads"},
        fixed={"attention_bias", "moe_apply_router_weight_on_input", "plain:gating"},
    ),
    "cohere_compass_text": Case(
        {
            "plain": {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 7, "logit_scale": 0.7}
            | {"rope_parameters": {FULL: None, SLIDING: IMAGES | {"rope_theta": 500.0}}},
            "biases-untied-one-kv-head": {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 2.0}
            | {"num_key_value_heads": 1, "layer_norm_eps": 1e-3, "hidden_act": "gelu"}
            | {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}}},
        },
        inert={"biases-untied-one-kv-head:sliding_window"} | OF_COMPASS_IMAGES,
        base=OWN_BASE | {"num_key_value_heads": 2},
        refused={"head_dim"},
    ),
    "cohere2_moe": Case(
        {
            "plain": COMMAND
            | {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_shared_experts": 2}
            | {"prefix_dense_intermediate_size": 30, "layer_types": [FULL, SLIDING, FULL], "sliding_window": 7},
            "sigmoid-summed-rms-biases": COMMAND
            | {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-3}
            | {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "attention_bias": True}
            | {"mlp_layer_types": ["dense", "sparse", "sparse"], "layer_types": [FULL, SLIDING, FULL]}
            | {"prefix_dense_sliding_window_pattern": 2, "tie_word_embeddings": False, "num_key_value_heads": 1},
        },
        inert=OF_LOSSES
        | {"sliding_window_pattern", "rope_theta", "plain:norm_topk_prob", "sigmoid-summed-rms-biases:layer_norm_eps"},
    ),
    "gpt_bigcode": Case(
        {
            "plain": {},
            "all-heads-untied-unscaled": {"multi_query": False, "tie_word_embeddings": False, "n_inner": 52}
            | {"scale_attn_weights": False, "activation_function": "silu", "layer_norm_epsilon": 1e-2},
        },
        inert=GPT_INERT | {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"},
        base=GPT_BASE | {"n_embd": 42},
        refused={"add_cross_attention", "n_embd", "n_head", "num_key_value_heads"},
    ),
    "starcoder2": Case(
        {
            "plain": {"norm_epsilon": 1e-4},
            "window-untied-yarn": YARN | {"sliding_window": 7, "tie_word_embeddings": False},
            "no-biases-one-kv-head": {"use_bias": False, "num_key_value_heads": 1, "hidden_act": "relu"},
        },
        inert={"residual_dropout", "embedding_dropout"},
    ),
    "stablelm": Case(
        {
            "plain": {"num_key_value_heads": 3},
            "parallel-biases-tied": {"use_parallel_residual": True, "use_qkv_bias": True, "tie_word_embeddings": True}
            | scaled("default", partial_rotary_factor=0.5),
            "one-kv-head-linear": {"num_key_value_heads": 1, "hidden_act": "gelu", "layer_norm_eps": 1e-3}
            | scaled("linear", factor=3.0, partial_rotary_factor=1.0),
        },
        inert={"plain:rope_parameters.rope_theta"},  # one pair of dims is rotated
        base=OWN_BASE | {"num_key_value_heads": 2},
        fixed={"qk_layernorm", "hidden_dropout"},
    ),
    "exaone4": Case(
        {
            "windows": {"sliding_window": 7, "sliding_window_pattern": 3},
            "by-types-tied-yarn": YARN
            | {"sliding_window": 5, "layer_types": [FULL, SLIDING, SLIDING], "tie_word_embeddings": True},
            "no-windows-one-kv-head": {"sliding_window": None, "layer_types": [FULL] * 3, "num_key_value_heads": 1}
            | {"rms_norm_eps": 1e-3, "hidden_act": "gelu"},
        },
        inert={"sliding_window_pattern"},
    ),
    "cwm": Case(
        {
            "by-default": {"sliding_window": 7},
            "by-types-tied-biases": {"sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING], "mlp_bias": True}
            | {"tie_word_embeddings": True, "num_key_value_heads": 1, **scaled("default")},
            "all-full-yarn": YARN | {"layer_types": [FULL] * 3, "num_key_value_heads": 3, "rms_norm_eps": 1e-3},
        },
        base=BASE | {"bos_token_id": 1},
    ),
    "dots1": Case(
        {
            "plain": OF_DOTS,
            "windows-biases-tied": OF_DOTS
            | {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 7, "attention_bias": True}
            | {"tie_word_embeddings": True, "norm_topk_prob": True, "num_key_value_heads": 1},
            "two-dense-yarn": OF_DOTS | YARN | {"first_k_dense_replace": 2, "routed_scaling_factor": 1.5},
        },
        inert={"output_router_logits", "max_window_layers"},
    ),
    "solar_open": Case(
        {
            "plain": OF_SOLAR,
            "biases-tied-yarn": OF_SOLAR | YARN | {"attention_bias": True, "tie_word_embeddings": True},
            "one-kv-head": OF_SOLAR | {"num_key_value_heads": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
        },
        base=NO_HIDDEN,
        inert={"output_router_logits"},
    ),
    "afmoe": Case(
        {
            "plain": OF_AFMOE | {"num_hidden_layers": 5},
            "by-types-scaled-tied-yarn": OF_AFMOE
            | YARN
            | {"layer_types": [FULL, SLIDING, SLIDING], "mup_enabled": True, "tie_word_embeddings": True}
            | {"num_key_value_heads": 1, "route_scale": 1.5, "rms_norm_eps": 1e-3},
            "one-shared-all-windows-gelu": OF_AFMOE
            | {"layer_types": [SLIDING] * 3, "sliding_window": 5, "num_shared_experts": 1, "num_dense_layers": 2}
            | {"hidden_act": "gelu", "num_key_value_heads": 3, "attention_dropout": 0.1},
        },
        inert={"output_router_logits", "global_attn_every_n_layers"},
        fixed={"attention_bias"},
    ),
    "glm4_moe_lite": Case(
        {
            "plain": OF_GLM_LITE,
            "by-types-halves-no-query-rank": OF_GLM_LITE
            | {"mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None, "rope_interleave": False}
            | {"norm_topk_prob": False, "routed_scaling_factor": 0.75},
            "yarn-bias-tied": OF_GLM_LITE | FACTORS | {"attention_bias": True, "tie_word_embeddings": True},
        },
        inert=OF_LATENTS,
    ),
    "deepseek_v32": Case(
        {
            "plain": OF_GLM_LITE | INDEXER,
            "by-types-tied-yarn-bias": OF_GLM_LITE
            | INDEXER
            | FACTORS
            | {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True, "tie_word_embeddings": True}
            | {"norm_topk_prob": False, "routed_scaling_factor": 0.75, "index_topk": 4},
        },
        inert=OF_LATENTS | {"first_k_dense_replace"},
        fixed={"mlp_bias", "head_dim"},
    ),
    "exaone_moe": Case(
        {
            "plain": OF_K_EXAONE,
            "by-types-tied-yarn": OF_K_EXAONE
            | YARN
            | {"layer_types": [FULL, SLIDING, SLIDING], "mlp_layer_types": ["sparse", "dense", "sparse"]}
            | {
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "sliding_window": 5,
                "n_group": 1,
                "topk_group": 1,
            },
            "one-kv-head-gelu": OF_K_EXAONE
            | {"sliding_window_pattern": 2, "hidden_act": "gelu", "num_key_value_heads": 6, "norm_topk_prob": False}
            | {"routed_scaling_factor": 0.75, "rms_norm_eps": 1e-3, "attention_dropout": 0.1},
        },
        inert={"output_router_logits", "first_k_dense_replace", "sliding_window_pattern"},
    ),
    "hy_v3": Case(
        {
            "plain": OF_HY,
            "biases-tied-yarn": OF_HY
            | YARN
            | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
            "by-types-gelu": OF_HY
            | {"mlp_layer_types": ["sparse", "dense", "sparse"], "hidden_act": "gelu", "router_scaling_factor": 0.75}
            | {"num_key_value_heads": 3, "rms_norm_eps": 1e-3, "head_dim": 10, "num_shared_experts": 1},
        },
        inert={"output_router_logits", "enable_moe_fp32_combine"},
    ),
    "minicpm3": Case(
        {
            "plain": OF_YOUTU | {"dim_model_base": 30},
            "biases-no-query-rank-untied": OF_YOUTU
            | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
            | {"scale_emb": 3.0, "scale_depth": 2.5, "dim_model_base": 21, "hidden_act": "gelu"},
            "no-multipliers-yarn": OF_YOUTU
            | FACTORS
            | {"scale_emb": 1, "scale_depth": None, "dim_model_base": None, "rms_norm_eps": 1e-3, "v_head_dim": None},
        },
        inert=OF_LATENTS,
        fixed={"head_dim"},
    ),
    "mellum": Case(
        {
            "plain": EXPERTS
            | {
                "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
                "mlp_layer_types": ["sparse", "dense", *["sparse"] * 2],
            }
            | {"sliding_window": 7},
            "dense-layer-tied-biases": EXPERTS
            | {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "layer_types": [FULL, SLIDING, SLIDING, FULL]}
            | {"sliding_window": 5, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1}
            | {"norm_topk_prob": False, "rope_parameters": by_type(ROUNDED, 5000.0), "head_dim": 16},
            "no-windows-gelu": EXPERTS
            | {"num_key_value_heads": 3, "head_dim": 10, "hidden_act": "gelu", "rms_norm_eps": 1e-3}
            | {"mlp_layer_types": ["dense", *["sparse"] * 3]},
        },
        inert=OF_LOSSES,
    ),
    "flint": Case(
        {
            "plain": FLINT | {"layer_types": [FULL, SLIDING, SLIDING, FULL], "mlp_only_layers": [1]},
            "usual-layers-tied-biases-yarn": FLINT
            | {"num_hidden_layers": 5, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1}
            | {"norm_topk_prob": False, "rms_norm_eps": 1e-3, **YARN},
            "every-second-gelu": FLINT
            | {"decoder_sparse_step": 2, "mlp_only_layers": [], "hidden_act": "gelu", "head_dim": 10}
            | {"layer_types": [SLIDING] * 4, "num_key_value_heads": 3},
        },
        inert=OF_LOSSES,
    ),
    "flex_olmo": Case(
        OF_OLMOE,
        inert=OF_LOSSES,
        base=OWN_BASE,
    ),
    "granite_swa": Case(
        {
            "plain": GRANITE_DENSE_ONLY | {"sliding_window": 7, "num_key_value_heads": 2},
            "thetas-biases-untied-yarn": GRANITE_DENSE_ONLY
            | YARN
            | {"layer_rope_theta": [0, 5000.0, 100], "layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 5}
            | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
            "all-windows-gelu": {"layer_types": [SLIDING] * 3, "layer_rope_theta": [900.0, 0.0, 0.0]}
            | {"sliding_window": 4, "num_key_value_heads": 3, "hidden_act": "gelu", "attention_multiplier": 0.4},
        },
        inert={"rope_parameters.rope_theta"},
        base=OWN_BASE,
    ),
    "granitemoe_swa": Case(
        {
            "plain": GRANITE_DENSE_ONLY | GRANITE_EXPERTS | {"shared_intermediate_size": 15, "sliding_window": 7},
            "thetas-biases-tied-yarn": GRANITE_DENSE_ONLY
            | GRANITE_EXPERTS
            | YARN
            | {"layer_rope_theta": [0, 5000.0, 100], "layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 5}
            | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
        },
        inert=OF_LOSSES | {"rope_parameters.rope_theta"},
        base=OWN_BASE,
    ),
    "codegen": Case(
        {
            "plain": {"rotary_dim": 8},
            "narrow-tied-gelu": {"rotary_dim": 4, "n_inner": 50, "activation_function": "gelu"}
            | {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-3, "n_head": 4},
        },
        inert=GPT_INERT | {"n_ctx", "n_positions"},
        base=GPT_BASE | {"n_embd": 64, "n_head": 8},
    ),
    "biogpt": Case(
        {
            "plain": {},
            "untied-not-scaled-relu": {"tie_word_embeddings": False, "scale_embedding": False, "hidden_act": "relu"}
            | {"max_position_embeddings": 128, "activation_dropout": 0.1, "attention_probs_dropout_prob": 0.2},
        },
        inert=BERT_INERT | {"layer_norm_eps", "layerdrop", "activation_dropout"},
        base=OWN_BASE,
    ),
    "mpt": Case(
        {
            "plain": {},
            "scale-untied": {"attn_config": {"softmax_scale": 0.3}, "tie_word_embeddings": False}
            | {"n_heads": 4, "layer_norm_epsilon": 1e-3},
        },
        inert={"max_seq_len", "emb_pdrop", "resid_pdrop", "learned_pos_emb", "embedding_fraction"}
        | {f"attn_config.{name}" for name in OF_INNER_TABLES},
        base={
            "vocab_size": 97,
            "d_model": 48,
            "n_heads": 8,
            "n_layers": 3,
            "initializer_range": 0.15,
            "pad_token_id": 0,
        },
        fixed=OF_MPT | {"is_encoder_decoder"},
        refused={"attn_config.attn_pdrop"},  # whole numbers there, and a rate of one here
    ),
    "glm_moe_dsa": Case(  # with biases, since every key is as good for the query of a token whose embedding is zero
        {
            "plain": OF_GLM_LITE | INDEXER | {"attention_bias": True, "index_n_heads": 7},
            "by-types-tied-yarn": OF_GLM_LITE
            | INDEXER
            | FACTORS
            | {"mlp_layer_types": ["dense", "sparse", "dense"], "tie_word_embeddings": True, "attention_bias": True}
            | {"norm_topk_prob": False, "routed_scaling_factor": 0.75, "index_n_heads": 8},
            "shared-index": OF_GLM_LITE
            | INDEXER
            | {"indexer_types": ["full", "shared", "full", "shared"], "num_hidden_layers": 4, "index_topk": 5}
            | {"attention_bias": True},
        },
        inert=OF_LATENTS | {"first_k_dense_replace"},
        fixed={"mlp_bias", "head_dim"},
    ),
    "olmo_hybrid": Case(
        {
            "plain": OF_OLMO_HYBRID | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
            "rope-tied": OF_OLMO_HYBRID
            | {"tie_word_embeddings": True, "linear_allow_neg_eigval": False, "num_key_value_heads": 1}
            | {"attention_bias": True, "rms_norm_eps": 1e-3}
            | YARN,
        },
        inert=OF_INITIAL_DELTA,
        refused=OF_OLMO_WIDTHS,
        base=OWN_BASE,
    ),
    "apertus": Case(
        {
            "plain": LLAMA3,
            "biases-tied-yarn": {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, **YARN},
            "squared-relu": {"hidden_act": "relu2", "num_key_value_heads": 3, "head_dim": 10, "rms_norm_eps": 1e-3}
            | scaled("linear", factor=3.0),
        },
    ),
    "youtu": Case(
        {
            "plain": OF_YOUTU,
            "halves-no-query-rank-untied": OF_YOUTU
            | {"q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": False, "hidden_act": "gelu"},
            "yarn-biases": OF_YOUTU | FACTORS | {"attention_bias": True, "rms_norm_eps": 1e-3},
        },
        inert=OF_LATENTS | {"embedding_initializer_range"},
        refused={"head_dim"},
    ),
    "glm4_moe": Case(
        {
            "plain": SIGMOID,
            "normed-heads-biases-tied": SIGMOID
            | {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}
            | {"norm_topk_prob": False, "routed_scaling_factor": 0.75, "first_k_dense_replace": 2},
            "all-turned-yarn": SIGMOID
            | {"rope_parameters": YARN["rope_parameters"] | {"partial_rotary_factor": 1.0}, "head_dim": 12}
            | {"rms_norm_eps": 1e-3, "num_key_value_heads": 3, "routed_scaling_factor": 1.5},
        },
        inert={"output_router_logits", "num_nextn_predict_layers"},
    ),
    "qwen3_5_text": Case(
        {
            "plain": DELTA_DENSE,
            "by-types-biases": DELTA_DENSE | SOFTMAX_AND_DELTA | {"attention_bias": True, "linear_num_key_heads": 4},
            "half-turned-tied-images": DELTA_DENSE
            | {"tie_word_embeddings": True, "linear_conv_kernel_dim": 2, "full_attention_interval": 2}
            | {"rope_parameters": IMAGES | {"partial_rotary_factor": 0.5}, "num_key_value_heads": 3},
        },
        inert=OF_IMAGES,
    ),
    "qwen3_5_moe_text": Case(
        {
            "plain": DELTA_SPARSE,
            "by-types-biases": DELTA_SPARSE | SOFTMAX_AND_DELTA | {"attention_bias": True, "linear_num_key_heads": 4},
            "half-turned-tied-images": DELTA_SPARSE
            | {"tie_word_embeddings": True, "linear_conv_kernel_dim": 2, "full_attention_interval": 2}
            | {"rope_parameters": IMAGES | {"partial_rotary_factor": 0.5}, "num_key_value_heads": 3},
        },
        inert=OF_LOSSES | OF_IMAGES,
        base=NO_HIDDEN,
    ),
    "ministral3": Case(
        {
            "plain": GROWING_YARN | {"head_dim": 32},
            "no-scaling-window-tied": {
                **scaled("default", original_max_position_embeddings=5, llama_4_scaling_beta=0.7),
                "sliding_window": 7,
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "head_dim": 10,
                "hidden_act": "gelu",
            },
            "no-growth-three-kv-heads": {
                "rope_parameters": YARN["rope_parameters"] | {"llama_4_scaling_beta": 0.0},
                "num_key_value_heads": 3,
                "rms_norm_eps": 1e-3,
                "attention_dropout": 0.1,
            },
        },
        exact=True,
        narrow=True,
    ),
    "gemma": Case(
        {
            "plain": {"num_key_value_heads": 1},
            "untied-biases-yarn": {
                "tie_word_embeddings": False,
                "attention_bias": True,
                "rms_norm_eps": 1e-3,
                "attention_dropout": 0.1,
                **YARN,
            },
            "three-kv-heads-linear": {
                "num_key_value_heads": 3,
                "head_dim": 10,
                "hidden_act": "silu",
                **scaled("linear", factor=3.0),
            },
        },
        refused={"use_bidirectional_attention"},
        exact=True,
        narrow=True,
    ),
    "olmoe": Case(
        OF_OLMOE,
        inert=OF_LOSSES,
        base=OWN_BASE,
    ),
    "qwen2_moe": Case(
        {
            "plain": DENSE_AND_SHARED | {"mlp_only_layers": [1]},
            "windows-every-second-tied": DENSE_AND_SHARED
            | WINDOWS
            | {"max_window_layers": 2, "decoder_sparse_step": 2, "tie_word_embeddings": True, "norm_topk_prob": True},
            "no-biases-by-types-yarn": DENSE_AND_SHARED
            | WINDOWS
            | {
                "qkv_bias": False,
                "mlp_only_layers": [3],
                "layer_types": [FULL, FULL, SLIDING, SLIDING],
                "num_key_value_heads": 1,
                "head_dim": 10,
                **YARN,
            },
        },
        inert=OF_LOSSES | SPELLINGS | {"plain:sliding_window"},
        refused=SPELLINGS,
    ),
    "cohere2": Case(
        {
            "plain": {"num_key_value_heads": 6, "sliding_window": 7, "num_hidden_layers": 5},
            "biases-untied-types-yarn": {
                "num_key_value_heads": 1,
                "sliding_window": 5,
                "layer_types": [FULL, SLIDING, SLIDING],
                "attention_bias": True,
                "tie_word_embeddings": False,
                "layer_norm_eps": 1e-2,
                **YARN,
            },
            "three-kv-heads-linear": {
                "num_key_value_heads": 3,
                "sliding_window": 9,
                "layer_types": [SLIDING, SLIDING, FULL],
                "hidden_act": "gelu",
                **scaled("linear", factor=3.0),
            },
        },
        base=OWN_BASE | {"logit_scale": 0.7},
        fixed={"head_dim"},
    ),
    "lfm2": Case(
        {
            "plain": LFM2 | {"layer_types": [CONV, FULL, CONV], "head_dim": 8},
            "biases-untied-yarn": LFM2
            | {"layer_types": [FULL, CONV, CONV], "conv_bias": True, "conv_L_cache": 2, "tie_word_embeddings": False}
            | {"num_key_value_heads": 1, "head_dim": 10, "norm_eps": 1e-2, **YARN},
            "two-of-three-kv-heads": LFM2
            | {"layer_types": [CONV, FULL, FULL], "conv_L_cache": 5, "num_key_value_heads": 3}
            | scaled("linear", factor=3.0),
        },
        inert={"block_ffn_dim_multiplier", "block_multiple_of"},
    ),
    "lfm2_moe": Case(
        {
            "plain": OF_LFM2_MOE | {"layer_types": [CONV, FULL, CONV], "num_dense_layers": 1},
            "biases-untied-yarn-all-sparse": OF_LFM2_MOE
            | {"layer_types": [FULL, CONV, CONV], "conv_bias": True, "conv_L_cache": 2, "tie_word_embeddings": False}
            | {"num_dense_layers": 0, "routed_scaling_factor": 1.5, "use_expert_bias": False, "norm_eps": 1e-2, **YARN},
            "gates-as-they-are": OF_LFM2_MOE
            | {"layer_types": [CONV, FULL, FULL], "num_dense_layers": 2, "norm_topk_prob": False}
            | {"num_key_value_heads": 3, "conv_L_cache": 5},
        },
        inert={"output_router_logits", "biases-untied-yarn-all-sparse:intermediate_size"},
        refused={"use_expert_bias"},  # their weights differ
    ),
    "mimo_v2_flash": Case(
        {
            "plain": OF_MIMO | {"layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 7},
            "biases-tied-dense-between": OF_MIMO
            | {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 5, "attention_bias": True}
            | {"mlp_layer_types": ["sparse", "dense", "sparse"], "tie_word_embeddings": True, "n_group": 1}
            | {"topk_group": 1, "attention_value_scale": None, "norm_topk_prob": False, "num_key_value_heads": 1},
            "all-windows-all-turned": OF_MIMO
            | {"layer_types": [SLIDING] * 3, "attention_value_scale": 1.3, "routed_scaling_factor": 1.5}
            | {"rope_parameters": by_type({"rope_theta": 50.0, "partial_rotary_factor": 1.0}, 9e2), "v_head_dim": 8},
        },
        inert={"output_router_logits"},
    ),
    "llama4_text": Case(
        {
            "plain": OF_LLAMA4 | {"num_hidden_layers": 4, "interleave_moe_layer_step": 2},
            "chunks-everywhere-tied-no-norms": OF_LLAMA4
            | {"layer_types": ["chunked_attention"] * 3, "no_rope_layers": [1, 0, 1], "use_qk_norm": False}
            | {"tie_word_embeddings": True, "moe_layers": [1], "num_experts_per_tok": 2, "num_key_value_heads": 1}
            | {"attn_temperature_tuning": False, **LLAMA3}
            | {"intermediate_size": 21},  # with 20, two experts of an early token tie where queries are normed
            "full-with-rope-biases": OF_LLAMA4
            | {"layer_types": [FULL, "chunked_attention", FULL], "no_rope_layers": [1, 1, 0], "attention_bias": True}
            | {"attention_chunk_size": 7, "num_key_value_heads": 3, "rms_norm_eps": 1e-3},
        },
        inert={"output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "no_rope_layer_interval"}
        | {"interleave_moe_layer_step", "full-with-rope-biases:intermediate_size_mlp"}
        | {f"chunks-everywhere-tied-no-norms:{name}" for name in ("attn_scale", "floor_scale")},
    ),
    "lfm3": Case(
        {
            "plain": {"layer_types": [CONV, FULL, SLIDING, CONV], "num_hidden_layers": 4, "sliding_window": 7}
            | LFM3_ROPE,
            "untied-biases-no-gate": {"layer_types": [FULL, CONV, SLIDING], "conv_bias": True, "conv_L_cache": 2}
            | {"use_attention_gate": False, "attention_bias": True, "tie_word_embeddings": False, "head_dim": 12}
            | {"num_key_value_heads": 1, "norm_eps": 1e-2, "sliding_window": 5}
            | {
                "rope_parameters": LFM3_ROPE["rope_parameters"]
                | {SLIDING: {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0}}
            },
            "pre-norm-all-turned": {"layer_types": [CONV, SLIDING, FULL], "use_sandwich_norm": False}
            | {"num_key_value_heads": 3, "sliding_window": 9, "rope_parameters": by_type(ROUNDED, 5000.0)}
            | {"head_dim": 16},
        },
        refused={"untied-biases-no-gate:use_attention_gate"},  # gates have no bias
        fixed={"plain:attention_bias", "pre-norm-all-turned:attention_bias"},
    ),
    "mamba2": Case(
        {
            "plain": {"num_heads": 12, "head_dim": 7, "n_groups": 1, "state_size": 5},
            "groups-tied": {"num_heads": 6, "head_dim": 21, "n_groups": 3, "expand": 3, "state_size": 9}
            | {"tie_word_embeddings": True, "conv_kernel": 2, "use_conv_bias": False, "layer_norm_epsilon": 1e-3},
            "biases-two-groups": {"num_heads": 4, "head_dim": 21, "n_groups": 2, "state_size": 3, "use_bias": True},
        },
        inert=OF_STATE_SPACES,
        base=STATE_SPACES,
    ),
    "mamba": Case({"plain": {"state_size": 5}, "untied-biases-own-rank": OWN_RANK}, inert=OF_SCANS, base=SCANS),
    "falcon_mamba": Case(
        {"plain": {"state_size": 5}, "untied-biases-own-rank": OWN_RANK | {"mixer_rms_eps": 0.3}},
        inert=OF_SCANS,
        base=SCANS,
    ),
    "recurrent_gemma": Case(
        {
            "plain": {"attention_window_size": 7},
            "untied-biases-own-width": {"tie_word_embeddings": False, "attention_bias": True, "lru_width": 18}
            | {"block_types": ["attention", "recurrent"], "num_key_value_heads": 3, "conv1d_width": 2}
            | {"attention_window_size": 5, "logits_soft_cap": 1.5, "hidden_activation": "silu", "rms_norm_eps": 1e-2}
            | scaled("default", partial_rotary_factor=1.0, rope_theta=700.0),
            "three-heads-then-attention": {"block_types": ["recurrent", "recurrent", "recurrent", "attention"]}
            | {"num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 6, "head_dim": 12}
            | {"attention_window_size": 9},
        },
        inert={"w_init_variance_scale", "final_w_init_variance_scale"},
        base=without(BASE, "head_dim") | {"hidden_size": 48},
    ),
    "jamba": Case(
        {
            "plain": JAMBA,
            "no-experts-tied-biases": JAMBA
            | {"num_experts": 1, "attn_layer_offset": 0, "num_experts_per_tok": 2}
            | {"num_hidden_layers": 3, "attention_dropout": 0.1}
            | {"tie_word_embeddings": True, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 2}
            | {"mamba_expand": 3, "mamba_dt_rank": 7, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
            "experts-alone": JAMBA | {"attn_layer_offset": 0, "num_hidden_layers": 3, "expert_layer_period": 1},
        },
        inert=OF_LOSSES
        | {"use_mamba_kernels", "use_mambapy", "use_associative_scan"}
        | {f"no-experts-tied-biases:{name}" for name in OF_JAMBA_DENSE},
        refused={"no-experts-tied-biases:output_router_logits", "experts-alone:expert_layer_offset"},
    ),
    "nemotron_h": Case(
        {
            "plain": NEMOTRON
            | {"layers_block_type": [LINEAR, "mlp", FULL, "moe"], "n_group": 4, "topk_group": 2}
            | {"n_routed_experts": 16, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5},
            "biases-one-kv-head": NEMOTRON
            | {"layers_block_type": ["moe", LINEAR, FULL, "mlp"], "use_bias": True, "norm_topk_prob": False}
            | {"mlp_bias": True, "num_key_value_heads": 1, "conv_kernel": 2, "layer_norm_epsilon": 1e-3},
            "no-experts-groups": NEMOTRON_DENSE
            | {"layers_block_type": [LINEAR, "mlp", FULL, LINEAR, "mlp"], "mlp_hidden_act": "silu", "n_groups": 3},
        },
        inert=(OF_STATE_SPACES | OF_NEMOTRON | {f"no-experts-groups:{name}" for name in OF_NEMOTRON_EXPERTS})
        - {"time_step_min"},
        refused={"attention_bias", "biases-one-kv-head:topk_group"},
        fixed={"tie_word_embeddings"},
    ),
    "falcon_h1": Case(
        {
            "plain": FALCON,
            "biases-tied-normed-before-yarn": FALCON
            | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True}
            | {"tie_word_embeddings": True, "num_key_value_heads": 1, "mamba_conv_bias": False, "mamba_d_conv": 2}
            | {"mamba_rms_norm": True, "mamba_n_groups": 3, "mamba_n_heads": 6, "mamba_d_head": 7, "rms_norm_eps": 1e-3}
            | YARN,
            "normed-after-no-multipliers": FALCON_PLAIN
            | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 10, "attention_dropout": 0.1},
        },
        inert=OF_FALCON,
        refused={"mamba_d_ssm", "mamba_d_head", "mamba_n_heads", "projectors_bias", "mamba_proj_bias"},
    ),
    "bamba": Case(
        {
            "plain": BAMBA,
            "biases-tied-groups-yarn": BAMBA
            | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "tie_word_embeddings": True}
            | {"mamba_n_groups": 3, "mamba_n_heads": 6, "mamba_d_head": 21, "mamba_expand": 3, "mamba_d_conv": 2}
            | {"attn_layer_indices": [0, 2], "num_key_value_heads": 1, "mamba_conv_bias": False, "head_dim": 16}
            | YARN,
            "all-turned": BAMBA
            | {"attn_layer_indices": [2], "head_dim": 12, "rms_norm_eps": 1e-3, "attention_dropout": 0.1}
            | scaled("linear", factor=3.0, partial_rotary_factor=1.0),
        },
        inert=OF_BAMBA,
    ),
    "hunyuan_v1_dense": Case(
        {
            "plain": {"num_key_value_heads": 3},
            "alpha-tied-biases": {"tie_word_embeddings": True, "attention_bias": True, **NTK_ALPHA},
            "one-kv-head-yarn-gelu": {"num_key_value_heads": 1, "head_dim": 10, "rms_norm_eps": 1e-3, **YARN}
            | {"attention_dropout": 0.1, "hidden_act": "gelu"},
        },
        inert={"eod_token_id", "alpha-tied-biases:rope_parameters.factor"},
        inexact={"alpha-tied-biases"},  # frequencies of another base are the product of two powers
        exact=True,
        narrow=True,
    ),
    "glm5_next_text": Case(  # with biases, as glm_moe_dsa
        {
            "plain": {},
            "shared-tied-unbounded": {
                "layer_types": ["linear_attention", INDEXED, INDEXED, "linear_attention"],
                "indexer_types": ["full", "full", "shared", "full"],
                "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
                "tie_word_embeddings": True,
                "linear_lower_bound": None,
                "linear_conv_kernel_dim": 2,
                "hc_mult": 3,
                "hc_sinkhorn_iters": 4,
                "norm_topk_prob": False,
                "routed_scaling_factor": 0.75,
                "index_kpool": 2,
                "index_topk": 8,
                "rms_norm_eps": 1e-3,
            },
        },
        inert={"output_router_logits", "router_aux_loss_coef", "qk_head_dim"},
        base=GLM5_NEXT,
        refused={"num_attention_heads", "num_key_value_heads"},  # they must be equal
        fixed={"head_dim", "qk_rope_head_dim", "index_kpool_always_select_tail", "output_router_logits"},
    ),
    "axk2": Case(  # with biases, as glm_moe_dsa
        {
            "plain": {},
            "groups-tied-yarn": {
                "n_group": 3,
                "topk_group": 2,
                "mlp_layer_types": ["sparse", "dense", "sparse"],
                "tie_word_embeddings": True,
                "norm_topk_prob": False,
                "routed_scaling_factor": 0.75,
                "index_topk": 6,
                "index_n_heads": 8,
                "qk_rope_head_dim": 8,
                "head_dim": 8,
                "rms_norm_eps": 1e-3,
                **FACTORS,
            },
        },
        inert=OF_LATENTS,
        base=AXK2,
        fixed={"head_dim"},
    ),
    "qwen4_exp_text": Case(
        {
            "plain": {},
            "no-memory-sigmoid-tied-biases-yarn": {
                "ple_layer_ids": [],
                "output_gate_type": "sigmoid",
                "tie_word_embeddings": True,
                "attention_bias": True,
                "norm_topk_prob": False,
                "hc_count": 2,
                "linear_conv_kernel_dim": 2,
                "indexer_compress_ratio": 2,
                "rms_norm_eps": 1e-3,
                **YARN,
            },
            "longer-grams": {
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
                "ple_layer_ids": [2],
                "ngram_size": 4,
                "heads_per_ngram": 1,
                "ple_embed_dim": 18,
                "eos_token_id": [9, 4],
                "seed": 3,
            },
        },
        inert={"number_of_conv_states", "split_ngram_parts", "output_router_logits", "router_aux_loss_coef"}
        | {f"no-memory-sigmoid-tied-biases-yarn:{name}" for name in OF_MEMORIES}
        | {"longer-grams:make_ngram_vocab_size_divisible_by"},
        base=QWEN4,
        refused={"plain:ple_layer_ids"},  # the next layer has softmax attention
        fixed={"indexer_kv_heads"},
    ),
    "hy_v4": Case(  # with biases, as glm_moe_dsa
        {
            "plain": {},
            "shared-three-streams-tied-yarn": {
                "num_hidden_layers": 4,
                "indexer_types": ["full", "shared", "full", "shared"],
                "mlp_layer_types": ["sparse", "dense", "dense", "sparse"],
                "tie_word_embeddings": True,
                "hc_mult": 3,
                "hc_magnitude": 1.5,
                "hc_eps": 1e-3,
                "norm_topk_prob": False,
                "routed_scaling_factor": 0.75,
                "index_topk": 6,
                "index_n_heads": 8,
                "index_head_dim": 10,
                "qk_rope_head_dim": 8,
                "head_dim": 8,
                "rms_norm_eps": 1e-3,
                **FACTORS,
            },
        },
        inert=OF_LATENTS | {"learnable_sink_init"},
        base=HY_V4,
        fixed={"head_dim", "output_router_logits"},
    ),
    "deepseek_v4": Case(
        {
            "plain": {},
            "sigmoid-three-streams-tied-yarn": {
                "layer_types": [HCA, CSA, SLIDING, HCA],
                "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"],
                "scoring_func": "sigmoid",
                "hc_mult": 3,
                "hc_sinkhorn_iters": 4,
                "routed_scaling_factor": 0.7,
                "num_experts_per_tok": 3,
                "tie_word_embeddings": True,
                "compress_rates": {CSA: 2, HCA: 5},
                "o_groups": 3,
                "index_topk": 6,
                "head_dim": 16,
                "index_head_dim": 10,
                "rms_norm_eps": 1e-3,
                "rope_parameters": {"main": V4_ROPE, "compress": V4_YARN},
                "compress_rope_theta": V4_YARN["rope_theta"],
            },
        },
        inert=V4_INERT,
        base=V4,
        fixed=V4_FIXED,
    ),
    "granitemoehybrid": Case(
        {
            "plain": GRANITE | {"layer_types": [LINEAR, FULL, LINEAR]},
            "rope-biases-tied-one-kv-head-yarn": GRANITE
            | {"layer_types": [FULL, LINEAR, FULL], "position_embedding_type": "rope", "attention_bias": True}
            | {"tie_word_embeddings": True, "num_key_value_heads": 1, "mamba_d_conv": 2, "mamba_conv_bias": False}
            | {"mamba_n_groups": 3, "mamba_n_heads": 6, "mamba_d_head": 21, "mamba_expand": 3, "rms_norm_eps": 1e-3}
            | YARN,
            "no-experts-all-attention": GRANITE_SOFTMAX
            | {"layer_types": [FULL] * 3, "position_embedding_type": "rope"}
            | {"hidden_act": "gelu", "num_key_value_heads": 3, "head_dim": 10},
            "projections-with-biases": GRANITE_DENSE | {"layer_types": [LINEAR, LINEAR, FULL], "mamba_proj_bias": True},
        },
        inert=OF_GRANITE,
        refused={f"{variant}:num_local_experts" for variant in GRANITE_DENSE_VARIANTS},
        fixed={f"{variant}:output_router_logits" for variant in GRANITE_DENSE_VARIANTS},
    ),
    "ernie4_5": Case(
        {
            "plain": {},
            "biases-untied-one-kv-head-yarn": {
                "use_bias": True,
                "tie_word_embeddings": False,
                "num_key_value_heads": 1,
                "head_dim": 10,
                "rms_norm_eps": 1e-3,
                **YARN,
            },
            "three-kv-heads-linear-gelu": {
                "num_key_value_heads": 3,
                "hidden_act": "gelu",
                **scaled("linear", factor=3.0),
            },
        },
    ),
}
