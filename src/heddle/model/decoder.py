"""The model: embedding → layers → close, and the head apart, so that a loss can be chunked over the vocabulary.

            positions, documents            (Layout, made once)
                    │
tokens → embed → [ residual(stream, mixer, feedforward) ] × N → close → hidden → head → logits
                          mixer(x, layout, state_i) → y, state_i'
                                    │
source → encoder → memory           (a design with an encoder, or a memory from elsewhere)
"""

import hashlib
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heddle.config import DesignError, build_under
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.embedding import Embedding, Head
from heddle.model.encoder import check_encoder, encode, encoder_config
from heddle.model.state import State
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.context.position_table import PositionTable
from heddle.parts.feedforwards import Feedforward
from heddle.parts.mixers import Mixer, Place
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.linear import Leaf
from heddle.parts.positions import Rotation
from heddle.parts.residuals import Stream, Wiring

BY_LENGTH = "a rotation of this design depends on how long the whole text will be"


class Layer(nn.Module):
    """One layer: a residual block around a mixer and a feed-forward, either of which may be absent."""

    mixer: Mixer | None
    feedforward: Feedforward | None

    def __init__(self, config: LayerConfig, model: ModelConfig, drop_rate: float) -> None:
        super().__init__()
        place = Place(model.width, model.norm)
        self.mixer = None if config.mixer is None else build_under("mixer", config.mixer.build, place)
        forward = config.feedforward
        self.feedforward = None if forward is None else build_under("feedforward", forward.build, model.width)
        names = [name for name, part in (("mixer", self.mixer), ("feedforward", self.feedforward)) if part is not None]
        wiring = Wiring(tuple(names), model.width, model.norm, drop_rate, model.residual.dropout)
        self.residual = build_under("residual", model.residual.build, wiring)

    def forward(self, stream: Stream, layout: Layout, state: Any = None) -> tuple[Stream, Any]:
        """The stream after this layer, and the mixer's new state."""
        mixer, feedforward = self.mixer, self.feedforward
        after = state

        def mix(x: Tensor) -> Tensor:
            nonlocal after
            assert mixer is not None
            y, after = mixer(x, layout, state)
            return y

        branches: dict[str, Callable[[Tensor], Tensor]] = {}
        if mixer is not None:
            branches["mixer"] = mix
        if feedforward is not None:
            branches["feedforward"] = partial(feedforward, layout=layout)
        return self.residual(stream, branches), after


