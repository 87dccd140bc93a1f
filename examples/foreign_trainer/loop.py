"""A loop in the manner of autoresearch, over a trainer in plain PyTorch that knows nothing of heddle.

    python examples/foreign_trainer/loop.py --minutes 60 --out runs/foreign

Each round changes constants of the incumbent's model.py or train.py, as an agent would edit them, and submits the
files to `heddle judge`. One change in the grammar reads ahead; the judge refuses it. No model is behind the loop.
"""

import argparse
import random
import re
import time
from pathlib import Path
from typing import Any

from heddle.errors import CheckpointError
from heddle.lab.judge.judge import describe, judge
from heddle.lab.judge.ledger import Ledger

HERE = Path(__file__).parent
FILES = ("model.py", "train.py", "score.py")
TRAINER = f"{{train: python train.py, score: python score.py, files: [{', '.join(FILES)}]}}"
CHANGES = {
    "model.py": {
        "WIDTH, DEPTH, HEADS, HIDDEN": ["64, 2, 4, 256", "64, 2, 4, 384", "64, 3, 4, 192", "96, 2, 4, 256"],
        "ACTIVATION": ['"gelu"', '"relu"', '"silu"', '"tanh"'],
        "EMBEDDING_STD": ["0.02", "0.1", "1.0"],
        "CAUSAL": ["False"],
    },
    "train.py": {
        "LR, BATCH, WARMUP, CLIP": ["1e-3, 4, 10, 1.0", "3e-3, 4, 10, 1.0", "3e-3, 4, 40, 1.0", "3e-3, 8, 10, 1.0"],
        "WEIGHT_DECAY": ["0.0", "0.01", "0.3"],
    },
}


def draw_change(draw: random.Random) -> tuple[str, str, str]:
    """A file, the constant in it that changes, and its new value."""
    file, constant = draw.choice([(file, constant) for file, constants in CHANGES.items() for constant in constants])
    return file, constant, draw.choice(CHANGES[file][constant])


def write_trainer(folder: Path, source: Path, name: str, change: tuple[str, str, str] | None = None) -> Path:
    """The files of `source` in `folder`, one constant changed, and the proposal that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        text = (source / file).read_text(encoding="utf-8")
        if change is not None and file == change[0]:
            text = re.sub(rf"^{change[1]} = .*$", f"{change[1]} = {change[2]}", text, flags=re.MULTILINE)
        (folder / file).write_text(text, encoding="utf-8")
    proposal = folder / "trainer.yaml"
    proposal.write_text(f"name: '{name}'\ntrainer: {TRAINER}\n", encoding="utf-8")
    return proposal


def incumbent_folder(ledger: Path) -> Path:
    """Where the incumbent's files are."""
    incumbent = Ledger.open(ledger).incumbent
    assert incumbent.trainer is not None
    return ledger / Path(incumbent.trainer["files"][0][0]).parent


def main() -> None:
    """Run the loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("runs/foreign"))
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--data", nargs="*", default=["stdlib"])
    arguments = parser.parse_args()
    until, ledger = time.monotonic() + 60 * arguments.minutes, arguments.out / "ledger"
    where: dict[str, Any] = {"out": ledger, "quiet": True, "device": "cpu"}
    try:
        facts = judge("show", **where)
    except CheckpointError:
        start = write_trainer(arguments.out / "start", HERE, "start")
        sizes = {"tokens": arguments.tokens, "sequence_length": 128, "vocab_size": 1024, "seconds": 300}
        facts = judge("init", start, data=arguments.data, **sizes, **where)
    number = len(facts.get("proposals", []))
    while time.monotonic() < until and facts["decisions_left"] > 0:
        change = draw_change(random.Random(number))
        name = f"{change[1]} = {change[2]}".replace("'", "")
        folder = arguments.out / "proposal"
        facts = judge("submit", write_trainer(folder, incumbent_folder(ledger), name, change), **where)
        print(f"{facts['number']:>4}  {facts['sentence']}", flush=True)
        number += 1
    for line in describe(judge("final", **where)):
        print(line)


if __name__ == "__main__":
    main()
