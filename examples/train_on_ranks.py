"""Train a design on several processes with a loop of your own: bytes of a text, FSDP2, any number of ranks.

    torchrun --nproc-per-node 2 examples/train_on_ranks.py README.md --steps 20

The losses are the same on 1, 2 or 4 ranks: the first weights, the order of samples and the noise know no ranks.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

import heddle
from heddle.data.samples import Batch
from heddle.distributed.process_group import join_ranks
from heddle.distributed.ranks import Ranks
from heddle.distributed.sharding import Sharding, initialize_shards, shard_model
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients, prepare_batch

SEED, ROWS, LENGTH = 0, 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text; its bytes are the tokens")
    parser.add_argument("--design", default="preset:gqa-tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; weights and sums stay float32")
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    with join_ranks(str(device)) as ranks:
        train(options, ranks, device)


def train(options: argparse.Namespace, ranks: Ranks, device: torch.device) -> None:
    """Train on this rank's rows of each batch."""
    config = heddle.load_config(options.design, ["vocab_size=256"])
    model = heddle.build(config, device="meta")
    sharding = Sharding(torch.bfloat16, torch.float32) if options.bf16 else Sharding()
    shard_model(model, init_device_mesh(device.type, (ranks.count,)), sharding)
    initialize_shards(model, SEED, device=device)
    optimizer = build_optimizer(model.train(), weight_decay=0.1, kind=options.optimizer)

    data = np.frombuffer(options.text.read_bytes(), dtype=np.uint8).astype(np.int64)
    for step in range(options.steps):
        starts = np.random.default_rng((SEED, step)).integers(0, len(data) - LENGTH, ROWS)
        tokens = np.stack([data[start : start + LENGTH + 1] for start in starts])
        batch = Batch(tokens, ((LENGTH,),) * ROWS, np.arange(ROWS) + step * ROWS)
        prepared = prepare_batch(batch, device, 1, ranks)
        gradients = accumulate_gradients(model, prepared, (SEED, step))
        result = apply_gradients(model, optimizer, gradients, learning_rate=3e-3, max_gradient_norm=1.0)
        if ranks.rank == 0:
            print(f"step {step + 1}: loss {result.loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
