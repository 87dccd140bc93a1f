"""What one row costs in each layer: FLOPs, parameters, and what is saved for the backward pass.

Everything is measured on the meta device with the kernels of a GPU; nothing is allocated. Each distinct layer of the
design runs once and is multiplied by its count.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.limits import refuse_overflow
from heddle.model.shapes_only import ShapesOnly
from heddle.model.size import build_distinct_layers, parameter_counts
from heddle.numerics.dispatch.flop_counter import count_flops
from heddle.numerics.dispatch.operation import record_choices
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import Feedforward

BF16_BYTES = 2
PRODUCTS = {"addmm", "baddbmm", "bmm", "mm", "linear"}


@dataclass(frozen=True)
class LayerCost:
    """One of `count` equal layers. FLOPs and bytes are those of the forward pass of one row.

    attention_flops: those that grow with the square of the length. saved_bytes: what the backward pass needs, in
    bfloat16. product_bytes: the outputs of every second product and of attention, which selective recomputation keeps.
    input_bytes: the layer's input, which full recomputation keeps.
    """

    count: int
    parameters: int
    active_parameters: int
    flops: float
    attention_flops: float
    saved_bytes: int
    product_bytes: int
    input_bytes: int


@dataclass(frozen=True)
class ModelCost:
    """The layers, and what stands around them: embedding, last norm and head (`root`)."""

    layers: tuple[LayerCost, ...]
    parameters: int
    active_parameters: int
    root_parameters: int
    head_flops: float
    vocab_size: int
    width: int
    sequence_length: int

    @property
    def forward_flops(self) -> float:
        """FLOPs of the forward pass of one row, causal pairs only, with the head."""
        return self.head_flops + sum(layer.count * layer.flops for layer in self.layers)

    @property
    def attention_flops(self) -> float:
        """Those of `forward_flops` that grow with the square of the length."""
        return sum(layer.count * layer.attention_flops for layer in self.layers)

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max((layer.parameters for layer in self.layers), default=0)


@dataclass
class _LayerTrace:
    flops: int = 0
    saved: dict[int, tuple[int, Any]] = field(default_factory=dict)
    products: list[int] = field(default_factory=list)
    attention_bytes: int = 0
    input_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        return sum(size for size, _ in self.saved.values())

    @property
    def product_bytes(self) -> int:
        return sum(self.products[::2]) + self.attention_bytes + self.input_bytes


def model_cost(config: ModelConfig, sequence_length: int) -> ModelCost:
    """Measure a design for rows of `sequence_length` tokens. Raises ConfigError for one with an encoder."""
    if config.encoder is not None or config.vocab_size is None:
        reason = "vocab_size: is missing" if config.vocab_size is None else "encoder: a plan covers decoders only"
        raise ConfigError(f"{reason}; give a design without an encoder and with a vocab_size")
    model = build_distinct_layers(config, torch.bfloat16)
    parameters, active = parameter_counts(model)
    flops, total_flops = _layer_flops(model, sequence_length)
    traces = _traces(model, sequence_length)
    layers = []
    for layer, count, layer_flops, trace in zip(model.layers, model.layer_counts, flops, traces, strict=True):
        size = _parameters(layer)
        active_size = size - sum(x.inactive_parameters for x in layer.modules() if isinstance(x, Feedforward))
        linear = 2.0 * active_size * sequence_length
        layers.append(
            LayerCost(
                count=count,
                parameters=size,
                active_parameters=active_size,
                flops=layer_flops,
                attention_flops=max(0.0, layer_flops - linear),
                saved_bytes=trace.saved_bytes,
                product_bytes=min(trace.product_bytes, trace.saved_bytes),
                input_bytes=trace.input_bytes,
            )
        )
    in_layers = sum(layer.count * layer.parameters for layer in layers)
    return ModelCost(
        layers=tuple(layers),
        parameters=parameters,
        active_parameters=active,
        root_parameters=parameters - in_layers,
        head_flops=total_flops - sum(flops),
        vocab_size=config.vocab_size,
        width=config.width,
        sequence_length=sequence_length,
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def _around_layers(model: Decoder, enter: Any, leave: Any) -> Iterator[None]:
    """Within the block, call enter(index, arguments) before and leave(index) after each layer."""
    hooks = []
    for index, layer in enumerate(model.layers):
        hooks.append(layer.register_forward_pre_hook(lambda _, inputs, index=index: enter(index, inputs)))
        hooks.append(layer.register_forward_hook(lambda *_, index=index: leave(index)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _layer_flops(model: Decoder, sequence_length: int) -> tuple[list[float], float]:
    """FLOPs of one row: of each distinct layer once, and of all of these with the head."""
    starts, flops = [0] * len(model.layers), [0.0] * len(model.layers)
    with refuse_overflow(), ShapesOnly(), torch.no_grad(), count_flops() as total:

        def enter(index: int, _: Any) -> None:
            starts[index] = total[0]

        def leave(index: int) -> None:
            flops[index] = float(total[0] - starts[index])

        with _around_layers(model, enter, leave):
            hidden, _ = model(*_row(sequence_length))
            model.head(hidden)
    return flops, float(total[0])


def _row(sequence_length: int) -> tuple[Tensor, Layout]:
    tokens = torch.zeros(1, sequence_length, dtype=torch.int64, device="meta")
    return tokens, Layout.causal(1, sequence_length, device="meta")


def _traces(model: Decoder, sequence_length: int) -> list[_LayerTrace]:
    """What each distinct layer saves for the backward pass of one row."""
    traces = [_LayerTrace() for _ in model.layers]
    current: list[_LayerTrace] = []
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def enter(index: int, inputs: tuple[Any, ...]) -> None:
        current.append(traces[index])
        traces[index].input_bytes = sum(x.nbytes for x in inputs if isinstance(x, Tensor) and x.is_floating_point())

    def leave(index: int) -> None:
        current.pop()

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if current and storage._cdata not in weights and x.is_meta:
            current[-1].saved.setdefault(storage._cdata, (storage.nbytes(), storage))
        return x

    model.train()
    with (
        record_choices("cuda"),
        _around_layers(model, enter, leave),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        _Products(current),
        _FusedAttention(current),
    ):
        model(*_row(sequence_length))
    return traces


class _Products(TorchDispatchMode):
    """Notes the bytes of each product's result."""

    def __init__(self, current: list[_LayerTrace]) -> None:
        super().__init__()
        self.current = current

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if self.current and name in PRODUCTS and isinstance(result, Tensor):
            self.current[-1].products.append(result.nbytes)
        return result


class _FusedAttention(TorchFunctionMode):
    """Stands for a fused kernel: it saves queries, keys, values, the output and the log-sum-exp, and no scores."""

    def __init__(self, current: list[_LayerTrace]) -> None:
        super().__init__()
        self.current = current

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not functional.scaled_dot_product_attention or not args[0].is_meta:
            return function(*args, **(kwargs or {}))
        q, k, v = args[:3]
        result: Tensor = _SavedAttention.apply(q, k, v)
        if self.current:
            self.current[-1].attention_bytes += result.nbytes
        return result


class _SavedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("a plan has no backward pass")
