"""HeddleModel and HeddleForCausalLM: a decoder of heddle behind the classes of transformers."""

from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from heddle.errors import ConfigError
from heddle.exchange.transformers.cache import Call, HeddleCache, HeddleLayer, layer_of
from heddle.exchange.transformers.config import HeddleConfig
from heddle.exchange.transformers.elsewhere import TOLD, Told, attach, elsewhere
from heddle.exchange.transformers.masks import Columns, Reading, read
from heddle.exchange.transformers.outputs import OF_GENERATION, OF_LOSS, check, penalty, seeing
from heddle.exchange.transformers.starting import start
from heddle.exchange.transformers.vocabulary import resize
from heddle.model.decoder import Decoder
from heddle.model.embedding import Embedding
from heddle.numerics.linear import packing
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import Feedforward
from heddle.parts.modules.router_statistics import Ledger, ledger


class HeddlePreTrainedModel(PreTrainedModel):
    """What both classes share. Weights that are not loaded start as those of `heddle.build`, with torch's seed."""

    config_class = HeddleConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_attention_backend = _supports_sdpa = True
    _no_split_modules = ["Layer"]  # noqa: RUF012 - transformers reads a list
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["balance"]  # noqa: RUF012 - what chooses experts moves by steps that bf16 would lose

    @property
    def of_heddle(self) -> Decoder:
        """The decoder itself."""
        decoder: Decoder = self.base_model.decoder
        return decoder

    def initialize_weights(self) -> None:
        """Fill what was not loaded; transformers calls this when a model was built or loaded, then goes by modules."""
        if not getattr(self.of_heddle, "_is_hf_initialized", False):
            start(self.of_heddle)
        super().initialize_weights()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: a module's start depends on its name, which it does not know."""

    def get_input_embeddings(self) -> nn.Module:
        """Tokens -> rows [B, T, width], which `inputs_embeds` takes; scale and positions come after."""
        embed = self.of_heddle.embed
        return embed if embed.rows is None else embed.rows

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the module, or what looks rows up within it; scale and positions come after."""
        if isinstance(value, Embedding):
            self.of_heddle.embed = value
        else:
            self.of_heddle.embed.lookup(value)

    def get_decoder(self) -> nn.Module:
        """HeddleModel, which takes what transformers' models do; `of_heddle` is what it holds."""
        model: nn.Module = self.base_model
        return model

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.of_heddle.head

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Another size of vocabulary. New rows are the mean of the old ones, or drawn as a fresh model's."""
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        size = size if pad_to_multiple_of is None else -(-size // pad_to_multiple_of) * pad_to_multiple_of
        resize(self.of_heddle, size, mean_resizing)
        self.config.take(self.of_heddle.config)
        return self.of_heddle.embed


class HeddleModel(HeddlePreTrainedModel):
    """Tokens -> hidden states, by `decoder`. Raises ConfigError for a design that reads a memory besides."""

    _tied_weights_keys = {"decoder.head.weight": "decoder.embed.weight"}  # noqa: RUF012

    def __init__(self, config: HeddleConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.read())
        if self.decoder.memory_width is not None:
            raise ConfigError("design: reads a memory beside the text (cross_attention), which these classes have not")
        attach(self.decoder, self.config)
        self.post_init()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether layers run again in the backward pass instead of keeping what they computed."""
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
        **more: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids int64 [B, T], or inputs_embeds [B, T, width], to hidden states [B, T, width].

        attention_mask, 2-D [B, columns] (1: a token, 0: padding, anywhere) or 4-D, and position_ids become a layout;
        see `masks`. Without gradients a cache is made where none is given, unless use_cache is False. More keywords:
        output_hidden_states, output_attentions, return_dict. Raises ConfigError for others, and for what no layout is.
        """
        hidden_wanted, weights_wanted = (
            bool(getattr(self.config, name) if (value := more.pop(name, None)) is None else value)
            for name in ("output_hidden_states", "output_attentions")
        )
        if not (others := attach(self.decoder, self.config)):
            check(more)
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigError("input_ids: give them or inputs_embeds, one of the two")
        tokens = inputs_embeds if input_ids is None else input_ids
        assert tokens is not None
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and not self.decoder.causal:
            raise ConfigError("attention_mask: is 4-D, but the design sees later tokens; give one of [batch, length]")
        cache, layer = self._cache(past_key_values, use_cache)
        past = Columns() if layer is None else layer.past(self.decoder)
        if others and attention_mask is None and position_ids is not None:  # no value is read
            found = Reading(Layout(position_ids.expand(tokens.shape[:2]), has_padding=False), None)
        else:
            found = read(tokens, attention_mask, position_ids, past)
        if weights_wanted and past.size and (past.real is not None or found.real is not None):
            raise ConfigError("output_attentions: beside a cache with padding, columns are not kept; use no cache")
        with seeing(self.decoder, hidden_wanted, weights_wanted) as seen:
            if layer is None:
                layout = found.layout or Layout.causal(tokens.shape[0], tokens.shape[1], device=tokens.device)
                if others:
                    layout.memo[TOLD] = Told(attention_mask, position_ids, more)
                hidden, _ = self.decoder(tokens, layout)
            else:
                hidden = layer.read(self.decoder, Call(tokens, found.layout), found.real)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=seen.hidden_states(hidden),
            attentions=seen.attentions(),
        )

    def _cache(self, given: Any, wanted: bool | None) -> tuple[Any, HeddleLayer | None]:
        """The cache of a call and our layer in it."""
        if elsewhere(self.config) and (given is not None or wanted):
            raise ConfigError("use_cache: attention that others compute has no cache of heddle; set it to False")
        if given is None:
            usual = (
                not elsewhere(self.config)
                and self.config.use_cache
                and self.decoder.causal
                and not torch.is_grad_enabled()
            )
            if not (usual if wanted is None else wanted):
                return None, None
            given = HeddleCache()
        return given, layer_of(given)


