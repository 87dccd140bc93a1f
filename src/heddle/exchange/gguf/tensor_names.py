"""llama.cpp's names of heddle's parameters, and how a tensor of a GGUF is made of them."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from heddle.exchange import design_parts
from heddle.exchange.family import CONCATENATED, TensorTransform, WeightMap, interleaved_by_group
from heddle.model.config import ModelConfig
from heddle.parts.mixers.mamba2 import Mamba2Config

# llama.cpp's names of heddle's modules and parameters: of the model, and of a layer. Several with one name are one
# tensor, one after the other in this order. `experts`: a feed-forward beside a router. `latent`: a mixer with latents
# of keys and values. `delta`, `ssm`, `conv`: a gated delta rule, a Mamba-2 mixer, a short convolution.
MODEL_NAMES = {
    "embed": "token_embd", "embed.position": "position_embd", "embed.token_types": "token_types",
    "embed.norm": "token_embd_norm", "final_norm.norm": "output_norm", "head": "output",
}  # fmt: skip
LAYER_NAMES = {
    "residual.norms.mixer": "attn_norm", "residual.norms.shared": "attn_norm", "residual.norms.feedforward": "ffn_norm",
    "residual.after.mixer": "post_attention_norm", "residual.after.feedforward": "post_ffw_norm",
    "mixer.q": "attn_q", "mixer.k": "attn_k", "mixer.v": "attn_v", "mixer.out": "attn_output",
    "mixer.q_norm": "attn_q_norm", "mixer.k_norm": "attn_k_norm", "mixer.gate": "attn_gate",
    "mixer.sink": "attn_sinks.weight",
    "latent.q": "attn_q", "latent.q_down": "attn_q_a", "latent.q_norm": "attn_q_a_norm", "latent.q_up": "attn_q_b",
    "latent.kv_down": "attn_kv_a_mqa", "latent.k_rope": "attn_kv_a_mqa", "latent.kv_norm": "attn_kv_a_norm",
    "latent.k_up": "attn_k_b", "latent.v_up": "attn_v_b", "latent.out": "attn_output",
    "conv.k": "shortconv.in_proj", "conv.q": "shortconv.in_proj", "conv.v": "shortconv.in_proj",
    "conv.convolution": "shortconv.conv", "conv.out": "shortconv.out_proj",
    **dict.fromkeys(("delta.q", "delta.k", "delta.v"), "attn_qkv"), "delta.gate": "attn_gate",
    "delta.beta": "ssm_ba", "delta.a": "ssm_ba",
    **dict.fromkeys(("ssm.gate", "ssm.v", "ssm.k", "ssm.q", "ssm.a"), "ssm_in"), "ssm.skip": "ssm_d",
    **{
        f"{mixer}.{role}": name
        for role, name in (
            ("convolution", "ssm_conv1d"), ("decay.rate", "ssm_a"), ("decay.bias", "ssm_dt.bias"),
            ("norm", "ssm_norm"), ("out", "ssm_out"),
        )
        for mixer in ("delta", "ssm")
    },
    "feedforward.gate": "ffn_gate", "feedforward.up": "ffn_up", "feedforward.down": "ffn_down",
    "feedforward.router": "ffn_gate_inp", "feedforward.router.expert_bias": "exp_probs_b.bias",
    "experts.gate": "ffn_gate_exps", "experts.up": "ffn_up_exps", "experts.down": "ffn_down_exps",
    "feedforward.shared.gate": "ffn_gate_shexp", "feedforward.shared.up": "ffn_up_shexp",
    "feedforward.shared.down": "ffn_down_shexp", "feedforward.shared_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
FUSED_QKV = dict.fromkeys(("mixer.q", "mixer.k", "mixer.v"), "attn_qkv")
FUSED_GATE = dict.fromkeys(("feedforward.gate", "feedforward.up"), "ffn_up")
# Where the norm before the feed-forward is named as the family names it, and where norms come after the branches.
POST_ATTENTION = {"residual.norms.feedforward": "post_attention_norm"}
# Where queries and their gate are one tensor.
FUSED_GATED_QUERY = dict.fromkeys(("mixer.q", "mixer.gate"), "attn_q")
REORDERED = {"residual.norms.mixer": "post_attention_norm", "residual.norms.feedforward": "post_ffw_norm"}


def map_weights(design: ModelConfig, weights: WeightMap, names: Mapping[str, str], tiled_values: bool) -> None:
    """Add the rules between the tensors of a GGUF and the model's parameters.

    names: entries of MODEL_NAMES and LAYER_NAMES that differ. tiled_values: heads of values lie in the order first head
    of each key head, then the second.
    """
    names = dict(names) | {role: name for role, name in (MODEL_NAMES | LAYER_NAMES).items() if role not in names}
    order, groups = list(names), dict[str, list[tuple[int, str]]]()
    for parameter in weights.shapes:
        role, prefix = _role(parameter, weights.shapes)
        module, _, kind = role.rpartition(".")
        name = names[role] if role in names else f"{names[module]}.{kind}"
        place = order.index(module) if module in names else 0
        groups.setdefault(prefix + name, []).append((place, parameter))
    transforms = _transforms(design.resolved(), names["mixer.gate"] == names["mixer.q"], tiled_values)
    for name, parameters in groups.items():
        ordered = [parameter for _, parameter in sorted(parameters)]
        own = name.split(".", 2)[-1] if name.startswith("blk.") else name
        weights.add_tensor(name, *ordered, transform=transforms.get(own, CONCATENATED))


def _transforms(design: ModelConfig, gated_queries: bool, tiled_values: bool) -> dict[str, TensorTransform]:
    """By the name of a layer's tensor, how it is made of parameters, where they do not follow one another."""
    heads = design_parts.first_latent_attention(design).heads
    transforms = {"attn_k_b.weight": _by_head(heads, transposed=True), "attn_v_b.weight": _by_head(heads)}
    if gated_queries:
        transforms["attn_q.weight"] = interleaved_by_group(design_parts.first_attention(design).heads)
    delta = design_parts.first_gated_delta(design)
    groups, width = delta.key_heads or delta.heads, delta.value_dim or 1
    transforms["ssm_ba.weight"] = interleaved_by_group(groups)
    if any(isinstance(mixer, Mamba2Config) for mixer in design_parts.mixers(design)):
        transforms |= {"ssm_a": COLUMN, "ssm_d": COLUMN}
    if tiled_values:
        tiled, before = partial(_tiled, groups, delta.heads // groups), 2 * groups * (delta.head_dim or 1)
        by_head = ("ssm_beta.weight", "ssm_alpha.weight", "ssm_a", "ssm_dt.bias")
        transforms |= {name: tiled(1) for name in by_head} | {
            "attn_qkv.weight": tiled(width, before),
            "ssm_conv1d.weight": tiled(width, before),
            "attn_gate.weight": tiled(width),
            "ssm_out.weight": tiled(width, dim=1),
        }
    return transforms


def _role(parameter: str, shapes: Mapping[str, torch.Size]) -> tuple[str, str]:
    """A parameter's key in LAYER_NAMES or MODEL_NAMES, with its kind, and the prefix of its layer's names."""
    if not parameter.startswith("layers."):
        return parameter, ""
    _, index, part, rest = parameter.split(".", 3)
    layer = f"layers.{index}"
    if part == "feedforward" and f"{layer}.feedforward.router.weight" in shapes and rest.count(".") == 1:
        part = "feedforward" if rest.startswith(("router.", "shared_gate.")) else "experts"
    if part == "mixer":
        part = next((kind for kind, own in MIXERS.items() if f"{layer}.mixer.{own}" in shapes), part)
    return f"{part}.{rest}", f"blk.{index}."


# By a parameter that only they have.
MIXERS = {"latent": "kv_down.weight", "delta": "beta.weight", "ssm": "skip", "conv": "convolution.weight"}
COLUMN = TensorTransform(lambda parameters: parameters[0].unsqueeze(1), lambda tensor, shapes: [tensor.squeeze(1)])


def _by_head(heads: int, transposed: bool = False) -> TensorTransform:
    """A projection from a latent, as one matrix for each head; transposed: [latent, head_dim] each."""

    def turned(x: Tensor) -> Tensor:
        return x.mT if transposed else x

    return TensorTransform(
        lambda parameters: turned(parameters[0].unflatten(0, (heads, -1))),
        lambda tensor, shapes: [turned(tensor).flatten(0, 1)],
    )


def _tiled(groups: int, per_group: int, size: int, start: int = 0, dim: int = 0) -> TensorTransform:
    """Concatenated, and the heads of `size` from `start` on in the order first of each group, then the second."""
    heads = torch.arange(groups * per_group * size).unflatten(0, (groups, per_group, size))
    order = torch.cat([torch.arange(start), start + heads.transpose(0, 1).flatten()])

    def select(x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(dim, index.to(x.device))

    return TensorTransform(
        lambda parameters: select(CONCATENATED.join(parameters), order),
        lambda tensor, shapes: CONCATENATED.split(select(tensor, order.argsort()), shapes),
    )
