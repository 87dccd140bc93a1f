"""What a design costs: parameters, FLOPs, state bytes and kernels, measured with a model on the meta device.

No formula is repeated here and nothing is allocated. The model has each distinct layer of the design once; what a layer
costs is multiplied by the number of such layers. All numbers are Python integers, which do not overflow.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from heddle.model.config import ModelConfig, describe, refuse_overflow
from heddle.model.decoder import Decoder
from heddle.model.initialization import materialize
from heddle.model.shapes_only import ShapesOnly
from heddle.model.state import State
from heddle.notebook import html_table
from heddle.numerics.dispatch import KernelChoice, count_flops, record_choices
from heddle.numerics.linear import packed_weights
from heddle.parts.feedforwards import Feedforward
from heddle.parts.layout import EncoderOutput, Layout
from heddle.parts.modules.linear import VisitAdapter
from heddle.parts.modules.value_embedding import ValueEmbedding

# A meta model with each distinct layer of a design once, and helpers that measure its layers.


def build_distinct_layers(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """Build a meta model with each distinct layer of the design once. Several measurements can share it."""
    with refuse_overflow():
        with torch.device("meta"):
            model = Decoder(config, distinct_layers_only=True)
        materialize(model, dtype, "meta")
    return model


def with_encoder(model: Decoder) -> list[Decoder]:
    """The decoder, and the encoder if there is one."""
    return [model] if model.encoder is None else [model, model.encoder]


def stacked_layers(model: Decoder, training: bool = False) -> list[tuple[nn.Module, int]]:
    """The layers of each stack, and how many layers of the design each stands for.

    training: with the multi-token modules at the end, one for each depth.
    """
    layers = [pair for stack in with_encoder(model) for pair in zip(stack.layers, stack.layer_counts, strict=True)]
    return [*layers, *((module, 1) for module in model.multi_token)] if training else layers


@contextmanager
def around_layers(
    layers: Sequence[nn.Module], before: Callable[[int, tuple[Any, ...]], None], after: Callable[[int], None]
) -> Iterator[None]:
    """Within the block, call before(index, arguments) and after(index) around each call of a layer."""
    hooks = []
    for index, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(lambda _, inputs, index=index: before(index, inputs)))
        hooks.append(layer.register_forward_hook(lambda *_, index=index: after(index)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def parameter_count(module: nn.Module) -> int:
    """The number of a module's parameters, counting shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def active_parameter_count(module: nn.Module) -> int:
    """How many of a module's parameters are active for one token."""
    parts = (part for part in module.modules() if isinstance(part, Feedforward | ValueEmbedding))
    idle = sum(part.inactive_parameters for part in parts)
    return parameter_count(module) - idle


def parameter_counts(model: Decoder) -> tuple[int, int]:
    """Return the number of parameters, counting shared ones once, and how many of them are active for one token.

    Adapters of visits count for each. Multi-token modules count in the first number only.
    """
    layers = [layer for layer, _ in stacked_layers(model)]
    weights = [count for stack in with_encoder(model) for count in stack.weight_counts]
    visits = [count for _, count in stacked_layers(model)]
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    around = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in in_layers)
    total, active = around, around - parameter_count(model.multi_token)
    for layer, count, visited in zip(layers, weights, visits, strict=True):
        own = (visited - count) * sum(parameter_count(x) for x in layer.modules() if isinstance(x, VisitAdapter))
        total += count * parameter_count(layer) + own
        active += count * active_parameter_count(layer) + own
    return total, active


def visits_of(count: int, weights: int) -> str:
    """A number of layers, and how many of them have their own weights: `6`, `6 visits of 1`, or `6 again`."""
    if count == weights:
        return f"{count}"
    return f"{count} visits of {weights}" if weights else f"{count} again"


@dataclass(frozen=True)
class LayerSize:
    """`count` equal adjacent layers. parameters, state_bytes: of one of them.

    weights: how many of them have their own parameters; the others visit a shared layer again, with their own adapters.
    """

    count: int
    mixer: str
    feedforward: str
    parameters: int
    state_bytes: int
    weights: int


