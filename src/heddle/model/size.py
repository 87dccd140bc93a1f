"""What a design costs, read off the model built on the meta device: nothing is allocated and no formula restated."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from heddle.config import kinds
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.numerics.dispatch.flop_counter import counting
from heddle.numerics.dispatch.operation import Choice, witnessing
from heddle.numerics.linear import packing
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.feedforwards import Feedforward
from heddle.parts.mixers import MixerConfig


@dataclass(frozen=True)
class LayerSize:
    """One layer, or `count` equal neighbours."""

    count: int
    mixer: str
    feedforward: str
    parameters: int
    state_bytes: int


@dataclass(frozen=True)
class Size:
    """The size of a design for rows of `context` tokens, `batch` of them.

    memory: tokens of what cross-attention reads, 0 where nothing does.
    flops_per_token: forward, averaged over a row of `context` tokens, causal pairs only; training is 3 times that.
    An encoder's pass over `memory` tokens is in it. state_bytes: every tensor of the state, the table of positions
    and what is kept of the memory included; state_bytes_per_token: what one more token adds to the layers' states
    (0 once all windows are full). table_bytes: the table alone.
    """

    context: int
    batch: int
    parameters: int
    active_parameters: int
    embedding_parameters: int
    flops_per_token: float
    state_bytes: int
    state_bytes_per_token: int
    table_bytes: int
    layers: tuple[LayerSize, ...]
    memory: int = 0
    encoder: tuple[LayerSize, ...] = ()


def size(
    config: ModelConfig,
    context: int = 2048,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    memory: int | None = None,
    rewind: int = 0,
) -> Size:
    """Measure a design that reads a memory of `memory` tokens (None: as many as `context`), if it reads one.

    `rewind` is that of its state; bidirectional designs keep none. Raises DesignError where it cannot be built,
    ConfigError where it cannot go back.
    """
    model = build(config, dtype=dtype, device="meta")
    parameters, active = parameter_counts(model)
    length = context if memory is None else memory
    state = model.init_state(batch, context, _memory(model, batch, length), rewind) if model.causal else None
    total = 0 if state is None else state.bytes
    table = 0 if state is None else state.table.bytes
    stacks = [model] if model.encoder is None else [model, model.encoder]
    return Size(
        context=context,
        batch=batch,
        parameters=parameters,
        active_parameters=active,
        embedding_parameters=sum(stack.embed.weight.numel() for stack in stacks),
        flops_per_token=flops_per_token(model, context, length),
        state_bytes=total,
        state_bytes_per_token=_state_growth(model, context, length) if state is not None else 0,
        table_bytes=table,
        layers=tuple(_layers(model, state.layer_bytes if state is not None else None)),
        memory=0 if model.memory_width is None else length,
        encoder=() if model.encoder is None else tuple(_layers(model.encoder, None)),
    )


def parameter_counts(model: Decoder) -> tuple[int, int]:
    """Parameters of a model, a shared one once, and how many of them a token meets."""
    every = _count(model)
    return every, every - sum(one.idle_parameters for one in model.modules() if isinstance(one, Feedforward))


def _memory(model: Decoder, rows: int, length: int) -> Memory | None:
    """What the layers read, on the meta device: made by the encoder, if there is one."""
    if model.memory_width is None:
        return None
    if model.encoder is not None:
        return model.encode(torch.zeros(rows, length, dtype=torch.int64, device="meta"))
    return Memory(torch.zeros(rows, length, model.memory_width, dtype=model.embed.weight.dtype, device="meta"))


def _placed(model: Decoder, length: int, memory: int) -> Layout:
    layout = Layout.causal(1, length, device="meta")
    beside = _memory(model, 1, memory)
    return layout if beside is None else layout.with_memory(beside)


def flops_per_token(model: Decoder, context: int, memory: int = 0) -> float:
    """Forward operations of a meta model for one row of `context` tokens and all its logits, divided by them.

    memory: tokens of what cross-attention reads; reading it, and an encoder's pass over it, are counted.
    """
    tokens = torch.zeros(1, context, dtype=torch.int64, device="meta")
    with torch.no_grad(), counting() as tally:
        hidden, _ = model(tokens, _placed(model, context, memory))
        model.head(hidden)
    return tally[0] / context


def state_bytes(config: ModelConfig, context: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a state of that capacity, table included, and of what is kept of as long a memory."""
    model = build(config, dtype=dtype, device="meta")
    return model.init_state(batch, context, _memory(model, batch, context)).bytes


def choices(
    config: ModelConfig, queries: int, past: int, dtype: torch.dtype, device: str, memory: int | None = None
) -> Counter[Choice]:
    """The kernel chosen for each operation of one call (`queries` tokens after `past`), with how often.

    The call is made on the meta device in the name of `device`. past = −1 means a training call without state.
    memory: tokens of what cross-attention reads (None: as many as the text).
    """
    length = queries + max(past, 0) if memory is None else memory
    model = build(config, dtype=dtype, device="meta")
    tokens = torch.zeros(1, queries, dtype=torch.int64, device="meta")
    with witnessing(device) as seen:
        if past < 0:
            hidden, _ = model(tokens, _placed(model, queries, length))
            model.head(hidden)
        else:
            with torch.no_grad(), packing():  # as generation runs
                state = model.init_state(1, past + queries, _memory(model, 1, length))
                if past:
                    _, state = model(torch.zeros(1, past, dtype=torch.int64, device="meta"), None, state)
                seen.clear()
                hidden, _ = model(tokens, None, state)
                model.head(hidden[:, -1:])
    return Counter(seen)


def _state_growth(model: Decoder, context: int, memory: int) -> int:
    beside = _memory(model, 1, memory)
    shorter, longer = (model.init_state(1, context + more, beside).layer_bytes for more in (0, 1))
    return sum(longer) - sum(shorter)


def _layers(model: Decoder, states: list[int] | None) -> list[LayerSize]:
    rows: list[LayerSize] = []
    for index, ((_, config), layer) in enumerate(zip(model.config.expand(), model.layers, strict=True)):
        row = LayerSize(
            count=1,
            mixer="–" if config.mixer is None else describe(config.mixer.dump()),
            feedforward="–" if config.feedforward is None else describe(config.feedforward.dump()),
            parameters=_count(layer),
            state_bytes=0 if states is None else states[index],
        )
        last = rows[-1] if rows else None
        if last is not None and LayerSize(last.count, *_fields(row)[1:]) == last:
            rows[-1] = LayerSize(last.count + 1, *_fields(row)[1:])
        else:
            rows.append(row)
    return rows


def _fields(row: LayerSize) -> tuple[int, str, str, int, int]:
    return row.count, row.mixer, row.feedforward, row.parameters, row.state_bytes


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def describe(data: dict[str, object]) -> str:
    """A part as a short phrase: `attention heads=4 kv_heads=2 position=rope`; defaults that are off stay out."""
    words = [str(data["kind"])]
    for name, value in data.items():
        if name == "kind" or value is False or value == 0.0:
            continue
        if isinstance(value, dict):
            value = f"({describe(value)})" if value["kind"] in kinds(MixerConfig.slot) else value["kind"]
        words.append(name if value is True else f"{name}={value}")
    return " ".join(words)
