"""What families with experts share: names on disk, where the dense layers are, and the loss that balances.

Theirs of Mixtral and Qwen is `coef · E · Σ_i c_i P_i` with c_i how often a token chose expert i, so that c sums to k,
and both are means over all layers and rows; ours is a sum over layers of each one's own, by sequence, and its shares
sum to 1. With L layers of experts, even loads cost `coef · k` there and `aux_loss · L` here, so that

    aux_loss = coef · k / L

where it is on (`output_router_logits`). Only training reads it, and only with one layer and one row are both equal.
An export tells the coefficient and leaves the switch off, with which their `generate` fails: who trains sets it.
"""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks
from heddle.exchange.fields import Fields
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig
from heddle.parts.feedforwards.moe import MoEConfig

LLAMA_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def read_heads(fields: Fields) -> dict[str, Any]:
    """As Llama's, but that theirs have other defaults, so that key and value heads must be told."""
    fields.need("num_key_value_heads", int)
    return _blocks.read_heads(fields, fields.need("hidden_size", int))


def read_number(fields: Fields) -> int:
    """How many experts; both names must say the same."""
    number = fields.need("num_experts", int, "num_local_experts")
    fields.expect("num_local_experts", number, default=number)
    return number


def read_sparse(fields: Fields, depth: int) -> list[bool]:
    """Which of Qwen's layers have experts: each `decoder_sparse_step`th, but those of `mlp_only_layers`."""
    step, dense = fields.take("decoder_sparse_step", 1), fields.take("mlp_only_layers", list[int]())
    return [(index + 1) % max(step, 1) == 0 and index not in dense for index in range(depth)]


def write_sparse(design: ModelConfig) -> dict[str, Any]:
    """The same, by a step alone where one says it."""
    sparse = views.sparse(design)
    for step in range(1, len(sparse) + 1):
        if sparse == [(index + 1) % step == 0 for index in range(len(sparse))]:
            return {"decoder_sparse_step": step, "mlp_only_layers": []}
    return {"decoder_sparse_step": 1, "mlp_only_layers": [index for index, found in enumerate(sparse) if not found]}


def read_loss(fields: Fields, top_k: int, sparse: int) -> dict[str, Any]:
    """`aux_loss` of so many layers of experts, if it is on."""
    coefficient, on = fields.take("router_aux_loss_coef", 0.001), fields.take("output_router_logits", False)
    return {"aux_loss": coefficient * top_k / sparse} if on and sparse else {}


def write_loss(design: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """The same; twelve digits give back the coefficient that was read."""
    if moe.aux_loss is None:
        return {"output_router_logits": False}  # and their default, 0.001
    coefficient = moe.aux_loss * sum(views.sparse(design)) / moe.top_k
    return {"output_router_logits": False, "router_aux_loss_coef": float(f"{coefficient:.12g}")}


def read_forwards(fields: Fields, more: dict[str, Any], renormalise: bool) -> list[dict[str, Any]]:
    """Each layer's feed-forward in Qwen's models; `more` fields of those with experts."""
    sparse = read_sparse(fields, fields.need("num_hidden_layers", int))
    number, top_k = read_number(fields), fields.need("num_experts_per_tok", int)
    activation = _blocks.read_activation(fields)
    dense = {"kind": "gated", "hidden": fields.need("intermediate_size", int), "activation": activation}
    moe = {
        "kind": "moe",
        "experts": number,
        "top_k": top_k,
        "hidden": fields.need("moe_intermediate_size", int),
        "activation": activation,
        "renormalise": fields.take("norm_topk_prob", renormalise),
        **read_loss(fields, top_k, sum(sparse)),
        **more,
    }
    return [moe if found and number else dense for found in sparse]


def write_forwards(design: ModelConfig) -> dict[str, Any]:
    """As `read_forwards`."""
    moe, dense = views.moe(design), views.gated(design)
    activation = moe.activation if any(views.sparse(design)) else dense.activation
    return {
        "num_experts": moe.experts,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.hidden,
        "intermediate_size": dense.hidden,
        "hidden_act": views.ACTIVATIONS[activation or "silu"],
        "norm_topk_prob": moe.renormalise,
        **write_sparse(design),
        **write_loss(design, moe),
    }


def experts(to: Rules, theirs: str, ours: str, names: dict[str, str] = LLAMA_NAMES) -> None:
    """Every expert's projections, `theirs.0.gate_proj` and so on, and the router's weight is `gate` beside them."""
    for role, name in names.items():
        for index in range(to.shapes[f"{ours}.{role}.weight"][0]):
            to.tensor(f"{theirs}.experts.{index}.{name}.weight", (f"{ours}.{role}.weight", index))
    to.tensor(f"{theirs}.gate.weight", f"{ours}.router.weight")


def mlp(to: Rules, theirs: str, ours: str, shared: str) -> None:
    """A layer's feed-forward, dense or of experts; `shared` is the name of the expert that every token meets."""
    if f"{ours}.router.weight" not in to.shapes:
        _blocks.gated(to, theirs, ours)
        return
    experts(to, theirs, ours)
    _blocks.gated(to, f"{theirs}.{shared}", f"{ours}.shared")
