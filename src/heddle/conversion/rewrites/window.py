"""Full attention becomes local: a query sees the last `window` tokens, and the cache holds no more.

No weight changes. With `keep`, the layers that become local are those that raise the loss on the user's text the least
when they alone get a window, or that give the least attention weight to what the window hides. (The loss chooses
better: evenly spread attention gives much weight to far tokens and needs none of them.) Every mixer that can have a
window gets one; a smaller window stays. The conversion is exact for texts that fit in the window.
"""

import copy
from collections.abc import Mapping
from typing import ClassVar, Literal

from heddle.config import DesignError, PositiveInt
from heddle.conversion.branches import layer_modules
from heddle.conversion.rewrite import Rewrite, replace_layers
from heddle.conversion.sensitivity import LayerCount, count_layers, hidden_attention, replacement_losses, top_layers
from heddle.conversion.weights import CalibrationText, ConvertedWeights, LayerActivations, Weights, activations_of
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.parts.mixers import Mixer
from heddle.progress import print_status


class Window(Rewrite):
    """`window`: the maximum keys that a query sees, itself included; to each side, if attention is not causal.

    keep: how many layers stay unchanged, or their share (1/4). by: how they are chosen, by the loss increase when
    a layer alone gets a window, or by the attention weight of tokens beyond it.
    longest_text: tokens of the longest text to be read; if it fits in the window, the conversion is exact.
    """

    targets: ClassVar[Mapping[str, str]] = {"window": "window"}
    window: PositiveInt
    keep: LayerCount | None = None
    by: Literal["loss", "attention"] = "loss"
    longest_text: PositiveInt | None = None

    @property
    def needs_text(self) -> bool:
        """True if it chooses layers."""
        return self.keep is not None

    @property
    def fits_on_text(self) -> bool:
        """False: layers are compared, and no weight changes."""
        return False

    def is_exact(self, design: ModelConfig) -> bool:
        """True if every text fits in the window."""
        return self.longest_text is not None and self.longest_text <= self.window

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if no layer can have a smaller window."""
        design = source.design
        changed: dict[int, LayerConfig] = {}
        for index in self.selected_layers(design):
            layer = design.layers[index]
            mixer = None if layer.mixer is None else layer.mixer.with_window(self.window)
            if mixer != layer.mixer:
                changed[index] = layer.replace(mixer=mixer)
        if not changed:
            reason = f"no layer has attention that sees more than {self.window} tokens; give a smaller window"
            raise DesignError("window", reason)
        if self.keep is not None:
            assert text is not None
            self._check_reaches(text)
            count = count_layers(self.keep, len(changed))
            effects = self._effects(source, text, replace_layers(design, changed), frozenset(changed))
            full = top_layers(effects, count)
            what = "attention weight beyond it" if self.by == "attention" else "loss increase of each layer alone"
            shown = ", ".join(f"layer {index} {value:.4g}" for index, value in effects.items())
            print_status(f"window {self.window}: {what}: {shown}; unchanged: {list(full)}")
            changed = {index: layer for index, layer in changed.items() if index not in full}
        return ConvertedWeights(source, replace_layers(design, changed))

    def _check_reaches(self, text: CalibrationText) -> None:
        """Raises DesignError if no sequence of the text exceeds the window, so that layers cannot be compared."""
        longest = max(batch.shape[1] for batch in text.batches)
        if longest <= self.window:
            reason = f"sequences of {longest} tokens fit in a window of {self.window}, so layers cannot be compared"
            raise DesignError("keep", f"{reason}; give --sequence-length {2 * self.window}, or name the layers")

    def _effects(
        self, source: Weights, text: CalibrationText, design: ModelConfig, changed: frozenset[int]
    ) -> dict[int, float]:
        """The effect of a window in each layer that could change: loss increase or hidden attention weight."""
        if self.by == "loss":
            windowed = build(design, device="meta").eval()
            return replacement_losses(
                source, text, lambda layer: _windowed_mixer(windowed, layer) if layer.index in changed else None
            )
        measured = activations_of(source, text, changed, "measuring attention")
        return {activations.index: hidden_attention(activations, self.window) for activations in measured}


def _windowed_mixer(windowed: Decoder, activations: LayerActivations) -> Mixer:
    """The windowed mixer with the layer's weights."""
    mixer, original = copy.deepcopy(layer_modules(windowed, activations.index).mixer), activations.layer.mixer
    assert mixer is not None
    assert original is not None
    mixer.load_state_dict(original.state_dict(), assign=True)
    return mixer
