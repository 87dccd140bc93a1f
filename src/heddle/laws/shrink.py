"""A small design with the structure of a large one, on which the laws run in seconds.

Parts are shrunk by their fields, which have one meaning in every kind: heads, their widths and groups, windows, ranks,
hidden channels. Where that is not enough, a kind has its own function, under `@shrink_part.register`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import groupby
from math import gcd, lcm
from typing import Any, TypeVar

from heddle.config import Part
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import build
from heddle.parts.feedforwards.moe import MoEConfig
from heddle.parts.mixers import MixerConfig
from heddle.parts.mixers.differential_attention import DifferentialAttentionConfig
from heddle.parts.modules.indexer import IndexerConfig
from heddle.parts.modules.value_embedding import ValueEmbeddingConfig
from heddle.parts.positions import MixerPositionConfig
from heddle.parts.positions.axial_rope import AxialRopeConfig
from heddle.parts.residuals.attention_residuals import AttentionResidualsConfig
from heddle.parts.scalings import ScalingConfig

V = TypeVar("V")

VOCAB_SIZE = 97
LEAST_WIDTH = 16
SMALL_WINDOW = 7
SMALL_TEXT = 128  # tokens, longer than any law's sequence
GROUP_FIELDS = ("kv_heads", "key_heads", "groups")
HEAD_WIDTH = 8
SMALL_BLOCK = 2  # positions
SMALL_RANK = 2  # of adapters
SMALL_TOP_K = 3  # keys that an indexer selects, fewer than any law's sequence has
MOST = {  # an odd number stays odd
    "kv_rank": 10, "query_rank": 8, "gate_rank": 8, "decay_rank": 8, "rate_rank": 6, "value_rank": 4, "vector_rank": 6,
    "state_size": 8, "time_step_rank": 4,
    "nope_dim": 6, "rope_dim": 4, "hidden": 20, "buckets": 8,
    "relative_dim": 4, "router_rank": 6, "slots": 20, "out_rank": 6, "index_head_dim": HEAD_WIDTH,
}  # fmt: skip
MOST_EXACTLY = {
    "window": SMALL_WINDOW, "conv_kernel": SMALL_WINDOW, "temperature_length": SMALL_WINDOW, "max_distance": 6,
    "relative_extent": 5, "compress_ratio": 3, "top_k": SMALL_TOP_K, "index_heads": 2,
    "block": SMALL_BLOCK, "local": 1, "first": 1,
}  # fmt: skip
WINDOWS = ("window", "conv_kernel")


@dataclass(frozen=True)
class ShrinkContext:
    """The width of the residual stream, before and after.

    small_encoder_width: the encoder output's, if the design has its own encoder. dims: of a head's rotated part, before
    and after.
    """

    width: int
    small_width: int
    small_encoder_width: int | None = None
    dims: tuple[int, int] = (0, 0)


def shrink(config: ModelConfig) -> ModelConfig:
    """Return a design with the same parts and options and small sizes.

    Layers: each distinct layer once, in order; one distinct layer is kept twice if it was repeated. The width is the
    least multiple of every layer's heads from 16 on; odd head widths stay odd. If the small sizes do not fit together,
    only layers, windows and vocabulary are reduced.
    """
    for sizes in (True, False):
        try:
            small = _shrunk(config, sizes)
            build(small, device="meta")
        except ConfigError:
            continue
        return small
    return config.replace(vocab_size=config.vocab_size or VOCAB_SIZE)


def _shrunk(config: ModelConfig, sizes: bool) -> ModelConfig:
    encoder, small_encoder, width = config.encoder, None, config.width
    small_width, encoder_width = width, None
    if encoder is not None:
        encoder_width, alike = encoder.width, encoder.width == width  # then both stay so
        if sizes:
            small_width = _width(config, encoder) if alike else _width(config)
            encoder_width = small_width if alike else _width(encoder)
        small_encoder = _stack(encoder, ShrinkContext(encoder.width, encoder_width), sizes)
        if encoder.vocab_size is not None:
            small_encoder = small_encoder.replace(vocab_size=VOCAB_SIZE)
    elif sizes:
        small_width = _width(config)
    small = _stack(config, ShrinkContext(width, small_width, encoder_width), sizes)
    return small.replace(vocab_size=VOCAB_SIZE, encoder=small_encoder)


def _stack(config: ModelConfig, context: ShrinkContext, sizes: bool) -> ModelConfig:
    """A design without its encoder, with each distinct layer once, and more where blocks of layers need them."""
    kept: list[tuple[LayerConfig, bool]] = []
    for distinct in config.distinct_layers:
        single = distinct.config.replace(repeat=1, shared=False)
        # Where the stream grows, all layers are distinct, also those of the same parts.
        if not config.residual.stream_grows or (single, distinct.looped) not in kept:
            kept.append((single, distinct.looped))
    layers: list[LayerConfig] = []
    for looped, run in groupby(kept, lambda pair: pair[1]):
        small = tuple(_layer(layer, context, sizes) for layer, _ in run)
        entry = small[0].replace(repeat=2, shared=True) if len(small) == 1 else None
        group = entry or LayerConfig(repeat=2, shared=True, layers=small)
        layers += [group] if looped else small
    residual, least = config.residual, min(config.depth, 2)
    if isinstance(residual, AttentionResidualsConfig) and residual.block_size is not None:
        block_size = min(residual.block_size, 2)
        residual, least = residual.replace(block_size=block_size), min(config.depth, block_size + 1)
    if sum(layer.count() for layer in layers) < least:
        layers = (layers * least)[: max(least, len(layers))]
    embedding = config.embedding
    if embedding.position is not None and "length" in type(embedding.position).model_fields:
        embedding = embedding.replace(position=embedding.position.replace(length=SMALL_TEXT))
    if embedding.per_layer is not None and sizes:
        per_layer = embedding.per_layer.replace(dim=at_most(embedding.per_layer.dim, MOST["rope_dim"] + 2))
        embedding = embedding.replace(per_layer=per_layer)
    fields = {"layers": tuple(layers), "residual": residual, "embedding": embedding}
    return config.replace(width=context.small_width, encoder=None, **fields)


def _layer(layer: LayerConfig, context: ShrinkContext, sizes: bool) -> LayerConfig:
    mixer, feedforward = layer.mixer, layer.feedforward
    if mixer is not None:
        mixer = shrink_part(mixer, context) if sizes else _with_small_window(mixer)
    if feedforward is not None:
        if sizes:
            feedforward = shrink_part(feedforward, context)
        else:
            feedforward = feedforward.replace(**_small_convolution(feedforward))
    rank = layer.adapter_rank and min(layer.adapter_rank, SMALL_RANK if sizes else layer.adapter_rank)
    return layer.replace(mixer=mixer, feedforward=feedforward, adapter_rank=rank)


@singledispatch
def shrink_part(part: Any, context: ShrinkContext) -> Any:
    """The same config with small sizes."""
    fields = _numbers(part)
    changes: dict[str, Any] = {name: at_most(fields[name], most) for name, most in MOST.items() if name in fields}
    changes |= {name: min(fields[name], most) for name, most in MOST_EXACTLY.items() if name in fields}
    if "heads" in fields:
        changes |= _small_heads(fields, context, changes)
        before, after = changes.pop("dims")
        context = ShrinkContext(context.width, context.small_width, context.small_encoder_width, (before, after))
    if "encoder_width" in fields:
        changes["encoder_width"] = context.small_encoder_width or at_most(fields["encoder_width"], 10)
    indexer = getattr(part, "indexer", None)
    if isinstance(indexer, IndexerConfig):
        changes["indexer"] = _small_indexer(indexer, changes["heads"], context.dims[1])
    embedding = getattr(part, "value_embedding", None)
    if isinstance(embedding, ValueEmbeddingConfig) and embedding.gate_channels is not None:
        channels = min(embedding.gate_channels, context.small_width)
        changes["value_embedding"] = embedding.replace(gate_channels=channels)
    if isinstance(decay := getattr(part, "decay", None), tuple):
        changes["decay"] = subsample(decay, changes["heads"])
    changes |= {
        name: shrink_part(inner, context)
        for name, inner in _parts(part)
        if isinstance(inner, MixerConfig | MixerPositionConfig)
    }
    changes |= _small_convolution(part)
    rotates = "rotary_dim" in type(part).model_fields and isinstance(part, MixerPositionConfig)
    return part.replace(**changes, **(_small_rotation(part, context.dims) if rotates else {}))


def _small_indexer(indexer: IndexerConfig, attention_heads: int, rotated: int) -> IndexerConfig:
    """Fewer keys, small blocks, and heads at least as wide as the rotated part of the mixer's.

    With `per_head`, as many heads as the attention, or one.
    """
    local = min(indexer.local, 1)
    small: dict[str, Any] = {"top_k": min(indexer.top_k, SMALL_TOP_K), "block": min(indexer.block, SMALL_BLOCK)}
    if indexer.heads is not None and indexer.head_dim is not None:
        heads = small_count(indexer.heads)
        small["heads"] = gcd(heads, attention_heads) if indexer.per_head else heads
        small["head_dim"] = max(at_most(indexer.head_dim, HEAD_WIDTH), rotated)
    first = min(indexer.first, 1 if small["top_k"] - local > 1 else 0)
    return indexer.replace(**small, local=local, first=first)


def _small_heads(fields: dict[str, int], context: ShrinkContext, changes: dict[str, Any]) -> dict[str, Any]:
    """Heads keep their ratio to groups if it is at most 3. Widths of up to 8 keep their order and parity."""
    heads, group_field = fields["heads"], next((name for name in GROUP_FIELDS if name in fields), None)
    groups = None if group_field is None else fields[group_field]
    few = small_head_count(heads, groups)
    if "nope_dim" in fields:
        before, after = fields["nope_dim"], changes["nope_dim"]
    else:
        before = fields.get("head_dim") or context.width // heads
        after = at_most(before, HEAD_WIDTH) if "head_dim" in fields else context.small_width // few
    small: dict[str, Any] = {"heads": few, "dims": (before, after)}
    if group_field is not None and groups is not None:
        small[group_field] = small_count(groups)
    if "head_dim" in fields:
        small["head_dim"] = after
    if "value_dim" in fields:
        small["value_dim"] = small_relative_width(fields["value_dim"], before, after)
    if "rope_dim" in fields:
        small["dims"] = fields["rope_dim"], changes["rope_dim"]
    return small


def _small_rotation(rotation: Any, dims: tuple[int, int]) -> dict[str, Any]:
    """As many dims as before are rotated, or as large a share of them, and frequencies are left out evenly."""
    multiple = 4 if isinstance(rotation, AxialRopeConfig) else 2
    before, small = rotation.rotary_dim or dims[0], dims[1]
    if before != dims[0]:
        small = max(multiple, before * small // dims[0] // multiple * multiple)
    inv_freq = None if rotation.inv_freq is None else subsample(rotation.inv_freq, small // multiple)
    changes: dict[str, Any] = {"rotary_dim": rotation.rotary_dim and small, "inv_freq": inv_freq}
    scaling: ScalingConfig | None = getattr(rotation, "scaling", None)
    if scaling is not None:
        per_pair = {
            name: value for name in type(scaling).model_fields if isinstance(value := getattr(scaling, name), tuple)
        }
        changes["scaling"] = scaling.replace(**{name: subsample(value, small // 2) for name, value in per_pair.items()})
    return changes


@shrink_part.register
def _(mixer: DifferentialAttentionConfig, context: ShrinkContext) -> Any:
    """Each head has two queries of half its width."""
    queries = mixer.replace(heads=2 * mixer.heads, kv_heads=mixer.kv_heads and 2 * mixer.kv_heads)
    small = shrink_part.dispatch(object)(queries, context)
    return small.replace(heads=small.heads // 2, kv_heads=small.kv_heads and small.kv_heads // 2)


@shrink_part.register
def _(mixture: MoEConfig, context: ShrinkContext) -> Any:
    """4 experts or 4 groups of 2, each at most 8 wide, with as large a share routed to, and 2 shared experts."""
    experts = selectable = min(mixture.experts, 4)
    groups, top_groups = mixture.groups, mixture.top_groups
    if groups is not None and top_groups is not None:
        size = min(mixture.experts // groups, 2)
        groups, top_groups = min(groups, 4), _small_share(top_groups, min(groups, 4), groups)
        experts, selectable = groups * size, top_groups * size
    shared_hidden = mixture.shared_hidden
    return mixture.replace(
        **_small_convolution(mixture),
        hidden=at_most(mixture.hidden, 8),
        shared_hidden=None if shared_hidden is None else at_most(shared_hidden, 8),
        experts=experts,
        top_k=min(_small_share(mixture.top_k, experts, mixture.experts), selectable),
        shared=None if mixture.shared is None else min(mixture.shared, 2),
        groups=groups,
        top_groups=top_groups,
    )


def _with_small_window(mixer: Any) -> Any:
    """The same config with windows and kernels of at most SMALL_WINDOW tokens."""
    fields = _numbers(mixer)
    changes: dict[str, Any] = {name: min(fields[name], SMALL_WINDOW) for name in WINDOWS if name in fields}
    inner = {name: _with_small_window(each) for name, each in _parts(mixer) if isinstance(each, MixerConfig)}
    return mixer.replace(**changes, **inner, **_small_convolution(mixer))


def _small_convolution(part: Any) -> dict[str, Any]:
    """Short convolutions of at most SMALL_WINDOW tokens, for the parts that have any."""
    convolution = getattr(part, "short_convolution", None)
    if convolution is None:
        return {}
    kernel = min(convolution.conv_kernel, SMALL_WINDOW)
    return {"short_convolution": convolution.replace(conv_kernel=kernel)}


def _numbers(part: Part) -> dict[str, int]:
    """The whole numbers among the fields."""
    return {name: value for name in type(part).model_fields if type(value := getattr(part, name)) is int}


def _parts(part: Part) -> Iterator[tuple[str, Part]]:
    """The parts among the fields."""
    for name in type(part).model_fields:
        if isinstance(value := getattr(part, name), Part):
            yield name, value


def _head_counts(mixer: MixerConfig) -> Iterator[tuple[int, int]]:
    """The numbers of heads, before and after, that must divide the model's width: they have no width of their own."""
    fields = _numbers(mixer)
    if "heads" in fields and "head_dim" not in fields:
        each = 2 if isinstance(mixer, DifferentialAttentionConfig) else 1  # two queries in a head
        groups = next((fields[name] for name in GROUP_FIELDS if name in fields), None)
        yield each * fields["heads"], each * small_head_count(fields["heads"], groups)
    for _, inner in _parts(mixer):
        if isinstance(inner, MixerConfig):
            yield from _head_counts(inner)


