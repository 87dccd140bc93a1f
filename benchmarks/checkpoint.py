"""How long do four ranks take to write a checkpoint, compared with one process?

A rank is a process of its own (gloo). Each writes a share of the same tensors into one folder; with ranks, writing
includes the plan, the exchange of hashes and the manifest. Both hash and sync everything.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from benchmarks.harness import limit_row, show, write
from heddle.distributed.ranks import Ranks
from heddle.storage.folder import write_folder
from heddle.storage.rank_folder import write_rank_folder

QUESTION = "How long do four ranks take to write a checkpoint of 1 GB, compared with one process?"
RANKS, ROUNDS, MATRICES, COLUMNS = 4, 5, 16, 1024


def write_once(folder: Path, rows: int) -> float:
    """Write the checkpoint on this rank, or alone; return the seconds."""
    ranks = Ranks(distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else Ranks()
    tensors: dict[str, Tensor] = {
        f"layers.{n}.weight": torch.ones(rows // ranks.count, COLUMNS) for n in range(MATRICES)
    }
    if ranks.count > 1:
        mesh = init_device_mesh("cpu", (ranks.count,))
        tensors = {name: DTensor.from_local(own, mesh, [Shard(0)]) for name, own in tensors.items()}
        distributed.barrier()
    started = time.perf_counter()
    if ranks.count > 1:
        write_rank_folder(folder, tensors={"model.safetensors": tensors}, documents={}, kind="model", ranks=ranks)
    else:
        write_folder(folder, tensors={"model.safetensors": tensors}, documents={}, kind="model")
    return time.perf_counter() - started


def measure(ranks: int, rows: int, folder: Path) -> float:
    """Write in new processes, by torchrun if there are several; return the seconds of rank 0."""
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command += ["benchmarks.checkpoint", "--rows", str(rows), "--folder", str(folder)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return float(json.loads(next(line for line in lines if line.startswith("{")))["seconds"])


def medians(rows: int, rounds: int, folder: Path) -> dict[int, float]:
    """The median seconds by the number of ranks, which take turns."""
    seconds: dict[int, list[float]] = {1: [], RANKS: []}
    for _ in range(rounds):
        for ranks, values in seconds.items():
            values.append(measure(ranks, rows, folder))
    return {ranks: statistics.median(values) for ranks, values in seconds.items()}


def main() -> None:
    """Measure, or, with --folder, write once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2**14, help="of each matrix; 2**14 make 1 GiB")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.folder is not None:
        if distributed.is_torchelastic_launched():
            distributed.init_process_group("gloo")
        elapsed = write_once(options.folder, options.rows)
        if not distributed.is_initialized() or distributed.get_rank() == 0:
            print(json.dumps({"seconds": elapsed}), flush=True)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        seconds = medians(options.rows, ROUNDS, Path(folder) / "model")
    rows = [limit_row("four ranks / one process", seconds[RANKS] / seconds[1], 1.2, "times")]
    rows += [
        {"case": f"{ranks} ranks", "value": round(value, 2), "unit": "seconds"} for ranks, value in seconds.items()
    ]
    show(rows)
    write("benchmarks.checkpoint", QUESTION, rows)


if __name__ == "__main__":
    main()
