"""Copies of a model: with int8 or int4 weights for generation on a CPU, and with compiled layers."""

import copy
import fcntl
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heddle.errors import ConfigError, lacks_compiler
from heddle.model.decoder import Decoder
from heddle.numerics.quantized import BITS, can_quantize, dequantize, quantize, quantized_linear
from heddle.parts.feedforwards import Feedforward
from heddle.parts.layout import HandedOver, Layout
from heddle.parts.mixers import Mixer
from heddle.parts.modules.eager import eager_methods
from heddle.parts.modules.indexer import Indexer
from heddle.parts.modules.linear import Linear
from heddle.parts.modules.short_convolution import ShortConvolutions
from heddle.parts.positions import ScoreBias
from heddle.torch_private import compiler_cache, is_compiler_error

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

    A tied head counts as quantized; the embedding that it shares is unchanged, for lookups.
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


def compiled(model: Decoder, backend: str | Callable[..., Any] | None = None, whole: bool = False) -> Decoder:
    """Return a copy over the same parameters that is compiled with `torch.compile`. The model stays eager.

    Each layer is compiled by itself. Methods marked `eager` (attention over a layout, expert statistics) are not
    compiled, so that a new layout never causes a recompilation. `backend` is torch.compile's; None is its default.
    whole: calls without a state run all layers as one graph, attention included: one for rows of one document, one for
    packed rows, one for padded rows, whatever their documents. It is for a model with no `whole_graph_refusal`.
    """
    for category, message in COMPILER_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    device = model.embed.weight.device.type
    if device == "cpu":
        remove_damaged_libraries()
    compiled_model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    options: dict[str, Any] = {} if backend is None else {"backend": backend}
    own_graphs = options | {"isolate_recompiles": True}
    if whole:
        setattr(compiled_model, "run_layers", _whole_graph(compiled_model, own_graphs))  # noqa: B010
        return compiled_model
    for module in compiled_model.modules():
        for name in eager_methods(module, device):
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
    for stack in (compiled_model, compiled_model.encoder):
        if stack is None:
            continue
        # A growing stream, or a shorter sequence, would make sizes dynamic in the graphs that layers share.
        for layer in stack.layers:
            layer.compile(**(own_graphs if stack.config.residual.stream_grows else options))
        for module in stack.multi_token:
            module.get_submodule("layer").compile(**own_graphs)
    return compiled_model


def whole_graph_refusal(model: Decoder) -> str | None:
    """Why `compiled` must not make one graph of a model's layers on a CPU, or None.

    Recurrences would be unrolled over the text, and experts are chosen on the host.
    """
    if model.encoder is not None or len(model.multi_token):
        return "an encoder and multi-token modules have graphs of their own"
    if model.config.reads_tokens or model.embed.per_layer is not None:
        return "layers read tokens or parts of the embedding"
    if model.length_dependent:
        return "rotary angles depend on the length of the text"
    for module in model.layers.modules():
        is_slow = isinstance(module, Mixer | Feedforward | ScoreBias) and not module.fast_graph
        if is_slow or isinstance(module, Indexer | ShortConvolutions):
            return f"{type(module).__name__} has no fast graph"
    return None


COMPILER_WARNINGS = (  # of torch's compiler itself, which reads .grad of any tensor and instantiates autograd functions
    (UserWarning, "The .grad attribute of a Tensor that is not a leaf"),
    (DeprecationWarning, ".*should not be instantiated"),
    (DeprecationWarning, "`torch.jit.script_method` is deprecated"),
)


def _whole_graph(model: Decoder, options: dict[str, Any]) -> Callable[..., Any]:
    """`Decoder.run_layers` as a graph of tensors alone: neither the lengths nor the cache of a layout are traced."""
    run_layers, no_states, hands_over = model.run_layers, [None] * len(model.layers), model.config.hands_over

    def run(
        x: Tensor, positions: Tensor | None, segments: Tensor | None, coordinates: Tensor | None, padded: bool
    ) -> Tensor:
        rows, length = x.shape[:2]
        layout = Layout.causal(rows, length, device=x.device)
        if positions is not None:
            layout = Layout(positions, segments, has_padding=padded, is_checked=True)
        handed_over = HandedOver() if hands_over else None
        return run_layers(x, replace(layout, coordinates=coordinates, handed_over=handed_over), no_states)[0]

    graph = torch.compile(run, fullgraph=True, **options)

    def run_graph(x: Tensor, layout: Layout, states: list[Any]) -> tuple[Tensor, list[Any]]:
        if layout.attention_backend is not None or any(state is not None for state in states):
            return run_layers(x, layout, states)
        positions = None if layout.start == 0 else layout.positions
        with refusing_compiler_errors("compile: torch.compile cannot make one graph of the layers"):
            return graph(x, positions, layout.segment_ids, layout.coordinates, layout.has_padding), states

    return run_graph


def remove_damaged_libraries() -> None:
    """Remove what killed processes left half written in the cache of torch's compiler, which would load it and fail.

    Files that another process is building are locked, and stay.
    """
    folder = Path(compiler_cache())
    for path in (*folder.glob("*/*.so"), *folder.glob("*/*.o")):
        lock = folder / "locks" / f"{path.name.partition('.')[0]}.lock"
        with suppress(OSError):  # locked, or removed by another process at this time
            if not _is_whole(path):
                lock.parent.mkdir(exist_ok=True)
                with lock.open("a") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if not _is_whole(path):
                        path.unlink()


def _is_whole(path: Path) -> bool:
    """Whether a library or object is not empty and, on Linux, reaches to the end of its table of sections."""
    with path.open("rb") as file:
        start, size = file.read(64), path.stat().st_size
    if not sys.platform.startswith("linux"):
        return size > 0
    if len(start) < 64 or start[:5] != b"\x7fELF\x02":
        return False
    sections = int.from_bytes(start[40:48], sys.byteorder)
    each, count = (int.from_bytes(start[at : at + 2], sys.byteorder) for at in (58, 60))
    return 0 < sections <= size - each * count


@contextmanager
def refusing_compiler_errors(sentence: str) -> Iterator[None]:
    """Within the block, errors of torch's compiler become a ConfigError, except that a C++ compiler is missing."""
    try:
        yield
    except RuntimeError as error:
        if not is_compiler_error(error) or lacks_compiler(error):
            raise
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise ConfigError(f"{sentence} ({reason}); leave it out") from error
