"""How much memory does encoding 1 GB of text add to the process?

`heddle.data` trains a tokenizer on at most 16 MB, encodes the text in chunks and writes token files.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import limit_row, peak_memory, show, write
from heddle.data.corpus import prepare_corpus

QUESTION = "How much memory does encoding 1 GB of text add?"
VOCABULARY = 4096


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


def run(size: int) -> list[dict[str, Any]]:
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--bytes", type=int, default=10**9, help="size of the text; only 1 GB writes a result")
    options = parser.parse_args()
    rows = run(options.bytes)
    show(rows)
    if options.bytes == 10**9:
        write("benchmarks.encode", QUESTION, rows)
