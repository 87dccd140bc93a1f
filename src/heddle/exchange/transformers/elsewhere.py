"""Softmax attention computed by others: by the function that `attn_implementation` names, of a server for one.

transformers' contract: function(module, q, k, v, mask, scaling=, sliding_window=, …) -> (y, weights), with q, k, v
[B, heads, T, d], keys and values not repeated, and y [B, T, heads, d] or any shape that holds it in this order. What
kernels ask of a module is on the mixer: layer_idx, scaling, is_causal, num_key_value_groups and config. Further
keywords of a call go to each of its functions.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heddle.errors import ConfigError
from heddle.model.decoder import BY_LENGTH, Decoder
from heddle.parts.context.layout import Layout
from heddle.parts.mixers.attention import Attention

OWN = (None, "eager", "sdpa")  # heddle chooses its kernels itself
TOLD = "attention of others"


class Told(NamedTuple):
    """What a call was given: masks are made of the first two, the keywords go to each function."""

    attention_mask: Tensor | None
    position_ids: Tensor | None
    keywords: Mapping[str, Any]


def elsewhere(config: Any) -> bool:
    """Whether the attention of a HeddleConfig is computed by others."""
    return config._attn_implementation not in OWN


def obstacles(decoder: Decoder) -> list[str]:
    """Why attention cannot be computed by others, one reason a field; empty: it can.

    They keep one cache a layer, of heads that are alike in all layers, and know one window at most.
    """
    found: list[str] = []
    first: tuple[int, int, int] | None = None
    windows: set[int] = set()
    for index, mixer in enumerate(decoder.mixers()):
        place = f"layers[{index}].mixer"
        if not isinstance(mixer, Attention):
            found.append(f"{place} is {'absent' if mixer is None else type(mixer).__name__}, no softmax attention")
            continue
        fields = {"sink": mixer.sink, "softcap": mixer.softcap, "position, a bias of distance,": mixer.distance}
        found += [f"{place}.{name} is set" for name, value in fields.items() if value is not None]
        if not mixer.causal:
            found.append(f"{place}.causal is false")
        if mixer.value_dim != mixer.head_dim:
            found.append(f"{place}.value_dim is {mixer.value_dim}, not head_dim = {mixer.head_dim}")
        shape = (mixer.heads, mixer.kv_heads, mixer.head_dim)
        first = first or shape
        if shape != first:
            found.append(f"{place} has heads, kv_heads and head_dim {shape}, an earlier layer {first}")
        windows |= set() if mixer.reach is None else {mixer.reach}
    if len(windows) > 1:
        found.append(f"windows differ: {sorted(windows)}")
    if decoder.head.scale != 1.0 and decoder.head.softcap is not None:
        found.append("head.scale and head.softcap are both set")
    return [*found, *([BY_LENGTH] if decoder.by_length else [])]


def attach(decoder: Decoder, config: Any) -> bool:
    """Let the mixers call what the config names, or compute themselves as ever; returns whether others compute.

    Raises ConfigError for a design that others cannot compute, naming the first reason.
    """
    mixers = [mixer for mixer in decoder.mixers() if mixer is not None]
    if not elsewhere(config):
        for mixer in mixers:
            mixer.__dict__.pop("_attend", None)
        return False
    if all("_attend" in mixer.__dict__ for mixer in mixers):
        return True
    reasons = obstacles(decoder)
    if reasons:
        name = config._attn_implementation
        raise ConfigError(
            f"attn_implementation: '{name}' runs layers of softmax attention that are alike, but {reasons[0]}; "
            "leave it out, or serve the design with heddle or transformers"
        )
    for index, mixer in enumerate(mixers):
        assert isinstance(mixer, Attention)
        given = {
            "layer_idx": index, "scaling": mixer.scale, "is_causal": True, "config": config,
            "num_key_value_groups": mixer.heads // mixer.kv_heads, "_attend": partial(_attend, mixer),
        }  # fmt: skip
        for name, value in given.items():
            object.__setattr__(mixer, name, value)
    return True


def _attend(mixer: Attention, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: Any) -> tuple[Tensor, Any]:
    """In the place of the mixer's own, in calls through our classes: the function of others, with its kind of mask."""
    if TOLD not in layout.memo:
        return Attention._attend(mixer, q, k, v, layout, state)
    if mixer.dropout.active:
        raise ConfigError("dropout: of attention weights is keyed by sample, which others cannot draw; set it to 0")
    told: Told = layout.memo[TOLD]
    config: Any = mixer.config
    function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, None)
    make = create_causal_mask if mixer.reach is None else create_sliding_window_causal_mask
    mask = layout.once(
        (TOLD, mixer.reach),
        lambda: make(
            config=config,
            inputs_embeds=q[:, 0],
            attention_mask=told.attention_mask,
            past_key_values=None,
            position_ids=told.position_ids,
        ),
    )
    y = function(mixer, q, k, v, mask, scaling=mixer.scale, sliding_window=mixer.reach, dropout=0.0, **told.keywords)[0]
    return y.reshape(q.shape[0], q.shape[2], mixer.heads, mixer.value_dim).transpose(1, 2), None
