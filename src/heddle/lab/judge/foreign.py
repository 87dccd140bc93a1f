"""Foreign trainers: a command that trains and gets no held-out text, and one that prints losses.

Both run in a folder of their own that holds the trainer's files, with limits of time and memory. They read these
variables: `HEDDLE_TRAIN`, a file train.npy of the training tokens in order, one dimension; `HEDDLE_VOCAB_SIZE`, how
many tokens there are; `HEDDLE_TOKENS`, how many to train on; `HEDDLE_SEQUENCE_LENGTH`, `HEDDLE_SEED` and
`HEDDLE_SECONDS`; and, for `score` only, `HEDDLE_ROWS`, a file rows.npy, int64 [rows, T + 1].

`score` prints a line of JSON for each row: T losses in nats, of row[1:], each given only the tokens before it. What it
prints is tested on training text: no loss may depend on a later token or on another row, and the probabilities of all
tokens at one position may not sum to more than 1, as they would if the target were visible.
"""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heddle.data.corpus import Corpus, prepare_corpus
from heddle.lab.judge.ledger import TOKENIZER_FILE, Ledger, checked_file
from heddle.lab.judge.proposal import Refused
from heddle.lab.workers import Task
from heddle.settings import shorten
from heddle.storage.file_io import write_json_file

TOLERANCE = 1e-3  # nats: other batches change the last bits of a loss
TEST_ROWS, TEST_TOKENS = 8, 8
MAX_PROBABILITY = 1.02  # of all tokens at one place


