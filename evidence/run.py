"""Run the trainings of rows in one-thread processes; each result is a line of a file, continued where it stopped."""

import importlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from evidence.row import MAX_LOSS, Results, Row

ROWS = Path(__file__).parent / "rows"
VOCAB_SIZE = 512
FINAL_TOKENS = 2**15  # held-out tokens of the evaluation at the end
Task = tuple[str, str, int]  # row, key of the training, seed


def row_names() -> list[str]:
    """The names of all rows: their files."""
    return sorted(path.stem for path in ROWS.glob("*.py") if path.stem != "__init__")


def load_row(name: str) -> Row:
    """The row of a file."""
    row: Row = importlib.import_module(f"evidence.rows.{name}").ROW
    return row


def read_results(name: str, folder: Path) -> list[dict[str, Any]]:
    """The results of a row's present trainings, in their order. Those of other designs or settings are left out."""
    file = folder / f"{name}.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    by_identity = {(line["key"], line["seed"], line["sha256"]): line for line in lines}
    identities = [
        (training.key, seed, training.sha256) for training in load_row(name).trainings for seed in training.seeds
    ]
    return [by_identity[identity] for identity in identities if identity in by_identity]


def by_training(lines: Sequence[dict[str, Any]]) -> Results:
    """The numbers of each training, by seed. A training that diverged has `MAX_LOSS`."""
    results: dict[str, dict[int, dict[str, float]]] = {}
    for line in lines:
        numbers = {name: MAX_LOSS if value is None else value for name, value in line["numbers"].items()}
        results.setdefault(line["key"], {})[line["seed"]] = numbers
    return results


def run_rows(names: Sequence[str], folder: Path, workers: int = 1) -> None:
    """Train what is not done yet of all rows, one row after another."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks: list[Task] = []
    for name in names:
        complete = {(line["key"], line["seed"]) for line in read_results(name, folder)}
        for training in load_row(name).trainings:
            tasks += [(name, training.key, seed) for seed in training.seeds if (training.key, seed) not in complete]
    for number, (task, line) in enumerate(_run_tasks(tasks, folder, workers), 1):
        with (folder / f"{task[0]}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        numbers = ", ".join(f"{label} {value:.4g}" for label, value in line["numbers"].items() if value is not None)
        label = "{} {} seed {}".format(*task)
        print(f"{number}/{len(tasks)} {label}: {numbers or 'diverged'} ({line['seconds']:.0f} s)", flush=True)


def _run_tasks(tasks: Sequence[Task], folder: Path, workers: int) -> Iterator[tuple[Task, dict[str, Any]]]:
    if workers == 1:
        yield from ((task, train_one(*task, folder)) for task in tasks)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(train_one, *task, folder): task for task in tasks}
        yield from ((futures[future], future.result()) for future in as_completed(futures))


def train_one(name: str, key: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train one design with one seed and measure it. A training that diverged has None for its loss."""
    import torch

    from heddle import progress
    from heddle.data.corpus import Corpus, prepare_corpus
    from heddle.data.recall import is_recall_argument, parse_recall
    from heddle.model.load_config import load_config
    from heddle.training.evaluation.scores import EvaluationBudget
    from heddle.training.job import TrainingJob
    from heddle.training.loop import Diverged, train
    from heddle.training.settings import Settings

    torch.set_num_threads(1)
    row = load_row(name)
    training = row.by_key[key]
    out = folder / "runs" / name / f"{key}-{seed}"
    start = time.process_time()
    with progress.quiet():
        if is_recall_argument(training.data):
            source: Any = parse_recall(training.data)
        else:
            source = prepare_corpus([training.data], vocab_size=VOCAB_SIZE, max_train_tokens=None)
        is_text = isinstance(source, Corpus)
        vocab_size = source.tokenizer.vocab_size if is_text else source.vocab_size
        config = load_config(dict(training.design)).replace(vocab_size=vocab_size)
        settings = Settings(seed=seed, **training.settings)
        budget = EvaluationBudget(final_tokens=FINAL_TOKENS)
        numbers: dict[str, float | None]
        try:
            trained = train(TrainingJob(config, source, settings, out, evaluation=budget))
        except Diverged:
            numbers = {"loss": None} if is_text else {"accuracy": 0.0}
        else:
            numbers = {"loss": trained.bits_per_byte} if is_text else {"accuracy": trained.task_accuracy}
            if row.measure is not None:
                numbers |= row.measure(trained.model, source)
    shutil.rmtree(out, ignore_errors=True)
    finite = {label: value if value is not None and math.isfinite(value) else None for label, value in numbers.items()}
    seconds = round(time.process_time() - start, 1)
    return {"key": key, "seed": seed, "sha256": training.sha256, "numbers": finite, "seconds": seconds}


def save_results(name: str, folder: Path, file: Path, date: str) -> None:
    """Write the results of a row, if it is complete: its runs, the judgments, the processor and the date."""
    from heddle.runtime import hardware

    row, lines = load_row(name), read_results(name, folder)
    if len(lines) < sum(len(training.seeds) for training in row.trainings):
        return
    findings = [
        {
            "claim": judgment.finding.claim,
            "unit": judgment.finding.unit,
            "threshold": judgment.finding.threshold,
            "mean": round(judgment.mean, 5),
            "half_width": round(judgment.half_width, 5),
            "seeds": len(judgment.finding.differences),
            "word": judgment.word,
            "note": judgment.finding.note,
        }
        for judgment in row.judge(by_training(lines))
    ]
    seconds = round(sum(line["seconds"] for line in lines))
    data = {"date": date, "cpu": hardware()["cpu"], "processor_seconds": seconds, "findings": findings, "runs": lines}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
