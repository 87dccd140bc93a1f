"""How much does a smaller cache cost? Trains two 16-head designs, converts them in many ways, heals some, and tells.

    python examples/conversion/smaller_caches.py runs/conversion            # everything; the same command continues
    python examples/conversion/smaller_caches.py runs/conversion --report   # only the tables, from what is there

Every result is a line of `results.jsonl` in the folder. Weights stay there; the recipe, the results and the figures
are committed.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from heddle.conversion.convert import Conversion, open_source
from heddle.conversion.heal import (
    MIN_RATE_SHARE,
    calibration_from_corpus,
    calibration_samples,
    convert_and_heal,
    healing_rate,
    healing_settings,
)
from heddle.conversion.targets import parse_rewrites
from heddle.conversion.weights import CalibrationText, ModelWeights, Weights, build_model
from heddle.data.corpus import Corpus, prepare_corpus
from heddle.data.samples import Batch, evaluation_windows
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.model.size import size
from heddle.storage.model import load
from heddle.training.distillation import Distillation, LossWeights
from heddle.training.evaluation.scores import bits_and_bytes
from heddle.training.init_checkpoint import open_init_checkpoint
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.settings import Settings

HERE = Path(__file__).parent
DESIGNS = ("llama16", "qwen16")
SEEDS = (0, 1, 2)
STEPS, BATCH_SIZE, SEQUENCE_LENGTH = 1920, 16, 256  # 7.86 M tokens: 20 for each of 390,816 parameters
VOCAB_SIZE = 512
CALIBRATION_TOKENS = 2**16
EVALUATION_WINDOWS = 256
KV_HEADS = (8, 4, 2)
GROUPINGS = ("contiguous", "similar-queries", "similar-keys-values", "similar-outputs")
MERGES = ("mean", "first", "aligned", "least-squares")
OF_INTEREST = {
    *(("contiguous", merge) for merge in MERGES),
    *(("similar-outputs", merge) for merge in ("mean", "aligned", "least-squares")),
}
STATE_SHARES = (50, 25, 12.5)  # per cent
HEALING_TOKENS = 393_216  # 5 % of the training tokens
HEALED = {
    "llama16": (
        *(f"kv_heads={kv_heads}" for kv_heads in KV_HEADS),
        *(f"kv_heads=4,groups=contiguous,merge={merge}" for merge in ("mean", "first")),
        *(f"latent_attention,state_budget={share}%" for share in STATE_SHARES),
    ),
    "qwen16": ("kv_heads=4", "kv_heads=4,groups=contiguous,merge=mean", "latent_attention,state_budget=25%"),
}
FROM_SCRATCH = 4  # key/value heads of the first design's target that is trained from scratch


def head_targets(kv_heads: int, design: str, seed: int) -> Iterator[str]:
    """Groupings and merges of this many key/value heads: all of the first model, those of interest of the others."""
    for groups in GROUPINGS:
        for merge in MERGES:
            if (design, seed) == (DESIGNS[0], SEEDS[0]) or (groups, merge) in OF_INTEREST:
                yield f"kv_heads={kv_heads},groups={groups},merge={merge}"


def targets(design: str, seed: int) -> list[str]:
    """Every conversion of one model that is measured before healing."""
    heads = [target for kv_heads in KV_HEADS for target in head_targets(kv_heads, design, seed)]
    return heads + [f"latent_attention,state_budget={share}%" for share in STATE_SHARES]


class Results:
    """The lines of a file, each with the key of what it is the result of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, **key: Any) -> bool:
        """Whether there is a line with this key."""
        return any(key.items() <= line.items() for line in self.lines)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line."""
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def source_run(folder: Path, design: str, seed: int, corpus: Corpus, fields: Sequence[str] = ()) -> Path:
    """Train a source model, or continue its training, and return its run's folder. fields: overrides of the design."""
    config = load_config(HERE / f"{design}.yaml", fields).replace(vocab_size=VOCAB_SIZE)
    settings = Settings(steps=STEPS, batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH, seed=seed, save_every=200)
    out = folder / "-".join([design, *(field.rpartition(".")[2] for field in fields), str(seed)])
    train(TrainingJob(config, corpus, settings, out, label=out.name))
    return out


