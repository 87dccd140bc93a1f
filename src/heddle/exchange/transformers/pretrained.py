"""HeddlePreTrainedModel: what HeddleModel and HeddleForCausalLM share."""

from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import PrefixedDataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from heddle.errors import ConfigError
from heddle.exchange.transformers.config import HeddleConfig
from heddle.model.decoder import Decoder, Layer
from heddle.model.embedding import Embedding
from heddle.model.initialization import initialize
from heddle.numerics.random import RandomStream
from heddle.parts.modules.linear import SelfInitialized, fill_normal

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
