"""Another size of vocabulary: rows of the embedding and of the head are cut off, or added at the end."""

import torch
from torch import Tensor, nn

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.parts.modules.linear import fill_normal


@torch.no_grad()
def resize(decoder: Decoder, size: int, mean: bool = True) -> None:
    """`size` rows in place; new ones are the mean of the old, or drawn as a fresh model's. The design says so too.

    Raises ConfigError for a size below 1.
    """
    if size < 1:
        raise ConfigError(f"vocab_size: {size} must be at least 1")
    std = decoder.config.initialisation.std
    head, embed = decoder.head, decoder.embed
    tied = head.weight is embed.weight
    embed.weight = _resized(embed.weight, size, mean, std)
    head.weight = embed.weight if tied else _resized(head.weight, size, mean, std)
    if head.bias is not None:
        head.bias = _resized(head.bias, size, mean, 0.0)
    decoder.config = decoder.config.replace(vocab_size=size)
    decoder.fingerprint = decoder.config.fingerprint()


def _resized(old: Tensor, size: int, mean: bool, std: float) -> nn.Parameter:
    kept = min(size, old.shape[0])
    new = old.new_empty(size, *old.shape[1:])
    new[:kept] = old[:kept]
    if mean:
        new[kept:] = old.double().mean(0).to(old.dtype)
    elif size > kept:
        fill_normal(new[kept:], std, torch.Generator().manual_seed(torch.initial_seed() >> 1))
    return nn.Parameter(new, old.requires_grad)
