"""A copy of a model whose projections and head have weights of 8 or 4 bits, for generation on a CPU."""

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

# Matrices that a mixer multiplies with each other, and a router's, whose choices small errors change.
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
        """[outputs, inputs], made at each access."""
        return dequantize(self.matrix, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return quantized_linear(x, self.matrix, self.bias)

    def extra_repr(self) -> str:
        """The sizes and bits."""
        return f"{self.inputs}, {self.matrix.codes.shape[0]}, bias={self.bias is not None}, bits={self.matrix.bits}"


class QuantizedModel(NamedTuple):
    """A model, how many weights it had, and how many of them now have fewer bits.

    A tied head counts; the embedding that it shares stays for looking tokens up.
    """

    model: Decoder
    weights: int
    quantized: int


def quantize_weights(model: Decoder, bits: int) -> QuantizedModel:
    """Return a copy in eval mode with weights of 8 or 4 bits; it shares all others with the model.

    The head has 8 bits in both cases: with 4 it adds a quarter as much loss as all other weights together. Embeddings,
    norms, convolutions, stacks of experts and routers stay as they are, and so do matrices whose sizes torch's kernels
    do not have: inputs in multiples of 32, and for 4 bits outputs in multiples of 16. Raises
    ConfigError for other bits, another device than a CPU, a dtype other than float32, bfloat16 and float64, or a design
    without a matrix that can be quantized.
    """
    device, dtype = model.embed.weight.device, model.embed.weight.dtype
    if bits not in BITS:
        raise ConfigError(f"weights: {bits} bits; choices: 8, 4")
    if device.type != "cpu":
        raise ConfigError(f"weights: int{bits} is for the CPU, and the device is {device.type}; use the CPU")
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ConfigError(f"weights: int{bits} multiplies float32 and bfloat16, and the model is {dtype}; use those")
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
            f"weights: no matrix of this design has sizes that int{bits} can have; use int8 or leave it out"
        )
    return QuantizedModel(changed, sum(parameter.numel() for parameter in model.parameters()), count)


# A copy of a model with compiled layers, which shares every parameter with the plain model.


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
    options: dict[str, Any] = {} if backend is None else {"backend": backend}
    for stack in (compiled_model, compiled_model.encoder):
        if stack is None:
            continue
        # A stream that grows, or a shorter text, would make the sizes of graphs that layers share variables.
        own_graphs = options | {"isolate_recompiles": True}
        for layer in stack.layers:
            layer.compile(**(own_graphs if stack.config.residual.stream_grows else options))
        for module in stack.multi_token:
            module.get_submodule("layer").compile(**own_graphs)
    return compiled_model
