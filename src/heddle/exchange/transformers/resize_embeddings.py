"""Change the vocabulary size of a model: cut off rows of the embedding and the head, or add rows at the end."""

import torch
from torch import Tensor, nn

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.numerics.philox import RandomStream
from heddle.parts.modules.linear import fill_normal


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
