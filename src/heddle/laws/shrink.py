"""A small design with the structure of a large one, on which the laws run in seconds."""

from math import lcm
from typing import Any

from heddle.config import kinds, parse_config
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import build

VOCAB_SIZE = 97
LEARNED_POSITIONS = 128  # learned positions: more than any law's text
MAX_WINDOW = 7

Data = dict[str, Any]


def shrink(config: ModelConfig) -> ModelConfig:
    """Return a design with the same parts and options and small sizes.

    Layers: each distinct layer once, in order; one distinct layer is kept twice if it was repeated. The width is the
    least multiple of every layer's heads from 16 on; odd head widths stay odd. Heads keep their ratio to kv_heads if it
    is at most 3. Explicit head and value widths keep their order and parity. Upper limits: latents 10 wide, windows 7,
    hidden 20, encoder outputs 10 wide (or the encoder's width), 4 experts or 4 groups of 2, each 8 wide, with as large
    a share routed to, 97 tokens, 128 learned positions. Unknown fields of a part are unchanged. If the small sizes do
    not fit together, only layers, windows and vocabulary are reduced.
    """
    for sizes in (True, False):
        try:
            small = parse_config(ModelConfig, _shrunk(config, sizes))
            build(small, device="meta")
        except ConfigError:
            continue
        return small
    return config.replace(vocab_size=config.vocab_size or VOCAB_SIZE)


def _shrunk(config: ModelConfig, sizes: bool) -> Data:
    layers, encoder = _distinct_layers(config), config.encoder
    if encoder is None:
        width = _width(config.width, layers) if sizes else config.width
        return _stack(config, layers, width, sizes) | {"vocab_size": VOCAB_SIZE}
    inner = _distinct_layers(encoder)
    alike = encoder.width == config.width  # then both stay so
    width, encoder_width = config.width, encoder.width
    if sizes:
        width = _width(width, layers + inner if alike else layers)
        encoder_width = width if alike else _width(encoder_width, inner)
    data = _stack(config, layers, width, sizes) | {"vocab_size": VOCAB_SIZE}
    small = _stack(encoder, inner, encoder_width, sizes)
    data["encoder"] = small | ({"vocab_size": VOCAB_SIZE} if "vocab_size" in small else {})
    for mixer in _mixers(data["layers"]):
        if "encoder_width" in mixer:
            mixer["encoder_width"] = encoder_width
    return data


def _distinct_layers(config: ModelConfig) -> list[Data]:
    distinct: list[Data] = []
    for _, layer in config.expand():
        plain = {name: value for name, value in layer.dump().items() if name != "repeat"}
        if plain not in distinct:
            distinct.append(plain)
    return distinct


def _stack(config: ModelConfig, distinct: list[Data], width: int, sizes: bool) -> Data:
    """A design without its encoder, with each distinct layer once."""
    layers = distinct * 2 if len(distinct) == 1 and config.depth > 1 else distinct
    data = config.dump() | {"width": width}
    data["layers"] = [_layer(layer, config.width, width, sizes) for layer in layers]
    position = data["embedding"].get("position")
    if position and "length" in position:
        data["embedding"] = data["embedding"] | {"position": position | {"length": LEARNED_POSITIONS}}
    return data


def _small_count(number: int) -> int:
    """1, 2 or 3, with the parity of the number."""
    return number if number <= 3 else 3 - (number + 1) % 2


def _at_most(number: int, most: int) -> int:
    """The number if it is at most `most` (which is even), else `most`, plus 1 for an odd number."""
    return number if number <= most else most + number % 2


