"""A copy of a model with compiled layers, which shares every parameter with the plain model."""

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from heddle.model.decoder import Decoder
from heddle.parts.modules.eager import eager_methods


def should_compile(device: str) -> bool:
    """Whether to compile layers on a device, such as "cuda:1", where nobody chose: on CUDA, with Triton installed.

    There the time of eager layers is that of thousands of launches. On a CPU, compiling takes longer than it saves in
    most runs.
    """
    return device.partition(":")[0] == "cuda" and find_spec("triton") is not None


def compiled(model: Decoder, backend: str | Callable[..., Any] | None = None) -> Decoder:
    """Return a copy over the same parameters whose layers are compiled with `torch.compile`. The model stays plain.

    Methods marked `eager` (attention over a layout, what experts record) run uncompiled, so that a new layout never
    causes a recompilation. `backend` is torch.compile's; None is its default.
    """
    device = model.embed.weight.device.type
    compiled_model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in compiled_model.modules():
        for name in eager_methods(module, device):
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
    for stack in (compiled_model, compiled_model.encoder):
        for layer in () if stack is None else stack.layers:
            layer.compile() if backend is None else layer.compile(backend=backend)
    return compiled_model
