"""How much faster is a training step with parallel branches than with the same branches in sequence?

Mixers and feed-forwards are the same. A parallel layer has one norm less, and its branches do not depend on each other.
Its projections (q, k, v, gate, up) read one input, but each is still a separate matrix product, as in the serial
layer.
"""

from functools import partial
from typing import Any

import torch

from benchmarks import peers
from benchmarks.harness import Case, Step, main, timed
from benchmarks.machine import THREADS
from heddle.data.samples import Batch
from heddle.machine import measured_choices
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.runtime import set_up_runtime
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients


def side(residual: list[str], arguments: dict[str, Any]) -> Step:
    """Gradients and an optimizer step of a design with this kind of residual connection."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    design, rows, length = arguments["design"], arguments["rows"], arguments["length"]
    model = build(load_config(design, [f"vocab_size={peers.VOCABULARY}", *residual])).train()
    optimizer = build_optimizer(model, 0.1)
    batch = Batch(peers.tokens(rows, length + 1).numpy(), ((length,),) * rows, torch.arange(rows).numpy())

    def work() -> None:
        apply_gradients(model, optimizer, accumulate_gradients(model, batch, (0, 0)), 1e-4, 1.0)

    return lambda: timed(work)


if __name__ == "__main__":
    main(
        "benchmarks.parallel",
        "How much faster is a training step with parallel branches than with the same branches in sequence?",
        {
            "parallel": partial(side, ["residual.kind=parallel"]),
            "serial": partial(side, ["residual.kind=pre_norm"]),
        },
        [
            Case("width 768, 2,048 tokens", {"design": "preset:gqa-medium", "rows": 4, "length": 512}, 1.0, pairs=7),
            Case("width 384, 2,048 tokens", {"design": "preset:gqa-small", "rows": 8, "length": 256}, 1.0),
            Case("width 128, 256 tokens", {"design": "preset:gqa-tiny", "rows": 4, "length": 64}, 1.0, pairs=25),
        ],
    )
