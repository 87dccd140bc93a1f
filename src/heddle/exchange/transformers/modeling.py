"""HeddleModel and HeddleForCausalLM: a heddle decoder with the interface of a transformers model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import PrefixedDataset, reduce
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import GenerationMixin, PreTrainedModel, TrainerCallback, initialization
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from heddle.errors import ConfigError
from heddle.exchange.transformers.cache import (
    CACHE_NAME,
    CACHE_NAMES,
    HeddleCache,
    HeddleCacheLayer,
    ModelInputs,
    given_cache,
    heddle_layer_of,
)
from heddle.exchange.transformers.config import HeddleConfig
from heddle.exchange.transformers.external_attention import (
    AttentionModule,
    ExternalAttention,
    attention_modules,
    uses_external_attention,
)
from heddle.exchange.transformers.masks import CachedTokens, LayoutAndMask, layout_from_inputs
from heddle.model.attention_maps import record_weights
from heddle.model.decoder import Decoder, Layer
from heddle.model.embedding import Embedding
from heddle.model.initialization import initialize
from heddle.numerics.attention.observer import Observation
from heddle.numerics.linear import packed_weights
from heddle.numerics.random import RandomStream
from heddle.parts.feedforwards import Feedforward
from heddle.parts.layout import Layout
from heddle.parts.modules.eager import disable_compilation
from heddle.parts.modules.indexer import Indexer
from heddle.parts.modules.linear import SelfInitialized, fill_normal
from heddle.parts.modules.router_statistics import IndexLoss, RouterRecorder, RouterStatistics, record_router_statistics
from heddle.parts.modules.value_embedding import ValueEmbedding

# HeddlePreTrainedModel: what HeddleModel and HeddleForCausalLM share.

# Initialize the weights that a loaded folder does not hold.


@torch.no_grad()
def init_missing_weights(decoder: Decoder) -> None:
    """Initialize the weights that were not loaded, as `heddle.build(seed=torch.initial_seed())` does."""
    loaded = {p for p in decoder.parameters() if getattr(p, "_is_hf_initialized", False)}

    def is_incomplete(module: SelfInitialized) -> bool:
        return any(parameter not in loaded for parameter in module.parameters(recurse=False))

    # A module initializes all of its parameters, so those that were loaded are saved and restored.
    modules = [module for module in decoder.modules() if isinstance(module, SelfInitialized) and is_incomplete(module)]
    saved = {p: p.clone() for module in modules for p in module.parameters(recurse=False) if p in loaded}
    initialize(decoder, torch.initial_seed(), is_incomplete)
    for parameter, value in saved.items():
        parameter.copy_(value)


# Change the vocabulary size of a model: cut off rows of the embedding and the head, or add rows at the end.


@torch.no_grad()
def resize_embeddings(decoder: Decoder, vocab_size: int, mean_init: bool = True) -> None:
    """Resize the embedding and the head in place, and set `vocab_size` of the design.

    mean_init: new rows are the mean of the old rows; otherwise they are initialized as in a new model. Raises
    ConfigError for a vocab_size below 1.
    """
    if vocab_size < 1:
        raise ConfigError(f"vocab_size: {vocab_size} must be at least 1")
    std = decoder.config.initialization.std
    head, embed = decoder.head, decoder.embed
    tied = head.weight is embed.weight
    embed.weight = _resized(embed.weight, vocab_size, mean_init, std)
    if embed.per_layer is not None:
        embed.per_layer.weight = _resized(embed.per_layer.weight, vocab_size, mean_init, std)
    for module in decoder.layers.modules():
        if isinstance(module, ValueEmbedding) and module.weight is not None:
            module.weight = _resized(module.weight, vocab_size, mean_init, std)
    decoder.tie()
    head.weight = embed.weight if tied else _resized(head.weight, vocab_size, mean_init, std)
    if head.bias is not None:
        head.bias = _resized(head.bias, vocab_size, mean_init, 0.0)
    decoder.config = decoder.config.replace(vocab_size=vocab_size)
    decoder.fingerprint = decoder.config.fingerprint()


def _resized(old: Tensor, rows: int, mean_init: bool, std: float) -> nn.Parameter:
    copied = min(rows, old.shape[0])
    new = old.new_empty(rows, *old.shape[1:])
    new[:copied] = old[:copied]
    if mean_init:
        new[copied:] = old.double().mean(0).to(old.dtype)
    elif rows > copied:
        fill_normal(new[copied:], std, RandomStream.of(torch.initial_seed(), "resized embeddings"))
    return nn.Parameter(new, old.requires_grad)


class HeddlePreTrainedModel(PreTrainedModel):
    """The base class. Weights that are not loaded are initialized as by `heddle.build`, with torch's seed."""

    config_class = HeddleConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_attention_backend = _supports_sdpa = True
    _no_split_modules = ["Layer"]  # noqa: RUF012 - transformers reads a list
    _skip_keys_device_placement = [*CACHE_NAMES]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["expert_bias", "table"]  # noqa: RUF012 - bf16 would lose small updates and ids

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: the config's `auto_map` names the classes, and no code is copied into a folder."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does. Weights that `device_map` offloads are loaded layer by layer."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with `output_loading_info`
        if getattr(model, "hf_device_map", None) is not None:
            # needs accelerate

            preload_layers(model)
        return loaded

    @property
    def heddle_decoder(self) -> Decoder:
        """The heddle decoder of this model."""
        decoder: Decoder = self.base_model.decoder
        return decoder

    def initialize_weights(self) -> None:
        """Initialize the weights that were not loaded. transformers calls this after building or loading a model."""
        if not getattr(self.heddle_decoder, "_is_hf_initialized", False):
            init_missing_weights(self.heddle_decoder)
        super().initialize_weights()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: initial weights depend on a module's name, which is unknown here (see `initialize_weights`)."""

    def get_input_embeddings(self) -> nn.Module:
        """Tokens -> rows [B, T, width], before scaling and position embeddings; as `inputs_embeds` expects them."""
        embed = self.heddle_decoder.embed
        return embed if embed.lookup_module is None else embed.lookup_module

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding (an `Embedding`), or only the module that looks up its rows (any other module)."""
        if isinstance(value, Embedding):
            self.heddle_decoder.embed = value
        else:
            self.heddle_decoder.embed.set_lookup(value)

    def get_decoder(self) -> nn.Module:
        """The HeddleModel. The decoder of heddle inside it is `heddle_decoder`."""
        model: nn.Module = self.base_model
        return model

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.heddle_decoder.head

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Change the vocabulary size. New rows are the mean of the old ones, or initialized as in a new model."""
        vocab_size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            vocab_size = -(-vocab_size // pad_to_multiple_of) * pad_to_multiple_of
        resize_embeddings(self.heddle_decoder, vocab_size, mean_resizing)
        self.config.set_design(self.heddle_decoder.config)
        return self.heddle_decoder.embed


# Weights that `device_map` offloads to the CPU or to disk: a layer's are loaded together, before it runs.
#
# accelerate loads the weights of a module when the module is called. Mixers and experts read the weights of their
# projections, which are then never called, and would compute with memory that nobody filled.


def preload_layers(model: nn.Module) -> None:
    """Move the hooks that load offloaded weights from the modules within each layer to the layer."""
    for name, layer in model.named_modules():
        hooks = [getattr(module, "_hf_hook", None) for module in layer.modules()] if isinstance(layer, Layer) else []
        hook = next((hook for hook in hooks if isinstance(hook, AlignDevicesHook) and hook.offload), None)
        if hook is None:
            continue
        remove_hook_from_submodules(layer)
        layer_hook = AlignDevicesHook(
            execution_device=hook.execution_device,
            offload=True,
            weights_map=PrefixedDataset(hook.weights_map.dataset, f"{name}."),
            place_submodules=True,
            skip_keys=hook.skip_keys,
            tied_params_map=hook.tied_params_map,
        )
        add_hook_to_module(layer, layer_hook)


# Optional outputs of a call (hidden states, attention weights, auxiliary loss) and checks of its keyword arguments.


# Arguments that repeat what the layout says: some collators give the boundaries of packed documents to kernels.
REDUNDANT_KWARGS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position"}
# Arguments for stop strings, which `generate` has used already but still passes to the model.
GENERATION_KWARGS = {"tokenizer", "assistant_tokenizer"}
LOSS_KWARGS = {"num_items_in_batch", "ignore_index", "shift_labels"}


@dataclass
class RecordedOutputs:
    """recorded_states: the embedding and the output of each layer (of two residual streams, the one that layers read).

    recorded_weights: the attention weights of each layer. None: not recorded.
    """

    recorded_states: list[Tensor] | None = None
    recorded_weights: list[Tensor | None] | None = None

    def hidden_states(self, last: Tensor) -> tuple[Tensor, ...] | None:
        """The hidden states as transformers returns them: the last is the input of the head."""
        return None if self.recorded_states is None else (*self.recorded_states[:-1], last)

    def attentions(self) -> tuple[Tensor | None, ...] | None:
        """The attention weights [B, H, T, S] of each layer, None for a layer without any."""
        return None if self.recorded_weights is None else tuple(self.recorded_weights)


@contextmanager
def record_outputs(decoder: Decoder, return_states: bool, return_weights: bool) -> Iterator[RecordedOutputs]:
    """Record the outputs of the decoder's calls within the block. Results do not change."""
    recorded = RecordedOutputs([] if return_states else None, [None] * len(decoder.layers) if return_weights else None)
    with ExitStack() as stack:
        if recorded.recorded_states is not None:
            states = recorded.recorded_states

            def after_embedding(module: nn.Module, args: Any, output: Any) -> None:
                states.append(output)

            def after_layer(module: nn.Module, args: Any, output: Any) -> None:
                stream = output[0]
                states.append(stream if isinstance(stream, Tensor) else stream[0])

            stack.callback(decoder.embed.register_forward_hook(after_embedding).remove)
            for layer in decoder.layers:
                stack.callback(layer.register_forward_hook(after_layer).remove)
        if recorded.recorded_weights is not None:
            weights = recorded.recorded_weights

            def on_weights(index: int, observation: Observation) -> None:
                weights[index] = observation.weights

            stack.enter_context(record_weights(decoder, on_weights))
        yield recorded


def take_token_types(kwargs: dict[str, Any], decoder: Decoder) -> Tensor | None:
    """Take token_type_ids [B, T] out of the arguments, if the design reads them."""
    return None if decoder.embed.token_types is None else kwargs.pop("token_type_ids", None)


def check_kwargs(kwargs: dict[str, Any]) -> None:
    """Raises ConfigError naming an argument that would be ignored."""
    for name, value in kwargs.items():
        if name == "token_type_ids" and isinstance(value, Tensor) and not bool(value.any()):
            continue  # all zeros say nothing; some tokenizers always return them
        if value is not None and name not in REDUNDANT_KWARGS | LOSS_KWARGS:
            raise ConfigError(f"{name}: is not supported by heddle's models; leave it out")


def scaled_aux_loss(
    entries: Sequence[RouterStatistics | IndexLoss], labels: Tensor | None, loss_kwargs: dict[str, Any]
) -> Tensor | float:
    """The auxiliary losses of the routers and the indexers per token.

    With num_items_in_batch it is multiplied by the share of the batch's scored tokens that this call has, so that the
    losses of accumulated calls add up.
    """
    losses = [entry.aux_loss / entry.tokens.clamp(min=1) for entry in entries if entry.aux_loss is not None]
    if not losses:
        return 0.0
    items = loss_kwargs.get("num_items_in_batch")
    if items is None:
        return sum(losses[1:], losses[0])
    shift_labels = loss_kwargs.get("shift_labels")
    targets = labels[:, 1:] if shift_labels is None and labels is not None else shift_labels
    assert targets is not None
    share: Tensor = (targets != loss_kwargs.get("ignore_index", -100)).sum() / items
    return sum(losses[1:], losses[0]) * share


# One call of HeddleModel: what it was given, and the layout that follows.
#
# What `torch.compile` must not trace is kept out of its graphs here: masks and positions are checked by their values, a
# cache changes with each token, and recorded outputs come through hooks.


@dataclass(frozen=True)
class ModelCall:
    """tokens [B, T], or embeddings [B, T, width]; the masks and positions beside them; and what to return.

    token_types: the type of each token [B, T], for designs that have any.
    """

    tokens: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    cache_layer: HeddleCacheLayer | None
    return_states: bool
    return_weights: bool
    kwargs: Mapping[str, Any]
    token_types: Tensor | None = None

    @property
    def traceable(self) -> bool:
        """Whether `torch.compile` may trace the decoder in this call."""
        return self.cache_layer is None and not self.return_states and not self.return_weights

    def layout(self, cached: CachedTokens, has_external_attention: bool) -> LayoutAndMask:
        """The layout of this call after `cached`. Raises ConfigError for what no layout can express."""
        mask, position_ids = self.attention_mask, self.position_ids
        if mask is None and position_ids is None:
            return LayoutAndMask(None, None)
        if has_external_attention and mask is None and position_ids is not None:  # reads no value
            positions = position_ids.expand(self.tokens.shape[:2])
            return LayoutAndMask(Layout(positions, has_padding=False, is_checked=True), None)
        inputs: LayoutAndMask = layout_from_inputs(self.tokens, mask, position_ids, cached)
        return inputs


class HeddleModel(HeddlePreTrainedModel):
    """Tokens -> hidden states. Raises ConfigError for a design with cross-attention, which is not supported."""

    _tied_weights_keys = {"decoder.head.weight": "decoder.embed.weight"}  # noqa: RUF012

    def __init__(self, config: HeddleConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.load_design())
        if self.decoder.encoder_width is not None:
            raise ConfigError("design: reads an encoder output (cross_attention), which these classes do not support")
        visits = [self.decoder.visits(name) for name, _ in self.decoder.named_parameters()]
        self._later_visits = {f"decoder.{each}": f"decoder.{first}" for first, *again in visits for each in again}
        self._tied_weights_keys = self._tied_weights_keys | self._later_visits
        disable_compilation(self.decoder)
        self._attention_modules: dict[nn.Module, AttentionModule] = {}
        self._external_attention_modules()
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Each tied parameter's name -> the name of the one it shares: a tied head, later visits of a layer."""
        tied: dict[str, str] = super().get_expanded_tied_weights_keys(all_submodels)
        return tied if all_submodels else tied | self._later_visits  # these are tied whether or not the head is

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the backward pass recomputes each layer instead of storing its activations."""
        return self.decoder.checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.decoder.checkpointing = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids int64 [B, T], or inputs_embeds [B, T, width], to hidden states [B, T, width].

        attention_mask, 2-D [B, columns] (1: a token, 0: padding, anywhere) or 4-D, and position_ids become a layout;
        see `masks`. cache is the newer name of past_key_values; without gradients one is created, unless use_cache is
        False. Further arguments: output_hidden_states, output_attentions, return_dict, and token_type_ids [B, T] for
        designs that have token types. Raises ConfigError for unknown arguments, and for masks and positions that no
        layout can express.
        """
        return_states, return_weights = (
            bool(getattr(self.config, name) if (value := kwargs.pop(name, None)) is None else value)
            for name in ("output_hidden_states", "output_attentions")
        )
        modules, token_types = self._external_attention_modules(), take_token_types(kwargs, self.decoder)
        if modules is None:
            check_kwargs(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigError("input_ids: give either input_ids or inputs_embeds")
        tokens = inputs_embeds if input_ids is None else input_ids
        assert tokens is not None
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and not self.decoder.causal:
            raise ConfigError("attention_mask: is 4-D, but the design sees later tokens; give one of [batch, length]")
        cache, cache_layer = self._cache(given_cache(cache, past_key_values), use_cache)
        if token_types is not None and cache_layer is not None:
            raise ConfigError("token_type_ids: are not kept in a cache; give use_cache=False")
        inputs = (tokens, attention_mask, position_ids, cache_layer)
        call = ModelCall(*inputs, return_states, return_weights, kwargs, token_types)
        recomputed = self.decoder.checkpointing and torch.is_grad_enabled()  # in a copy of the call's context
        run = self._run if call.traceable and not recomputed else self._run_uncompiled
        hidden, recorded = run(call, modules)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            hidden_states=recorded.hidden_states(hidden),
            attentions=recorded.attentions(),
            **{CACHE_NAME: cache},
        )

    def _run(self, call: ModelCall, modules: dict[nn.Module, AttentionModule] | None) -> tuple[Tensor, RecordedOutputs]:
        """Run the decoder. modules: from `_external_attention_modules`."""
        tokens, cache_layer = call.tokens, call.cache_layer
        cached = CachedTokens() if cache_layer is None else cache_layer.read_pending(self.decoder)
        inputs = call.layout(cached, has_external_attention=modules is not None)
        if call.return_weights and cached.length and (cached.is_token is not None or inputs.is_token is not None):
            raise ConfigError("output_attentions: a cache with padding does not keep its columns; use no cache")
        with record_outputs(self.decoder, call.return_states, call.return_weights) as recorded:
            if cache_layer is not None:
                inputs_and_layout = ModelInputs(tokens, inputs.layout)
                return cache_layer.run_decoder(self.decoder, inputs_and_layout, inputs.is_token), recorded
            layout = inputs.layout or Layout.causal(tokens.shape[0], tokens.shape[1], device=tokens.device)
            if call.token_types is not None:
                layout = layout.with_token_types(call.token_types)
            if is_compiling() and layout.start is None and not self.decoder.length_dependent:
                # Lengths that differ in each batch would compile the graph again.
                layout = replace(layout, doc_lengths=None, max_position=None)
            if modules is not None:
                backend = ExternalAttention(modules, call.attention_mask, call.position_ids, call.kwargs)
                layout = replace(layout, attention_backend=backend)
            return self.decoder(tokens, layout)[0], recorded

    _run_uncompiled = torch.compiler.disable(_run)

    def _external_attention_modules(self) -> dict[nn.Module, AttentionModule] | None:
        """The modules for external attention functions, or None if heddle computes attention itself."""
        if not uses_external_attention(self.config):
            return None
        if list(self._attention_modules) != self.decoder.mixers():  # not made yet, or the decoder was replaced
            self._attention_modules = attention_modules(self.decoder, self.config)
        return self._attention_modules

    def _cache(self, past_key_values: Any, use_cache: bool | None) -> tuple[Any, HeddleCacheLayer | None]:
        """The cache of a call, created if needed, and heddle's layer in it. (None, None) if it uses none."""
        is_external = uses_external_attention(self.config)
        if is_external and (past_key_values is not None or use_cache):
            raise ConfigError("use_cache: external attention has no heddle cache; set it to False")
        if past_key_values is None:
            if use_cache is None:
                is_inference = self.decoder.causal and not torch.is_grad_enabled()
                use_cache = not is_external and self.config.use_cache and is_inference
            if not use_cache:
                return None, None
            past_key_values = HeddleCache()
        return past_key_values, heddle_layer_of(past_key_values)


class HeddleForCausalLM(HeddlePreTrainedModel, GenerationMixin):
    """Tokens -> logits of the next tokens, and the loss. `generate` works as for every model of transformers."""

    def __init__(self, config: HeddleConfig) -> None:
        super().__init__(config)
        self.model = HeddleModel(config)
        self.expert_counts: dict[Feedforward, Tensor] = {}  # tokens per expert since `balance_experts`
        self.post_init()

    @classmethod
    def from_decoder(cls, decoder: Decoder) -> Self:
        """Wrap a decoder. Its weights are shared, not copied."""
        with torch.device("meta"):
            model = cls(HeddleConfig(design=decoder.config.dump()))
        model.model.decoder = decoder
        model.config.dtype = model.dtype
        model.train(decoder.training)
        return model

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As HeddleModel, and logits [B, N, vocab] of the last `logits_to_keep` tokens (0: all) or of those indices.

        labels int64 [B, T], −100 where a token is not scored; the logits at t are scored against the label at t + 1.
        loss: the mean over scored tokens, or their sum / num_items_in_batch. In training it includes the auxiliary
        losses of experts and indexers.
        """
        loss_kwargs = {name: kwargs.pop(name) for name in LOSS_KWARGS & kwargs.keys()}
        has_labels = labels is not None or loss_kwargs.get("shift_labels") is not None
        if self.training and has_labels and len(self.heddle_decoder.multi_token):
            reason = "their losses are not part of this loss, so they would not be trained"
            raise ConfigError(f"multi_token: {reason}; train with heddle, or convert with drop_multi_token first")
        kwargs |= {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cache": given_cache(cache, past_key_values),
            "inputs_embeds": inputs_embeds,
            "use_cache": False if has_labels and use_cache is None else use_cache,
        }
        recorder = RouterRecorder()
        if self.training and self._has_auxiliary_losses:
            with record_router_statistics() as recorder:
                outputs = self.model(**kwargs)
        else:
            outputs = self.model(**kwargs)
        hidden = outputs.last_hidden_state
        indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.heddle_decoder.head(hidden[:, indices])
        loss = None
        if has_labels:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **loss_kwargs)
            loss = loss + scaled_aux_loss([*recorder.entries, *recorder.index_losses], labels, loss_kwargs)
        for entry in recorder.entries:
            counts = self.expert_counts.get(entry.mixture, 0) + entry.expert_counts.detach()
            self.expert_counts[entry.mixture] = counts
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )

    @property
    def _has_auxiliary_losses(self) -> bool:
        """Whether a layer is a mixture of experts, or has an indexer."""
        if any(isinstance(module, Indexer) for module in self.heddle_decoder.modules()):
            return True
        feedforwards = [layer.feedforward for layer in self.heddle_decoder.layers if isinstance(layer, Layer)]
        return any(feedforward is not None and feedforward.expert_info is not None for feedforward in feedforwards)

    def balance_experts(self) -> None:
        """Update the expert biases of designs with `bias_update`. Call it once after each optimizer step."""
        decoder, summed = self.heddle_decoder, dict[Feedforward, Any]()
        names = {module: name for name, module in decoder.named_modules() if module in self.expert_counts}
        for mixture, counts in self.expert_counts.items():  # all visits of a shared layer are of one mixture
            first: Any = decoder.get_submodule(decoder.visits(names[mixture])[0])
            summed[first] = summed.get(first, 0) + counts
        for mixture, counts in summed.items():
            if any(parameter.requires_grad for parameter in mixture.parameters()):
                mixture.update_expert_bias(counts)
        self.expert_counts.clear()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, a cache given by either name. Weights are packed once for the whole call."""
        if (cache := given_cache(*(kwargs.pop(name, None) for name in CACHE_NAMES))) is not None:
            kwargs[CACHE_NAME] = cache
        with packed_weights():
            return super().generate(*args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The inputs of the next call. Generated tokens are not padding, so after the first call there is no mask."""
        for name in GENERATION_KWARGS & kwargs.keys():
            del kwargs[name]
        cache = given_cache(cache, kwargs.pop(CACHE_NAMES[1], None))
        has_past = cache is not None and cache.get_seq_length() > 0
        if has_past and next_sequence_length is not None and not is_first_iteration:
            attention_mask = None
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **{CACHE_NAME: cache},
            **kwargs,
        )
        return inputs

    def _prepare_position_ids_for_generation(self, *_: Any) -> None:
        """Return None: positions follow from the mask or the cache."""

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        """Create heddle's cache.

        It has a maximum length if it is static, or if the design's RoPE depends on the length of the text.
        """
        kind = generation_config.cache_implementation
        if model_kwargs.get(CACHE_NAME) is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
            return
        if kind not in (None, "dynamic", "static"):
            raise ConfigError(f"cache_implementation: is {kind!r}; choose 'dynamic' or 'static'")
        needs_length = kind == "static" or self.heddle_decoder.length_dependent
        cache = HeddleCache(args[-1] if needs_length else None)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[CACHE_NAME] = cache


# Classes that label texts and tokens: a heddle decoder under a new head without bias, as in transformers' own.


HEAD_STD = 0.02  # of a new head's weights, as in most models of transformers


class _Classifier(HeddlePreTrainedModel):
    score: nn.Module

    @classmethod
    def from_decoder(cls, decoder: Decoder, num_labels: int = 2, **fields: Any) -> Any:
        """Put a new head on a decoder. Its weights are shared, not copied. fields: of the config, as `pad_token_id`."""
        with torch.device("meta"):
            model = cls(HeddleConfig(design=decoder.config.dump(), num_labels=num_labels, **fields))
        model.model.decoder = decoder
        model.score.to_empty(device=decoder.embed.weight.device).to(decoder.embed.weight.dtype)
        with torch.no_grad():
            for parameter in model.score.parameters():
                nn.init.normal_(parameter, std=HEAD_STD) if parameter.dim() == 2 else nn.init.zeros_(parameter)
        model.config.dtype = model.dtype
        model.train(decoder.training)
        return model

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a head that was not loaded. The decoder is initialized by `initialize_weights`."""
        if module is getattr(self, "score", None) and isinstance(module, nn.Linear):
            initialization.normal_(module.weight, std=HEAD_STD)
            if module.bias is not None:
                initialization.zeros_(module.bias)


class HeddleForSequenceClassification(GenericForSequenceClassification, _Classifier):
    """Tokens -> label logits [B, num_labels], from each sequence's last token that is not `pad_token_id`.

    Trainers of reward models use it with num_labels 1. The loss has no auxiliary loss that balances experts.
    """


class HeddleForTokenClassification(GenericForTokenClassification, _Classifier):
    """Tokens -> label logits [B, T, num_labels]. The loss has no auxiliary loss of experts."""


# A callback of transformers' Trainer that updates the expert biases of designs with `bias_update`.


class BalanceExperts(TrainerCallback):
    """Use it as `Trainer(..., callbacks=[BalanceExperts()])`. It sums the expert counts of all processes."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Update the expert biases."""
        for module in model.modules():
            if isinstance(module, HeddleForCausalLM):
                for mixture, counts in module.expert_counts.items():
                    module.expert_counts[mixture] = reduce(counts, "sum")
                module.balance_experts()