@dataclass(frozen=True)
class Size:
    """The size of a design for `batch` rows of `context_length` tokens.

    encoder_length: tokens of the encoder output, 0 without cross-attention. flops_per_token: of a forward pass,
    averaged over a row of `context_length` tokens, causal pairs only, with the encoder's pass over `encoder_length`
    tokens; training takes 3 times as many. state_bytes: all tensors of the state, with the table of positions and
    the projected encoder output. state_bytes_per_token: what one more token adds to the layers' states (0 once all
    windows are full). position_table_bytes: of the table of positions alone.
    multi_token: one entry for all multi-token modules, which count in `parameters` and serve training and drafts
    only; its state_bytes: of the module that drafts. multi_token_flops_per_token: what the modules and their logits
    add to a forward pass of training.
    """

    context_length: int
    batch: int
    parameters: int
    active_parameters: int
    embedding_parameters: int
    flops_per_token: float
    state_bytes: int
    state_bytes_per_token: int
    position_table_bytes: int
    layers: tuple[LayerSize, ...]
    encoder_length: int = 0
    encoder: tuple[LayerSize, ...] = ()
    multi_token: tuple[LayerSize, ...] = ()
    multi_token_flops_per_token: float = 0.0

    def _repr_html_(self) -> str:
        rows = [
            (
                f"{visits_of(layer.count, layer.weights)} × {layer.mixer}, {layer.feedforward}",
                layer.parameters,
                layer.state_bytes,
            )
            for layer in (*self.encoder, *self.layers, *self.multi_token)
        ]
        total = (f"all, {self.batch} × {self.context_length:,} tokens", self.parameters, self.state_bytes)
        caption = f"{self.active_parameters:,} active parameters, {self.flops_per_token:,.4g} FLOPs per token"
        return html_table(("layers", "parameters per layer", "state bytes per layer"), [*rows, total], caption)


def summarize_design(config: ModelConfig, model_size: Size) -> str:
    """A design in one line: depth, width, and each different layer."""
    layers = [
        f"{visits_of(layer.count, layer.weights)} × [{layer.mixer}; {layer.feedforward}]" for layer in model_size.layers
    ]
    head = "tied" if config.head.tied else "untied"
    return (
        f"{config.depth} layers, width {config.width}, vocabulary {config.vocab_size} ({head}), residual "
        f"{describe(config.residual)}, norm {describe(config.norm)}: {', '.join(layers)}"
    )


@contextmanager
def _shapes_only() -> Iterator[None]:
    with refuse_overflow(), ShapesOnly():
        yield


def size(
    config: ModelConfig,
    context_length: int = 2048,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    encoder_length: int | None = None,
    rollback: int = 0,
) -> Size:
    """Measure a design. encoder_length: tokens of the encoder output, if it is read; None means `context_length`.

    rollback: as in `Decoder.init_state`; a bidirectional design has no state. Raises DesignError if the design cannot
    be built, ConfigError if its state cannot roll back.
    """
    return measure_size(build_distinct_layers(config, dtype), context_length, batch, encoder_length, rollback)


@_shapes_only()
def measure_size(
    model: Decoder, context_length: int, batch: int = 1, encoder_length: int | None = None, rollback: int = 0
) -> Size:
    """Measure the design of a meta model, as `size` does."""
    parameters, active = parameter_counts(model)
    source_length = context_length if encoder_length is None else encoder_length
    layer_bytes, growth, state_total, table_total = None, 0, 0, 0
    flops = _flops(model, context_length, source_length)
    ahead = _flops(model, context_length, source_length, True) - flops if len(model.multi_token) else 0
    if model.causal:
        state = model.init_state(batch, context_length, _encoder_output(model, batch, source_length), rollback)
        layer_bytes, table_total = state.layer_bytes, state.table.bytes
        state_total = table_total + _times_counts(model, layer_bytes)
        growth = _state_growth(model, context_length, source_length)
    return Size(
        context_length=context_length,
        batch=batch,
        parameters=parameters,
        active_parameters=active,
        embedding_parameters=sum(stack.embed.weight.numel() for stack in with_encoder(model)),
        flops_per_token=flops / context_length,
        state_bytes=state_total,
        state_bytes_per_token=growth,
        position_table_bytes=table_total,
        layers=_layer_sizes(model, layer_bytes),
        encoder_length=0 if model.encoder_width is None else source_length,
        encoder=() if model.encoder is None else _layer_sizes(model.encoder, None),
        multi_token=_multi_token_sizes(model, batch, context_length, source_length, rollback),
        multi_token_flops_per_token=ahead / context_length,
    )


