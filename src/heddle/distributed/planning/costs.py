"""What one row costs in each layer: FLOPs, parameters, and what is saved for the backward pass.

Everything is measured on the meta device with the kernels of a GPU; nothing is allocated. Each distinct layer of the
design runs once and is multiplied by its count.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heddle.distributed.planning.attention_shapes import AttentionShapes
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.distinct_layers import (
    active_parameter_count,
    around_layers,
    build_distinct_layers,
    parameter_count,
    parameter_counts,
)
from heddle.model.size import layer_flops
from heddle.numerics.dispatch.operation import record_choices
from heddle.parts.context.layout import Layout

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
    flops, other_flops = layer_flops(model, sequence_length)
    traces = _traces(model, sequence_length)
    layers = []
    for layer, count, row_flops, trace in zip(model.layers, model.layer_counts, flops, traces, strict=True):
        active_size = active_parameter_count(layer)
        linear = 2.0 * active_size * sequence_length
        layers.append(
            LayerCost(
                count=count,
                parameters=parameter_count(layer),
                active_parameters=active_size,
                flops=row_flops,
                attention_flops=max(0.0, row_flops - linear),
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
        head_flops=other_flops,
        vocab_size=config.vocab_size,
        width=config.width,
        sequence_length=sequence_length,
    )


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

    def note_attention(output: Tensor | None, _: float) -> None:
        if current and output is not None:
            current[-1].attention_bytes += output.nbytes

    model.train()
    with (
        record_choices("cuda"),
        around_layers(list(model.layers), enter, leave),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        _Products(current),
        AttentionShapes(note_attention),
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
