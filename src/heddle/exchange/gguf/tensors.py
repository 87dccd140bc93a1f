"""A family's tensors as llama.cpp keeps them: other names, experts stacked, rows in the order of its rotation."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heddle.exchange.export import Tensors
from heddle.exchange.gguf.architectures import Architecture

EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<index>\d+)\.(?P<after>.*)")
SUFFIXES = (".weight", ".bias")


@dataclass(frozen=True)
class Piece:
    """A tensor of a GGUF: its name and shape, the tensors of the family it is made of, how, and in which type."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    theirs: tuple[str, ...]
    form: Callable[[Tensor], Tensor]

    def make(self, tensors: Tensors) -> Tensor:
        """The tensor, in memory of its own."""
        found = [tensors[name] for name in self.theirs]
        whole = found[0] if len(found) == 1 else torch.stack(found)
        return self.form(whole.to(torch.float32)).to(self.dtype).contiguous()


def pieces(tensors: Tensors, config: dict[str, Any], graph: Architecture, dtype: torch.dtype) -> Iterator[Piece]:
    """All tensors of a GGUF, in the order of the family's.

    Vectors and routers are float32 whatever the type, as llama.cpp wants them.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    names = get_tensor_name_map({name: arch for arch, name in MODEL_ARCH_NAMES.items()}[graph.name], _depth(config))
    for theirs in _stacked(list(tensors)):
        plain = EXPERT.sub(r"\g<before>.\g<after>", theirs[0])
        name = names.get_name(plain, SUFFIXES)
        assert name is not None, f"{plain}: {graph.name} has no name for it"
        one = tensors.rules.shape(tensors.rules.found[theirs[0]])
        shape = one if len(theirs) == 1 and plain == theirs[0] else torch.Size((len(theirs), *one))
        wide = len(shape) < 2 or "ffn_gate_inp" in name
        form = _form(name, config, graph)
        if len(shape) > len(one) and len(theirs) == 1:
            form = partial(torch.unsqueeze, dim=0)
        yield Piece(name, shape, torch.float32 if wide else dtype, theirs, form)


def _depth(config: dict[str, Any]) -> int:
    depth: int = config["num_hidden_layers"]
    return depth


def _stacked(names: list[str]) -> list[tuple[str, ...]]:
    """Names, those of experts that differ in their number alone together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(EXPERT.sub(r"\g<before>.*.\g<after>", name), []).append(name)
    return [tuple(group) for group in groups.values()]


def _form(name: str, config: dict[str, Any], graph: Architecture) -> Callable[[Tensor], Tensor]:
    if graph.interleaved and ".attn_q." in name:
        return partial(interleaved, heads=config["num_attention_heads"])
    if graph.interleaved and ".attn_k." in name:
        return partial(interleaved, heads=config["num_key_value_heads"])
    if graph.offset and name.endswith("norm.weight"):
        return _plus_one
    return _same


def interleaved(x: Tensor, heads: int) -> Tensor:
    """Rows of heads whose pairs are (i, i + d/2), in the order of pairs (2i, 2i + 1)."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _plus_one(x: Tensor) -> Tensor:
    return x + 1.0


def _same(x: Tensor) -> Tensor:
    return x
