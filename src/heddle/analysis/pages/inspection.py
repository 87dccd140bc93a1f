"""The page of an inspected model: maps of every head's attention weights, and a table of the layers."""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heddle.analysis.comparison.formatting import NO_VALUE, format_bytes, format_context
from heddle.analysis.inspection.collect import LONG_CONTEXT, LayerInspection
from heddle.analysis.pages.render import render

MIN_SINK_SHARE = 1e-6  # a smaller one is rounding


@dataclass(frozen=True)
class InspectedModel:
    """A model and what it read: its name, its number of parameters, and the text of each token."""

    name: str
    parameters: int
    token_texts: Sequence[str]


def inspect_page(model: InspectedModel, layers: Sequence[LayerInspection]) -> str:
    """The page as one HTML document; the same input gives the same bytes."""
    tokens = [visible_token(text) for text in model.token_texts]
    return render(
        "inspect.html",
        title=f"heddle inspect: {model.name}",
        model=model,
        layer_count=len(layers),
        head_count=sum(layer.weights.heads for layer in layers if layer.weights is not None),
        tokens=tokens,
        state_contexts=[format_context(context) for context in (len(tokens), LONG_CONTEXT)],
        rows=[(layer.mixer, _cells(layer)) for layer in layers],
        weights={"tokens": tokens, "layers": [_script_data(layer) for layer in layers]},
    )


def visible_token(text: str) -> str:
    """A token as it is shown: line breaks, tabs, a token of spaces and an empty token get a symbol."""
    symbols = text if text.strip() else text.replace(" ", "·")
    return symbols.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍") or "∅"


def _cells(layer: LayerInspection) -> list[str]:
    """A row of the table: heads, groups, visible range, four averages, and the state at two contexts."""
    states = [NO_VALUE] * 2 if layer.state_bytes is None else [format_bytes(size) for size in layer.state_bytes]
    weights = layer.weights
    if weights is None:
        return [NO_VALUE, NO_VALUE, layer.visible_range, *[NO_VALUE] * 4, *states]
    return [
        str(weights.heads),
        layer.latent or str(weights.groups),
        layer.visible_range,
        NO_VALUE if weights.mean_distance is None else f"{weights.mean_distance:.1f} tokens",
        NO_VALUE if weights.self_share is None else f"{weights.self_share:.0%}",
        f"{weights.first_token_share:.0%}",
        f"{weights.sink_share:.0%}" if weights.sink_share > MIN_SINK_SHARE else NO_VALUE,
        *states,
    ]


def _script_data(layer: LayerInspection) -> dict[str, Any]:
    """What the script draws of a layer. codes: the weights' bytes, compressed with zlib, in base64."""
    data: dict[str, Any] = {
        "kind": layer.mixer.split(" ")[0],
        "visible_range": layer.visible_range,
        "latent": layer.latent,
    }
    if layer.weights is not None:
        data |= {
            "heads": layer.weights.heads,
            "groups": layer.weights.groups,
            "keys": layer.weights.keys,
            "codes": base64.b64encode(zlib.compress(layer.weights.weight_codes, 9)).decode("ascii"),
            "window": layer.window,
            "causal": layer.causal,
        }
    return data