class Decoder(nn.Module):
    """A model built from a `ModelConfig` whose vocab_size is known."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise DesignError("vocab_size", "is required to build a model; give it, or train on a text")
        self.config = config
        self.fingerprint = config.fingerprint()
        self.embed = build_under("embedding", Embedding, config.vocab_size, config.width, config.embedding)
        self.layers = nn.ModuleList()
        for index, (path, layer) in enumerate(config.expand()):
            rate = config.residual.drop_path * index / max(1, config.depth - 1)
            self.layers.append(build_under(path, Layer, layer, config, rate))
            self._check_width(path)
        self.encoder = self._encoder(config)
        self.close = config.residual.build_close(config.width, config.norm)
        own = self.embed.weight if config.head.tied else nn.Parameter(torch.empty_like(self.embed.weight))
        self.head = Head(own, config.head)
        self.checkpointing = False
        drops = [module for module in self.modules() if isinstance(module, Dropout)]
        for site, module in enumerate(drops):
            module.site = site

    def _check_width(self, path: str) -> None:
        """Raises DesignError if the newest layer reads a memory of another width than one before."""
        *_, newest = self.mixers()
        width = None if newest is None else newest.memory_width
        if width is not None and width != self.memory_width:
            reason = f"reads a memory {width} wide, a layer before one {self.memory_width} wide; make them equal"
            raise DesignError(f"{path}.mixer", reason)

    def _encoder(self, config: ModelConfig) -> "Decoder | None":
        inner = encoder_config(config, self.memory_width)
        if inner is None:
            return None
        encoder = build_under("encoder", Decoder, inner)
        build_under("encoder", check_encoder, encoder)
        return encoder

    def tie(self) -> None:
        """Make a tied head the embedding, and the encoder's too: anew after parameters were replaced."""
        if self.config.head.tied:
            self.head.weight = self.embed.weight
        if self.encoder is not None:
            self.encoder.tie()

    def mixers(self) -> list[Mixer | None]:
        """The mixer of each layer."""
        return [layer.mixer for layer in self.layers if isinstance(layer, Layer)]

    @property
    def causal(self) -> bool:
        """Whether every mixer hides later tokens."""
        return all(mixer is None or mixer.causal for mixer in self.mixers())

    @property
    def reach(self) -> int | None:
        """Earlier positions that a state's table must keep: as many as the widest window, or all (None)."""
        reaches = [mixer.looks_back for mixer in self.mixers() if mixer is not None]
        return None if None in reaches else max((reach for reach in reaches if reach is not None), default=0)

    @property
    def by_length(self) -> bool:
        """Whether a rotation depends on how long the text will be, so that a state must declare its capacity."""
        return any(part.by_length for part in self.layers.modules() if isinstance(part, Rotation))

    @property
    def memory_width(self) -> int | None:
        """The width of the memory that layers read beside the text; None: they read none."""
        widths = [mixer.memory_width for mixer in self.mixers() if mixer is not None]
        return next((width for width in widths if width is not None), None)

    def encode(self, source: Tensor, layout: Layout | None = None) -> Memory:
        """source int64 [B, S] -> what the layers' cross-attention reads, once for as many calls as one likes.

        For `layout.with_memory(memory)`, or `init_state(memory=memory)`. Raises ConfigError without an encoder.
        """
        if self.encoder is not None:
            self.encoder.checkpointing = self.checkpointing
        return encode(self.encoder, source, layout)

    @torch.no_grad()  # a state carries no gradient, whatever its memory does
    def init_state(
        self, batch: int, capacity: int | None = None, memory: Memory | None = None, rewind: int = 0
    ) -> State:
        """An empty state for `batch` rows; an explicit `capacity` (tokens a row) is never exceeded, none doubles.

        memory: what cross-attention reads; its keys and values are projected now, once. rewind: how many tokens
        `State.rewind` may take back at a time. Raises ConfigError if a mixer is bidirectional or cannot go back, or
        if a rotation depends on the length of the text and no capacity tells it.
        """
        if not self.causal:
            raise ConfigError("state: a bidirectional design (causal: false) sees later tokens and cannot keep one")
        if batch < 1 or (capacity is not None and capacity < 1):
            raise ConfigError(f"state: batch = {batch} and capacity = {capacity} must be at least 1")
        if capacity is None and self.by_length:
            raise ConfigError(f"state: {BY_LENGTH}; make it with a capacity")
        if rewind < 0:
            raise ConfigError(f"state: rewind = {rewind} must not be negative")
        self._check_memory(memory, batch)
        weight = self.embed.weight
        table = PositionTable.empty(batch, self.reach, capacity, weight.device, rewind)
        kind: Any = {"dtype": weight.dtype, "device": weight.device, "memory": memory, "rewind": rewind}
        states = [None if mixer is None else mixer.init_state(batch, capacity, **kind) for mixer in self.mixers()]
        state = State(table, states, self.fingerprint)
        if rewind and not state.can_roll_back(1):
            raise ConfigError(f"state: rewind = {rewind} asks a recurrence to go back; fork the state instead")
        return state

    def _check_memory(self, memory: Memory | None, batch: int) -> None:
        if self.memory_width is None:
            if memory is not None:
                raise ConfigError("memory: no layer of this design reads one; leave it out, or add cross_attention")
            return
        if memory is None:
            raise ConfigError("memory: is missing; give layout.with_memory(...), or init_state(..., memory=...)")
        memory.check(self.memory_width, batch)

    def forward(
        self, tokens: Tensor, layout: Layout | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """tokens int64 [B, T] -> (hidden [B, T, width], new state or None).

        Rows of the embedding [B, T, width], or other vectors in their place, may stand for tokens. Without a layout,
        rows are one document each from position 0, or continue where the state's rows ended.
        Raises ConfigError if shapes disagree, or a state meets gradients, was consumed or is of another design.
        """
        layout = self._layout(tokens, layout, state)
        if state is None:
            self._check_memory(layout.memory, layout.batch)
            return self._run(tokens, layout, [None] * len(self.layers))[0], None
        if torch.is_grad_enabled():
            raise ConfigError("state: is written in place and carries no gradient; call within torch.no_grad()")
        if layout.memory is not None:
            raise ConfigError("memory: the state holds its own already; give it to init_state alone")
        if state.design != self.fingerprint:
            raise ConfigError("state: is of another design; continue with a state that this model's init_state made")
        state.take()
        table, layout = state.table.extend(layout)
        hidden, states = self._run(tokens, layout, state.layers)
        return hidden, State(table, states, state.design)

    def _run(self, tokens: Tensor, layout: Layout, states: list[Any]) -> tuple[Tensor, list[Any]]:
        stream = self.config.residual.open(self.embed(tokens, layout))
        after = []
        for layer, state in zip(self.layers, states, strict=True):
            if self.checkpointing and torch.is_grad_enabled():
                # What is in force now (noise key, kernels) must be when the layer runs again, in whatever thread.
                again = copy_context().run
                stream, state = checkpoint(again, layer, stream, layout, state, use_reentrant=False)
            else:
                stream, state = layer(stream, layout, state)
            after.append(state)
        return self.close(stream), after

    def _layout(self, tokens: Tensor, layout: Layout | None, state: State | None) -> Layout:
        shape = tokens.shape[:2]
        if tokens.dim() - tokens.is_floating_point() != 2:
            raise ConfigError(f"tokens: have shape {list(tokens.shape)}; expected [batch, length]")
        if tokens.is_floating_point() and tokens.shape[2] != self.config.width:
            raise ConfigError(f"tokens: are vectors {tokens.shape[2]} wide; the embedding's are {self.config.width}")
        if layout is None:
            if state is not None:
                state.table.check_batch(tokens.shape[0])
                return state.table.following(tokens.shape[1])
            return Layout.causal(tokens.shape[0], tokens.shape[1], device=tokens.device)
        if layout.positions.shape != shape:
            shapes = f"{list(layout.positions.shape)} and tokens {list(shape)}"
            raise ConfigError(f"layout: positions have shape {shapes}; they must be equal")
        return layout


def initialise(model: Decoder, seed: int, wanted: Callable[[Leaf], bool] = lambda leaf: True) -> None:
    """Fill every parameter of the `wanted` modules: a function of the seed and the parameter's name alone."""
    for name, module in model.named_modules():
        stack = model if model.encoder is None or not name.startswith("encoder.") else model.encoder
        config = stack.config.initialisation
        own = list(module.parameters(recurse=False))
        if isinstance(module, Leaf):
            module.branch_scale = (2 * stack.config.depth) ** -0.5 if config.depth_scaled else 1.0
        if own and not isinstance(module, Leaf):
            raise TypeError(f"{name}: owns parameters but is no Leaf, so nothing says how they start")
        if isinstance(module, Leaf) and wanted(module):
            module.initialise(config.std, generator_of(seed, name))


def generator_of(seed: int, name: str) -> torch.Generator:
    """That which a module of this name is filled from, on the CPU."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def build(
    config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Decoder:
    """Build a model and fill its parameters; on device "meta" nothing is allocated or filled.

    Raises DesignError, with the path of the field, where parts do not fit together.
    """
    with torch.device("meta"):
        model = Decoder(config)
    materialise(model, dtype, device)
    if torch.device(device).type != "meta":
        initialise(model, seed)
    return model


def held_in(parameter: nn.Parameter, dtype: torch.dtype) -> torch.dtype:
    """What a model of `dtype` holds a parameter in: one that no gradient teaches counts in at least float32."""
    return dtype if parameter.requires_grad else torch.promote_types(dtype, torch.float32)


def materialise(model: Decoder, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give every parameter of a meta model its (unset) storage, keeping the head tied."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=held_in(parameter, dtype), device=device)
            setattr(module, name, nn.Parameter(empty, parameter.requires_grad))
    model.tie()