def run(task: Task, ledger: Ledger) -> dict[str, Any]:
    """Train and score, and write the result, which is returned. Raises Refused for a broken rule."""
    request, settings = task.request, ledger.settings
    folder = Path(request["out"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file, digest in request["trainer"]["files"]:
        shutil.copy(checked_file(ledger.folder, file, digest), folder / Path(file).name)
    corpus = prepare_corpus(
        request["data"], vocab_size=None, max_train_tokens=settings.tokens,
        tokenizer=ledger.folder / TOKENIZER_FILE,
    )  # fmt: skip
    text = np.concatenate([file.read(0, len(file)) for file in corpus.train])
    np.save(folder / "train.npy", text)
    values = request["settings"]
    environment = {
        "HEDDLE_TRAIN": str(folder / "train.npy"), "HEDDLE_VOCAB_SIZE": str(corpus.tokenizer.vocab_size),
        "HEDDLE_TOKENS": str(values["steps"] * values["batch_size"] * values["sequence_length"]),
        "HEDDLE_SEQUENCE_LENGTH": str(values["sequence_length"]), "HEDDLE_SEED": str(values["seed"]),
        "HEDDLE_SECONDS": f"{settings.seconds:g}", "HOME": str(folder),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}",
    }  # fmt: skip
    limits = (settings.seconds, settings.memory)
    message = _command(request["trainer"]["train"], folder, environment, limits)[1]
    if message is None:
        score = Scorer(request["trainer"]["score"], folder, environment, limits)
        _test(score, text, corpus.tokenizer.vocab_size)
        result = _scored(score, request, corpus)
    else:
        result = {"status": "failed", "message": f"{task.label}: train {message}"}
    if result["status"] == "done":
        write_json_file(task.result_file, result)
        shutil.rmtree(folder, ignore_errors=True)
    return result


class Scorer:
    """Calls the `score` command."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str], limits: tuple[float, float]) -> None:
        self.command, self.folder, self.environment, self.limits = command, folder, environment, limits

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """rows [R, T + 1] -> losses in nats [R, T]. Raises Refused for anything else."""
        file = self.folder / "rows.npy"
        np.save(file, rows)
        environment = self.environment | {"HEDDLE_ROWS": str(file)}
        printed, message = _command(self.command, self.folder, environment, self.limits)
        file.unlink(missing_ok=True)
        if message is not None:
            raise Refused("score", f"the command {message}")
        try:
            lines = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
            losses = np.array(lines, dtype=np.float64)
        except (ValueError, TypeError):
            losses = np.empty(0)
        if losses.shape != (len(rows), rows.shape[1] - 1):
            raise Refused("score", f"must print {len(rows)} lines of {rows.shape[1] - 1} losses, one for each row")
        return losses


def _test(score: Scorer, text: np.ndarray, vocab_size: int) -> None:
    """Raise Refused if losses on rows of the training text depend on later tokens, other rows or their targets."""
    width = TEST_TOKENS + 1
    starts = np.linspace(0, len(text) - width, 2 * TEST_ROWS).astype(np.int64)
    places = np.stack([text[start : start + width] for start in starts])
    rows, others = places[:TEST_ROWS], places[TEST_ROWS:]
    # variant `index` of a row differs from it in the tokens from `index` on
    variants = np.stack([np.where(np.arange(width) < index, rows, others) for index in range(1, width + 1)])
    place = width // 2
    every = np.repeat(rows[:2, None], vocab_size, 1)
    every[:, :, place] = np.arange(vocab_size)
    # one call: most of its time is the start of a process
    found = score(np.concatenate([variants.reshape(-1, width), every.reshape(-1, width)]))
    losses = found[: variants.size // width].reshape(width, TEST_ROWS, width - 1)
    if not np.abs(score(rows) - losses[-1]).max() <= TOLERANCE:
        raise Refused("other_rows", f"the losses of {width} tokens change with the other rows")
    for index in range(1, width):
        before, after = losses[-1, :, : index - 1], losses[index - 1, :, : index - 1]
        moved = np.argwhere(~(np.abs(before - after) <= TOLERANCE))
        if len(moved):
            what = f"of {width} tokens, changing those from {index} on moves the loss of token {int(moved[0][1]) + 1}"
            raise Refused("later_tokens", what)
    for total in np.exp(-found[variants.size // width :, place - 1]).reshape(2, vocab_size).sum(1):
        if not total <= MAX_PROBABILITY:
            what = f"the probabilities of all {vocab_size} tokens at position {place} sum to {total:.4g}"
            raise Refused("shifted_targets", f"{what}, so the target was visible to its own loss")


def _scored(score: Scorer, request: Any, corpus: Corpus) -> dict[str, Any]:
    """The result, on windows of the held-out text."""
    length = request["settings"]["sequence_length"]
    firsts = [first for start, stop in request["held_out"] for first in range(start, stop - length, length)]
    rows = np.stack([corpus.validation.read(first, first + length + 1) for first in firsts])
    sizes = corpus.tokenizer.byte_lengths[rows[:, 1:]]
    losses = np.where(sizes > 0, score(rows), 0.0)
    bits, counts = losses.sum(1) / math.log(2), np.maximum(sizes, 0).sum(1)
    value = float(bits.sum() / max(1, counts.sum()))
    windows = None if request["hides_windows"] else list(zip(bits.tolist(), counts.tolist(), strict=True))
    return {"status": "done", "bits_per_byte": value if math.isfinite(value) else None, "windows": windows}


def _command(
    command: str, folder: Path, environment: dict[str, str], limits: Sequence[float]
) -> tuple[str, str | None]:
    """What a command prints, and how it failed; None if it did not."""
    seconds, memory = limits
    limited = ["sh", "-c", f'ulimit -v {int(memory * 2**20)}; exec "$@"', "sh"]
    try:
        process = subprocess.Popen(
            [*limited, *shlex.split(command)], cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return "", f"cannot be started ({error})"
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return "", f"takes more than {seconds:g} seconds"
    except BaseException:
        os.killpg(process.pid, 9)
        raise
    if process.returncode:
        last = (errors.strip().splitlines() or ["nothing"])[-1]
        return printed, f"ended with code {process.returncode} ({shorten(last)})"
    return printed, None
