"""The encoder of an encoder-decoder design: source tokens -> the hidden states that cross-attention reads."""

from typing import TYPE_CHECKING

from torch import Tensor

from heddle.config import DesignError
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.parts.context.encoder_output import EncoderOutput
from heddle.parts.context.layout import Layout

if TYPE_CHECKING:
    from heddle.model.decoder import Decoder


def encoder_config(config: ModelConfig, encoder_width: int | None) -> ModelConfig | None:
    """Return the encoder's design with its vocab_size set. Raises DesignError if no layer can read its output."""
    encoder = config.encoder
    if encoder is None:
        return None
    if encoder_width is None:
        raise DesignError("encoder", "no layer reads its output; add a cross_attention mixer, or leave it out")
    if encoder.width != encoder_width:
        reason = f"{encoder.width} is not the encoder_width = {encoder_width} of the layers; make them equal"
        raise DesignError("encoder.width", reason)
    return encoder if encoder.vocab_size is not None else encoder.replace(vocab_size=config.vocab_size)


def check_encoder(encoder: "Decoder") -> None:
    """Raises DesignError for an encoder with cross-attention."""
    if encoder.encoder_width is not None:
        raise DesignError("layers", "an encoder has no encoder output to read; take cross_attention out of it")


def encode(encoder: "Decoder | None", source: Tensor, layout: Layout | None) -> EncoderOutput:
    """source int64 [B, S] -> the encoder's hidden states, with its padding marked.

    Raises ConfigError without an encoder, or if rows hold several documents: cross-attention would read all of them.
    """
    if encoder is None:
        raise ConfigError("encoder: this design has none; give vectors of your own to layout.with_encoder_output(...)")
    layout = None if layout is None else layout.checked()
    if layout is not None and layout.segment_ids is not None:
        raise ConfigError("source: packed documents would be read as one; give each its own row")
    hidden, _ = encoder(source, layout)
    return EncoderOutput(hidden, is_token=None if layout is None or layout.padding is None else ~layout.padding)
