"""Coordinate checks (Yang et al. 2022, appendix D.1): how far a few steps move each activation, by the width.

If a learning rate transfers over width, the mean change of an activation's coordinates is about the same at every
width. If it grows with width, a wider model needs a smaller learning rate.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heddle.data.samples import Batch
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.parts.layout import Layout
from heddle.training.optimizer import Optimizer, build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients
from heddle.training.width_transfer import scale_to_width, transfer_over_width

BASE = 32
RATE, STEPS = 0.005, 3
ROWS, LENGTH, VOCABULARY = 4, 16, 61
# The exponents of the width that count as none. The random part of a change falls with 1/sqrt(width).
FLAT = (-0.4, 0.3)
BATCH = Batch(
    np.random.default_rng(0).integers(1, VOCABULARY, (ROWS, LENGTH + 1)), ((LENGTH,),) * ROWS, np.arange(ROWS)
)


def growth(data: dict[str, Any], optimizer: str, widths: tuple[int, ...], transfer: bool = True) -> dict[str, float]:
    """The exponent of the width in the change of each activation after a few steps.

    data: a design of width `BASE`. transfer: whether the rate was chosen there, else it is the same everywhere.
    """
    config = load_config(data)
    changes: dict[str, list[float]] = {}
    for width in widths:
        scaled = scale_to_width(config, width)
        scaling = transfer_over_width(scaled, BASE if transfer else None, optimizer)
        model = scaling.build_model()
        built = build_optimizer(model, 0.1, optimizer, scales=scaling.scales)
        for path, values in activation_changes(model, built, BATCH, RATE, STEPS).items():
            changes.setdefault(path, []).append(values[-1])
    return {path: float(np.polyfit(np.log(widths), np.log(values), 1)[0]) for path, values in changes.items()}


def not_flat(exponents: dict[str, float]) -> dict[str, float]:
    """The activations whose change depends on the width."""
    return {path: round(exponent, 2) for path, exponent in exponents.items() if not FLAT[0] < exponent < FLAT[1]}


def activation_changes(
    model: Decoder, optimizer: Optimizer, batch: Batch, learning_rate: float, steps: int
) -> dict[str, list[float]]:
    """Train on one batch, and return each activation's mean absolute change from initialization after each step.

    Activations: the output of each mixer and feed-forward by its path, `final_norm`, and `head` for the logits.
    """
    initial, changes = _activations(model, batch), dict[str, list[float]]()
    for step in range(steps):
        result = accumulate_gradients(model, batch, (0, step))
        apply_gradients(model, optimizer, result, learning_rate, max_gradient_norm=1.0)
        for path, activation in _activations(model, batch).items():
            changes.setdefault(path, []).append(float((activation - initial[path]).abs().mean()))
    return changes


@torch.no_grad()
def _activations(model: Decoder, batch: Batch) -> dict[str, Tensor]:
    tokens = torch.from_numpy(batch.tokens[:, :-1])
    layout = Layout.packed(batch.doc_lengths, tokens.shape[1], tokens.device)
    with _record_outputs(model) as outputs:
        outputs["head"] = model.head(model(tokens, layout)[0]).float()
    return outputs


@contextmanager
def _record_outputs(model: Decoder) -> Iterator[dict[str, Tensor]]:
    """Within the block, the mapping holds the latest output of each branch of each layer and of the final norm."""
    outputs: dict[str, Tensor] = {}
    branches = {
        f"layers.{index}.{name}": branch
        for index, layer in enumerate(model.layers)
        for name, branch in (("mixer", layer.mixer), ("feedforward", layer.feedforward))
        if isinstance(branch, nn.Module)
    }
    with ExitStack() as hooks:
        for path, module in {**branches, "final_norm": model.final_norm}.items():

            def record(_module: nn.Module, _inputs: Any, output: Any, path: str = path) -> None:
                outputs[path] = (output[0] if isinstance(output, tuple) else output).float()

            hooks.callback(module.register_forward_hook(record).remove)
        yield outputs
