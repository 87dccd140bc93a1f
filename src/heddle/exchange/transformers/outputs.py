"""What a call gives besides its answer: hidden states and attention weights of each layer, where they are asked for."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heddle.errors import ConfigError
from heddle.model.attention_maps import watching
from heddle.model.decoder import Decoder
from heddle.numerics.attention.observer import Observation
from heddle.parts.modules.router_statistics import Entry

# Keywords that say nothing a layout does not say already: how packed rows are cut, as some collators tell kernels.
SAID_ALREADY = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position"}
# What `generate` hands on to a model although it is read before, where texts stop at strings.
OF_GENERATION = {"tokenizer", "assistant_tokenizer"}
OF_LOSS = {"num_items_in_batch", "ignore_index", "shift_labels"}


@dataclass
class Seen:
    """hidden: the embedding and each layer's output, of a stream of two what layers read. weights: as observed."""

    hidden: list[Tensor] | None = None
    weights: list[Tensor | None] | None = None

    def hidden_states(self, last: Tensor) -> tuple[Tensor, ...] | None:
        """As transformers gives them: the last is what the head reads."""
        return None if self.hidden is None else (*self.hidden[:-1], last)

    def attentions(self) -> tuple[Tensor | None, ...] | None:
        """[B, H, T, S] of each layer, None where its mixer has no weights."""
        return None if self.weights is None else tuple(self.weights)


@contextmanager
def seeing(decoder: Decoder, hidden: bool, weights: bool) -> Iterator[Seen]:
    """Within the block, calls of the decoder are looked at as asked; results do not change."""
    seen = Seen([] if hidden else None, [None] * len(decoder.layers) if weights else None)
    with ExitStack() as stack:
        if seen.hidden is not None:
            states = seen.hidden

            def embedded(*given: Any) -> None:
                states.append(given[2])

            def passed(*given: Any) -> None:
                stream = given[2][0]
                states.append(stream if isinstance(stream, Tensor) else stream[0])

            stack.callback(decoder.embed.register_forward_hook(embedded).remove)
            for layer in decoder.layers:
                stack.callback(layer.register_forward_hook(passed).remove)
        if seen.weights is not None:
            found = seen.weights

            def take(index: int, observation: Observation) -> None:
                found[index] = observation.weights

            stack.enter_context(watching(decoder, take))
        yield seen


def check(more: dict[str, Any]) -> None:
    """Raises ConfigError naming a keyword that would be ignored."""
    for name, value in more.items():
        if name == "token_type_ids" and isinstance(value, Tensor) and not bool(value.any()):
            continue  # a text of one part, as some tokenizers tell always
        if value is not None and name not in SAID_ALREADY | OF_LOSS:
            raise ConfigError(f"{name}: is not read by the models of heddle; leave it out")


def penalty(entries: list[Entry], labels: Tensor | None, of_loss: dict[str, Any]) -> Tensor | float:
    """What balances experts, a mean token, by the share of the batch's scored tokens that this call has."""
    found = [entry.penalty / entry.tokens.clamp(min=1) for entry in entries if entry.penalty is not None]
    if not found:
        return 0.0
    items = of_loss.get("num_items_in_batch")
    if items is None:
        return sum(found[1:], found[0])
    shifted = of_loss.get("shift_labels")
    targets = labels[:, 1:] if shifted is None and labels is not None else shifted
    assert targets is not None
    return sum(found[1:], found[0]) * ((targets != of_loss.get("ignore_index", -100)).sum() / items)
