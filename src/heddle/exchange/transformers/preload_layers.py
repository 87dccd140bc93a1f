"""Weights that `device_map` offloads to the CPU or to disk: a layer's are loaded together, before it runs.

accelerate loads the weights of a module when the module is called. Mixers and experts read the weights of their
projections, which are then never called, and would compute with memory that nobody filled.
"""

from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import PrefixedDataset
from torch import nn

from heddle.model.decoder import Layer


def preload_layers(model: nn.Module) -> None:
    """Move the hooks that load offloaded weights from the modules within each layer to the layer."""
    for name, layer in model.named_modules():
        hooks = [getattr(module, "_hf_hook", None) for module in layer.modules()] if isinstance(layer, Layer) else []
        hook = next((hook for hook in hooks if isinstance(hook, AlignDevicesHook) and hook.offload), None)
        if hook is None:
            continue
        remove_hook_from_submodules(layer)
        layer_hook = AlignDevicesHook(
            execution_device=hook.execution_device,
            offload=True,
            weights_map=PrefixedDataset(hook.weights_map.dataset, f"{name}."),
            place_submodules=True,
            skip_keys=hook.skip_keys,
            tied_params_map=hook.tied_params_map,
        )
        add_hook_to_module(layer, layer_hook)
