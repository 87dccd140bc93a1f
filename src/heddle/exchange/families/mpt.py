"""MPT (MosaicML 2023): ALiBi, norms without a bias, no biases at all.

Where the number of heads is no power of two, its slopes are others than heddle's, so that is refused.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

ALIBI_BIAS_MAX = 8  # the exponent of heddle's smallest slope


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; the options of attention are a table."""
    width, heads = config.require_count("d_model", "hidden_size"), config.require_count("n_heads")
    if heads & (heads - 1) or width % heads:
        raise config.invalid("n_heads", f"should be a power of two that divides the width {width}")
    empty: dict[str, Any] = {}
    attention = ConfigReader(config.get("attn_config", empty), f"{config.source}: attn_config")
    attention.unread -= {"model_type"}
    attention.expect("attn_type", "multihead_attention", default="multihead_attention")
    attention.expect("alibi", True, default=True)
    attention.expect("alibi_bias_max", ALIBI_BIAS_MAX, default=ALIBI_BIAS_MAX)
    for name in ("clip_qkv", "prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attention.expect(name, None, False)
    attention.optional("attn_impl")
    scale, dropout = attention.optional("softmax_scale"), attention.get("attn_pdrop", 0.0)
    attention.check_all_read()
    for name in ("resid_pdrop", "emb_pdrop", "init_device", "embedding_fraction", "learned_pos_emb", "verbose"):
        config.optional(name)  # read by the program that trained them alone
    config.note("norm_type", "init_config", "tokenizer_name", "max_seq_len", "torch_dtype")
    config.expect("no_bias", True, default=True)
    config.expect("logit_scale", None)
    mixer = {
        "kind": "attention",
        "heads": heads,
        "scale": scale,
        "dropout": dropout,
        "position": {"kind": "alibi"},
    }
    feedforward = {"kind": "mlp", "hidden": config.get("expansion_ratio", 4) * width, "activation": "gelu"}
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5), "bias": False},
        [{"repeat": config.require_count("n_layers"), "mixer": mixer, "feedforward": feedforward}],
        width=width,
        residual={"kind": "pre_norm", "dropout": dropout},
        head={"tied": config.get("tie_word_embeddings", True)},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, feedforward = design_parts.first_attention(design), design_parts.first_mlp(design)
    return {
        "vocab_size": design.vocab_size,
        "d_model": design.width,
        "n_layers": design.depth,
        "n_heads": mixer.heads,
        "expansion_ratio": (feedforward.hidden or 4 * design.width) // design.width,
        "max_seq_len": _common.DEFAULT_MAX_POSITIONS,
        "attn_config": {"alibi": True, "attn_pdrop": mixer.dropout, "softmax_scale": mixer.scale},
        "layer_norm_epsilon": design_parts.norm_eps(design),
        "initializer_range": design.initialization.std,
        "tie_word_embeddings": design.head.tied,
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names; queries, keys and values are one concatenated matrix."""
    weights.add_module("transformer.wte", "embed")
    weights.add_module("transformer.norm_f", "final_norm.norm")
    if not design.head.tied:
        weights.add_module("lm_head", "head")
    for index in range(design.depth):
        hf, heddle = f"transformer.blocks.{index}", f"layers.{index}"
        weights.add_module(f"{hf}.norm_1", f"{heddle}.residual.norms.mixer")
        weights.add_module(f"{hf}.norm_2", f"{heddle}.residual.norms.feedforward")
        weights.add_module(f"{hf}.attn.Wqkv", *(f"{heddle}.mixer.{role}" for role in "qkv"))
        weights.add_module(f"{hf}.attn.out_proj", f"{heddle}.mixer.out")
        for name in ("up", "down"):
            weights.add_module(f"{hf}.ffn.{name}_proj", f"{heddle}.feedforward.{name}")


FAMILY = Family("mpt", "MptForCausalLM", read_config, write_config, map_weights)