@_shapes_only()
def flops_per_token(model: Decoder, context_length: int, encoder_length: int = 0, training: bool = False) -> float:
    """Return the FLOPs per token of a forward pass of a meta model over one sequence of `context_length` tokens.

    All logits are counted, and so are the encoder's pass over `encoder_length` tokens and reading its output. training:
    with the multi-token modules and their logits.
    """
    return _flops(model, context_length, encoder_length, training) / context_length


@_shapes_only()
def layer_flops(
    model: Decoder, context_length: int, encoder_length: int = 0, training: bool = False
) -> tuple[list[int], int]:
    """FLOPs of a meta model for one sequence: of each layer that was built (see `stacked_layers`), and of the rest."""
    tokens = torch.zeros(1, context_length, dtype=torch.int64, device="meta")

    def read() -> None:  # the layout holds the encoder's output
        _read_row(model, tokens, _layout(model, context_length, encoder_length), training)

    return _count_by_layer(model, training, read)


@_shapes_only()
def decode_flops(model: Decoder, context_length: int, encoder_length: int = 0) -> int:
    """Return the FLOPs of a causal meta model for the last of `context_length` tokens, after a state of the others.

    Its logits are counted. Latent attention absorbs its up-projections where that takes fewer than expanding the state.
    """
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    state = _state_after(model, context_length - 1, 1, _encoder_output(model, 1, encoder_length))
    flops, around = _count_by_layer(model, False, lambda: model.head(model(token, None, state)[0]))
    return around + sum(value * count for value, (_, count) in zip(flops, stacked_layers(model), strict=True))


def _count_by_layer(model: Decoder, training: bool, call: Callable[[], object]) -> tuple[list[int], int]:
    """FLOPs of a call of the model: of each layer that was built, and of the rest."""
    layers = [layer for layer, _ in stacked_layers(model, training)]
    starts, flops = [0] * len(layers), [0] * len(layers)
    with torch.no_grad(), count_flops() as total:

        def enter(index: int, _: Any) -> None:
            starts[index] = total[0]

        def leave(index: int) -> None:
            flops[index] = total[0] - starts[index]

        with around_layers(layers, enter, leave):
            call()
    return flops, total[0] - sum(flops)


def _read_row(model: Decoder, tokens: Tensor, layout: Layout, training: bool) -> None:
    """Compute all logits; in training also those of the multi-token modules."""
    hidden, _ = model(tokens, layout)
    model.head(hidden)
    for ahead, _ in model.predict_ahead(hidden, tokens, layout) if training else ():
        model.head(ahead)


def _flops(model: Decoder, context_length: int, encoder_length: int, training: bool = False) -> int:
    flops, around = layer_flops(model, context_length, encoder_length, training)
    layers = stacked_layers(model, training)
    return around + sum(value * count for value, (_, count) in zip(flops, layers, strict=True))


