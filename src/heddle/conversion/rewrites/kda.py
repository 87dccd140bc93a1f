"""Full attention becomes Kimi Delta Attention: a state of fixed size with a decay for each channel of the key.

Queries, keys, values and outputs start from attention's, as in `gated_delta`, and so does the convolution as the
identity; the low-rank gates are initialized as in a new model.
"""

from torch import Tensor

from heddle.conversion.mixer_replacement import MixerReplacement, identity_convolution
from heddle.parts.mixers import Mixer, MixerConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.kda import KDA, KDAConfig


class KDAReplacement(MixerReplacement):
    """Replace full attention by `kda`, fitted to attention's outputs."""

    def new_config(self, mixer: AttentionConfig) -> MixerConfig:
        """The same heads and head dims."""
        return KDAConfig(heads=mixer.heads, head_dim=mixer.head_dim, value_dim=mixer.value_dim)

    def first_values(self, mixer: Mixer) -> dict[str, Tensor]:
        """The identity as the convolution."""
        assert isinstance(mixer, KDA)
        return identity_convolution(mixer.conv_widths, mixer.conv_kernel)
