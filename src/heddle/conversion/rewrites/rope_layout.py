"""RoPE pairs in half or interleaved layout: the rows of W_q and W_k are permuted; every score stays as it was.

Interleaved pairs are the dims (2i, 2i + 1) of a head, half pairs the dims (i, i + rotary_dim/2).
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from heddle.config import DesignError
from heddle.conversion.head_parameters import head_sizes
from heddle.conversion.rewrite import Rewrite, replace_layers
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights
from heddle.model.config import LayerConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from heddle.parts.positions.rope import RopeConfig

RotaryMixerConfig = AttentionConfig | LatentAttentionConfig


class RopeLayout(Rewrite):
    """`layout`: the order of RoPE pairs in each head of `attention` and `latent_attention`."""

    exact: ClassVar[bool] = True
    targets: ClassVar[Mapping[str, str]] = {"position.layout": "layout"}
    layout: Literal["half", "interleaved"]

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if no layer has RoPE in the other layout."""
        changed: dict[int, LayerConfig] = {}
        for index in self.selected_layers(source.design):
            layer = source.design.layers[index]
            mixer = layer.mixer
            if not isinstance(mixer, RotaryMixerConfig) or not isinstance(mixer.position, RopeConfig):
                continue
            if mixer.position.layout != self.layout:
                position = mixer.position.replace(layout=self.layout)
                changed[index] = layer.replace(mixer=mixer.replace(position=position))
        if not changed:
            reason = f"no layer has RoPE in another layout than {self.layout}; name the other layout"
            raise DesignError("position.layout", reason)
        return _Permuted(source, replace_layers(source.design, changed))


class _Permuted(ConvertedWeights):
    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer with the rotated dims of queries and keys in the other order."""
        layer = self.source.layer(index)
        if index not in self.changed:
            return layer
        mixer = self.source.design.layers[index].mixer
        assert isinstance(mixer, RotaryMixerConfig)
        assert isinstance(mixer.position, RopeConfig)
        order = new_pair_order(mixer.position)
        if isinstance(mixer, AttentionConfig):
            _, head_dim, _ = head_sizes(mixer)
            names = {f"mixer.{name}": (0, head_dim) for name in ("q", "k", "q_norm", "k_norm")}
        else:
            assert mixer.rope_dim is not None
            query = "mixer.q" if mixer.query_rank is None else "mixer.q_up"
            names = {query: (mixer.nope_dim, mixer.nope_dim + mixer.rope_dim), "mixer.k_rope": (0, mixer.rope_dim)}
        for module, (start, head_dim) in names.items():
            for name in (f"{module}.weight", f"{module}.bias"):
                if name in layer:
                    dim = layer[name].dim() - 1 if "norm" in module else 0
                    layer[name] = permute_heads(layer[name], head_dim, start, order, dim)
        return layer


def new_pair_order(position: RopeConfig) -> Tensor:
    """For each rotated dim in the other layout, its index in this layout."""
    assert position.rotary_dim is not None
    pairs = torch.arange(position.rotary_dim).view(2, -1)  # half: (first dims, second dims)
    return pairs.T.flatten() if position.layout == "half" else pairs.view(-1, 2).T.flatten()


def permute_heads(x: Tensor, head_dim: int, start: int, order: Tensor, dim: int) -> Tensor:
    """Permute dims `start` … of each head of head_dim dims, which lie in dimension `dim`.

    x: a matrix [heads · head_dim, inputs], a bias or gain [heads · head_dim], or gains [heads, head_dim] or [head_dim].
    """
    index = torch.arange(head_dim)
    index[start : start + len(order)] = start + order
    heads = x.unflatten(dim, (-1, head_dim))
    permuted: Tensor = heads.index_select(dim + 1, index.to(x.device)).flatten(dim, dim + 1)
    return permuted
