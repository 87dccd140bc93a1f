"""Full attention becomes Mamba-2: a state of fixed size in place of a cache (Mamba in the Llama, Wang et al. 2024).

Mamba-2's C, B and x start from attention's queries, keys and values, its output projection from attention's, and the
convolution as the identity; key and value heads are repeated for the query heads they serve, so each head is a group.
"""

from heddle.conversion.head_parameters import head_sizes
from heddle.conversion.mixer_replacement import MixerReplacement
from heddle.parts.mixers import MixerConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.mamba2 import Mamba2Config


class Mamba2Replacement(MixerReplacement):
    """Replace full attention by `mamba2`, fitted to attention's outputs."""

    def new_config(self, mixer: AttentionConfig) -> MixerConfig:
        """As many heads and groups; the state is as large as a head of queries times one of values."""
        _, head_dim, value_dim = head_sizes(mixer)
        return Mamba2Config(heads=mixer.heads, head_dim=value_dim, state_size=head_dim, groups=mixer.heads)
