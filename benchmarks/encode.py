"""How fast is text encoded, and a tokenizer trained? How much memory does encoding 1 GB of text add to the process?

`heddle.data` trains a tokenizer on at most 16 MB, encodes the text in chunks and writes token files.
"""

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import alternate, limit_row, peak_memory, run_rows
from heddle.data.corpus import prepare_corpus
from heddle.data.sources import parse_source
from heddle.tokenization.tokenizer import Tokenizer

QUESTION = "How fast is text encoded, and how much memory does encoding 1 GB of text add?"
VOCABULARY = 4096
SPEED_ROUNDS = 5
SPEED_BYTES = 32 * 1024 * 1024


def make_text(path: Path, size: int) -> None:
    """Write about `size` bytes of random words in lines and paragraphs. Deterministic."""
    generator = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(generator.choices(letters, k=generator.randint(2, 9))) for _ in range(20000)]
    with path.open("w", encoding="utf-8") as file:
        written = 0
        while written < size:
            text = "\n".join(" ".join(generator.choices(words, k=12)) for _ in range(500))
            written += file.write(text.replace("\n", "\n\n", 50) + "\n\n")


def measure_memory(size: int) -> list[dict[str, Any]]:
    """Encode once, from tokenizer training to token files."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder, "text.txt")
        make_text(path, size)
        before = peak_memory()
        began = time.perf_counter()
        corpus = prepare_corpus(
            [str(path)], vocab_size=VOCABULARY, max_train_tokens=None, cache_folder=Path(folder, "cache")
        )
        seconds = time.perf_counter() - began
        added = peak_memory() - before
        row = limit_row(f"encoding {size / 1e9:g} GB, memory added", added, 500.0, "MB")
        tokens = sum(len(file) for file in corpus.train)
        return [row | {"seconds": round(seconds, 1), "training tokens": tokens}]


def stdlib_documents() -> list[str]:
    """About SPEED_BYTES of Python's own source code, in documents."""
    source, _ = parse_source("stdlib")
    documents, size = [], 0
    for text in source.scan(lambda _: None).read():
        documents.append(text)
        size += len(text.encode())
        if size >= SPEED_BYTES:
            break
    return documents


def measure_speed() -> list[dict[str, Any]]:
    """Encoding beside the `tokenizers` library alone, on the same documents in turn, and training a tokenizer."""
    documents = stdlib_documents()
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    tokenizer = Tokenizer.train(documents, VOCABULARY)
    own, peer = tokenizer.encode_documents(documents), tokenizer.encode_batch(documents)
    assert [ids.tolist() for ids in own] == peer
    json_text = tokenizer.to_json()
    seconds = alternate(
        {
            # a new tokenizer has seen no word yet
            "heddle": lambda: Tokenizer.from_json(json_text).encode_documents(documents),
            "tokenizers": lambda: tokenizer.encode_batch(documents),
            "training": lambda: Tokenizer.train(documents, VOCABULARY),
        },
        SPEED_ROUNDS,
    )
    speeds = {name: megabytes / statistics.median(values) for name, values in seconds.items()}
    ratios = [peer / own for own, peer in zip(seconds["heddle"], seconds["tokenizers"], strict=True)]
    encoding = speed_row(f"encoding {megabytes:.0f} MB of source code", speeds["heddle"], 60, "encoding")
    encoding["ratio to tokenizers"] = round(statistics.median(ratios), 2)
    return [encoding, speed_row("training a tokenizer", speeds["training"], 10, "tokenizer training")]


def speed_row(name: str, speed: float, goal: float, figure: str) -> dict[str, Any]:
    """A row for a speed in MB/s that must reach a goal, and answers a figure."""
    row = {"case": name, "value": round(speed, 1), "unit": "MB/s", "goal": f">= {goal:g}", "met": speed >= goal}
    return row | {"figure": figure}


def rows(quick: bool) -> list[dict[str, Any]]:
    """Both speeds, and the memory of 1 GB (quick: 10 MB)."""
    return [*measure_speed(), *measure_memory(10**7 if quick else 10**9)]


if __name__ == "__main__":
    run_rows("benchmarks.encode", QUESTION, rows)
