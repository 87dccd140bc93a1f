"""Train on the workers of a Ray cluster: Ray Train makes the process group, and heddle joins it.

    python examples/cluster/ray_train.py --workers 16 --gpu preset:gqa-medium --data /shared/books --out /shared/gqa

The folder of the run must be one that all nodes see. Ray starts the workers again after a failure, and the run goes on
from its last checkpoint.
"""

import argparse

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(settings: dict[str, list[str]]) -> None:
    """Run `heddle train` as a rank of Ray's process group."""
    from heddle.cli.main import run_command

    exit_code = run_command(["train", *settings["arguments"]])
    if exit_code:
        raise RuntimeError(f"heddle train ended with code {exit_code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--storage", default=None, help="where Ray writes its own files, seen by all nodes")
    options, arguments = parser.parse_known_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"arguments": arguments},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if options.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(storage_path=options.storage, failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
