"""What cross-attention reads: the hidden states of an encoder, or any other sequence, with its padding mask."""

from dataclasses import dataclass

from torch import Tensor

from heddle.errors import ConfigError


@dataclass(frozen=True, eq=False)
class EncoderOutput:
    """Keys are projected from `keys` [B, S, width], values from `values` [B, S, width] (None: from `keys` as well).

    is_token: bool [B, S], False at padding; None when there is no padding.
    """

    keys: Tensor
    values: Tensor | None = None
    is_token: Tensor | None = None

    def __post_init__(self) -> None:
        shape = list(self.keys.shape)
        if self.keys.dim() != 3:
            raise ConfigError(f"encoder_output: keys have shape {shape}; expected [batch, length, width]")
        if self.values is not None and self.values.shape[:2] != self.keys.shape[:2]:
            raise ConfigError(
                f"encoder_output: values have shape {list(self.values.shape)}, keys {shape}; "
                "batch and length must be equal"
            )
        if self.is_token is not None and self.is_token.shape != self.keys.shape[:2]:
            raise ConfigError(f"encoder_output: is_token has shape {list(self.is_token.shape)}; expected {shape[:2]}")

    def check(self, width: int, rows: int) -> None:
        """Raise ConfigError unless keys and values have this width and this number of rows."""
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            if tensor is not None and tensor.shape[2] != width:
                raise ConfigError(
                    f"encoder_output: {name} are {tensor.shape[2]} wide, the design reads encoder_width = {width}"
                )
        if self.keys.shape[0] != rows:
            raise ConfigError(f"encoder_output: has {self.keys.shape[0]} rows, the call has {rows}; they must be equal")

    def clean(self) -> tuple[Tensor, Tensor]:
        """The inputs of the key and the value projection, zero at padding: 0 · NaN would reach results or gradients."""
        values = self.keys if self.values is None else self.values
        if self.is_token is None:
            return self.keys, values
        padding = ~self.is_token[..., None]
        return self.keys.masked_fill(padding, 0.0), values.masked_fill(padding, 0.0)
