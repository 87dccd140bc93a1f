"""Bits per byte: `Σ loss / ln 2 / Σ bytes` over the tokens of a text; end tokens count neither bits nor bytes."""

import math
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from heddle.model.decoder import Decoder
from heddle.numerics.cross_entropy import losses
from heddle.parts.context.layout import Layout


class Windows(Protocol):
    """Rows of a text: tokens int64 [B, T + 1], the lengths of the documents in each row's T inputs, targets or −1."""

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def targets(self) -> np.ndarray: ...


def window_bits(
    model: Decoder, windows: Iterable[Windows], byte_lengths: np.ndarray, autocast: torch.dtype | None = None
) -> list[tuple[float, int]]:
    """Total bits and bytes of each window, the model in eval mode and its mode restored afterwards.

    byte_lengths: int [vocab], bytes each token stands for; the end token's are counted, but not its bits.
    """
    device = model.embed.weight.device
    sizes = torch.from_numpy(np.asarray(byte_lengths, dtype=np.int64)).to(device)
    was_training = model.training
    model.eval()
    result: list[tuple[float, int]] = []
    try:
        for window in windows:
            tokens = torch.tensor(window.tokens, device=device)  # a copy: windows may be read-only
            targets = torch.tensor(window.targets, device=device)
            layout = Layout.packed(window.lengths, targets.shape[1], device)
            with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                hidden, _ = model(tokens[:, :-1], layout)
                scored = targets >= 0
                nats = torch.zeros(targets.shape, dtype=torch.float64, device=device)
                nats[scored] = losses(hidden[scored], model.head.end, targets[scored]).double()
            weight = sizes[targets.clamp(min=0)] * scored
            bits = (nats * (weight > 0)).sum(1) / math.log(2)
            result += [(float(b), int(n)) for b, n in zip(bits, weight.sum(1), strict=True)]
    finally:
        model.train(was_training)
    return result


def bits_per_byte(windows: list[tuple[float, int]]) -> float:
    """The ratio of totals; nan where there are no bytes."""
    bits, size = sum(b for b, _ in windows), sum(n for _, n in windows)
    return bits / size if size else math.nan
