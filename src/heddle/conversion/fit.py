"""Fit a new mixer to the outputs of the one it replaces, on the activations of a calibration text.

    minimize Σ ‖new(x) − old(x)‖² / Σ ‖old(x)‖²   over the parameters of the new mixer, by AdamW

or another error of a mixer (`FitError`), over the parameters that it is about.

x is what the original model's mixer reads, so the layers are fitted independently of each other: the second stage of
MOHAWK (Bick et al. 2024), and the attention transfer of LoLCATs (Zhang et al. 2024) with every parameter free.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.config import DesignError
from heddle.conversion.head_parameters import rows_of
from heddle.conversion.weights import CalibrationText, LayerActivations
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer
from heddle.progress import progress_bar
from heddle.training.optimizer import EagerAdamw
from heddle.training.settings import Settings, scheduled_learning_rate

TOKENS_PER_STEP = 2048
VALIDATION_INTERVAL = 8  # one in so many chunks of the text is held out to measure the error
TOKENS_PER_DIM = 2  # of the width, at least: fewer tokens do not determine a mixer
EVALUATION_COUNT = 20  # in all steps, but at least MIN_INTERVAL steps apart
MIN_INTERVAL = 10
PATIENCE = 5  # evaluations without a lower error, after which a fit ends
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class FitResult:
    """The error of a mixer on held-out rows of the text, before and after the fit: relative and squared, or a KL.

    steps: how many were taken. error_after is never above error_before. seconds: of the median step.
    """

    error_before: float
    error_after: float
    steps: int
    seconds: float


class Chunk(NamedTuple):
    """Some rows of a text: what the old mixer reads and writes, [rows, T, width] each, and their layout."""

    inputs: Tensor
    outputs: Tensor
    layout: Layout


class FitError(NamedTuple):
    """What a fit lowers: `error(mixer, chunk)`, a scalar with gradients, by `size(chunk)`, both summed over chunks."""

    name: str
    error: Callable[[Mixer, Chunk], Tensor]
    size: Callable[[Chunk], float]


def check_fit_text(text: CalibrationText, width: int) -> None:
    """Raises DesignError, which says how much is needed, for a text too short to fit a mixer of this width on."""
    rows, tokens, needed = sum(len(batch) for batch in text.batches), text.tokens, TOKENS_PER_DIM * width
    if tokens < needed or rows < 2:
        raise DesignError(
            "text",
            f"has {tokens} tokens in rows of {tokens // max(1, rows)}, but a mixer of width {width} is fitted on "
            f"at least {needed} tokens in 2 rows; give --calibration-tokens {max(needed, 2 * tokens // max(1, rows))}",
        )


def without_padding_rows(x: Tensor, layout: Layout) -> Tensor:
    """x [rows, T, width] with zeros at padding."""
    return x if layout.padding is None else x.masked_fill(layout.padding[..., None], 0.0)


def _squared_error(mixer: Mixer, chunk: Chunk) -> Tensor:
    dtype = next(mixer.parameters()).dtype
    output = mixer(chunk.inputs.to(dtype), chunk.layout)[0]
    return without_padding_rows(output - chunk.outputs.to(dtype), chunk.layout).square().sum()


def _squared_outputs(chunk: Chunk) -> float:
    return float(without_padding_rows(chunk.outputs, chunk.layout).double().square().sum())


OUTPUT_ERROR = FitError("relative error", _squared_error, _squared_outputs)


def fit_mixer(
    mixer: Mixer, activations: LayerActivations, settings: Settings, lowered: FitError = OUTPUT_ERROR
) -> FitResult:
    """Fit a mixer, in place, to the outputs of the mixer of a layer, or by another error.

    Equal arguments give equal weights. settings: steps, learning_rate, schedule and seed are used. The mixer gets the
    weights that had the lowest error on the held-out rows, possibly its initial ones.
    """
    fitted, held_out = fit_chunks(activations)
    order = _chunk_order(len(fitted), settings)
    parameters = [parameter for parameter in mixer.parameters() if parameter.requires_grad]
    optimizer = EagerAdamw(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    size = sum(map(lowered.size, fitted)) / sum(chunk.outputs.numel() for chunk in fitted)
    scale = 1.0 / (size or 1.0)  # outputs may all be zero
    error_before = lowest = relative_error(mixer, held_out, lowered)
    best = _copied(mixer)
    interval = max(MIN_INTERVAL, settings.steps // EVALUATION_COUNT)
    stale = step = shown = 0
    seconds = list[float]()
    with progress_bar(f"fitting layer {activations.index}", settings.steps, "steps") as bar, torch.enable_grad():
        for step in range(1, settings.steps + 1):
            began = time.monotonic()
            for group in optimizer.param_groups:
                group["lr"] = scheduled_learning_rate(settings, step - 1)
            chunk = fitted[order[step - 1]]
            lowered.error(mixer, chunk).mul(scale / chunk.outputs.numel()).backward()
            torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(time.monotonic() - began)
            if step % interval == 0 or step == settings.steps:
                error = relative_error(mixer, held_out, lowered)
                if error < lowest:
                    lowest, best, stale = error, _copied(mixer), 0
                else:
                    stale += 1
                bar.advance(step - shown, f"error {error:.3g}")
                shown = step
                if stale == PATIENCE:
                    break
    mixer.load_state_dict(best)
    return FitResult(error_before, lowest, step, median(seconds))


def fit_chunks(activations: LayerActivations) -> tuple[list[Chunk], list[Chunk]]:
    """Split the text of a layer into chunks of a few rows: chunks to fit on, and held-out chunks."""
    rows = sum(len(x) for x in activations.mixer_inputs)
    chunk_rows = max(1, TOKENS_PER_STEP // activations.mixer_inputs[0].shape[1])
    chunk_rows = min(chunk_rows, -(-rows // VALIDATION_INTERVAL))
    chunks = [
        Chunk(x[part], y[part], rows_of(layout, part))
        for x, y, layout in zip(activations.mixer_inputs, activations.mixer_outputs, activations.layouts, strict=True)
        for part in (slice(start, start + chunk_rows) for start in range(0, len(x), chunk_rows))
    ]
    held_out = chunks[VALIDATION_INTERVAL - 1 :: VALIDATION_INTERVAL] or chunks[-1:]
    chosen = {id(chunk) for chunk in held_out}
    return [chunk for chunk in chunks if id(chunk) not in chosen], held_out


@torch.no_grad()
def relative_error(mixer: Mixer, chunks: Sequence[Chunk], measured: FitError = OUTPUT_ERROR) -> float:
    """Σ ‖new − old‖² / Σ ‖old‖² over the tokens of some chunks, or another error; infinite if it is not a number."""
    error = sum(float(measured.error(mixer, chunk)) for chunk in chunks)
    total = sum(map(measured.size, chunks))
    ratio = error / (total or 1.0)
    return ratio if math.isfinite(ratio) else math.inf


def _chunk_order(chunks: int, settings: Settings) -> list[int]:
    """The chunk of each step; every epoch shuffles them anew."""
    generator = torch.Generator().manual_seed(settings.seed)
    order: list[int] = []
    while len(order) < settings.steps:
        order += torch.randperm(chunks, generator=generator, device="cpu").tolist()
    return order


def _copied(mixer: Mixer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in mixer.state_dict().items()}
