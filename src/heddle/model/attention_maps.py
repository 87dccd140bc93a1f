"""Attention weights of every layer of a call, exact, beside the fast forms that make the answer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.numerics.attention.observer import Observation, observing
from heddle.parts.context.layout import Layout


def attention_weights(
    model: Decoder, tokens: Tensor, layout: Layout | None = None, implied: bool = False
) -> list[Tensor | None]:
    """What each query takes of each key: for tokens int64 [B, T], a tensor [B, H, T, S] a layer, or None.

    In at least float32, before dropout. Rows sum to 1, with a sink to less; rows of padding are zero. S is T, or the
    length of the memory that cross-attention reads. None: a layer without a mixer, or whose mixer has no weights. With
    `implied`, mixers without a softmax tell how much of each value (after its convolution) is in each answer (before
    its norm and gate): such rows sum to anything, and entries may be negative. Two mixers side by side are joined along
    the heads; raises ConfigError where they read different lengths.
    """
    found: list[Tensor | None] = [None] * len(model.layers)

    def take(index: int, observation: Observation) -> None:
        found[index] = observation.weights

    watch(model, tokens, layout, take, implied)
    return found


@torch.no_grad()
def watch(
    model: Decoder,
    tokens: Tensor,
    layout: Layout | None,
    take: Callable[[int, Observation], None],
    implied: bool = False,
) -> Tensor:
    """Call the model without a state; `take(layer, observation)` gets the weights of each layer that has some.

    Only one layer's weights exist at a time. Returns the hidden states [B, T, width], the same bits as of any call. No
    other thread may call the model meanwhile. Raises ConfigError as `attention_weights`.
    """
    with watching(model, take, implied):
        hidden: Tensor = model(tokens, layout)[0]
    return hidden


@contextmanager
def watching(model: Decoder, take: Callable[[int, Observation], None], implied: bool = False) -> Iterator[None]:
    """As `watch`, for whatever calls of the model the block makes; with a state, S are the tokens a mixer holds."""
    held: list[Observation] = []

    def start(*_: object) -> None:
        held.clear()

    def end(index: int) -> Callable[..., None]:
        def give(*_: object) -> None:
            if held:
                take(index, _joined(index, held))

        return give

    with ExitStack() as stack:
        for index, mixer in enumerate(model.mixers()):
            if mixer is not None:
                for handle in (mixer.register_forward_pre_hook(start), mixer.register_forward_hook(end(index))):
                    stack.callback(handle.remove)
        stack.enter_context(observing(held.append, implied))
        yield


def _joined(index: int, held: list[Observation]) -> Observation:
    """The observations of one layer as one."""
    if len(held) == 1:
        return held[0]
    lengths = sorted({observation.weights.shape[3] for observation in held})
    if len(lengths) > 1:
        raise ConfigError(
            f"attention_weights: layer {index} reads texts of {lengths} tokens side by side, which make no one tensor; "
            "collect them with heddle.numerics.attention.observer"
        )
    return Observation(torch.cat([one.weights for one in held], dim=1), sum(one.groups for one in held))
