"""Full attention becomes Kimi Delta Attention: a state of fixed size with a decay for each channel of the key.

Queries, keys, values and outputs start from attention's, as in `gated_delta`, and so does the convolution as the
identity; the low-rank gates are initialized as in a new model.
"""

from typing import Any, ClassVar

from heddle.conversion.mixer_replacement import MixerReplacement
from heddle.parts.mixers.kda import KDAConfig


class KDAReplacement(MixerReplacement):
    """Replace full attention by `kda`, fitted to attention's outputs."""

    new: ClassVar[type[Any]] = KDAConfig
