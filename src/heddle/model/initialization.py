"""Initialization: allocate the parameters of a model built on the meta device, and draw their first values."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from heddle.numerics.random import ParameterDraws
from heddle.parts.modules.linear import SelfInitialized
from heddle.parts.residuals import InitialScales

if TYPE_CHECKING:
    from heddle.model.decoder import Decoder


def initialize(model: "Decoder", seed: int, include: Callable[[SelfInitialized], bool] = lambda module: True) -> None:
    """Initialize every parameter of the modules that `include` accepts.

    The values depend only on the seed and each parameter's name, not on other parameters or the device.
    """
    for name, module in model.own_modules():
        initialize_module(model, name, module, seed, include)


def initialize_module(
    model: "Decoder",
    name: str,
    module: nn.Module,
    seed: int,
    include: Callable[[SelfInitialized], bool] = lambda module: True,
) -> None:
    """Initialize the parameters that one module of a model owns, if there are any."""
    stack = model if model.encoder is None or not name.startswith("encoder.") else model.encoder
    config = stack.config.initialization
    if not isinstance(module, SelfInitialized):
        if next(module.parameters(recurse=False), None) is not None:
            raise TypeError(f"{name}: owns parameters but is not a SelfInitialized, so nothing initializes them")
        return
    scales = stack.config.residual.initial_scales(stack.config.depth) if config.depth_scaled else InitialScales()
    module.value_scale, module.output_scale = scales
    if include(module):
        module.init_weights(config.std, ParameterDraws(seed, name))


def storage_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a model of `dtype` stores a parameter in: at least float32 if it has no gradient."""
    return dtype if parameter.requires_grad else torch.promote_types(dtype, torch.float32)


def set_parameter(module: nn.Module, name: str, value: torch.Tensor, requires_grad: bool) -> None:
    """Put a tensor in place of a parameter, such as `mixer.q.weight`; of any dtype, device and shape."""
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, nn.Parameter(value, requires_grad))


def materialize(model: "Decoder", dtype: torch.dtype, device: torch.device | str) -> None:
    """Allocate every parameter of a meta model, without setting its values. Shared ones stay shared."""
    _replace_values(model, lambda each: torch.empty(each.shape, dtype=storage_dtype(each, dtype), device=device))


def cast_parameters(model: "Decoder", dtype: torch.dtype) -> None:
    """Cast every parameter to the dtype that a model of `dtype` stores it in. Shared ones stay shared."""
    _replace_values(model, lambda each: each.detach().to(storage_dtype(each, dtype)))


def _replace_values(model: "Decoder", values: Callable[[nn.Parameter], torch.Tensor]) -> None:
    for name, parameter in list(model.named_parameters()):
        path, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(path), own_name, nn.Parameter(values(parameter), parameter.requires_grad))
    model.tie()