def held_out_batches(corpus: Corpus) -> list[Batch]:
    """Held-out windows, spread over the text."""
    batches = list(evaluation_windows(corpus.validation, SEQUENCE_LENGTH, BATCH_SIZE))[:-1]
    count = EVALUATION_WINDOWS // BATCH_SIZE
    return list(islice(batches, 0, None, len(batches) // count))[:count]


def measure(model: Decoder, corpus: Corpus, batches: list[Batch]) -> dict[str, Any]:
    """Bits per byte on the held-out windows, the bits of each window, and the bytes of state a token."""
    scores = bits_and_bytes(model, batches, corpus.tokenizer.byte_lengths)
    costs = size(model.config, SEQUENCE_LENGTH)
    return {
        "bits_per_byte": sum(bits for bits, _ in scores) / sum(length for _, length in scores),
        "window_bits": [round(bits, 3) for bits, _ in scores],
        "state_bytes_per_token": costs.state_bytes_per_token,
        "parameters": costs.parameters,
    }


def convert_all(run: Path, design: str, seed: int, corpus: Corpus, results: Results) -> None:
    """Measure every conversion of a trained model that was not measured yet."""
    model, _ = load(run)
    text, batches = calibration_from_corpus(corpus, CALIBRATION_TOKENS, SEQUENCE_LENGTH), held_out_batches(corpus)
    source = ModelWeights(model)
    for target in ("", *targets(design, seed)):
        key = {"design": design, "seed": seed, "target": target, "stage": "converted"}
        if not results.has(**key):
            converted = model if not target else build_model(rewritten(source, target, text))
            results.add(key | measure(converted, corpus, batches))


def rewritten(source: Weights, target: str, text: CalibrationText) -> Weights:
    """The weights after one target."""
    (rewrite,) = parse_rewrites([target])
    return rewrite.apply(source, text if rewrite.needs_text else None)


def heal_all(run: Path, design: str, seed: int, corpus: Corpus, results: Results) -> None:
    """Heal conversions of a trained model, and train the model itself on for the same tokens, which is a control."""
    source, batches = open_source(run), held_out_batches(corpus)
    text = calibration_from_corpus(corpus, CALIBRATION_TOKENS, SEQUENCE_LENGTH)
    samples = calibration_samples(CALIBRATION_TOKENS, SEQUENCE_LENGTH)
    rate = healing_rate(source.weights.design.width)
    settings = healing_settings(HEALING_TOKENS, SEQUENCE_LENGTH, rate, samples)
    folder = run.with_name(f"{run.name}.healed")
    for number, target in enumerate(HEALED[design]):
        key = {"design": design, "seed": seed, "target": target, "stage": "healed"}
        if not results.has(**key):
            conversion = Conversion(source, parse_rewrites([target]), text)
            distillation = Distillation(source, LossWeights())
            healed = convert_and_heal(conversion, distillation, corpus, settings, folder / str(number))
            results.add(key | measure(healed.model, corpus, batches))
    key = {"design": design, "seed": seed, "target": "", "stage": "trained on"}
    if not results.has(**key):
        start = open_init_checkpoint(run)
        gentle = replace(settings, learning_rate=rate * MIN_RATE_SHARE)  # nothing has to be repaired
        job = TrainingJob(start.config, corpus, gentle, folder / "trained-on", init_checkpoint=start)
        results.add(key | measure(train(job).model, corpus, batches))


def train_target(folder: Path, design: str, seed: int, corpus: Corpus, results: Results) -> None:
    """Train a target of conversions from scratch, for as many tokens as the source: the other control."""
    key = {"design": design, "seed": seed, "target": f"kv_heads={FROM_SCRATCH}", "stage": "from scratch"}
    if not results.has(**key):
        fields = [f"layers.*.mixer.kv_heads={FROM_SCRATCH}"]
        run = source_run(folder, design, seed, corpus, fields)
        results.add(key | measure(load(run)[0], corpus, held_out_batches(corpus)))


def summary(results: Results) -> list[dict[str, Any]]:
    """The mean over seeds of what each conversion adds to the bits per byte of its source, and the range."""
    sources = {
        (line["design"], line["seed"]): line
        for line in results.lines
        if line["stage"] == "converted" and not line["target"]
    }
    added: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in results.lines:
        source = sources.get((line["design"], line["seed"]))
        if source is not None:
            change = line["bits_per_byte"] - source["bits_per_byte"]
            share = line["state_bytes_per_token"] / source["state_bytes_per_token"]
            group = added.setdefault((line["design"], line["target"], line["stage"]), [])
            group.append({"added": change, "state": share, "seed": line["seed"]})
    return [
        {
            "design": design, "target": target, "stage": stage, "models": len(group),
            "seeds": len({entry["seed"] for entry in group}), "state": round(group[0]["state"], 4),
            "added": round(statistics.mean(entry["added"] for entry in group), 4),
            "least": round(min(entry["added"] for entry in group), 4),
            "most": round(max(entry["added"] for entry in group), 4),
        }
        for (design, target, stage), group in added.items()
    ]  # fmt: skip


def report(results: Results, folder: Path) -> None:
    """Write `summary.json` and print it as a table."""
    rows = summary(results)
    (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{'design':10}{'target':58}{'stage':14}{'models':>7}{'state':>8}{'added':>9}{'least':>9}{'most':>9}")
    for row in rows:
        numbers = f"{row['models']:7}{row['state']:8.3f}{row['added']:9.4f}{row['least']:9.4f}{row['most']:9.4f}"
        print(f"{row['design']:10}{row['target']:58}{row['stage']:14}{numbers}")


def main() -> None:
    """Train, convert, heal and report; each step continues where it stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--designs", nargs="*", default=DESIGNS)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.folder / "results.jsonl")
    if arguments.report:
        report(results, arguments.folder)
        return
    corpus = prepare_corpus(["stdlib"], vocab_size=VOCAB_SIZE, max_train_tokens=None)
    for seed in arguments.seeds:
        for design in arguments.designs:
            run = source_run(arguments.folder, design, seed, corpus)
            convert_all(run, design, seed, corpus, results)
            heal_all(run, design, seed, corpus, results)
            if design == DESIGNS[0]:
                train_target(arguments.folder, design, seed, corpus, results)
            report(results, arguments.folder)


if __name__ == "__main__":
    main()
