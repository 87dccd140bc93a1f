"""The tensors of a GGUF, made of a family's tensors: renamed, experts stacked, rows ordered for llama.cpp's RoPE."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heddle.exchange.export import HFTensors
from heddle.exchange.gguf.architectures import Architecture

EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<index>\d+)\.(?P<after>.*)")
FLOAT32_WEIGHTS = ("ffn_gate_inp", "position_embd")  # routers and learned positions
SUFFIXES = (".weight", ".bias")
Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF. It is made of the Hugging Face tensors `hf_names` (stacked if several) by `transform`.

    restore: the inverse, of one of several.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    hf_names: tuple[str, ...]
    transform: Transform
    restore: Transform

    def build(self, tensors: HFTensors) -> Tensor:
        """Make the tensor, in memory of its own."""
        parts = [tensors[name] for name in self.hf_names]
        tensor = parts[0] if len(parts) == 1 else torch.stack(parts)
        return self.transform(tensor.to(torch.float32)).to(self.dtype).contiguous()


def gguf_tensors(
    tensors: HFTensors, config: dict[str, Any], graph: Architecture, dtype: torch.dtype
) -> Iterator[GGUFTensor]:
    """All tensors of a GGUF, in the order of the family's tensors.

    dtype: of matrices. Vectors, routers and learned positions are always float32, as llama.cpp requires.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    names = get_tensor_name_map({name: arch for arch, name in MODEL_ARCH_NAMES.items()}[graph.name], _depth(config))
    for hf_names in _group_experts(list(tensors)):
        stacked_name = EXPERT.sub(r"\g<before>.\g<after>", hf_names[0])
        name = names.get_name(stacked_name, SUFFIXES)
        assert name is not None, f"{stacked_name}: {graph.name} has no name for it"
        hf_shape = tensors.weight_map.hf_shape(tensors.weight_map.rules[hf_names[0]])
        is_expert = stacked_name != hf_names[0]
        shape = torch.Size((len(hf_names), *hf_shape)) if is_expert else hf_shape
        if graph.transposed and _is_layer_matrix(name):
            shape = torch.Size(reversed(shape))
        is_float32 = len(shape) < 2 or any(role in name for role in FLOAT32_WEIGHTS)
        transform, restore = _transforms_of(name, config, graph)
        if is_expert and len(hf_names) == 1:
            transform = partial(torch.unsqueeze, dim=0)
        yield GGUFTensor(name, shape, torch.float32 if is_float32 else dtype, hf_names, transform, restore)


def _depth(config: dict[str, Any]) -> int:
    depth: int = config.get("num_hidden_layers") or config["n_layer"]
    return depth


def _is_layer_matrix(name: str) -> bool:
    return name.startswith("blk.") and name.endswith(".weight") and "norm" not in name


def _group_experts(names: list[str]) -> list[tuple[str, ...]]:
    """Tensor names; those that differ only in the number of the expert are in one group."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(EXPERT.sub(r"\g<before>.*.\g<after>", name), []).append(name)
    return [tuple(group) for group in groups.values()]


def _transforms_of(name: str, config: dict[str, Any], graph: Architecture) -> tuple[Transform, Transform]:
    """What makes a tensor of the family's, and what undoes it."""
    for role, heads in ((".attn_q.", "num_attention_heads"), (".attn_k.", "num_key_value_heads")):
        if graph.interleaved_rope and role in name:
            return partial(interleave_rope_rows, heads=config[heads]), partial(_separate_rope_rows, heads=config[heads])
    if graph.interleaved_heads and ".attn_qkv." in name:
        heads = config["num_attention_heads"]
        return partial(_swap_groups, sizes=(heads, 3)), partial(_swap_groups, sizes=(3, heads))
    if graph.transposed and _is_layer_matrix(name):
        return Tensor.t, Tensor.t
    if graph.norm_plus_one and name.endswith("norm.weight"):
        return partial(torch.add, other=1.0), partial(torch.sub, other=1.0)
    return _identity, _identity


def interleave_rope_rows(x: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from RoPE pairs (i, i + d/2) to pairs (2i, 2i + 1)."""
    split: Tensor = x.unflatten(0, (heads, 2, -1))
    return split.transpose(1, 2).flatten(0, 2)


def _separate_rope_rows(x: Tensor, heads: int) -> Tensor:
    split: Tensor = x.unflatten(0, (heads, -1, 2))
    return split.transpose(1, 2).flatten(0, 2)


def _swap_groups(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Reorder rows, seen as [*sizes, head_dim], to [sizes[1], sizes[0], head_dim]."""
    split: Tensor = x.unflatten(0, (*sizes, -1))
    return split.transpose(0, 1).flatten(0, 2)


def _identity(x: Tensor) -> Tensor:
    return x
