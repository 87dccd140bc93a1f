"""What DeepSeek-V2 and V3 share: latent attention, dense layers first, experts beside shared ones."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _experts
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope, write_rope
from heddle.exchange.rules import Rules, in_groups
from heddle.model.config import ModelConfig
from heddle.parts.feedforwards.moe import MoEConfig


def read_attention(fields: Fields, layout: str) -> dict[str, Any]:
    """The latent attention of every layer, which turns neighbours (`interleaved`) or halves (`half`)."""
    heads, turned = fields.need("num_attention_heads", int), fields.need("qk_rope_head_dim", int)
    if heads // fields.take("num_key_value_heads", heads) != 1:
        raise fields.wrong("num_key_value_heads", f"latent attention has as many as num_attention_heads = {heads}")
    fields.expect("head_dim", turned, None)  # of what is turned
    fields.find("qk_head_dim")  # a sum of two others
    fields.expect("attention_dropout", 0.0, None)
    return {
        "kind": "latent_attention",
        "heads": heads,
        "kv_rank": fields.need("kv_lora_rank", int),
        "query_rank": fields.find("q_lora_rank") if "q_lora_rank" in fields.data else 1536,
        "nope_dim": fields.need("qk_nope_head_dim", int),
        "rope_dim": turned,
        "value_dim": fields.need("v_head_dim", int),
        "bias": fields.take("attention_bias", False),
        "position": _read_rope(fields, turned) | {"layout": layout},
    }


def _read_rope(fields: Fields, turned: int) -> dict[str, Any]:
    table = fields.data.get("rope_scaling") or fields.data.get("rope_parameters") or {}
    if table.get("mscale_all_dim") and (table.get("attention_factor") or not table.get("mscale")):
        raise fields.wrong("rope_parameters", "mscale_all_dim is read beside mscale only, and without attention_factor")
    rope = read_rope(fields, turned)
    if "dim" in rope:
        raise fields.wrong("partial_rotary_factor", "all of qk_rope_head_dim is turned; leave it out")
    return rope


def read_layers(fields: Fields, mixer: dict[str, Any], routing: dict[str, Any], bias: bool) -> list[dict[str, Any]]:
    """Dense layers, then layers with experts that are chosen by `routing`; bias: of all but the routed experts.

    The authors' own code has a loss that balances each sequence, which is ours (`aux_loss_alpha` is `aux_loss`);
    transformers has none.
    """
    fields.take("pretraining_tp", 1)  # how products were once cut
    fields.find("ep_size")  # on how many devices experts were
    fields.take("output_router_logits", False)
    fields.expect("moe_layer_freq", 1, default=1)
    fields.expect("seq_aux", True, default=True)
    depth, activation = fields.need("num_hidden_layers", int), _blocks.read_activation(fields)
    first = min(fields.need("first_k_dense_replace", int), depth)
    dense = {
        "kind": "gated",
        "hidden": fields.need("intermediate_size", int),
        "activation": activation,
        "bias": bias,
    }
    alpha = fields.take("aux_loss_alpha", 0.0)
    moe = {
        "kind": "moe",
        "experts": fields.need("n_routed_experts", int),
        "top_k": fields.need("num_experts_per_tok", int),
        "hidden": fields.need("moe_intermediate_size", int),
        "activation": activation,
        "shared": fields.need("n_shared_experts", int),
        "scale": fields.need("routed_scaling_factor", float),
        "bias": "shared" if bias else False,
        "aux_loss": alpha or None,
        **routing,
    }
    counts = ((first, dense), (depth - first, moe))
    return [{"repeat": count, "mixer": mixer, "feedforward": one} for count, one in counts if count]


def write(design: ModelConfig) -> dict[str, Any]:
    """What both versions write."""
    mixer, moe, dense, sparse = views.latent(design), views.moe(design), views.gated(design), views.sparse(design)
    turned = mixer.rope_dim or 2
    first = sparse.index(True) if any(sparse) else len(sparse)
    activation = moe.activation if any(sparse) else dense.activation
    loss = {} if moe.aux_loss is None else {"aux_loss_alpha": moe.aux_loss, "seq_aux": True}
    return (
        _blocks.write_frame(design)
        | {
            "num_attention_heads": mixer.heads,
            "num_key_value_heads": mixer.heads,
            "kv_lora_rank": mixer.kv_rank,
            "q_lora_rank": mixer.query_rank,
            "qk_nope_head_dim": mixer.nope_dim,
            "qk_rope_head_dim": turned,
            "qk_head_dim": mixer.nope_dim + turned,
            "head_dim": turned,
            "v_head_dim": mixer.value_dim,
            "attention_bias": mixer.bias,
            "attention_dropout": 0.0,
            "rms_norm_eps": views.eps(design),
            "hidden_act": views.ACTIVATIONS[activation or "silu"],
            "intermediate_size": dense.hidden,
            "first_k_dense_replace": first,
            "moe_layer_freq": 1,
            "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.hidden,
            "n_shared_experts": _shared(moe),
            "routed_scaling_factor": moe.scale,
        }
        | write_rope(views.rope(mixer), turned, _blocks.LONGEST)
        | loss
    )


def _shared(moe: MoEConfig) -> int:
    """What is shared, as a number of experts as wide as the others."""
    return max((moe.shared_hidden or moe.hidden) // moe.hidden, 1)


def rules(design: ModelConfig, to: Rules) -> None:
    """Their names."""
    _blocks.ends(design, to)
    for index, layer in enumerate(views.layers(design)):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        _attention(to, f"{theirs}.self_attn", f"{ours}.mixer", getattr(layer.mixer, "heads", 1))
        _experts.mlp(to, f"{theirs}.mlp", f"{ours}.feedforward", "shared_experts")
        to.tensor(f"{theirs}.mlp.gate.e_score_correction_bias", f"{ours}.feedforward.router.balance")
        _blocks.pre_norms(to, theirs, ours)


def _attention(to: Rules, theirs: str, ours: str, heads: int) -> None:
    to.module(f"{theirs}.q_proj", f"{ours}.q")
    to.module(f"{theirs}.q_a_proj", f"{ours}.q_down")
    to.module(f"{theirs}.q_a_layernorm", f"{ours}.q_norm")
    to.module(f"{theirs}.q_b_proj", f"{ours}.q_up")
    to.module(f"{theirs}.kv_a_proj_with_mqa", f"{ours}.kv_down", f"{ours}.k_rope")
    to.module(f"{theirs}.kv_a_layernorm", f"{ours}.kv_norm")
    to.module(f"{theirs}.kv_b_proj", f"{ours}.k_up", f"{ours}.v_up", form=in_groups(heads))
    to.module(f"{theirs}.o_proj", f"{ours}.out")
