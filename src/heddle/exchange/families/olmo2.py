"""OLMo 2 (Team OLMo 2025): norms after the branches and of whole projections of q and k, every layer alike."""

from typing import Any

from heddle.exchange.families import _local, _olmo
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope


def read(fields: Fields) -> dict[str, Any]:
    """No windows."""
    mixer = _olmo.read_mixer(fields)
    mixer["position"] = read_rope(fields, mixer["head_dim"]) | _olmo.CAST
    return _olmo.read(fields, [mixer] * _local.depth(fields))


FAMILY = Family("olmo2", "Olmo2ForCausalLM", read, _olmo.write, _olmo.rules, preferred=6)