@lru_cache(maxsize=16)  # reports ask for many contexts, and building takes most of an answer's time
def _kept_layers(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    return build_distinct_layers(config, dtype)


@_shapes_only()
def state_bytes(config: ModelConfig, context_length: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of a state for `context_length` tokens, with the table of positions.

    If the design reads an encoder output, it has as many tokens, and its projected keys and values are counted.
    """
    model = _kept_layers(config, dtype)
    state = model.init_state(batch, context_length, _encoder_output(model, batch, context_length))
    return state.table.bytes + _times_counts(model, state.layer_bytes)


def kernel_choices(
    config: ModelConfig,
    queries: int,
    cached_tokens: int,
    dtype: torch.dtype,
    device: str,
    encoder_length: int | None = None,
) -> Counter[KernelChoice]:
    """Count the kernels chosen for the operations of one call: `queries` tokens after `cached_tokens`.

    The call runs on the meta device, but kernels are chosen as for `device`. cached_tokens = −1 means a training call
    without a state. encoder_length: tokens of the encoder output; None means as many as the sequence has.
    """
    return measure_kernel_choices(build_distinct_layers(config, dtype), queries, cached_tokens, device, encoder_length)


@_shapes_only()
def measure_kernel_choices(
    model: Decoder, queries: int, cached_tokens: int, device: str, encoder_length: int | None = None
) -> Counter[KernelChoice]:
    """Count the `kernel_choices` of the design of a meta model. Puts it in training or evaluation mode."""
    source_length = queries + max(cached_tokens, 0) if encoder_length is None else encoder_length
    model.train(cached_tokens < 0)
    tokens = torch.zeros(1, queries, dtype=torch.int64, device="meta")
    layers, counts = zip(*stacked_layers(model, training=cached_tokens < 0), strict=True)
    starts = [0] * len(layers)
    with record_choices(device) as choices:

        def enter(index: int, _: Any) -> None:
            starts[index] = len(choices)

        def leave(index: int) -> None:
            choices.extend(choices[starts[index] :] * (counts[index] - 1))

        with around_layers(layers, enter, leave):
            if cached_tokens < 0:
                _read_row(model, tokens, _layout(model, queries, source_length), training=True)
            else:
                with torch.no_grad(), packed_weights():  # as generation runs
                    state = _state_after(model, cached_tokens, queries, _encoder_output(model, 1, source_length))
                    choices.clear()
                    hidden, _ = model(tokens, None, state)
                    model.head(hidden[:, -1:])
    return Counter(choices)


@torch.no_grad()
def _state_after(model: Decoder, cached_tokens: int, queries: int, encoder_output: EncoderOutput | None) -> State:
    """The state of a meta model after `cached_tokens`, with room for `queries` more."""
    state = model.init_state(1, cached_tokens + queries, encoder_output)
    if cached_tokens:
        _, state = model(torch.zeros(1, cached_tokens, dtype=torch.int64, device="meta"), None, state)
    return state


def _encoder_output(model: Decoder, rows: int, length: int) -> EncoderOutput | None:
    """Return the encoder output that cross-attention reads, on the meta device. None without cross-attention."""
    if model.encoder_width is None:
        return None
    if model.encoder is not None:
        return model.encode(torch.zeros(rows, length, dtype=torch.int64, device="meta"))
    return EncoderOutput(torch.zeros(rows, length, model.encoder_width, dtype=model.embed.weight.dtype, device="meta"))


def _layout(model: Decoder, length: int, encoder_length: int) -> Layout:
    layout = Layout.causal(1, length, device="meta")
    encoder_output = _encoder_output(model, 1, encoder_length)
    return layout if encoder_output is None else layout.with_encoder_output(encoder_output)


def _times_counts(model: Decoder, values: list[int]) -> int:
    """Sum a value of each built layer over all layers of the design."""
    return sum(value * count for value, count in zip(values, model.layer_counts, strict=True))


def _state_growth(model: Decoder, context_length: int, encoder_length: int) -> int:
    encoder_output = _encoder_output(model, 1, encoder_length)
    shorter, longer = (model.init_state(1, context_length + extra, encoder_output).layer_bytes for extra in (0, 1))
    return _times_counts(model, longer) - _times_counts(model, shorter)


def _multi_token_sizes(
    model: Decoder, batch: int, context_length: int, encoder_length: int, rollback: int
) -> tuple[LayerSize, ...]:
    """One entry for all modules, which are equal; none without modules."""
    if not len(model.multi_token):
        return ()
    layer, output = model.config.last_layer, _encoder_output(model, batch, encoder_length)
    state = model.init_draft_state(batch, context_length, output, rollback)
    mixer, feedforward = ("–" if part is None else describe(part) for part in (layer.mixer, layer.feedforward))
    parameters, state_bytes = parameter_count(model.multi_token[0]), state.layer_bytes[0]
    count = len(model.multi_token)
    return (LayerSize(count, mixer, feedforward, parameters, state_bytes, weights=count),)


def _layer_sizes(model: Decoder, layer_bytes: list[int] | None) -> tuple[LayerSize, ...]:
    """Return one entry for each run of equal neighbors."""
    sizes = []
    for index, (distinct, layer) in enumerate(zip(model.config.distinct_layers, model.layers, strict=True)):
        mixer, feedforward = distinct.config.mixer, distinct.config.feedforward
        layer_size = LayerSize(
            count=1,
            weights=1,
            mixer="–" if mixer is None else describe(mixer),
            feedforward="–" if feedforward is None else describe(feedforward),
            parameters=parameter_count(layer),
            state_bytes=0 if layer_bytes is None else layer_bytes[index],
        )
        sizes.append(layer_size)
    runs: list[LayerSize] = []
    config, looped = model.config, False
    for number, index in enumerate(config.layer_order):
        same_kind, looped = looped == config.looped_layers[number], config.looped_layers[number]
        weights = int(config.weight_sources[number] == number)
        if runs and same_kind and replace(runs[-1], count=1, weights=1) == sizes[index]:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1, weights=runs[-1].weights + weights)
        else:
            runs.append(replace(sizes[index], weights=weights))
    return tuple(runs)
