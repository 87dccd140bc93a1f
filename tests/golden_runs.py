"""Runs whose draws and results are settled: `python -m tests.golden_runs` adds new cases to tests/goldens/runs.json.

Draws are compared bit for bit: they are the same on every machine. Outputs in float64 and losses in float32 are
compared within rounding, because matrix products differ.
"""

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heddle.laws.harness import layout_for, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.training.loop import train
from tests import small
from tests.cases import CASES, case

GOLDEN = Path(__file__).parent / "goldens/runs.json"
WINDOWED: dict[str, Any] = {"kind": "attention", "heads": 2, "window": 5, "position": {"kind": "rope"}}
DELTA: dict[str, Any] = {"kind": "gated_delta", "heads": 2, "head_dim": 8}
RUNS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "dropout": (small.dropping(), {"gradient_accumulation_steps": 2}),
    "mixture": (small.design(layers=[{"mixer": WINDOWED, "feedforward": small.MOE}]), {}),
    "muon": (None, {"optimizer": "muon"}),
    "delta": (small.design(layers=[{"mixer": DELTA, "feedforward": {"kind": "mlp", "hidden": 20}}]), {}),
}


def digest(tensors: list[Tensor]) -> str:
    """Of the bits of all numbers, rounded to float32."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().to(torch.float32).contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def outputs(config: ModelConfig) -> dict[str, Any]:
    """The digest of a design's initial weights, its fingerprint, and two sums over its logits, float64."""
    model = build(config, dtype=torch.float64, seed=3).eval()
    layout = layout_for(model, 2, 9)
    with torch.no_grad():
        logits = model.head(model(random_tokens(config, 2, 9, 1), layout)[0])
    weights = torch.linspace(-1.0, 1.0, logits.numel(), dtype=torch.float64).view(logits.shape)
    sums = [float((logits * weights).sum()), float(logits.square().sum())]
    return {"draws": digest(list(model.parameters())), "fingerprint": config.fingerprint(), "logits": sums}


def runs(folder: Path) -> dict[str, Any]:
    """Scores of some trainings of six steps: each window's sum of bits."""
    corpus = small.corpus(folder / "texts")
    scores: dict[str, Any] = {"corpus": corpus.hash}
    for name, (design, settings) in RUNS.items():
        result = train(small.job(corpus, folder / name, design, steps=6, **settings))
        scores[name] = [bits for bits, _ in result.scores]
    return scores


def main() -> None:
    """Add what is new to the golden file. What stands there is settled."""
    settled = json.loads(GOLDEN.read_text(encoding="utf-8"))
    designs = {name: settled["designs"].get(name) or outputs(case(name)) for name in CASES}
    content = {"designs": designs, "runs": settled["runs"]}
    if content["runs"].keys() != {"corpus", *RUNS}:
        with tempfile.TemporaryDirectory() as folder:
            content["runs"] = runs(Path(folder)) | settled["runs"]
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{GOLDEN.name}: {len(designs.keys() - settled['designs'].keys())} designs added")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    main()
