"""DBRX (Databricks 2024): 4 of 16 experts in every layer, clipped queries, keys and values, norms without biases.

Published files have the base of RoPE in `attn_config`; transformers reads it from the top level, so the two must agree
where both are present. Its class divides gates by a p-norm; heddle builds p = 1, or none.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.design_parts import HEDDLE_ACTIVATIONS, HF_ACTIVATIONS
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family, TensorTransform, WeightMap, reshaped
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig

NAMES = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
EXPERTS = _common.Fields(
    experts=("moe_num_experts", 4), top_k=("moe_top_k", 1), hidden=("ffn_hidden_size", 3584)
)  # fmt: skip
# Each expert's matrix [inputs, outputs], one below the other.
TRANSPOSED_ROWS = TensorTransform(
    lambda parameters: parameters[0].mT.flatten(0, 1),
    lambda tensor, shapes: [tensor.unflatten(0, (shapes[0][0], -1)).mT],
)


def read_config(config: ConfigReader) -> dict[str, Any]:
    config.names = NAMES
    _common.check_width(config)
    config.expect("tie_word_embeddings", False, None)
    config.ignore("num_key_value_heads")  # written from attn_config
    empty: dict[str, Any] = {}
    tables = [
        ConfigReader(config.get(name, empty), f"{config.source}, {name}") for name in ("attn_config", "ffn_config")
    ]
    attention, experts = tables
    depth, heads = _layer_types.read_depth(config), config.require_count("num_attention_heads")
    head_dim = config.require("hidden_size", int) // heads
    position = read_rope(config, head_dim, attention.get("rope_theta", 10000.0))
    if attention.get("rope_theta", position["base"]) != position["base"]:
        raise attention.invalid("rope_theta", f"but the model's is {position['base']}; make them equal")
    clip = attention.optional("clip_qkv")
    mixer = {
        "kind": "attention",
        "heads": heads,
        "kv_heads": attention.get("kv_n_heads", 1),
        "head_dim": head_dim,
        "qkv_clip": None if clip is None else float(clip),
        "dropout": attention.get("attn_pdrop", 0.0),
        "position": position,
    }
    feedforward = _read_experts(config, experts, depth)
    for table in tables:
        table.check_all_read()
    return _common.design_fields(
        config,
        {"kind": "layer", "bias": False},
        _common.same_layers(config, mixer, feedforward),
        embedding={"dropout": config.get("emb_pdrop", 0.0)},
        residual={"kind": "pre_norm", "dropout": config.get("resid_pdrop", 0.0)},
    )


def _read_experts(config: ConfigReader, experts: ConfigReader, depth: int) -> dict[str, Any]:
    """The mixture of every layer; its balancing loss as in `_moe`."""
    experts.ignore("hidden_size")  # the model's
    experts.expect("moe_jitter_eps", None, 0.0)
    name = experts.get("ffn_act_fn", {"name": "silu"}).get("name", "silu")
    if name not in HEDDLE_ACTIVATIONS:
        raise experts.invalid("ffn_act_fn", f"heddle has {', '.join(HEDDLE_ACTIVATIONS)}")
    fields, norm = EXPERTS.read(experts), experts.get_nullable("moe_normalize_expert_weights", 1.0)
    if norm not in (None, 1.0):
        raise experts.invalid("moe_normalize_expert_weights", "heddle divides gates by their sum (1), or not at all")
    weight, on = experts.get("moe_loss_weight", 0.01), config.get("output_router_logits", False)
    loss = {"aux_loss": weight * fields["top_k"] / depth} if on else {}
    activation = {"activation": HEDDLE_ACTIVATIONS[name], "renormalize": norm is not None}
    return {"kind": "moe", **fields, **activation, **loss}


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, moe = design_parts.first_attention(design), design_parts.first_moe(design)
    fields = _common.write_common(design)
    fields |= {"max_seq_len": fields.pop("max_position_embeddings")}
    rope = _common.write_attention(design)
    fields |= {name: rope[name] for name in ("rope_parameters", "rope_theta", "rope_scaling")}
    loss = {} if moe.aux_loss is None else {"moe_loss_weight": float(f"{moe.aux_loss * design.depth / moe.top_k:.12g}")}
    return {NAMES.get(name, name): value for name, value in fields.items()} | {
        "n_heads": mixer.heads,
        "emb_pdrop": design.embedding.dropout,
        "resid_pdrop": design.residual.dropout,
        "tie_word_embeddings": False,
        "attn_config": {
            "attn_pdrop": mixer.dropout,
            "clip_qkv": mixer.qkv_clip,
            "kv_n_heads": mixer.kv_heads,
            "rope_theta": rope["rope_theta"],
        },
        "ffn_config": {
            **EXPERTS.write(moe),
            "ffn_act_fn": {"name": HF_ACTIVATIONS[moe.activation or "silu"]},
            "moe_normalize_expert_weights": 1.0 if moe.renormalize else None,
            **loss,
        },
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """One matrix of q, k and v, and one of all experts for each of their projections."""
    _common.map_embedding_and_head(design, weights, "transformer.wte", "transformer.norm_f")
    rows = reshaped(-1, design.width)
    for hf, heddle, _ in _common.named_layers(design, prefix="transformer.blocks"):
        attention, experts = f"{hf}.norm_attn_norm", f"{hf}.ffn.experts.mlp"
        weights.add_module(f"{attention}.attn.Wqkv", *(f"{heddle}.mixer.{role}" for role in "qkv"))
        weights.add_module(f"{attention}.attn.out_proj", f"{heddle}.mixer.out")
        weights.add_module(f"{attention}.norm_1", f"{heddle}.residual.norms.mixer")
        weights.add_module(f"{attention}.norm_2", f"{heddle}.residual.norms.feedforward")
        weights.add_module(f"{hf}.ffn.router.layer", f"{heddle}.feedforward.router")
        for name, role, transform in (("w1", "gate", rows), ("v1", "up", rows), ("w2", "down", TRANSPOSED_ROWS)):
            weights.add_tensor(f"{experts}.{name}", f"{heddle}.feedforward.{role}.weight", transform=transform)


FAMILY = Family("dbrx", "DbrxForCausalLM", read_config, write_config, map_weights)
