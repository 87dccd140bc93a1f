"""Copies of a model: with int8 or int4 weights for generation on a CPU, and with compiled layers."""

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.numerics.quantized import BITS, can_quantize, dequantize, quantize, quantized_linear
from heddle.parts.modules.eager import eager_methods
from heddle.parts.modules.linear import Linear

# Not quantized: matrices that a mixer multiplies with each other, and routers, since small errors change their choices.
EXEMPT = ("k_up", "v_up", "router")
HEAD_BITS = 8


class QuantizedLinear(nn.Module):
    """Replaces a `Linear`: `y = x Wᵀ + b` with W [outputs, inputs] of 8 or 4 bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int) -> None:
        super().__init__()
        self.matrix, self.bias = quantize(weight, bits), bias
        self.inputs, self.dtype = weight.shape[1], weight.dtype

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs], dequantized at each access."""
        return dequantize(self.matrix, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return quantized_linear(x, self.matrix, self.bias)

    def extra_repr(self) -> str:
        """The sizes and bits."""
        return f"{self.inputs}, {self.matrix.codes.shape[0]}, bias={self.bias is not None}, bits={self.matrix.bits}"


class QuantizedModel(NamedTuple):
    """A quantized model, its number of weights, and how many of them were quantized.

    A tied head counts as quantized; the embedding that it shares stays as it is, for lookups.
    """

    model: Decoder
    weights: int
    quantized: int


def quantize_weights(model: Decoder, bits: int) -> QuantizedModel:
    """Return a copy in eval mode with int8 or int4 weights; it shares all other parameters with the model.

    The head is int8 in both cases: in int4 it adds a quarter as much loss as all other weights together. Embeddings,
    norms, convolutions, stacks of experts and routers are not quantized, nor are matrices of sizes that torch's kernels
    do not support: inputs must be multiples of 32, and for int4 outputs multiples of 16. Raises ConfigError for other
    bits, a device other than the CPU, a dtype other than float32, bfloat16 and float64, or a design without a matrix
    that can be quantized.
    """
    device, dtype = model.embed.weight.device, model.embed.weight.dtype
    if bits not in BITS:
        raise ConfigError(f"weights: {bits} bits; choices: 8, 4")
    if device.type != "cpu":
        raise ConfigError(f"weights: int{bits} is for the CPU, and the device is {device.type}; use the CPU")
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ConfigError(f"weights: int{bits} needs a float32 or bfloat16 model, and this one is {dtype}; convert it")
    changed = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()}).eval()
    count, made = 0, dict[int, QuantizedLinear]()
    for path, module in list(changed.named_modules()):
        parent, _, name = path.rpartition(".")
        if (
            type(module) is Linear
            and name not in EXEMPT
            and can_quantize(module.out_features, module.in_features, bits)
        ):
            if id(module.weight) not in made:  # layers may be visited several times
                made[id(module.weight)] = QuantizedLinear(module.weight, module.bias, bits)
                count += module.weight.numel()
            setattr(changed.get_submodule(parent), name, made[id(module.weight)])
    head = changed.head.weight
    if can_quantize(head.shape[0], head.shape[1], HEAD_BITS):
        changed.head.projection = QuantizedLinear(head, changed.head.bias, HEAD_BITS)
        count += head.numel()
    if count == 0:
        raise ConfigError(
            f"weights: no matrix of this design has a size that int{bits} supports; use int8 or leave it out"
        )
    return QuantizedModel(changed, sum(parameter.numel() for parameter in model.parameters()), count)


# A copy of a model with compiled layers, which shares every parameter with the plain model.


def should_compile(device: str) -> bool:
    """Whether to compile layers by default on a device such as "cuda:1": on CUDA, with Triton installed.

    There, eager layers are bound by thousands of kernel launches. On a CPU, compiling takes longer than it saves in
    most runs.
    """
    return device.partition(":")[0] == "cuda" and find_spec("triton") is not None


def compiled(model: Decoder, backend: str | Callable[..., Any] | None = None) -> Decoder:
    """Return a copy over the same parameters whose layers are compiled with `torch.compile`. The model stays eager.

    Methods marked `eager` (attention over a layout, expert statistics) are not compiled, so that a new layout never
    causes a recompilation. `backend` is torch.compile's; None is its default.
    """
    device = model.embed.weight.device.type
    compiled_model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in compiled_model.modules():
        for name in eager_methods(module, device):
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
    options: dict[str, Any] = {} if backend is None else {"backend": backend}
    for stack in (compiled_model, compiled_model.encoder):
        if stack is None:
            continue
        # A growing stream, or a shorter sequence, would make sizes dynamic in the graphs that layers share.
        own_graphs = options | {"isolate_recompiles": True}
        for layer in stack.layers:
            layer.compile(**(own_graphs if stack.config.residual.stream_grows else options))
        for module in stack.multi_token:
            module.get_submodule("layer").compile(**own_graphs)
    return compiled_model
