"""Full attention becomes the gated delta rule: a state of fixed size in place of a cache (Yang et al. 2024).

Queries, keys, values and outputs start from attention's, as in Mamba in the Llama (Wang et al. 2024) and MOHAWK (Bick
et al. 2024); key and value heads are repeated for the query heads they serve. The convolution starts as the identity,
which leaves a quarter less error than a random one; decay, β and the gate are initialized as in a new model. A
per-channel gate is copied. Positions are left out: the decay and the convolution encode the order.
"""

from typing import Any, ClassVar

from heddle.conversion.mixer_replacement import MixerReplacement
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig


class GatedDeltaReplacement(MixerReplacement):
    """Replace full attention by `gated_delta`, fitted to attention's outputs; `keep=1/4` keeps a quarter of them."""

    new: ClassVar[type[Any]] = GatedDeltaConfig

    def missing_features(self, mixer: AttentionConfig) -> list[str]:
        """Not a gate per channel either."""
        return [name for name in super().missing_features(mixer) if name != "gate" or mixer.gate != "channel"]
