"""The model: embedding → layers → final norm. The head is separate, so that a loss can be chunked over the vocabulary.

            positions, segment ids          (Layout, built once per call)
                    │
tokens → embed → [ residual(stream, mixer, feedforward) ] × N → final_norm → hidden → head → logits
                          mixer(x, layout, state_i) → y, state_i'     (a feed-forward with a state likewise)
                                    │
source → encoder → encoder_output   (from the design's own encoder, or given by the caller)
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heddle.config import DesignError, build_under
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.embedding import Embedding, Head, PerLayerBranch
from heddle.model.initialization import initialize, materialize
from heddle.model.multi_token import MultiTokenModule, Prediction, predictions
from heddle.model.state import State
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import BuildContext, ResidualContext
from heddle.parts.feedforwards import Feedforward, FeedforwardConfig
from heddle.parts.layout import EncoderOutput, HandedOver, Layout
from heddle.parts.mixers import Mixer, MixerConfig
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.modules.linear import SelfInitialized, VisitAdapter, adapt_projections
from heddle.parts.modules.short_convolution import ShortConvolutions, build_convolutions
from heddle.parts.position_table import PositionTable
from heddle.parts.positions import Rotation
from heddle.parts.residuals import Stream
from heddle.parts.states import LayerState, MixerState, StateSpec

LENGTH_DEPENDENT = "a rotary embedding of this design depends on the final length of the text"


class LayerScalar(SelfInitialized):
    """`residual.layer_scalar`: a learned factor of the stream, 1 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Set the factor to 1."""
        nn.init.ones_(self.weight)

    def forward(self, stream: Tensor) -> Tensor:
        """[B, T, width] -> the same shape."""
        return stream * self.weight.to(stream.dtype)


class Layer(nn.Module):
    """One layer: a residual block around a mixer and a feed-forward. Either of the two may be absent."""

    mixer: Mixer | None
    feedforward: Feedforward | None

    def __init__(self, config: LayerConfig, model: ModelConfig, layer_index: int) -> None:
        super().__init__()
        streams = model.residual.parallel_streams
        sizes = model.width, model.norm, model.depth, layer_index, streams
        context = BuildContext(*sizes, model.vocab_size or 1)
        self.mixer = None if config.mixer is None else build_under("mixer", config.mixer.build, context)
        feedforward = config.feedforward
        self.feedforward = None if feedforward is None else build_under("feedforward", feedforward.build, context)
        self.mixer_convolution = _input_convolution(config.mixer, model.width)
        self.feedforward_convolution = _input_convolution(feedforward, model.width)
        branches = {"mixer": self.mixer, "feedforward": self.feedforward}
        names = tuple(name for name, branch in branches.items() if branch is not None)
        drop_rate = model.residual.drop_rate(layer_index, model.depth)
        residual_context = ResidualContext(
            names,
            model.width,
            model.norm,
            drop_rate,
            model.residual.dropout,
            model.depth,
            layer_index,
            mixer="" if config.mixer is None else config.mixer.kind,
            feedforward="" if feedforward is None else feedforward.kind,
            on_streams=feedforward is not None and feedforward.reads_streams,
            per_layer=model.embedding.per_layer is not None,
        )
        self.residual = build_under("residual", model.residual.build, residual_context)
        per_layer, self.layer_index = model.embedding.per_layer, layer_index
        self.per_layer = None if per_layer is None else PerLayerBranch(per_layer, model.width, model.norm)
        self.scalar = LayerScalar() if model.residual.layer_scalar else None
        for branch in branches.values():
            if branch is not None and config.adapter_rank is not None:
                adapt_projections(branch, config.adapter_rank)

    def init_state(self, spec: StateSpec) -> MixerState | None:
        """An empty state: the mixer's, or a `LayerState` if the feed-forward has one, too."""
        states: list[MixerState | None] = []
        for part, convolution in (
            (self.mixer, self.mixer_convolution),
            (self.feedforward, self.feedforward_convolution),
        ):
            own = None if part is None else part.init_state(spec)
            states.append(own if convolution is None else convolution.init_state(spec, own))
        mixer, feedforward = states
        return mixer if feedforward is None else LayerState(mixer, feedforward)

    def forward(self, stream: Stream, layout: Layout, state: Any = None) -> tuple[Stream, Any]:
        """Return the stream after this layer and the layer's new state."""
        both = isinstance(state, LayerState)
        mixer_state: Any = state.mixer if both else state
        feedforward_state: Any = state.feedforward if both else None

        def mix(x: Tensor) -> Tensor:
            nonlocal mixer_state
            y, mixer_state = _run(self.mixer, self.mixer_convolution, x, layout, mixer_state)
            return y

        def feed_forward(x: Tensor) -> Tensor:
            nonlocal feedforward_state
            y, feedforward_state = _run(self.feedforward, self.feedforward_convolution, x, layout, feedforward_state)
            return y

        branches: dict[str, Callable[[Tensor], Tensor]] = {}
        if self.mixer is not None:
            branches["mixer"] = mix
        if self.feedforward is not None:
            branches["feedforward"] = feed_forward
        stream = self.after_branches(self.residual(stream, branches), layout)
        return stream, LayerState(mixer_state, feedforward_state) if both else mixer_state

    def after_branches(self, stream: Stream, layout: Layout) -> Stream:
        """The stream with the layer's own embedding added, times its scalar; unchanged if it has neither."""
        per_layer = self.per_layer
        if per_layer is not None:
            own = self._own_embedding(layout)
            stream = self.residual.add_embedding(stream, lambda x: per_layer(x, own))
        return stream if self.scalar is None else self.scalar(stream)

    @layout_dependent
    def _own_embedding(self, layout: Layout) -> Tensor:
        """What `embedding.per_layer` has for this layer [B, T, dim]."""
        assert layout.handed_over is not None
        assert layout.handed_over.per_layer is not None
        return layout.handed_over.per_layer[:, :, self.layer_index]


