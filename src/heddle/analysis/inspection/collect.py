"""The weights of every head on one text, rounded to a byte each, and what can be said of them in a number."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.model.attention_maps import watch
from heddle.model.decoder import Decoder, build
from heddle.model.size import describe
from heddle.numerics.attention.observer import Observation
from heddle.parts.mixers import Mixer

LENGTH = 512  # tokens that a map can still show
CELLS = 2**25  # weights of all heads: 32 MB before they are packed
LONG = 8192  # the context at which states are told, beside that of the text


@dataclass(frozen=True)
class Maps:
    """The heads of one layer: bytes of shape [H, T, S], 255 · sqrt(weight) rounded; what heads do on average.

    distance: how many tokens back (or away) the weight stands; itself, first: the share of it on the token itself, and
    on the first one; sink: the share that goes to no token. All but the first token's queries count.
    """

    heads: int
    groups: int
    keys: int
    codes: bytes
    distance: float | None
    itself: float | None
    first: float
    sink: float


@dataclass(frozen=True)
class View:
    """One layer; `state` are its bytes at the text's length and at LONG, None for a bidirectional design."""

    mixer: str
    sees: str
    latent: str
    reach: int | None
    causal: bool
    state: tuple[int, int] | None
    maps: Maps | None


def collect(model: Decoder, tokens: list[int]) -> list[View]:
    """Each layer's view of a row of tokens. Raises ConfigError where there are too many for a page."""
    device = model.embed.weight.device
    text = torch.tensor([tokens], device=device)
    _check(model, text)
    maps: dict[int, Maps] = {}

    def take(index: int, observation: Observation) -> None:
        maps[index] = reduce(observation)

    watch(model, text, None, take)
    states = _states(model, len(tokens))
    return [
        _view(config.mixer.dump() if config.mixer is not None else {}, mixer, states[index], maps.get(index))
        for index, ((_, config), mixer) in enumerate(zip(model.config.expand(), model.mixers(), strict=True))
    ]


def _check(model: Decoder, text: Tensor) -> None:
    """One token tells how many heads there are."""
    heads = 0

    def take(index: int, observation: Observation) -> None:
        nonlocal heads
        heads += observation.weights.shape[1]

    watch(model, text[:, :1], None, take)
    if not heads:
        raise ConfigError("inspect: no mixer of this design has attention weights; nothing can be drawn")
    most = min(LENGTH, int((CELLS / heads) ** 0.5))
    if text.shape[1] > most:
        raise ConfigError(
            f"--text: has {text.shape[1]} tokens with the start token; a page of {heads} heads holds at most {most}; "
            "give a shorter text"
        )


def reduce(observation: Observation) -> Maps:
    """The weights of the first row of a batch as a map. They are at least 0, so a byte of the root serves all sizes."""
    weights = observation.weights[0].double().cpu()
    heads, queries, keys = weights.shape
    codes = (weights.sqrt() * 255).round().to(torch.uint8)
    later = weights[:, 1:] if queries > 1 else weights
    total = float(later.sum().clamp(min=1e-12))
    square = queries == keys
    away = (torch.arange(queries)[:, None] - torch.arange(keys)).abs().double()
    away = away[1:] if queries > 1 else away
    return Maps(
        heads=heads,
        groups=observation.groups,
        keys=keys,
        codes=codes.numpy().tobytes(),
        distance=float((later * away).sum()) / total if square else None,
        itself=float(later[away.expand_as(later) == 0].sum()) / total if square else None,
        first=float(later[:, :, 0].sum()) / total,
        sink=max(0.0, 1.0 - total / (heads * later.shape[1])),
    )


def _states(model: Decoder, length: int) -> list[tuple[int, int] | None]:
    """Bytes of each layer's state, read off the model built without memory."""
    if not model.causal:
        return [None] * len(model.layers)
    twin = build(model.config, dtype=model.embed.weight.dtype, device="meta")
    sizes = [twin.init_state(1, capacity).layer_bytes for capacity in (length, LONG)]
    return list(zip(*sizes, strict=True))


def _view(data: dict[str, object], mixer: Mixer | None, state: tuple[int, int] | None, maps: Maps | None) -> View:
    if mixer is None:
        return View("none", "nothing", "", None, True, None, None)
    if mixer.reach is not None:
        sees = f"{mixer.reach} tokens, itself included" if mixer.causal else f"{mixer.reach} tokens to each side"
    else:
        sees = "every earlier token" if mixer.causal else "every token"
    rank = data.get("kv_rank")
    latent = "" if rank is None else f"one latent of {rank} for all heads"
    return View(describe(data), sees, latent, mixer.reach, mixer.causal, state, maps)