def _width(*configs: ModelConfig) -> int:
    """The small width of designs that have the same width."""
    width, least = configs[0].width, 1
    odd = width % 2 == 1
    for config in configs:
        for distinct in config.distinct_layers:
            mixer = distinct.config.mixer
            for heads, few_heads in () if mixer is None else _head_counts(mixer):
                least = lcm(least, few_heads)
                odd = odd or width // heads % 2 == 1
    step = least if odd else 2 * least
    times = -(-LEAST_WIDTH // step)
    return step * (times + (1 - times % 2 if odd else 0))


def small_count(number: int) -> int:
    """1, 2 or 3, with the parity of `number`."""
    return number if number <= 3 else 3 - (number + 1) % 2


def small_head_count(heads: int, groups: int | None = None) -> int:
    """The number of heads after shrinking, a multiple of the number of groups. None: each head is a group."""
    groups = groups or heads
    return small_count(groups) * small_count(heads // groups)


def at_most(number: int, most: int) -> int:
    """`number` if it is at most `most` (which is even), else `most`, plus 1 if `number` is odd."""
    return number if number <= most else most + number % 2


def small_relative_width(value: int, before: int, after: int) -> int:
    """A width that relates to `after` as `value` does to `before`: wider, as wide or narrower."""
    return after + (value > before) - (value < before and after > 1)


def subsample(values: Sequence[V], count: int) -> tuple[V, ...]:
    """`count` of the values, evenly spaced."""
    return tuple(values[i * len(values) // count] for i in range(count))


def _small_share(part: int, few: int, whole: int) -> int:
    """The same share of `few` as `part` is of the whole, but at least 2 if `part` was."""
    return max(min(part, 2), part * few // whole)
