"""A model whose layers are compiled, sharing every parameter with the plain one."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from heddle.model.decoder import Decoder
from heddle.parts.modules.eager import eager_methods


def compiled(model: Decoder, backend: str | Callable[..., Any] | None = None) -> Decoder:
    """A twin over the same parameters, its layers compiled with `torch.compile`; the model itself stays plain.

    Methods marked `eager` (attention over a layout, tables of positions, keyed noise) run uncompiled between the
    compiled pieces, so a new layout never compiles anything anew. `backend` is torch.compile's; None is its default.
    """
    twin = copy.deepcopy(model, {id(one): one for one in model.parameters()})
    for module in twin.modules():
        for name in eager_methods(module):
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
    for stack in (twin, twin.encoder):
        for layer in () if stack is None else stack.layers:
            layer.compile() if backend is None else layer.compile(backend=backend)
    return twin
