"""A copy of a model with compiled layers, which shares every parameter with the plain model."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from heddle.model.decoder import Decoder
from heddle.parts.modules.eager import eager_methods


def compiled(model: Decoder, backend: str | Callable[..., Any] | None = None) -> Decoder:
    """Return a copy over the same parameters whose layers are compiled with `torch.compile`. The model stays plain.

    Methods marked `eager` (attention over a layout, position tables, keyed noise) run uncompiled, so that a new layout
    never causes a recompilation. `backend` is torch.compile's; None is its default.
    """
    compiled_model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in compiled_model.modules():
        for name in eager_methods(module):
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
    for stack in (compiled_model, compiled_model.encoder):
        for layer in () if stack is None else stack.layers:
            layer.compile() if backend is None else layer.compile(backend=backend)
    return compiled_model
