"""Classes that label texts and tokens: a heddle decoder under a new head without bias, as in transformers' own."""

from typing import Any

import torch
from torch import nn
from transformers import initialization
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from heddle.exchange.transformers.config import HeddleConfig
from heddle.exchange.transformers.pretrained import HeddlePreTrainedModel
from heddle.model.decoder import Decoder

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
    """Tokens -> one row of labels [B, num_labels] for each text, from its last token that is not `pad_token_id`.

    Trainers of reward models use it with num_labels 1. The loss has no auxiliary loss that balances experts.
    """


class HeddleForTokenClassification(GenericForTokenClassification, _Classifier):
    """Tokens -> a row of labels for each token [B, T, num_labels]. The loss has no auxiliary loss of experts."""
