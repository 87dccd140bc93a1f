"""Does a hybrid keep recall? Trains a design to look back, turns its layers into recurrences, and asks.

    python examples/conversion/recall.py runs/recall            # three seeds; the same command continues
    python examples/conversion/recall.py runs/recall --report   # only the table, from what is there

Each training row is a block of 16 to 32 different tokens, repeated to the end of 64: the next token is known to
whoever finds the same token in the block before. Conversions are fitted to 32 thousand tokens of such rows and healed
on 5 % of the training tokens; accuracy is measured on rows that none of them read. Results are lines of
`recall.jsonl` in the folder.
"""

import argparse
import statistics
from pathlib import Path

import torch
from smaller_caches import HERE, Results

from heddle.conversion.convert import Conversion, convert, open_source
from heddle.conversion.heal import healing_rate
from heddle.conversion.targets import parse_rewrites
from heddle.conversion.weights import CalibrationText
from heddle.data.recall import TaskStream, parse_recall
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.model.size import size
from heddle.parts.layout import Layout
from heddle.storage.model import load
from heddle.training.evaluation.scores import correct_predictions
from heddle.training.init_checkpoint import open_init_checkpoint
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.settings import Settings

SEEDS = (0, 1, 2)
TASK = "recall:induction"
STEPS, BATCH_SIZE = 900, 32
HEALING_STEPS = STEPS // 20
CALIBRATION_SEED, CALIBRATION_BATCHES = -2, 16  # no training and no evaluation draws this seed
MEASURED_ROWS = 512
HYBRIDS = ("gated_delta", "linear_attention", "window=16")
TARGETS = tuple(target + keep for target in HYBRIDS for keep in ("", ",keep=1"))


def calibration(task: TaskStream) -> CalibrationText:
    """Rows of the task that nothing else reads."""
    batches = [task.batch(CALIBRATION_SEED, BATCH_SIZE * index, BATCH_SIZE) for index in range(CALIBRATION_BATCHES)]
    tokens = [torch.from_numpy(batch.tokens[:, :-1].copy()) for batch in batches]
    return CalibrationText(tokens, [Layout.packed(batch.doc_lengths) for batch in batches], task.argument)


def accuracy(model: Decoder, task: TaskStream) -> float:
    """The share of right answers on rows that were never trained on."""
    scores = correct_predictions(model, task.validation_batches(MEASURED_ROWS, BATCH_SIZE))
    return sum(right for right, _ in scores) / sum(count for _, count in scores)


def study(folder: Path, seed: int, results: Results) -> None:
    """Train one model, convert and heal it in each way, and measure what was not measured yet."""
    task = parse_recall(TASK)
    config = load_config(HERE / "recall4.yaml").replace(vocab_size=task.vocab_size)
    settings = Settings(steps=STEPS, batch_size=BATCH_SIZE, sequence_length=task.length, learning_rate=2e-3, seed=seed)
    run = folder / f"recall4-{seed}"
    train(TrainingJob(config, task, settings, run, label=run.name))
    source, text = open_source(run), calibration(task)
    healing = Settings(
        steps=HEALING_STEPS,
        batch_size=BATCH_SIZE,
        sequence_length=task.length,
        learning_rate=healing_rate(config.width),
        seed=seed + len(SEEDS),
        schedule="cosine",
        weight_decay=0.0,
    )

    def measure(target: str, stage: str, model: Decoder) -> None:
        state_bytes = size(model.config, 8192).state_bytes
        line = {"seed": seed, "target": target, "stage": stage, "state_bytes": state_bytes}
        if not results.has(**line):
            results.add(line | {"accuracy": accuracy(model, task)})

    measure("", "original", load(run)[0])
    for number, target in enumerate(TARGETS):
        converted, healed = (folder / f"recall4-{seed}.{number}.{stage}" for stage in ("converted", "healed"))
        if not converted.is_dir():
            convert(Conversion(source, parse_rewrites([target]), text), converted)
        measure(target, "converted", load(converted)[0])
        start = open_init_checkpoint(converted)
        train(TrainingJob(start.config, task, healing, healed, label="healing", init_checkpoint=start))
        measure(target, "healed", load(healed)[0])


def report(results: Results) -> None:
    """Print a row for each conversion: means over seeds, with the least and the most."""
    print(f"{'target':26}{'stage':11}{'seeds':>6}{'accuracy':>10}{'least':>8}{'most':>8}{'state MB at 8k':>16}")
    for target in ("", *TARGETS):
        for stage in ("original", "converted", "healed"):
            lines = [line for line in results.lines if line["target"] == target and line["stage"] == stage]
            if lines:
                shares = [line["accuracy"] for line in lines]
                numbers = f"{statistics.mean(shares):10.3f}{min(shares):8.3f}{max(shares):8.3f}"
                print(f"{target:26}{stage:11}{len(lines):6}{numbers}{lines[0]['state_bytes'] / 1e6:16.2f}")


def main() -> None:
    """Train, convert, heal and report; each step continues where it stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.folder / "recall.jsonl")
    if not arguments.report:
        for seed in arguments.seeds:
            study(arguments.folder, seed, results)
    report(results)


if __name__ == "__main__":
    main()
