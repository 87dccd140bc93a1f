"""What Qwen2 and Qwen3 share: windows above the first layers, if they are on, and a plain gated feed-forward."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _local
from heddle.exchange.fields import Fields
from heddle.exchange.rope import FULL, SLIDING
from heddle.model.config import ModelConfig


def read(fields: Fields, mixer: dict[str, Any]) -> dict[str, Any]:
    """A design of layers with this mixer, and the window of each.

    Without `layer_types`, `use_sliding_window` gives a window to layers from `max_window_layers` on.
    """
    window, first = fields.given("sliding_window", 4096), fields.take("max_window_layers", 28)
    if not fields.take("use_sliding_window", False):
        window = None
    types = [FULL if window is None or index < first else SLIDING for index in range(_local.depth(fields))]
    feedforward = _blocks.read_gated(fields)
    shared = {"dropout": fields.take("attention_dropout", 0.0)}
    layers = [
        {"mixer": mixer | shared | {"window": one}, "feedforward": feedforward}
        for one in _local.windows(fields, _local.read_types(fields, types), window)
    ]
    norm = {"kind": "rms", "eps": fields.take("rms_norm_eps", 1e-6)}
    return _blocks.frame(fields, norm, _local.stack(layers))


def write(design: ModelConfig) -> dict[str, Any]:
    """As read; older readers know no `layer_types`, so they are told where windows begin."""
    window, types = views.window(design), views.layer_types(design)
    return (
        _blocks.write_frame(design)
        | _blocks.write_attention(design)
        | _blocks.write_gated(design)
        | {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": design.depth if window is None else types.index(SLIDING),
            "layer_types": types,
            "rms_norm_eps": views.eps(design),
        }
    )
