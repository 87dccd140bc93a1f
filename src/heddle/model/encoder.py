"""The encoder of a design that has one: it turns a source into the memory that the layers' cross-attention reads."""

from typing import TYPE_CHECKING

from torch import Tensor

from heddle.config import DesignError
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.parts.context.layout import Layout, Memory

if TYPE_CHECKING:
    from heddle.model.decoder import Decoder


def encoder_config(config: ModelConfig, memory_width: int | None) -> ModelConfig | None:
    """The design of the encoder, with a vocabulary. Raises DesignError where the layers cannot read it."""
    encoder = config.encoder
    if encoder is None:
        return None
    if memory_width is None:
        raise DesignError("encoder", "no layer reads what it makes; add a cross_attention mixer, or leave it out")
    if encoder.width != memory_width:
        reason = f"{encoder.width} is not the memory_width = {memory_width} that the layers read; make them equal"
        raise DesignError("encoder.width", reason)
    return encoder if encoder.vocab_size is not None else encoder.replace(vocab_size=config.vocab_size)


def check_encoder(encoder: "Decoder") -> None:
    """Raises DesignError for an encoder that reads a memory itself."""
    if encoder.memory_width is not None:
        raise DesignError("layers", "an encoder has no memory to read; take cross_attention out of it")


def encode(encoder: "Decoder | None", source: Tensor, layout: Layout | None) -> Memory:
    """source int64 [B, S] -> a memory of the encoder's hidden states, its padding marked.

    Raises ConfigError where there is no encoder, or rows hold several documents, which all would read.
    """
    if encoder is None:
        raise ConfigError("encoder: this design has none; give a memory of your own with layout.with_memory(...)")
    if layout is not None and layout.documents is not None:
        raise ConfigError("source: packed documents would be read as one; give each a row of its own")
    hidden, _ = encoder(source, layout)
    return Memory(hidden, real=None if layout is None or layout.padding is None else ~layout.padding)
