"""Full attention becomes linear attention with a learned feature map: a state of fixed size in place of a cache.

The map is Hedgehog's (Zhang et al. 2024). Queries, keys, values and outputs start from attention's, the map near the
identity, and all of them are fitted to attention's outputs (LoLCATs, Zhang et al. 2024, fits the map alone). Key and
value heads are repeated for the query heads they serve. A rotary embedding is kept, and rotates the features.
"""

from heddle.conversion.mixer_replacement import MixerReplacement, features
from heddle.parts.mixers import MixerConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.linear_attention import LinearAttentionConfig
from heddle.parts.positions import RotationConfig


class LinearAttentionReplacement(MixerReplacement):
    """Replace full attention by `linear_attention` with a learned feature map, fitted to attention's outputs."""

    def new_config(self, mixer: AttentionConfig) -> MixerConfig:
        """The same heads and head dims, and the rotary embedding."""
        return LinearAttentionConfig(
            heads=mixer.heads,
            head_dim=mixer.head_dim,
            value_dim=mixer.value_dim,
            feature_map="learned",
            position=mixer.position if isinstance(mixer.position, RotationConfig) else None,
        )

    def missing_features(self, mixer: AttentionConfig) -> list[str]:
        """Everything but a rotation."""
        rotates = isinstance(mixer.position, RotationConfig)
        return [name for name in features(mixer) if not (rotates and name.startswith("position"))]