def _heads(mixer: Data) -> tuple[int, int]:
    heads: int = mixer["heads"]
    groups = mixer.get("kv_heads") or mixer.get("key_heads") or heads
    few = _small_count(groups)
    return few * _small_count(heads // groups), few


def _is_mixer(value: Any) -> bool:
    return isinstance(value, dict) and value.get("kind") in kinds("mixers")


def _mixers(layers: list[Data]) -> list[Data]:
    """Every mixer, also those within other mixers."""
    mixers = [layer["mixer"] for layer in layers if layer.get("mixer")]
    for mixer in mixers:  # grows as it goes
        mixers += [value for value in mixer.values() if _is_mixer(value)]
    return mixers


def _width(width: int, layers: list[Data]) -> int:
    least = 1
    odd = width % 2 == 1
    for mixer in _mixers(layers):
        if "heads" in mixer and "head_dim" not in mixer:
            least = lcm(least, _heads(mixer)[0])
            odd = odd or width // mixer["heads"] % 2 == 1
    step = least if odd else 2 * least
    times = -(-16 // step)
    return step * (times + (1 - times % 2 if odd else 0))


def _layer(layer: Data, width: int, small_width: int, sizes: bool) -> Data:
    layer = dict(layer)
    mixer, feedforward = layer.get("mixer"), layer.get("feedforward")
    if mixer is not None:
        layer["mixer"] = _mixer(mixer, width, small_width, sizes)
    if feedforward is not None and sizes and "hidden" in feedforward:
        layer["feedforward"] = _feedforward(feedforward)
    return layer


def _feedforward(feedforward: Data) -> Data:
    if "experts" not in feedforward:
        return feedforward | {"hidden": _at_most(feedforward["hidden"], 20)}
    most = {"hidden": 8, "shared_hidden": 8}
    small = feedforward | {
        name: _at_most(feedforward[name], limit) for name, limit in most.items() if name in feedforward
    }
    if "shared" in feedforward:
        small["shared"] = min(feedforward["shared"], 2)
    experts, groups = feedforward["experts"], feedforward.get("groups")
    few_experts = selectable = min(experts, 4)
    if groups:
        few_groups, per_group = min(groups, 4), min(experts // groups, 2)
        small["groups"], small["top_groups"] = few_groups, _share(feedforward["top_groups"], few_groups, groups)
        few_experts, selectable = few_groups * per_group, small["top_groups"] * per_group
    small["experts"], small["top_k"] = few_experts, min(_share(feedforward["top_k"], few_experts, experts), selectable)
    return small


def _share(part: int, few: int, whole: int) -> int:
    """The same share of `few` as `part` is of the whole, but at least 2 if `part` was."""
    return max(min(part, 2), part * few // whole)


def _mixer(mixer: Data, width: int, small_width: int, sizes: bool) -> Data:
    small = dict(mixer)
    for name, value in mixer.items():
        if _is_mixer(value):
            small[name] = _mixer(value, width, small_width, sizes)
    if mixer.get("window"):
        small["window"] = min(mixer["window"], MAX_WINDOW)
    if sizes and mixer.get("encoder_width"):
        small["encoder_width"] = _at_most(mixer["encoder_width"], 10)
    if not sizes or "heads" not in mixer:
        return small
    small["heads"], groups = _heads(mixer)
    if "kv_rank" in mixer:
        return small | _latent(mixer)
    for name in ("kv_heads", "key_heads"):
        if name in mixer:
            small[name] = groups
    head = mixer.get("head_dim") or width // mixer["heads"]
    small_head = _at_most(head, 8) if "head_dim" in mixer else small_width // small["heads"]
    if "head_dim" in mixer:
        small["head_dim"] = small_head
    if "value_dim" in mixer:
        value = mixer["value_dim"]
        small["value_dim"] = small_head + (value > head) - (value < head and small_head > 1)
    position = mixer.get("position")
    if position:
        small["position"] = _position(position, head, small_head)
    return small


def _latent(mixer: Data) -> Data:
    most = {"kv_rank": 10, "query_rank": 8, "nope_dim": 6, "rope_dim": 4}
    small: Data = {name: _at_most(mixer[name], limit) for name, limit in most.items() if name in mixer}
    if "value_dim" in mixer:
        value, nope, least = mixer["value_dim"], mixer["nope_dim"], small["nope_dim"]
        small["value_dim"] = least + (value > nope) - (value < nope and least > 1)
    if mixer.get("position"):
        small["position"] = _position(mixer["position"], mixer["rope_dim"], small["rope_dim"])
    return small


def _position(position: Data, head: int, small_head: int) -> Data:
    small = dict(position)
    dim = position.get("rotary_dim", head)
    if "rotary_dim" in position:
        small["rotary_dim"] = dim = small_head if dim == head else max(2, dim * small_head // head // 2 * 2)
    else:
        dim = small_head
    if "inv_freq" in position:
        small["inv_freq"] = _thinned(position["inv_freq"], dim // 2)
    if "scaling" in position:
        lists = {name: value for name, value in position["scaling"].items() if isinstance(value, list)}
        thinned = {name: _thinned(value, dim // 2) for name, value in lists.items()}
        small["scaling"] = position["scaling"] | thinned
    return small


def _thinned(values: list[float], count: int) -> list[float]:
    """`count` of the values, evenly spaced."""
    return [values[i * len(values) // count] for i in range(count)]
