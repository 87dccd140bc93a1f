"""Does a hybrid keep recall? Trains a design on text full of repetitions, turns its layers into recurrences, and asks.

    python examples/conversion/recall.py runs/conversion            # three seeds; the same command continues
    python examples/conversion/recall.py runs/conversion --report   # only the table, from what is there

Each training document is a passage, other text, and the passage again, so that the design learns to look back. The
passages are the standard library's text, and in every second document words of it in random order, which nothing but
looking back predicts. Recall is measured on held-out files: needles hidden in them, and spans that are repeated.
Results are lines of `recall.jsonl` in the folder.
"""

import argparse
import hashlib
import json
import re
import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smaller_caches import HERE, Results, rewritten

from heddle.analysis.conversion.measure import measured_rows, score_recall
from heddle.analysis.conversion.texts import MeasurementSettings, MeasurementText
from heddle.conversion.calibration import calibration_from_corpus, calibration_samples
from heddle.conversion.convert import Conversion
from heddle.conversion.heal import Original, convert_and_heal, healing_rate, healing_settings
from heddle.conversion.sources import open_source
from heddle.conversion.targets import parse_rewrites
from heddle.conversion.weights import ModelWeights, build_model
from heddle.data.corpus import Corpus, prepare_corpus
from heddle.data.sources import is_in_validation
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.model.size import size
from heddle.progress import progress_bar
from heddle.storage.model import load
from heddle.training.distillation import Distillation, LossWeights
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.settings import Settings

SEEDS = (0, 1, 2)
STEPS, BATCH_SIZE, SEQUENCE_LENGTH = 960, 16, 256  # 3.93 M tokens: 20 for each of 197,184 parameters
VOCAB_SIZE = 512
CALIBRATION_TOKENS, HEALING_TOKENS = 2**16, 196_608  # 5 % of the training tokens
TARGETS = ("gated_delta", "gated_delta,keep=1", "linear_attention", "linear_attention,keep=1", "window=16,keep=1")
PASSAGE_WORDS, OTHER_WORDS = (8, 24), (0, 16)
WORD = re.compile(r"\s*\S+")


def repeated_passages(seed: int = 0) -> Iterator[str]:
    """Documents: a passage, other text, and the passage again. Held-out files are left out."""
    rng = np.random.default_rng(seed)
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        data = path.read_bytes()
        if "site-packages" in path.parts or is_in_validation(hashlib.sha256(data).digest()):
            continue
        words = [word for word in WORD.findall(data.decode("utf-8", errors="ignore")) if len(word) < 40]
        shuffled = [words[index] for index in rng.permutation(len(words))]
        start, is_shuffled = 0, False
        while start + PASSAGE_WORDS[1] + OTHER_WORDS[1] < len(words):
            middle = start + int(rng.integers(*PASSAGE_WORDS))
            end = middle + int(rng.integers(*OTHER_WORDS))
            of_document = shuffled if is_shuffled else words
            yield "".join(of_document[start:end] + of_document[start:middle])
            start, is_shuffled = end, not is_shuffled


def training_corpus(folder: Path, held_out: Corpus) -> Corpus:
    """The corpus of repeated passages, with the tokenizer of the text that is measured."""
    file = folder / "repeated-passages.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in repeated_passages()), encoding="utf-8")
    return prepare_corpus([str(file)], vocab_size=None, max_train_tokens=None, tokenizer=held_out.tokenizer)


def measure(model: Decoder, text: MeasurementText) -> dict[str, Any]:
    """The share of needle tokens recalled, with and without the needle, and bits per byte of both occurrences."""
    with progress_bar("recall", measured_rows(text), "rows") as bar:
        first, second, needles = score_recall(model.eval(), text, bar)
    shares = {
        row.depth: sum(right or 0.0 for right, _ in row.correct) / sum(n for _, n in row.correct) for row in needles
    }
    bits = [
        sum(score or 0.0 for score, _ in scores) / sum(length for _, length in scores) for scores in (first, second)
    ]
    return {
        "needles": statistics.mean(share for depth, share in shares.items() if depth is not None),
        "without": shares[None],
        "first_span": bits[0],
        "repeated_span": bits[1],
        "state_bytes": size(model.config, 8192).state_bytes,
    }


def study(folder: Path, seed: int, corpus: Corpus, text: MeasurementText, results: Results) -> None:
    """Train one model, convert and heal it in each way, and measure what was not measured yet."""
    config = load_config(HERE / "recall4.yaml").replace(vocab_size=VOCAB_SIZE)
    settings = Settings(steps=STEPS, batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH, seed=seed, save_every=200)
    run = folder / f"recall4-{seed}"
    train(TrainingJob(config, corpus, settings, run, label=run.name))
    source, model = open_source(run), load(run)[0]
    calibration = calibration_from_corpus(corpus, CALIBRATION_TOKENS, SEQUENCE_LENGTH)
    samples = calibration_samples(CALIBRATION_TOKENS, SEQUENCE_LENGTH)
    healing = healing_settings(HEALING_TOKENS, SEQUENCE_LENGTH, healing_rate(config.width), samples)
    if not results.has(seed=seed, target="", stage="original"):
        results.add({"seed": seed, "target": "", "stage": "original"} | measure(model, text))
    for number, target in enumerate(TARGETS):
        if not results.has(seed=seed, target=target, stage="converted"):
            converted = build_model(rewritten(ModelWeights(model), target, calibration))
            results.add({"seed": seed, "target": target, "stage": "converted"} | measure(converted, text))
        if not results.has(seed=seed, target=target, stage="healed"):
            conversion = Conversion(source, parse_rewrites([target]), calibration)
            distillation = Distillation(Original(source), LossWeights())
            out = folder / f"recall4-{seed}.healed" / str(number)
            healed = convert_and_heal(conversion, distillation, corpus, healing, out).model
            results.add({"seed": seed, "target": target, "stage": "healed"} | measure(healed, text))


def report(results: Results) -> None:
    """Print a row for each conversion: means over seeds, with the least and the most needles recalled."""
    print(
        f"{'target':26}{'stage':11}{'seeds':>6}{'needles':>9}{'least':>8}{'most':>8}{'without':>9}{'span':>8}{'again':>8}"
    )
    for target in ("", *TARGETS):
        for stage in ("original", "converted", "healed"):
            lines = [line for line in results.lines if line["target"] == target and line["stage"] == stage]
            if lines:
                needles = [line["needles"] for line in lines]
                keys = ("without", "first_span", "repeated_span")
                others = [statistics.mean(line[key] for line in lines) for key in keys]
                numbers = f"{statistics.mean(needles):9.3f}{min(needles):8.3f}{max(needles):8.3f}"
                print(f"{target:26}{stage:11}{len(lines):6}{numbers}{others[0]:9.3f}{others[1]:8.3f}{others[2]:8.3f}")


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
        held_out = prepare_corpus(["stdlib"], vocab_size=VOCAB_SIZE, max_train_tokens=None)
        corpus = training_corpus(arguments.folder, held_out)
        text = MeasurementText(held_out, MeasurementSettings(sequence_length=SEQUENCE_LENGTH))
        for seed in arguments.seeds:
            study(arguments.folder, seed, corpus, text, results)
    report(results)


if __name__ == "__main__":
    main()
