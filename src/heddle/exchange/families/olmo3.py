"""OLMo 3 (Team OLMo 2025): OLMo 2 with a window in three of four layers, which are turned without scaling."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _local, _olmo
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_ropes, write_ropes
from heddle.model.config import ModelConfig

WINDOW = 4096  # of a file that does not tell


def read(fields: Fields) -> dict[str, Any]:
    """A table of each type's rotation; before, one theta of both, and a scaling of full layers."""
    mixer = _olmo.read_mixer(fields)
    theta = fields.take("rope_theta", 5e5)
    ropes = read_ropes(fields, mixer["head_dim"], theta, theta)
    types = _local.read_types(fields, _local.every(4, fields))
    windows = _local.windows(fields, types, fields.given("sliding_window", WINDOW))
    mixers = [
        mixer | {"window": window, "position": ropes[kind] | _olmo.CAST}
        for kind, window in zip(types, windows, strict=True)
    ]
    return _olmo.read(fields, mixers)


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    told = write_ropes(*_local.ropes(design), views.attention(design).head_dim or design.width)
    local = {"sliding_window": views.window(design) or WINDOW, "layer_types": views.layer_types(design)}
    return _olmo.write(design) | told | local


FAMILY = Family("olmo3", "Olmo3ForCausalLM", read, write, _olmo.rules, preferred=7)
