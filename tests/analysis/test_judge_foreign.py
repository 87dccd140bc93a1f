"""Trainers of someone else's: judged end to end, and refused where what they print knows what it must not."""

import random
import shutil
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from heddle.lab.judge.judge import judge
from heddle.lab.judge.ledger import Ledger
from tests import small

READ = """
import array, json, math, os, random
def read(name):
    data = open(name, "rb").read()
    start = 10 + int.from_bytes(data[8:10], "little")
    shape = data[10:start].decode().split("(")[1].split(")")[0].split(",")
    return array.array("q", data[start:]), int(shape[-1] or shape[0])
size = int(os.environ["HEDDLE_VOCAB_SIZE"])
"""
# Counts of pairs, of a random part of the text that the seed chooses.
TRAIN = (
    READ
    + """
text, _ = read(os.environ["HEDDLE_TRAIN"])
draw = random.Random(int(os.environ["HEDDLE_SEED"]))
counts = {}
for place in (draw.randrange(1, len(text)) for _ in range(int(os.environ["HEDDLE_TOKENS"]))):
    pair = f"{text[place - 1] * BIGRAM} {text[place]}"
    counts[pair] = counts.get(pair, 0) + 1
json.dump(counts, open("counts.json", "w"))
"""
)
SCORE = (
    READ
    + """
counts = json.load(open("counts.json"))
totals = {}
for pair, count in counts.items():
    totals[pair.split()[0]] = totals.get(pair.split()[0], 0) + count
def loss(before, token):
    before = before * BIGRAM
    return -math.log((counts.get(f"{before} {token}", 0) + 0.1) / (totals.get(str(before), 0) + 0.1 * size))
rows, width = read(os.environ["HEDDLE_ROWS"])
for start in range(0, len(rows), width):
    row = rows[start:start + width]
    print(json.dumps([LOSS for place in range(1, width)]))
"""
)
HONEST = "loss(row[place - 1], row[place])"
DISHONEST = {
    "later_tokens": "loss(row[place - 1], row[min(place + 1, width - 1)])",
    "shifted_targets": "-math.log(0.9)",
    "other_rows": "loss(row[place - 1], row[place]) + 0.01 * len(rows)",
    "score": "float('nan') if place == 1 else 0, 1",
}
OPTIONS: dict[str, Any] = {
    "tokens": 2048, "sequence_length": 16, "batch_size": 4, "pairs": 3, "windows": 8, "alpha": 0.5, "quiet": True,
    "vocab_size": small.VOCABULARY, "device": "cpu", "threads": 1, "seconds": 20,
}  # fmt: skip


def write(folder: Path, bigram: int, loss: str = HONEST, extra: str = "") -> Path:
    """A trainer's files, and its proposal."""
    folder.mkdir()
    (folder / "train.py").write_text(f"BIGRAM = {bigram}\n{extra}{TRAIN}")
    (folder / "score.py").write_text(f"BIGRAM = {bigram}\n{SCORE.replace('LOSS', loss)}")
    trainer = "{train: python train.py, score: python score.py, files: [train.py, score.py]}"
    (folder / "trainer.yaml").write_text(f"name: {folder.name}\ntrainer: {trainer}\n")
    return folder / "trainer.yaml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A ledger whose incumbent predicts a token from nothing."""
    root = tmp_path_factory.mktemp("foreign")
    (root / "text").mkdir()
    draw, words = random.Random(0), ["warp", "weft", "heddle", "shuttle", "reed", "loom", "lifts", "throws", "the", "a"]
    for number in range(120):
        steps = accumulate(draw.choices((1, 2, 5), k=300))  # what follows a word is one of three
        (root / "text" / f"{number}.txt").write_text(" ".join(words[step % 10] for step in steps))
    judge("init", write(root / "unigram", 0), data=[str(root / "text")], out=root / "ledger", **OPTIONS)
    yield root
    shutil.rmtree(root)


def test_a_better_trainer_becomes_the_incumbent(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "ledger", tmp_path / "ledger")
    where: dict[str, Any] = {"out": tmp_path / "ledger", "quiet": True}
    verdict = judge("submit", write(tmp_path / "bigram", 1), **where)
    assert (verdict["verdict"], Ledger.open(tmp_path / "ledger").incumbent.name) == ("better", "bigram")
    # the same code with another comment, and weights beside it
    copy = judge("submit", write(tmp_path / "copy", 1, extra="# another comment\n"), **where)
    assert (copy["verdict"], copy["rule"]) == ("refused", "copy")
    renamed = tmp_path / "copy" / "renamed.yaml"
    renamed.write_text((tmp_path / "copy" / "trainer.yaml").read_text().replace("train.py", "learn.py"))
    (tmp_path / "copy" / "learn.py").write_bytes((tmp_path / "copy" / "train.py").read_bytes())
    copy = judge("submit", renamed, **where)
    assert (copy["verdict"], copy["rule"]) == ("refused", "copy"), copy["sentence"]
    (tmp_path / "copy" / "score.py").write_bytes(b"\xff\xfe\x00")
    weights = judge("submit", tmp_path / "copy" / "trainer.yaml", **where)
    assert (weights["verdict"], weights["rule"]) == ("refused", "initial_weights")


@pytest.mark.parametrize("rule", DISHONEST)
def test_losses_that_know_too_much_are_refused(rule: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "ledger", tmp_path / "ledger")
    verdict = judge("submit", write(tmp_path / "leaky", 1, DISHONEST[rule]), out=tmp_path / "ledger", quiet=True)
    assert (verdict["verdict"], verdict["rule"]) == ("refused", rule), verdict["sentence"]


def test_held_out_text_in_the_code_and_a_loop_without_end(made: Path, tmp_path: Path) -> None:
    from heddle.data.corpus import prepare_corpus

    shutil.copytree(made / "ledger", tmp_path / "ledger")
    where: dict[str, Any] = {"out": tmp_path / "ledger", "quiet": True}
    failing = judge("submit", write(tmp_path / "failing", 1, extra="raise SystemExit('no such file')\n"), **where)
    assert (failing["verdict"], failing["rule"]) == ("refused", "failed")
    assert "no such file" in failing["sentence"]
    corpus = prepare_corpus(
        [str(made / "text")], vocab_size=None, max_train_tokens=64, tokenizer=made / "ledger" / "tokenizer.json"
    )
    secret = corpus.tokenizer.decode(corpus.validation.read(1, 300).tolist()).replace("'''", "")
    copied = judge("submit", write(tmp_path / "copied", 1, extra=f"TEXT = r'''{secret}'''\n"), **where)
    assert (copied["verdict"], copied["rule"]) == ("refused", "evaluation_text_in_training")
