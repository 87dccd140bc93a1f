"""Configs in the older words of published models: read as transformers reads them, and as many parameters built."""

import json
from typing import Any

import pytest
import torch

import heddle
from heddle.exchange.family import families
from heddle.exchange.family_match import best_match, design_from_config, differences
from tests.exchange.hf_models import PLAIN, AutoConfig, AutoModelForCausalLM

Fields = dict[str, Any]


def words(text: str, **fields: Any) -> Fields:
    """`name value` pairs, of JSON values."""
    words = text.split()
    return {name: json.loads(value) for name, value in zip(words[::2], words[1::2], strict=True)} | fields


YARN = words("beta_fast 32 beta_slow 1 factor 40 original_max_position_embeddings 4096", type="yarn")
PUBLISHED: dict[str, Fields] = {
    "mixtral": words(
        """
        attention_dropout 0.0 bos_token_id 1 eos_token_id 2 hidden_size 4096 initializer_range 0.02
        intermediate_size 14336 max_position_embeddings 32768 num_attention_heads 32 num_experts_per_tok 2
        num_hidden_layers 32 num_key_value_heads 8 num_local_experts 8 output_router_logits false rms_norm_eps 1e-05
        rope_theta 1000000.0 router_aux_loss_coef 0.02 sliding_window null tie_word_embeddings false use_cache true
        vocab_size 32000
        """,
        hidden_act="silu",
    ),
    "qwen3_moe": words(
        """
        attention_bias false attention_dropout 0.0 bos_token_id 151643 decoder_sparse_step 1 eos_token_id 151645
        head_dim 128 hidden_size 2048 initializer_range 0.02 intermediate_size 6144 max_position_embeddings 40960
        max_window_layers 48 mlp_only_layers [] moe_intermediate_size 768 norm_topk_prob true num_attention_heads 32
        num_experts 128 num_experts_per_tok 8 num_hidden_layers 48 num_key_value_heads 4 output_router_logits false
        rms_norm_eps 1e-06 rope_scaling null rope_theta 1000000.0 router_aux_loss_coef 0.001 sliding_window null
        tie_word_embeddings false use_cache true use_sliding_window false vocab_size 151936
        """,
        hidden_act="silu",
    ),
    "deepseek_v2": words(
        """
        attention_bias false attention_dropout 0.0 aux_loss_alpha 0.001 bos_token_id 100000 eos_token_id 100001
        first_k_dense_replace 1 hidden_size 2048 initializer_range 0.02 intermediate_size 10944 kv_lora_rank 512
        max_position_embeddings 163840 moe_intermediate_size 1408 moe_layer_freq 1 n_group 1 n_routed_experts 64
        n_shared_experts 2 norm_topk_prob false num_attention_heads 16 num_experts_per_tok 6 num_hidden_layers 27
        num_key_value_heads 16 pretraining_tp 1 q_lora_rank null qk_nope_head_dim 128 qk_rope_head_dim 64
        rms_norm_eps 1e-06 rope_theta 10000 routed_scaling_factor 1.0 seq_aux true tie_word_embeddings false
        topk_group 1 use_cache true v_head_dim 128 vocab_size 102400
        """,
        hidden_act="silu",
        scoring_func="softmax",
        topk_method="greedy",
        rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v3": words(
        """
        attention_bias false attention_dropout 0.0 aux_loss_alpha 0.001 bos_token_id 0 eos_token_id 1 ep_size 1
        first_k_dense_replace 3 hidden_size 7168 initializer_range 0.02 intermediate_size 18432 kv_lora_rank 512
        max_position_embeddings 163840 moe_intermediate_size 2048 moe_layer_freq 1 n_group 8 n_routed_experts 256
        n_shared_experts 1 norm_topk_prob true num_attention_heads 128 num_experts_per_tok 8 num_hidden_layers 61
        num_key_value_heads 128 num_nextn_predict_layers 1 pretraining_tp 1 q_lora_rank 1536 qk_nope_head_dim 128
        qk_rope_head_dim 64 rms_norm_eps 1e-06 rope_theta 10000 routed_scaling_factor 2.5 seq_aux true
        tie_word_embeddings false topk_group 4 use_cache true v_head_dim 128 vocab_size 129280
        """,
        hidden_act="silu",
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "qwen3_next": words(
        """
        attention_bias false attention_dropout 0.0 bos_token_id 151643 decoder_sparse_step 1 eos_token_id 151645
        full_attention_interval 4 head_dim 256 hidden_size 2048 initializer_range 0.02 intermediate_size 5120
        linear_conv_kernel_dim 4 linear_key_head_dim 128 linear_num_key_heads 16 linear_num_value_heads 32
        linear_value_head_dim 128 max_position_embeddings 262144 mlp_only_layers [] moe_intermediate_size 512
        norm_topk_prob true num_attention_heads 16 num_experts 512 num_experts_per_tok 10 num_hidden_layers 48
        num_key_value_heads 2 output_router_logits false partial_rotary_factor 0.25 rms_norm_eps 1e-06
        rope_scaling null rope_theta 10000000 router_aux_loss_coef 0.001 shared_expert_intermediate_size 512
        tie_word_embeddings false use_cache true use_sliding_window false vocab_size 151936
        """,
        hidden_act="silu",
    ),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_older_words_say_the_same(family: str) -> None:
    published = {"model_type": family, **PUBLISHED[family]}
    config = AutoConfig.for_model(family, **PUBLISHED[family])
    newer = json.loads(config.to_json_string())
    assert newer["rope_parameters"], "theirs tells it in newer words"
    design = design_from_config(published, families()[family])
    assert not differences(design, design_from_config(newer, families()[family]))
    assert best_match(design).family.model_type == family
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config, **PLAIN)
    count = sum(parameter.numel() for parameter in theirs.parameters())
    count += sum(buffer.numel() for name, buffer in theirs.named_buffers() if name.endswith("correction_bias"))
    assert heddle.size(design, context_length=1024, batch=1).parameters == count
