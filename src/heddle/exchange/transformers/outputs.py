"""Optional outputs of a call (hidden states, attention weights, auxiliary loss) and checks of its keyword arguments."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heddle.errors import ConfigError
from heddle.model.attention_maps import record_weights
from heddle.model.decoder import Decoder
from heddle.numerics.attention.observer import Observation
from heddle.parts.modules.router_statistics import RouterStatistics

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
            raise ConfigError(f"{name}: is not read by the models of heddle; leave it out")


def scaled_aux_loss(
    entries: list[RouterStatistics], labels: Tensor | None, loss_kwargs: dict[str, Any]
) -> Tensor | float:
    """The auxiliary loss of the routers per token.

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
