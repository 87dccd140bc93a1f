"""Coordinate check (Yang et al. 2022, appendix D.1): how far a few steps move each activation of a model.

If a learning rate transfers over width, the mean change of an activation's coordinates is about the same at every
width. If it grows with width, a wider model needs a smaller learning rate.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from heddle.data.samples import Batch
from heddle.model.decoder import Decoder
from heddle.parts.layout import Layout
from heddle.training.optimizer import Optimizer
from heddle.training.step import accumulate_gradients, apply_gradients


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
