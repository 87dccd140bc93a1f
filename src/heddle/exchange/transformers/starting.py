"""How what a folder does not hold starts."""

import torch

from heddle.model.decoder import Decoder, initialise
from heddle.parts.modules.linear import Leaf


@torch.no_grad()
def start(decoder: Decoder) -> None:
    """Fill what was not loaded, as `heddle.build(seed=torch.initial_seed())` does."""
    loaded = {p for p in decoder.parameters() if getattr(p, "_is_hf_initialized", False)}

    def wanted(leaf: Leaf) -> bool:
        return any(parameter not in loaded for parameter in leaf.parameters(recurse=False))

    leaves = [leaf for leaf in decoder.modules() if isinstance(leaf, Leaf) and wanted(leaf)]
    held = {p: p.clone() for leaf in leaves for p in leaf.parameters(recurse=False) if p in loaded}
    initialise(decoder, torch.initial_seed(), wanted)
    for parameter, value in held.items():
        parameter.copy_(value)
