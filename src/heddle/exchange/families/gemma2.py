"""Gemma 2 (Riviere et al. 2024): every other layer has a window, scores and logits are capped."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _gemma, _local
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read(fields: Fields) -> dict[str, Any]:
    """A cap that is absent is the published model's; null is none."""
    mixer = _gemma.read_mixer(fields)
    mixer["softcap"] = fields.given("attn_logit_softcapping", 50.0)
    mixer["position"] = read_rope(fields, mixer["head_dim"])
    types = _local.read_types(fields, _local.every(2, fields))
    windows = _local.windows(fields, types, fields.given("sliding_window", _gemma.WINDOW))
    mixers = [mixer | {"window": window} for window in windows]
    return _gemma.read(fields, mixers, fields.given("final_logit_softcapping", 30.0))


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    cap = {"attn_logit_softcapping": views.attention(design).softcap}
    return _blocks.write_attention(design) | _gemma.write(design) | cap


FAMILY = Family("gemma2", "Gemma2ForCausalLM", read, write, _gemma.rules, preferred=4)
