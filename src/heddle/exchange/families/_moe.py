"""What families with experts share: tensor names, which layers are dense, and the balancing loss.

The loss of Mixtral and Qwen in transformers is `coef · E · Σ_i c_i P_i`, where c_i is the mean number of times that a
token chose expert i (so c sums to top_k) and P_i its mean probability, both over all layers and rows. Heddle's loss is
a sum over layers, computed by sequence, and its c sums to 1. With L layers of experts and balanced routing the loss is
`coef · k` in transformers and `aux_loss · L` in heddle, hence

    aux_loss = coef · k / L

if it is on (`output_router_logits`). Only training uses it. The two are equal only for one layer and one row.
An export writes the coefficient but leaves `output_router_logits` off, because `generate` of transformers fails with
it; set it for training.
"""

from collections.abc import Sequence
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import STACKED, WeightMap
from heddle.model.config import ModelConfig
from heddle.parts.feedforwards.moe import MoEConfig

LLAMA_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def read_expert_count(config: ConfigReader) -> int:
    """The number of experts; if both names are given, they must agree."""
    number = config.require("num_experts", int, "num_local_experts")
    config.expect("num_local_experts", number, default=number)
    return number


def read_moe_layers(config: ConfigReader, depth: int, dense: Sequence[int] = ()) -> list[bool]:
    """Whether each of Qwen's layers has experts: every `decoder_sparse_step`th one, except `mlp_only_layers`.

    dense: the layers without experts where that field is absent.
    """
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", list(dense))
    return [(index + 1) % max(step, 1) == 0 and index not in dense for index in range(depth)]


def write_moe_layers(design: ModelConfig) -> dict[str, Any]:
    """The fields for which layers have experts; a step alone if that is enough."""
    sparse = design_parts.has_experts(design)
    if True in sparse:
        step = sparse.index(True) + 1  # no other step can be right
        if sparse == [(index + 1) % step == 0 for index in range(len(sparse))]:
            return {"decoder_sparse_step": step, "mlp_only_layers": []}
    return {"decoder_sparse_step": 1, "mlp_only_layers": [index for index, is_moe in enumerate(sparse) if not is_moe]}


def read_aux_loss(config: ConfigReader, top_k: int, sparse: int, default: float = 0.001) -> dict[str, Any]:
    """`aux_loss` for a model with `sparse` layers of experts, if the loss is on; `default` is its coefficient."""
    coefficient, on = config.get("router_aux_loss_coef", default), config.get("output_router_logits", False)
    return {"aux_loss": coefficient * top_k / sparse} if on and sparse else {}


def write_aux_loss(design: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """The fields of the loss; rounded to twelve digits, the coefficient is exactly the one that was read."""
    if moe.aux_loss is None:
        return {"output_router_logits": False}  # the coefficient is then the default of transformers, 0.001
    coefficient = moe.aux_loss * sum(design_parts.has_experts(design)) / moe.top_k
    return {"output_router_logits": False, "router_aux_loss_coef": float(f"{coefficient:.12g}")}


def read_experts(
    config: ConfigReader, sparse: int, hidden: str = "intermediate_size", default_loss: float = 0.001
) -> dict[str, Any]:
    """Routed experts in `sparse` layers; `hidden` is the field of their width. default_loss as in `read_aux_loss`."""
    top_k = config.require("num_experts_per_tok", int)
    return {
        "kind": "moe",
        "experts": read_expert_count(config),
        "top_k": top_k,
        "hidden": config.require(hidden, int),
        "activation": _common.read_activation(config),
        **read_aux_loss(config, top_k, sparse, default_loss),
    }


def write_experts(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_experts` reads, without the loss."""
    moe = design_parts.first_moe(design)
    return {
        "num_experts": moe.experts,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.hidden,
        "hidden_act": design_parts.HF_ACTIVATIONS[moe.activation or "silu"],
    }


def read_feedforwards(
    config: ConfigReader,
    extra: dict[str, Any],
    renormalize: bool,
    dense: Sequence[int] = (),
    default_loss: float = 0.001,
) -> list[dict[str, Any]]:
    """The feed-forward of each layer of Qwen's models. `extra` fields are added to mixtures.

    The others are the family's defaults; dense as in `read_moe_layers`, default_loss as in `read_aux_loss`.
    """
    is_moe_layer = read_moe_layers(config, config.require("num_hidden_layers", int), dense)
    experts = read_experts(config, sum(is_moe_layer), "moe_intermediate_size", default_loss) | extra
    experts["renormalize"] = config.get("norm_topk_prob", renormalize)
    gated = _common.read_gated(config)
    return [experts if is_moe and experts["experts"] else gated for is_moe in is_moe_layer]


def write_activation(design: ModelConfig) -> str:
    """The Hugging Face name of the first mixture's activation; without one, of the first gated feed-forward's."""
    has_experts = any(design_parts.has_experts(design))
    first = design_parts.first_moe(design) if has_experts else design_parts.first_gated(design)
    return design_parts.HF_ACTIVATIONS[first.activation or "silu"]


def write_feedforwards(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_feedforwards` reads."""
    moe = design_parts.first_moe(design)
    return write_experts(design) | {
        "moe_intermediate_size": moe.hidden,
        "intermediate_size": design_parts.first_gated(design).hidden,
        "hidden_act": write_activation(design),
        "norm_topk_prob": moe.renormalize,
        **write_moe_layers(design),
        **write_aux_loss(design, moe),
    }


def map_experts(
    weights: WeightMap, hf: str, heddle: str, names: dict[str, str] = LLAMA_NAMES, router: str = "gate"
) -> None:
    """Every expert's projections, `{hf}.experts.0.gate_proj` and so on, or stacks of them; `router` by its name."""
    experts = range(weights.shapes[f"{heddle}.up.weight"][0])
    hf_names = {role: [f"{hf}.experts.{index}.{name}.weight" for index in experts] for role, name in names.items()}
    for role, tensors in hf_names.items():
        for index, tensor in enumerate(tensors):
            weights.add_tensor(tensor, (f"{heddle}.{role}.weight", index))
    stacks = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}  # as published files of Qwen3.5 have them
    for name, roles in stacks.items():
        replaced = [tensor for role in roles for tensor in hf_names.get(role, [])]
        parameters = [f"{heddle}.{role}.weight" for role in roles]
        if all(parameter in weights.shapes for parameter in parameters):
            weights.add_alternative(f"{hf}.experts.{name}", *parameters, transform=STACKED, replace=replaced)
    weights.add_tensor(f"{hf}.{router}.weight", f"{heddle}.router.weight")


def map_feedforward(
    weights: WeightMap, hf: str, heddle: str, shared_expert: str = "shared_expert", router: str = "gate"
) -> None:
    """A layer's feed-forward, dense or with experts; `shared_expert` and `router` are Hugging Face names."""
    if f"{heddle}.router.weight" not in weights.shapes:
        _common.map_gated(weights, hf, heddle)
        return
    map_experts(weights, hf, heddle, router=router)
    _common.map_gated(weights, f"{hf}.{shared_expert}", f"{heddle}.shared")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, and the names of each expert."""
    _common.map_weights(design, weights, map_feedforward=map_feedforward)
