"""Initialize the weights that a loaded folder does not hold."""

import torch

from heddle.model.decoder import Decoder
from heddle.model.initialization import initialize
from heddle.parts.modules.linear import SelfInitialized


@torch.no_grad()
def init_missing_weights(decoder: Decoder) -> None:
    """Initialize the weights that were not loaded, as `heddle.build(seed=torch.initial_seed())` does."""
    loaded = {p for p in decoder.parameters() if getattr(p, "_is_hf_initialized", False)}

    def is_incomplete(module: SelfInitialized) -> bool:
        return any(parameter not in loaded for parameter in module.parameters(recurse=False))

    # A module initializes all of its parameters, so those that were loaded are saved and restored.
    modules = [module for module in decoder.modules() if isinstance(module, SelfInitialized) and is_incomplete(module)]
    saved = {p: p.clone() for module in modules for p in module.parameters(recurse=False) if p in loaded}
    initialize(decoder, torch.initial_seed(), is_incomplete)
    for parameter, value in saved.items():
        parameter.copy_(value)