class HeddleForCausalLM(HeddlePreTrainedModel, GenerationMixin):
    """Tokens -> logits of the next ones, and their loss; `generate` as of every model of transformers."""

    def __init__(self, config: HeddleConfig) -> None:
        super().__init__(config)
        self.model = HeddleModel(config)
        self.loads: dict[Feedforward, Tensor] = {}  # what training gave each expert since `balance_experts`
        self.post_init()

    @classmethod
    def of(cls, decoder: Decoder) -> Self:
        """The same decoder behind this class: its weights are shared, not copied."""
        with torch.device("meta"):
            model = cls(HeddleConfig(design=decoder.config.dump()))
        model.model.decoder = decoder
        model.config.dtype = model.dtype
        return model.train(decoder.training)

    @can_return_tuple
    def forward(  # noqa: PLR0913 - transformers reads the names off the signature
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """As HeddleModel, and logits [B, kept, vocab] of the last `logits_to_keep` tokens (0: all), or of those named.

        labels int64 [B, T]: tokens that are scored, −100 elsewhere; each is compared with what is said of it one
        before. loss: their mean, or their sum / num_items_in_batch; in training with what balances experts.
        """
        of_loss = {name: more.pop(name) for name in OF_LOSS & more.keys()}
        scored = labels is not None or of_loss.get("shift_labels") is not None
        with ledger() if self.training else nullcontext(Ledger()) as kept:
            outputs = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=False if scored and use_cache is None else use_cache,
                **more,
            )
        hidden = outputs.last_hidden_state
        chosen = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.of_heddle.head(hidden[:, chosen])
        loss = None
        if scored:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **of_loss)
            loss = loss + penalty(kept.entries, labels, of_loss)
        if self.training:
            for entry in kept.entries:
                self.loads[entry.mixture] = self.loads.get(entry.mixture, 0) + entry.loads.detach()
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def balance_experts(self) -> None:
        """Tell mixtures of experts that balance themselves their loads, once after each step that was taken."""
        for mixture, loads in self.loads.items():
            if any(parameter.requires_grad for parameter in mixture.parameters()):
                mixture.balance(loads)
        self.loads.clear()

    def generate(self, *given: Any, **more: Any) -> Any:
        """As every model of transformers; weights are packed once for the whole text."""
        with packing():
            return super().generate(*given, **more)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The inputs of the next call: what was just written is never padding, so its mask need not be read."""
        for name in OF_GENERATION & kwargs.keys():
            del kwargs[name]
        goes_on = past_key_values is not None and past_key_values.get_seq_length() > 0
        if goes_on and next_sequence_length is not None and not is_first_iteration:
            attention_mask = None
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        return inputs

    def _prepare_position_ids_for_generation(self, *_: Any) -> None:
        """None: the layout of the mask, or the cache, says where tokens stand."""

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *more: Any) -> None:
        """Ours. A static one holds the longest text; so does that of a design which turns by the length of the text."""
        given, kind = model_kwargs.get("past_key_values"), generation_config.cache_implementation
        if given is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *more)
            return
        if kind not in (None, "dynamic", "static"):
            raise ConfigError(f"cache_implementation: is {kind!r}; the states of heddle are 'dynamic' or 'static'")
        cache = HeddleCache(more[-1] if kind == "static" or self.of_heddle.by_length else None)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs["past_key_values"] = cache
