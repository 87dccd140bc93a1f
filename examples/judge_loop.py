"""A research loop without any model behind it: random changes from a grammar, submitted to `heddle judge`.

    python examples/judge_loop.py --minutes 60 --out runs/judge-loop

Each round draws one or two changes of the incumbent's design, its optimizer or its schedule, and submits them. The
judge refuses copies and designs that cannot be built, keeps what is better, and says when its windows are spent. At
the end the sealed text is opened and every accepted change is removed once. The same command continues a loop that was
stopped.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

import yaml

from heddle.errors import CheckpointError
from heddle.lab.judge.judge import describe, judge

OVERRIDES = {
    "layers.*.feedforward.hidden": ["192", "320", "384"],
    "layers.*.feedforward.kind": ["gated", "mlp"],
    "layers.*.feedforward.activation": ["silu", "gelu", "relu"],
    "layers.*.mixer.kv_heads": ["1", "2", "4"],
    "layers.*.mixer.window": ["16", "64", "null"],
    "layers.*.mixer.qk_norm": ["head", "null"],
    "layers.*.mixer.position.base": ["1000", "100000"],
    "norm.kind": ["rms", "layer"],
    "residual.kind": ["pre_norm", "parallel"],
    "head.tied": ["true", "false"],
}
TRAINING: dict[str, list[Any]] = {
    "lr": [1e-3, 2e-3, 5e-3, 8e-3],
    "optimizer": ["adamw", "muon"],
    "schedule": ["wsd", "cosine", "linear"],
    "weight_decay": [0.0, 0.05, 0.2],
    "warmup": [5, 40],
}


def draw_proposal(draw: random.Random) -> dict[str, Any]:
    """One or two changes; most do nothing or harm, as in any such loop."""
    proposal: dict[str, Any] = {"overrides": [], "training": {}}
    for _ in range(draw.choice((1, 1, 2))):
        if draw.random() < 0.6:
            field = draw.choice(list(OVERRIDES))
            proposal["overrides"].append(f"{field}={draw.choice(OVERRIDES[field])}")
        else:
            field = draw.choice(list(TRAINING))
            proposal["training"][field] = draw.choice(TRAINING[field])
    values = [*proposal["overrides"], *(f"{name}={value}" for name, value in proposal["training"].items())]
    return {"name": " ".join(values), **{name: value for name, value in proposal.items() if value}}


def main() -> None:
    """Run the loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("runs/judge-loop"))
    parser.add_argument("--design", default="preset:gqa-tiny")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--data", nargs="*", default=[])
    arguments = parser.parse_args()
    until, out = time.monotonic() + 60 * arguments.minutes, arguments.out
    where: dict[str, Any] = {"out": out, "quiet": True, "device": "cpu"}
    try:
        facts = judge("show", **where)
    except CheckpointError:
        words = (arguments.design, "width=64", "layers.*.feedforward.hidden=256")
        sizes = {"tokens": arguments.tokens, "sequence_length": 128, "vocab_size": 1024, "second": 1.5}
        facts = judge("init", *words, data=arguments.data, **sizes, **where)
    number = len(facts.get("proposals", []))
    while time.monotonic() < until and facts["decisions_left"] > 0:
        file = out / "proposal.yaml"
        file.write_text(yaml.safe_dump(draw_proposal(random.Random(number))), encoding="utf-8")
        facts = judge("submit", file, **where)
        print(f"{facts['number']:>4}  {facts['sentence']}", flush=True)
        number += 1
    for words in (judge("final", **where), judge("show", **where)):
        print("\n".join(describe(words)[-1:]))
    print(f"page: {out / 'judge.html'}")


if __name__ == "__main__":
    main()
