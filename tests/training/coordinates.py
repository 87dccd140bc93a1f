"""Coordinate checks over widths: how fast the change of each activation grows with the width."""

from typing import Any

import numpy as np

from heddle.data.samples import Batch
from heddle.lab.coordinate_check import activation_changes
from heddle.model.load_config import load_config
from heddle.training.optimizer import build_optimizer
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
