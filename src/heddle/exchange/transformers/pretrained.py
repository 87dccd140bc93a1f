"""HeddlePreTrainedModel: what HeddleModel and HeddleForCausalLM share."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from heddle.exchange.transformers.config import HeddleConfig
from heddle.exchange.transformers.init_missing import init_missing_weights
from heddle.exchange.transformers.resize_embeddings import resize_embeddings
from heddle.model.decoder import Decoder
from heddle.model.embedding import Embedding


class HeddlePreTrainedModel(PreTrainedModel):
    """The base class. Weights that are not loaded are initialized as by `heddle.build`, with torch's seed."""

    config_class = HeddleConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_attention_backend = _supports_sdpa = True
    _no_split_modules = ["Layer"]  # noqa: RUF012 - transformers reads a list
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["expert_bias"]  # noqa: RUF012 - bf16 would lose its small updates

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: the config's `auto_map` names the classes, and no code is copied into a folder."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As for every model of transformers. What `device_map` offloads is loaded layer by layer."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with `output_loading_info`
        if getattr(model, "hf_device_map", None) is not None:
            from heddle.exchange.transformers.preload_layers import preload_layers  # needs accelerate

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
