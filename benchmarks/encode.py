"""How much memory reading a large text adds: one file of 1 GB, tokenized in a fresh process."""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT, bounded, show, write

SIZE = 10**9


def write_text(path: Path, size: int) -> None:
    """Words of a small vocabulary in lines and paragraphs, never the same paragraph twice."""
    words = [
        f"{stem}{end}" for stem in ("warp", "weft", "loom", "reed", "shed") for end in ("", "s", "ed", "ing", "er")
    ]
    with path.open("w", encoding="utf-8") as file:
        written = number = 0
        while written < size:
            line = " ".join(words[(number * step + step) % len(words)] for step in range(3, 17))
            written += file.write(f"{line} {number}\n" + ("\n" if number % 5 == 0 else ""))
            number += 1


def encode(path: Path, cache: Path) -> float:
    """Megabytes that preparing the text adds to the peak of this process."""
    from heddle.data.corpus import prepare

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    prepare([str(path)], vocab_size=4096, budget=None, cache=cache)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(encode(Path(sys.argv[1]), Path(sys.argv[2])))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        write_text(text, SIZE)
        command = [sys.executable, "-m", "benchmarks.encode", str(text), f"{folder}/cache"]
        added = float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    rows = [bounded("memory added by encoding 1 GB", added, 500, "MB")]
    show(rows)
    write("benchmarks.encode", "How much memory does reading a large text add?", rows)
