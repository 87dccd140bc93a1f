"""FP8 training through torchao: products of `Linear` in float8 (Micikevicius et al. 2022).

Inputs, weights and gradients are scaled and rounded to float8 before each product. The parameters stay as they are, and
so do the stacked matrices of experts, the head and norms.
"""

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.parts.modules.linear import Linear
from heddle.progress import print_status
from heddle.training.settings import FLOAT8_MULTIPLE

_CAPABILITY = (8, 9)  # the oldest NVIDIA GPUs (Ada, Hopper) that multiply float8


def float8_copy(model: Decoder) -> Decoder:
    """Return a copy over the same parameters whose `Linear`s multiply in float8. The model stays plain.

    Matrices with a size that is no multiple of 16 stay as they are. Raises ConfigError where torchao or the device
    cannot do it, or where the design has no such matrix.
    """
    convert = _converter()
    reason = device_reason(model.embed.weight.device)
    if reason is not None:
        raise ConfigError(f"fp8: {reason}; leave fp8 out")
    float8_model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    if not any(_converts(module, path) for path, module in model.named_modules()):
        raise ConfigError(
            f"fp8: no projection of this design has sizes that are multiples of {FLOAT8_MULTIPLE}; leave fp8 out"
        )
    convert(float8_model, module_filter_fn=_converts)
    stacked = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 2)
    if stacked:
        print_status(f"fp8: {stacked:,} weights in stacks of matrices, such as experts, multiply in bfloat16")
    return float8_model


def device_reason(device: torch.device) -> str | None:
    """Say why a device cannot multiply float8; None if it can."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, and the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return f"needs compute capability 8.9 (Ada, Hopper) or newer, and this GPU has {'.'.join(map(str, capability))}"
    return None


def _converts(module: nn.Module, path: str) -> bool:
    is_projection = type(module) is Linear and path.rpartition(".")[2] != "router"  # a router is in float32
    sizes = (module.in_features, module.out_features) if isinstance(module, Linear) else ()
    return is_projection and all(size % FLOAT8_MULTIPLE == 0 for size in sizes)


def _converter() -> Callable[..., Any]:
    try:
        convert: Callable[..., Any] = importlib.import_module("torchao.float8").convert_to_float8_training
    except ImportError:
        raise ConfigError("fp8: needs torchao; install heddle-lm[gpu], or leave fp8 out") from None
    return convert
