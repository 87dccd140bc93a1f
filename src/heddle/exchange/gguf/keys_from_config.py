"""The keys of a GGUF that only some graphs of llama.cpp have, from the fields of a config.json."""

from typing import Any

ConfigFields = dict[str, Any]  # fields of a config.json, or keys of a GGUF
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of the functions of router logits
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def expert_keys(config: ConfigFields) -> ConfigFields:
    """Of routed experts."""
    return {
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size") or config["intermediate_size"],
    }


def local_keys(config: ConfigFields) -> ConfigFields:
    """Of windows and soft caps."""
    caps = {name: float(config[name]) for name in SOFTCAPS if config.get(name)}
    window = {"attention.sliding_window": config["sliding_window"]} if config.get("sliding_window") else {}
    return window | caps


def shared_expert_keys(config: ConfigFields) -> ConfigFields:
    """Of routed experts and a shared one of a width of its own."""
    return expert_keys(config) | {"expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}


def _routed_keys(experts: int, top_k: int, hidden: int, *, shared: int = 0, dense: int = 0) -> ConfigFields:
    """Of routed experts, `hidden` wide, after some dense layers. shared: the width of the shared expert."""
    return {
        "expert_count": experts,
        "expert_used_count": top_k,
        "expert_feed_forward_length": hidden,
        "expert_shared_count": shared // hidden,
        "expert_shared_feed_forward_length": shared,
        "leading_dense_block_count": dense,
    }


def deepseek_keys(config: ConfigFields) -> ConfigFields:
    """Of DeepSeek's experts."""
    hidden = config["moe_intermediate_size"]
    groups = {"expert_group_count": config.get("n_group"), "expert_group_used_count": config.get("topk_group")}
    return {
        **_routed_keys(
            config["n_routed_experts"],
            config["num_experts_per_tok"],
            hidden,
            shared=hidden * config["n_shared_experts"],
            dense=config["first_k_dense_replace"],
        ),
        "expert_gating_func": SIGMOID if config["scoring_func"] == "sigmoid" else SOFTMAX,
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
        **(groups if (config.get("n_group") or 1) > (config.get("topk_group") or 1) else {}),
    }


def latent_keys(config: ConfigFields) -> ConfigFields:
    """Of DeepSeek's latent attention, which llama.cpp computes with one head of keys, the latent, and experts."""
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    query_rank = {} if config["q_lora_rank"] is None else {"attention.q_lora_rank": config["q_lora_rank"]}
    return {
        **deepseek_keys(config),
        **query_rank,
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope_dim,
    }


def ernie_keys(config: ConfigFields) -> ConfigFields:
    """Of ERNIE 4.5's experts."""
    hidden = config["moe_intermediate_size"]
    routed = _routed_keys(
        config["moe_num_experts"],
        config["moe_k"],
        hidden,
        shared=hidden * config["moe_num_shared_experts"],
        dense=config["moe_layer_start_index"],
    )
    return routed | {"interleave_moe_layer_step": 1}


def hunyuan_keys(config: ConfigFields) -> ConfigFields:
    """Of Hunyuan's experts."""
    hidden = config["intermediate_size"]
    return _routed_keys(config["num_experts"], config["moe_topk"], hidden, shared=hidden)


def afmoe_keys(config: ConfigFields) -> ConfigFields:
    """Of AFMoE's experts and windows."""
    hidden = config["moe_intermediate_size"]
    return {
        **_routed_keys(
            config["num_experts"],
            config["num_experts_per_tok"],
            hidden,
            shared=hidden * config["num_shared_experts"],
            dense=config["num_dense_layers"],
        ),
        "expert_weights_scale": float(config["route_scale"]),
        "expert_weights_norm": True,
        "attention.sliding_window": config["sliding_window"],
    }


def _ssm_keys(kernel: int, heads: int, head_dim: int, state: int, groups: int) -> ConfigFields:
    """Of a recurrent mixer whose heads have a state of `state` by `head_dim`."""
    return {
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": heads * head_dim,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }


def delta_keys(config: ConfigFields) -> ConfigFields:
    """Of Qwen's gated delta rule, and which layers have it."""
    return {
        **_ssm_keys(
            config["linear_conv_kernel_dim"],
            config["linear_num_value_heads"],
            config["linear_value_head_dim"],
            config["linear_key_head_dim"],
            config["linear_num_key_heads"],
        ),
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
    }


def qwen35_keys(config: ConfigFields) -> ConfigFields:
    """With RoPE sections that give every pair of dims the token's position: a text has one on every axis."""
    pairs = int(config["head_dim"] * config["rope_parameters"].get("partial_rotary_factor", 1.0)) // 2
    return delta_keys(config) | {"rope.dimension_sections": [*((pairs + 2 - axis) // 3 for axis in range(3)), 0]}


def hybrid_keys(config: ConfigFields) -> ConfigFields:
    """Of Granite 4's Mamba-2 layers, attention and experts."""
    kv_heads = config["num_key_value_heads"]
    return {
        **granite_keys(config),
        **_ssm_keys(
            config["mamba_d_conv"],
            config["mamba_n_heads"],
            config["mamba_d_head"],
            config["mamba_d_state"],
            config["mamba_n_groups"],
        ),
        "attention.head_count_kv": [0 if kind == "linear_attention" else kv_heads for kind in config["layer_types"]],
        "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
    }


def mamba2_keys(config: ConfigFields) -> ConfigFields:
    """Of a model of Mamba-2 layers alone."""
    sizes = (config[name] for name in ("conv_kernel", "num_heads", "head_dim", "state_size", "n_groups"))
    return {
        **_ssm_keys(*sizes),
        "attention.head_count": 0,
        "attention.head_count_kv": 0,
        "feed_forward_length": 0,
        "attention.layer_norm_rms_epsilon": float(config["layer_norm_epsilon"]),
    }


def granite_keys(config: ConfigFields) -> ConfigFields:
    """Of Granite's multipliers and experts."""
    keys = {
        "attention.scale": float(config["attention_multiplier"]),
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": float(config["logits_scaling"]),
    }
    if not config.get("num_local_experts"):
        return keys
    return keys | {
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_feed_forward_length": config.get("shared_intermediate_size", 0),
    }


def ministral_keys(config: ConfigFields) -> ConfigFields:
    """Of the temperature of scores, which grows with the position."""
    rope = config["rope_parameters"]
    keys = {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
    beta = float(rope["llama_4_scaling_beta"])
    return keys | ({"attention.temperature_scale": beta} if beta else {})


def lfm2_keys(config: ConfigFields) -> ConfigFields:
    """Of short convolutions, and which layers have them."""
    kv_heads = config["num_key_value_heads"]
    return {
        "attention.head_count_kv": [0 if kind == "conv" else kv_heads for kind in config["layer_types"]],
        "attention.layer_norm_rms_epsilon": float(config["norm_eps"]),
        "shortconv.l_cache": config["conv_L_cache"],
    }


def cohere_keys(config: ConfigFields) -> ConfigFields:
    """Of the logits' multiplier and windows."""
    return {"logit_scale": float(config["logit_scale"])} | local_keys(config)