def _input_convolution(config: MixerConfig | FeedforwardConfig | None, width: int) -> ShortConvolutions | None:
    """The short convolution of a branch's input, if its part has one."""
    convolution = None if config is None else config.short_convolution
    is_named = convolution is not None and "input" in convolution.of
    return build_convolutions(convolution, {"input": width} if is_named else {})


def _run(
    part: Mixer | Feedforward | None, convolution: ShortConvolutions | None, x: Tensor, layout: Layout, state: Any
) -> tuple[Tensor, Any]:
    """The output of a branch and its new state."""
    assert part is not None
    if convolution is None:
        result: tuple[Tensor, Any] = part(x, layout, state)
        return result
    (x,), state = convolution({"input": x}, layout, state)
    y, own = part(x, layout, None if state is None else state.own)
    return y, None if state is None else replace(state, own=own)


class Decoder(nn.Module):
    """A model built from a `ModelConfig`. Raises DesignError for a config without a `vocab_size`.

    `distinct_layers_only` builds each different layer once, to check and measure a design. `layer_counts`: how many
    layers each one stands for. `weight_counts`: how many of these have their own weights. `weight_sources`: for each
    layer, the first one with its weights. `imported_config`: fields of an imported config.json that an export writes
    back.
    """

    def __init__(self, config: ModelConfig, distinct_layers_only: bool = False) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise DesignError("vocab_size", "is required to build a model; set it, or train on data")
        self.config = config
        self.fingerprint = config.fingerprint()
        sizes = config.vocab_size, config.width, config.depth
        self.embed = build_under("embedding", Embedding, *sizes, config.embedding, config.norm)
        layers = [(path, layer, index, 1) for index, (path, layer) in enumerate(config.expand())]
        if distinct_layers_only:
            layers = [(layer.path, layer.config, layer.index, layer.count) for layer in config.distinct_layers]
        self.layer_counts = [count for *_, count in layers]
        self.weight_sources = list(config.weight_sources)
        self.weight_counts = [int(source == index) for index, source in enumerate(self.weight_sources)]
        if distinct_layers_only:  # only the first of equal layers was built
            self.weight_counts = [layer.weights for layer in config.distinct_layers]
            self.weight_sources = [config.layer_order[config.weight_sources[index]] for _, _, index, _ in layers]
        self.layers = nn.ModuleList(build_under(path, Layer, layer, config, index) for path, layer, index, _ in layers)
        self._check_encoder_widths([path for path, *_ in layers])
        self._link_layers([(path, index) for path, _, index, _ in layers])
        self._check_shared_weights([path for path, *_ in layers])
        self.encoder = self._build_encoder(config, distinct_layers_only)
        self.expansion = config.residual.build_expansion(config.width)
        self.final_norm = config.residual.build_final_norm(config.width, config.norm)
        weight = self.embed.weight if config.head.tied else nn.Parameter(torch.empty_like(self.embed.weight))
        self.head = Head(weight, config.head, config.norm)
        self.tie()
        self.multi_token = nn.ModuleList(build_under("multi_token", self._build_multi_token))
        self.checkpointing, self.imported_config = False, dict[str, Any]()
        dropouts = [module for module in self.modules() if isinstance(module, Dropout)]
        for site, dropout in enumerate(dropouts):
            dropout.site = site

    def _check_encoder_widths(self, paths: list[str]) -> None:
        """Raise DesignError if a layer expects an encoder output of another width than an earlier layer."""
        expected = self.encoder_width
        for path, mixer in zip(paths, self.mixers(), strict=True):
            width = None if mixer is None else mixer.encoder_width
            if width is not None and width != expected:
                reason = f"has encoder_width = {width}, an earlier layer has {expected}; make them equal"
                raise DesignError(f"{path}.mixer", reason)

    def _link_layers(self, layers: list[tuple[str, int]]) -> None:
        """Set from which layer each mixer reads keys and values, values alone, rows of a table, or relative biases.

        layers: path and index of each layer that was built. Raises DesignError if the two layers' fields differ.
        """
        config, mixers = self.config, self.mixers()
        by_index = {index: (path, mixer) for (path, index), mixer in zip(layers, mixers, strict=True)}

        def link(index: int, source: int | None, fields: str, what: str, target: str = "kv_target") -> int | None:
            path, mixer = by_index[index]
            if source is None or mixer is None:
                return None
            if source not in by_index:  # only the first of equal layers was built
                source = config.distinct_layers[config.layer_order[source]].index
            source_path, source_mixer = by_index[source]
            assert source_mixer is not None
            own = getattr(mixer, fields)
            for name, value in getattr(source_mixer, fields).items():
                if own[name] != value:
                    reason = f"differs from {source_path}'s, whose {what}; make the two equal"
                    raise DesignError(f"{path}.mixer.{name}", reason)
            setattr(source_mixer, target, source)
            return source

        for index, (_, mixer) in by_index.items():
            if mixer is not None:
                mixer.kv_source = link(index, config.kv_sources[index], "kv_fields", "keys and values it reads")
                mixer.value_source = link(index, config.value_sources[index], "value_fields", "values it adds")
                source = config.table_sources[index]
                mixer.table_source = link(index, source, "value_fields", "value embeddings it shares", "table_target")
                source = config.bias_sources[index]
                mixer.bias_source = link(index, source, "bias_fields", "relative biases it shares", "bias_target")

    def _check_shared_weights(self, paths: list[str]) -> None:
        """Raise DesignError where a later visit of a shared layer would have other weights than the first."""
        for index, source in enumerate(self.weight_sources):
            if source != index:
                first, again = (
                    {name: parameter.shape for name, parameter in self.layers[number].named_parameters()}
                    for number in (source, index)
                )
                different = sorted(name for name in first.keys() | again.keys() if first.get(name) != again.get(name))
                if different:
                    reason = f"two of its visits differ in {different[0]}; put another layer first, or leave it out"
                    raise DesignError(f"{self.config.shared_entry(paths[index])}.shared", reason)

    def _build_encoder(self, config: ModelConfig, distinct_layers_only: bool) -> "Decoder | None":
        """The encoder, with its vocab_size set. Raises DesignError if no layer can read its output."""
        inner = config.encoder
        if inner is None:
            return None
        if self.encoder_width is None:
            raise DesignError("encoder", "no layer reads its output; add a cross_attention mixer, or leave it out")
        if inner.width != self.encoder_width:
            reason = f"{inner.width} is not the encoder_width = {self.encoder_width} of the layers; make them equal"
            raise DesignError("encoder.width", reason)
        inner = inner if inner.vocab_size is not None else inner.replace(vocab_size=config.vocab_size)
        encoder = build_under("encoder", Decoder, inner, distinct_layers_only)
        if encoder.encoder_width is not None:
            raise DesignError("encoder.layers", "an encoder has no encoder output to read; remove its cross_attention")
        return encoder

    def _build_multi_token(self) -> list[MultiTokenModule]:
        """One module per depth, built last, so that no other random draw depends on them."""
        config = self.config
        if config.multi_token is None:
            return []
        if not self.causal:
            raise DesignError("", "a bidirectional mixer (causal: false) sees the tokens to predict; leave it out")
        index = 0 if config.residual.stream_grows else config.depth - 1  # each module starts a new stream
        depth = config.multi_token.depth
        plain = config.replace(embedding=config.embedding.replace(per_layer=None))  # a module has no embedding there
        last = config.last_layer.replace(adapter_rank=None)  # a module is visited once
        return [MultiTokenModule(config, Layer(last, plain, index)) for _ in range(depth)]

    def predict_ahead(self, hidden: Tensor, tokens: Tensor, layout: Layout | None = None) -> list[Prediction]:
        """The predictions of the multi-token modules, from the hidden states that a call without a state returned.

        hidden [B, T, width], tokens and layout: of that call. Returns one entry per depth that has tokens; none without
        modules. `head(entry.hidden)` are the logits of the token after the next d.
        """
        layout = self._layout(tokens, layout, None)
        if not len(self.multi_token):
            return []
        return predictions(self.multi_token, hidden, self.embed(tokens, layout), layout, self._call_layer)

    def tie(self) -> None:
        """Share the embedding's weight with a tied head, and a layer's with its later visits; in the encoder, too.

        Call it after replacing parameters. A shared layer keeps the parameters of its first visit; each visit keeps its
        adapters.
        """
        if self.config.head.tied:
            self.head.weight = self.embed.weight
        for index, source in enumerate(self.weight_sources):
            if source != index:
                for path, module in self.layers[source].named_modules():
                    if isinstance(module, VisitAdapter):
                        continue
                    again = self.layers[index].get_submodule(path)
                    for name, parameter in module.named_parameters(recurse=False):
                        setattr(again, name, parameter)
        if self.encoder is not None:
            self.encoder.tie()

    def visits(self, name: str) -> list[str]:
        """The names of a parameter or module in all layers that share its weights, the first visit's first.

        Only the name itself outside of layers, in layers visited once, and for the adapters of a visit.
        """
        prefix = "encoder." if self.encoder is not None and name.startswith("encoder.") else ""
        stack = self.encoder if self.encoder is not None and prefix else self
        group, number, *rest = [*name.removeprefix(prefix).split(".", 2), "", ""][:3]
        if (
            group != "layers"
            or "adapter" in rest[0].split(".")
            or not number.isdigit()
            or int(number) >= len(stack.weight_sources)
        ):
            return [name]
        sources, inner = stack.weight_sources, f".{rest[0]}" if rest[0] else ""
        same = [index for index, source in enumerate(sources) if source == sources[int(number)]]
        return [f"{prefix}layers.{index}{inner}" for index in same]

    def own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Each module with its name, without later visits of shared layers."""
        return ((name, module) for name, module in self.named_modules() if self.visits(name)[0] == name)

    def mixers(self) -> list[Mixer | None]:
        """Return the mixer of each layer, None where a layer has none."""
        return [layer.mixer for layer in self.layers if isinstance(layer, Layer)]

    @property
    def causal(self) -> bool:
        """Whether every mixer hides later tokens."""
        return all(mixer is None or mixer.causal for mixer in self.mixers())

    @property
    def lookback(self) -> int | None:
        """How many earlier positions a state's table must store: as many as the widest window, or all (None)."""
        lookbacks = [mixer.lookback for mixer in self.mixers() if mixer is not None]
        return None if None in lookbacks else max((length for length in lookbacks if length is not None), default=0)

    @property
    def length_dependent(self) -> bool:
        """Whether a rotary embedding depends on the final length of the text. A state then needs a `cache_length`."""
        return any(module.length_dependent for module in self.layers.modules() if isinstance(module, Rotation))

    @property
    def encoder_width(self) -> int | None:
        """The width of the encoder output that cross-attention reads, None without cross-attention."""
        widths = [mixer.encoder_width for mixer in self.mixers() if mixer is not None]
        return next((width for width in widths if width is not None), None)

    def encode(self, source: Tensor, layout: Layout | None = None) -> EncoderOutput:
        """source int64 [B, S] -> the encoder output that the layers' cross-attention reads, for any number of calls.

        Pass it to `layout.with_encoder_output` or `init_state(encoder_output=...)`. Raises ConfigError if the design
        has no encoder, or if a row of `layout` holds several documents.
        """
        if self.encoder is None:
            raise ConfigError("encoder: this design has none; pass your own vectors to layout.with_encoder_output(...)")
        self.encoder.checkpointing = self.checkpointing
        layout = None if layout is None else layout.checked()
        if layout is not None and layout.segment_ids is not None:
            raise ConfigError("source: packed documents would be read as one; put each in its own row")
        hidden, _ = self.encoder(source, layout)
        return EncoderOutput(hidden, is_token=None if layout is None or layout.padding is None else ~layout.padding)

    @torch.no_grad()  # a state carries no gradient, even if the encoder output does
    def init_state(
        self,
        batch: int,
        cache_length: int | None = None,
        encoder_output: EncoderOutput | None = None,
        rollback: int = 0,
        text_lengths: Sequence[int] | None = None,
    ) -> State:
        """Return an empty state for `batch` rows of at most `cache_length` tokens (None: the caches grow by doubling).

        encoder_output: what cross-attention reads; its keys and values are projected here, once. rollback: the most
        tokens that `State.rollback` can remove at a time. text_lengths: each row's final length, where a rotary
        embedding depends on it (None: `cache_length`). Raises ConfigError if a mixer is bidirectional or cannot roll
        back, or if an embedding depends on the final length and both are None.
        """
        if not self.causal:
            raise ConfigError("state: a bidirectional design (causal: false) sees later tokens and cannot have one")
        spec = self._state_spec(batch, cache_length, encoder_output, rollback)
        self._check_encoder_output(encoder_output, batch)
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        return self._empty_state(spec, layers, self.lookback, text_lengths, self.fingerprint)

    @torch.no_grad()
    def init_draft_state(
        self,
        batch: int,
        cache_length: int | None = None,
        encoder_output: EncoderOutput | None = None,
        rollback: int = 0,
        text_lengths: Sequence[int] | None = None,
    ) -> State:
        """`init_state` for the first multi-token module, whose state has one token less per row than the model's.

        Raises ConfigError as `init_state`, and for a design without modules.
        """
        if not len(self.multi_token):
            raise ConfigError("multi_token: this design has no modules; add multi_token to it and train it")
        self._check_encoder_output(encoder_output, batch)
        layer = self.multi_token[0].get_submodule("layer")
        assert isinstance(layer, Layer)
        lookback = 0 if layer.mixer is None else layer.mixer.lookback
        spec = self._state_spec(batch, cache_length, encoder_output, rollback)
        return self._empty_state(spec, [layer], lookback, text_lengths, f"{self.fingerprint} multi_token")

    def _state_spec(
        self, batch: int, cache_length: int | None, encoder_output: EncoderOutput | None, rollback: int
    ) -> StateSpec:
        if batch < 1 or (cache_length is not None and cache_length < 1):
            raise ConfigError(f"state: batch = {batch} and cache_length = {cache_length} must be at least 1")
        if rollback < 0:
            raise ConfigError(f"state: rollback = {rollback} must not be negative")
        weight = self.embed.weight
        return StateSpec(batch, cache_length, weight.dtype, weight.device, encoder_output, rollback)

    def _empty_state(
        self,
        spec: StateSpec,
        layers: Sequence[Layer],
        lookback: int | None,
        text_lengths: Sequence[int] | None,
        fingerprint: str,
    ) -> State:
        if spec.cache_length is None and text_lengths is None and self.length_dependent:
            raise ConfigError(f"state: {LENGTH_DEPENDENT}; give init_state a cache_length")
        if text_lengths is not None and not self.length_dependent:
            raise ConfigError("state: nothing in this design depends on text_lengths; leave them out")
        table = PositionTable.empty(spec.batch, lookback, spec.cache_length, spec.device, spec.rollback)
        states = [layer.init_state(spec) for layer in layers]
        state = State(table.with_text_lengths(text_lengths), states, fingerprint)
        if spec.rollback and not state.can_roll_back(1):
            raise ConfigError(
                f"state: rollback = {spec.rollback}, but a recurrence cannot roll back; fork the state instead"
            )
        return state

    def _check_encoder_output(self, encoder_output: EncoderOutput | None, batch: int) -> None:
        if self.encoder_width is None:
            if encoder_output is not None:
                reason = "no layer of this design reads one; leave it out, or add cross_attention"
                raise ConfigError(f"encoder_output: {reason}")
            return
        if encoder_output is None:
            reason = "is missing; give layout.with_encoder_output(...), or init_state(..., encoder_output=...)"
            raise ConfigError(f"encoder_output: {reason}")
        encoder_output.check(self.encoder_width, batch)

    def forward(
        self, tokens: Tensor, layout: Layout | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """tokens int64 [B, T] -> (hidden [B, T, width], new state or None).

        tokens may also be vectors [B, T, width], which replace the embedding's rows. Without a layout each row is one
        document from position 0, or continues where the state's row ended. Raises ConfigError if shapes or devices
        disagree, if the layout is not valid, if an encoder output is missing or not read, or if a state is used under
        gradients, was consumed or belongs to another design.
        """
        is_next, layout = layout is None, self._layout(tokens, layout, state)
        if state is None:
            self._check_encoder_output(layout.encoder_output, layout.batch)
            return self._run(tokens, layout, [None] * len(self.layers))[0], None
        if torch.is_grad_enabled():
            raise ConfigError("state: is written in place and carries no gradient; call within torch.no_grad()")
        if layout.encoder_output is not None:
            raise ConfigError("encoder_output: the state already has one; pass it to init_state alone")
        if state.fingerprint != self.fingerprint:
            raise ConfigError("state: belongs to another design; continue with a state from this model's init_state")
        state.check_not_consumed()
        table, layout = state.table.extend(layout, check=not is_next)
        state.consume()  # after the checks: a refused layout leaves the handle valid
        hidden, states = self._run(tokens, layout, state.layers)
        return hidden, State(table, states, state.fingerprint)

    def _run(self, tokens: Tensor, layout: Layout, states: list[Any]) -> tuple[Tensor, list[Any]]:
        if self.config.hands_over:
            layout = replace(layout, handed_over=HandedOver())  # of this call, and of its backward pass
        return self.run_layers(self.embedded(tokens, layout), layout, states)

    def run_layers(self, x: Tensor, layout: Layout, states: list[Any]) -> tuple[Tensor, list[Any]]:
        """The embedding's output x [B, T, width] -> (hidden [B, T, width], the layers' new states)."""
        stream, new_states = self.expand_stream(x), []
        for layer, state in zip(self.layers, states, strict=True):
            stream, new_state = self._call_layer(layer, stream, layout, state)
            new_states.append(new_state)
        return self.final_norm(stream), new_states

    def embedded(self, tokens: Tensor, layout: Layout) -> Tensor:
        """tokens [B, T] -> the embedding's output [B, T, width]; what layers read beside it is left in the layout."""
        x: Tensor = self.embed(tokens, layout)
        if self.config.reads_tokens:
            if tokens.is_floating_point():
                raise ConfigError("tokens: are vectors, but a layer reads ids; give ids")
            assert layout.handed_over is not None
            layout.handed_over.tokens = tokens
        if self.embed.per_layer is not None:
            assert layout.handed_over is not None
            layout.handed_over.per_layer = self.embed.per_layer(tokens, x, layout)
        return x

    def expand_stream(self, x: Tensor) -> Stream:
        """The embedding's output [B, T, width] -> the stream that enters the first layer."""
        return self.config.residual.expand(x) if self.expansion is None else self.expansion(x)

    def _call_layer(self, layer: nn.Module, stream: Stream, layout: Layout, state: Any) -> tuple[Stream, Any]:
        if self.checkpointing and torch.is_grad_enabled():
            # The backward pass runs the layer again, in another thread: with the same noise key and kernels.
            run_in_context = copy_context().run
            stream, state = checkpoint(run_in_context, layer, stream, layout, state, use_reentrant=False)
            return stream, state
        stream, state = layer(stream, layout, state)
        return stream, state

    def _layout(self, tokens: Tensor, layout: Layout | None, state: State | None) -> Layout:
        shape = tokens.shape[:2]
        if tokens.dim() - tokens.is_floating_point() != 2:
            raise ConfigError(f"tokens: have shape {list(tokens.shape)}; expected [batch, length]")
        if tokens.is_floating_point() and tokens.shape[2] != self.config.width:
            raise ConfigError(f"tokens: are vectors {tokens.shape[2]} wide; expected width {self.config.width}")
        if layout is None:
            if state is not None:
                state.table.check_batch(tokens.shape[0])
                return state.table.next_layout(tokens.shape[1])
            return Layout.causal(tokens.shape[0], tokens.shape[1], device=tokens.device)
        if layout.positions.shape != shape:
            shapes = f"{list(layout.positions.shape)} and tokens {list(shape)}"
            raise ConfigError(f"layout: positions have shape {shapes}; they must be equal")
        if layout.positions.device != tokens.device:
            raise ConfigError(f"layout: is on {layout.positions.device} and tokens on {tokens.device}; move one")
        return layout.checked()


def build(
    config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Decoder:
    """Build a model and initialize its parameters. On device "meta" nothing is allocated or initialized.

    Raises DesignError with the path of the field where parts do not fit together.
    """
    with torch.device("meta"):
        model = Decoder(config)
    materialize(model, dtype, device)
    if torch.device(device).type != "meta":
        initialize(model, seed)
    return model
