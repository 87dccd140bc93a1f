"""MPT (MosaicML 2023): ALiBi, norms and projections without biases, and a feed-forward four times as wide as the model.

Other options of the program that trained it are refused by name where transformers' class ignores them. Where the
number of heads is no power of two, its slopes are others than heddle's, so that is refused.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

NAMES = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
# Options that its class has one value for, and those of training, of devices and of what its class leaves out.
ALWAYS = {"expansion_ratio": 4, "no_bias": True, "logit_scale": None, "ffn_config": None}
OF_ATTENTION = {
    "attn_type": "multihead_attention", "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "alibi": True,
    "alibi_bias_max": 8, "attn_uses_sequence_id": False, "qk_gn": False, "sliding_window_size": -1, "rope": False,
}  # fmt: skip
OF_LAYER = {
    "attn.out_proj": "mixer.out", "norm_1": "residual.norms.mixer", "norm_2": "residual.norms.feedforward",
    "ffn.up_proj": "feedforward.up", "ffn.down_proj": "feedforward.down",
}  # fmt: skip
UNUSED = (
    "emb_pdrop", "resid_pdrop", "learned_pos_emb", "init_device", "embedding_fraction", "norm_type", "verbose",
    "init_config", "tokenizer_name", "fc_type",
)  # fmt: skip


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; one dropout is of attention and of branches."""
    config.names = NAMES
    _common.check_width(config)
    width, heads = config.require_count("hidden_size"), config.require_count("num_attention_heads")
    if heads & (heads - 1):
        raise config.invalid("n_heads", "should be a power of two; other numbers have slopes heddle does not build")
    for name in UNUSED:
        config.optional(name)
    attention = ConfigReader(config.get("attn_config", dict[str, Any]()), f"{config.source}, attn_config")
    for reader, always in ((config, ALWAYS), (attention, OF_ATTENTION)):
        for name, value in always.items():
            reader.expect(name, value, None)
    attention.optional("attn_impl")
    scale, dropout = attention.optional("softmax_scale"), attention.get("attn_pdrop", 0.0)
    attention.check_all_read()
    mixer = {"kind": "attention", "heads": heads, "scale": scale, "dropout": dropout, "position": {"kind": "alibi"}}
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5), "bias": False},
        _common.same_layers(config, mixer, {"kind": "mlp", "hidden": 4 * width, "activation": "gelu"}),
        tied=True,
        residual={"kind": "pre_norm", "dropout": dropout},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, fields = design_parts.first_attention(design), _common.write_common(design)
    fields["max_seq_len"] = fields.pop("max_position_embeddings")
    usual = mixer.scale == (mixer.head_dim or 1) ** -0.5
    return {NAMES.get(name, name): value for name, value in fields.items()} | {
        "n_heads": mixer.heads,
        "attn_config": {"softmax_scale": None if usual else mixer.scale, "attn_pdrop": mixer.dropout or 0},
        "layer_norm_epsilon": design_parts.norm_eps(design),
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names."""
    _common.map_embedding_and_head(design, weights, "transformer.wte", "transformer.norm_f")
    for index in range(design.depth):
        hf, heddle = f"transformer.blocks.{index}", f"layers.{index}"
        weights.add_module(f"{hf}.attn.Wqkv", *(f"{heddle}.mixer.{role}" for role in "qkv"))
        for name, own in OF_LAYER.items():
            weights.add_module(f"{hf}.{name}", f"{heddle}.{own}")


FAMILY = Family("mpt", "MptForCausalLM", read_config, write_config, map_weights)
