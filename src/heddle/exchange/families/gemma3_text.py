"""Gemma 3's text model (Gemma Team 2025): Gemma 2 with norms of q and k, without caps, and two rotations.

Five layers with a window, theta 1e4, to one without, theta 1e6.
"""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _gemma, _local
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_ropes, write_ropes
from heddle.model.config import ModelConfig


def read(fields: Fields) -> dict[str, Any]:
    """Both spellings: `layer_types` or `sliding_window_pattern`, a table of each rotation or one theta of each."""
    mixer = _gemma.read_mixer(fields) | {"qk_norm": "head"}
    fields.expect("attn_logit_softcapping", None)  # their class reads it and caps nothing
    thetas = fields.take("rope_theta", 1e6), fields.take("rope_local_base_freq", 1e4)
    ropes = read_ropes(fields, mixer["head_dim"], *thetas)
    period = fields.take("sliding_window_pattern", 6, "_sliding_window_pattern")
    if period < 1:
        raise fields.wrong("sliding_window_pattern", "should be at least 1, which gives no layer a window")
    types = _local.read_types(fields, _local.every(period, fields))
    windows = _local.windows(fields, types, fields.given("sliding_window", _gemma.WINDOW))
    mixers = [mixer | {"window": window, "position": ropes[kind]} for kind, window in zip(types, windows, strict=True)]
    return _gemma.read(fields, mixers, fields.given("final_logit_softcapping", None))


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    full, sliding = _local.ropes(design)
    told = write_ropes(full, sliding, views.attention(design).head_dim or design.width)
    return _gemma.write(design) | told | {"rope_local_base_freq": sliding.base, "attn_logit_softcapping": None}


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", read, write, _gemma.rules, preferred=5)
