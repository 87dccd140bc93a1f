"""Full attention becomes RWKV-7's time mixing: a state of fixed size in place of a cache (Peng et al. 2025).

Its r, k, v and output projections start from attention's, and its gate near 1; token shift, decay and bonus are
initialized as in a new model.
"""

from typing import Any, ClassVar

from torch import Tensor

from heddle.conversion.mixer_replacement import MixerReplacement
from heddle.parts.mixers import Mixer
from heddle.parts.mixers.rwkv7 import RWKV7, RWKV7Config


class RWKV7Replacement(MixerReplacement):
    """Replace full attention by `rwkv7`, fitted to attention's outputs."""

    new: ClassVar[type[Any]] = RWKV7Config

    def first_values(self, mixer: Mixer) -> dict[str, Tensor]:
        """The gate's second matrix, which reads σ(0): its rows sum to about 2."""
        assert isinstance(mixer, RWKV7)
        weight = mixer.gate_up.weight.detach()
        return {"gate_up.weight": weight + 2.0 / weight.shape[1]}
