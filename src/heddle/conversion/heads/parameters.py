"""The parameters of an `attention` mixer by head, and the maps of a head's dims that leave the layer as it was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.norms import NormConfig
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.positions import RotationConfig
from heddle.parts.positions.axial_rope import AxialRopeConfig
from heddle.parts.positions.rope import RopeConfig

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True)
class HeadFreedom:
    """The maps M of a head's d dims that commute with whatever stands between a head and its reader.

    A key M k with the query M⁻ᵀ q gives the same scores; a value M v with the output W_o M⁻¹ the same output.
    pairs: int64 [P, 2], dims that a rotary embedding rotates together. A pair is multiplied by a complex number.
    phases: bool [P], whether that may be any number; else it is 1 or −1. groups: dims among which M may be any matrix.
    All other dims stay. scales: whether M may change lengths; else it is orthogonal.
    """

    dim: int
    pairs: Tensor
    phases: Tensor
    groups: tuple[Tensor, ...]
    scales: bool


def rotary_pairs(position: RotationConfig, head_dim: int) -> Tensor | None:
    """The dims that are rotated together, int64 [P, 2]; None for a rotation that is not known."""
    if not isinstance(position, RopeConfig | AxialRopeConfig):
        return None
    rotary_dim = position.rotary_dim or head_dim
    axes = 2 if isinstance(position, AxialRopeConfig) else 1
    dims = torch.arange(rotary_dim).view(axes, -1)
    pairs = dims.view(axes, 2, -1).mT if position.layout == "half" else dims.view(axes, -1, 2)
    return pairs.reshape(-1, 2)


def key_freedom(config: AttentionConfig, layer: Parameters, norm: NormConfig) -> HeadFreedom:
    """The freedom of keys: RoPE allows rotations of its pairs, query-key norms only those that commute with γ."""
    assert config.head_dim is not None
    dim = config.head_dim
    pairs: Tensor | None = torch.zeros(0, 2, dtype=torch.int64)
    if isinstance(config.position, RotationConfig):
        pairs = rotary_pairs(config.position, dim)
    if pairs is None or (config.qk_norm is not None and not isinstance(norm, RMSConfig)):
        empty = torch.zeros(0, 2, dtype=torch.int64)
        return HeadFreedom(dim, empty, torch.zeros(0, dtype=torch.bool), (), scales=False)
    is_rotated = torch.zeros(dim, dtype=torch.bool)
    is_rotated[pairs.flatten()] = True
    rest = (~is_rotated).nonzero().flatten()
    if config.qk_norm is None:
        phases = torch.ones(len(pairs), dtype=torch.bool)
        return HeadFreedom(dim, pairs, phases, (rest,) if len(rest) else (), scales=True)
    gains = torch.cat([layer[f"mixer.{name}.weight"].double().cpu().reshape(-1, dim) for name in ("q_norm", "k_norm")])
    phases = (gains[:, pairs[:, 0]] == gains[:, pairs[:, 1]]).all(0)
    return HeadFreedom(dim, pairs, phases, _equal_columns(gains, rest), scales=False)


def value_freedom(config: AttentionConfig) -> HeadFreedom:
    """The freedom of values: any map, unless a gate multiplies each channel; then each channel stays by itself."""
    assert config.value_dim is not None
    dims = torch.arange(config.value_dim)
    groups = tuple(dims.split(1)) if config.gate == "channel" else (dims,)
    empty = torch.zeros(0, 2, dtype=torch.int64)
    return HeadFreedom(config.value_dim, empty, torch.zeros(0, dtype=torch.bool), groups, scales=True)


def _equal_columns(gains: Tensor, dims: Tensor) -> tuple[Tensor, ...]:
    """Dims in groups with equal gains in every head."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for dim in dims.tolist():
        groups.setdefault(tuple(gains[:, dim].tolist()), []).append(dim)
    return tuple(torch.tensor(group) for group in groups.values())


def select_heads(layer: Parameters, config: AttentionConfig, key_heads: Sequence[int]) -> dict[str, Tensor]:
    """The parameters with some key heads only, in this order, each together with the query heads that read it."""
    assert config.kv_heads is not None
    size = config.heads // config.kv_heads
    queries = [head * size + each for head in key_heads for each in range(size)]
    result = dict(layer)
    for name, value in layer.items():
        dim, is_key = _heads_of(name, config)
        if dim is not None:
            heads, chosen = (config.kv_heads, key_heads) if is_key else (config.heads, queries)
            result[name] = _take(value, dim, heads, chosen)
    return result


def repeat_key_heads(layer: Parameters, config: AttentionConfig, repeats: int) -> dict[str, Tensor]:
    """The parameters with each key and value head repeated, as neighbors."""
    assert config.kv_heads is not None
    chosen = [head for head in range(config.kv_heads) for _ in range(repeats)]
    result = dict(layer)
    for name, value in layer.items():
        dim, is_key = _heads_of(name, config)
        if dim is not None and is_key:
            result[name] = _take(value, dim, config.kv_heads, chosen)
    return result


def _take(value: Tensor, dim: int, heads: int, chosen: Sequence[int]) -> Tensor:
    index = torch.tensor(list(chosen), device=value.device)
    result: Tensor = value.unflatten(dim, (heads, -1)).index_select(dim, index).flatten(dim, dim + 1)
    return result


def _heads_of(name: str, config: AttentionConfig) -> tuple[int | None, bool]:
    """The dim of a parameter that runs over heads (None: none), and whether they are key heads."""
    if name == "mixer.out.weight":
        return 1, False
    module = name.removeprefix("mixer.").partition(".")[0]
    if not name.startswith("mixer.") or module == "out":
        return None, False
    if module in ("q_norm", "k_norm"):
        return None if config.qk_norm == "head" else 0, module == "k_norm"
    return 0, module in ("k", "v")


def head_maps(layer: Parameters, name: str, heads: int) -> Tensor:
    """[W, b] of a projection by head, float64 [heads, rows, inputs + 1]; without a bias the last column is 0."""
    weight = layer[f"{name}.weight"].double()
    bias = layer.get(f"{name}.bias")
    column = weight.new_zeros(len(weight), 1) if bias is None else bias.double()[:, None]
    maps: Tensor = torch.cat((weight, column), dim=1).unflatten(0, (heads, -1))
    return maps


def set_head_maps(layer: dict[str, Tensor], name: str, maps: Tensor) -> None:
    """Write [W, b] by head, [heads, rows, inputs + 1], to a projection."""
    rows = maps.flatten(0, 1)
    layer[f"{name}.weight"] = rows[:, :-1]
    if f"{name}.bias" in layer:
        layer[f"{name}.bias"] = rows[:, -1]


def output_maps(layer: Parameters, heads: int) -> Tensor:
    """W_o by query head, float64 [heads, width, value_dim]."""
    maps: Tensor = layer["mixer.out.weight"].double().unflatten(1, (heads, -1))
    return maps.transpose(0, 1)


def set_output_maps(layer: dict[str, Tensor], maps: Tensor) -> None:
    """Write W_o by query head, [heads, width, value_dim]."""
    layer["mixer.out.weight"] = maps.transpose(0, 1).flatten(1)
