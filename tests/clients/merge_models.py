"""mergekit: every method that heddle has, of exports, by its library and command, beside `heddle convert`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mergekit import sparsify
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import TensorGroup
from mergekit.options import MergeOptions
from torch import Tensor
from transformers import AutoModelForCausalLM

from heddle.conversion.convert import Conversion, open_source
from heddle.conversion.rewrites.merge_models import MergeModels
from heddle.conversion.weights import Weights
from heddle.exchange.load import load
from heddle.numerics.random import RandomStream
from tests.clients.folders import folder_of, run_client

# heddle's fields; mergekit's names are made of them.
CASES: dict[str, dict[str, Any]] = {
    "mean": {"method": "linear", "weights": (0.75, 0.5, 0.25)},
    "sum": {"method": "linear", "weights": (0.75, 0.5, -0.25), "normalize": False},
    "slerp": {"method": "slerp", "t": 0.3},
    "task arithmetic": {"method": "task_arithmetic", "weights": (0.7, -0.4), "scale": 0.6},
    "task arithmetic, normalized": {"method": "task_arithmetic", "weights": (0.7, 0.4), "normalize": True},
    "TIES": {"method": "ties", "weights": (0.7, 0.4), "density": 0.3},
    "TIES, not normalized": {
        "method": "ties", "weights": (1.0, 0.4), "densities": (0.2, 0.6), "normalize": False, "scale": 0.9,
    },
    "TIES, a negative weight": {"method": "ties", "weights": (0.7, -0.4)},
    "DARE of all": {"method": "dare", "weights": (0.7, 0.4)},
    "DARE-TIES of all": {"method": "dare_ties", "weights": (0.7, 0.4), "normalize": True},
}  # fmt: skip
DRAWN: dict[str, dict[str, Any]] = {
    "DARE": {"method": "dare", "weights": (0.7, 0.4), "densities": (0.3, 0.8), "seed": 3},
    "DARE-TIES": {"method": "dare_ties", "weights": (0.7, 0.4), "density": 0.4, "scale": 1.2, "seed": 4},
}
THEIR_NAMES = {"dare": "dare_linear"}
TOLERANCE = {"float32": 2**-21, "bfloat16": 2**-7}  # relative to the largest weight: roundings of mergekit, up to four
# In bfloat16 TIES elects signs of rounded sums, and sums of weights are rounded, too: those merges differ.
CASES_OF = {"float32": list(CASES), "bfloat16": ["mean", "sum", "slerp", "task arithmetic"]}


def their_config(fields: dict[str, Any], folders: list[Path], dtype: str) -> dict[str, Any]:
    """The case in mergekit's words. folders: MODEL, then the others."""
    method, first, *others = fields["method"], *folders
    config: dict[str, Any] = {"merge_method": THEIR_NAMES.get(method, method), "dtype": dtype, "parameters": {}}
    shared = config["parameters"]
    if method != "linear":
        config["base_model"] = str(first)
    if method == "slerp":
        others, shared["t"] = others[:1], fields["t"]
    if "normalize" in fields:
        shared["normalize"] = fields["normalize"]
    if "scale" in fields:
        shared["lambda"] = fields["scale"]
    models: list[dict[str, Any]] = [
        {"model": str(folder)} for folder in ([first, *others] if method in ("linear", "slerp") else others)
    ]
    densities = fields.get("densities", (fields.get("density", 1.0),) * len(others))
    for index, model in enumerate(models):
        if method != "slerp":
            model["parameters"] = {"weight": fields["weights"][index]}
        if "ties" in method or "dare" in method:
            model["parameters"]["density"] = densities[index]
    return config | {"models": models}


def ours(fields: dict[str, Any], folders: list[Path]) -> Weights:
    """The case by heddle, each tensor when it is asked for."""
    others = tuple(map(str, folders[1:2] if fields["method"] == "slerp" else folders[1:]))
    return Conversion(open_source(folders[0]), (MergeModels(models=others, **fields),)).plan()


def difference(mine: Tensor, theirs: Tensor) -> float:
    """The largest, relative to the largest weight."""
    return float((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def merged_by_mergekit(name: str, folders: list[Path], dtype: str, work: Path) -> float:
    """The largest difference of any weight of a case, which changes every matrix."""
    config = MergeConfiguration.model_validate(their_config(CASES[name], folders, dtype))
    run_merge(config, str(work / "merged"), MergeOptions(quiet=True, write_model_card=False))
    weights, before = ours(CASES[name], folders), load(folders[0]).model
    worst = 0.0
    for parameter_name, theirs in load(work / "merged").model.named_parameters():
        mine = weights.tensor(parameter_name)
        assert mine.dim() == 1 or difference(mine, before.get_parameter(parameter_name)) > 1e-2, parameter_name
        worst = max(worst, difference(mine, theirs.detach()))
    assert worst < TOLERANCE[dtype], (name, dtype, worst)
    return worst


def drawn(name: str, folders: list[Path]) -> float:
    """The largest difference where mergekit's function of a group takes heddle's draws."""
    fields = DRAWN[name]
    method = registry.get(THEIR_NAMES.get(fields["method"], fields["method"]))
    densities = fields.get("densities", (fields.get("density"),) * 2)
    parameters = {
        **{spec.name: spec.default for spec in method.spec.parameters},
        "weight": dict(enumerate(fields["weights"], 1)),
        "density": dict(enumerate(densities, 1)),
        "lambda": fields.get("scale", 1.0),
    }
    weights, worst = ours(fields, folders), 0.0
    sources = [open_source(folder).weights for folder in folders]
    for tensor_name in weights.names:
        tensors = [source.tensor(tensor_name) for source in sources]
        masks = draws_of(fields["seed"], tensor_name, tensors[0].shape)
        with mock.patch.object(sparsify.torch, "bernoulli", lambda shares, masks=masks: (next(masks) < shares).float()):
            theirs = method.merge_group(TensorGroup.from_tensors(tensors, base_index=0), **parameters)
        worst = max(worst, difference(weights.tensor(tensor_name), theirs))
    assert worst < TOLERANCE["float32"], (name, worst)
    return worst


def draws_of(seed: int, name: str, shape: torch.Size) -> Iterator[Tensor]:
    """heddle's draws for each of the other models."""
    for index in range(2):
        yield RandomStream.of(seed, "dare", index, name).uniform(0, shape.numel()).view(shape)


def by_command(folders: list[Path], work: Path) -> None:
    """The command merges as the library does, and its folder runs in transformers."""
    (work / "merge.yaml").write_text(json.dumps(their_config(CASES["TIES"], folders, "float32")))
    program = Path(sys.executable).with_name("mergekit-yaml")
    done = subprocess.run(
        [str(program), str(work / "merge.yaml"), str(work / "command")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    weights = ours(CASES["TIES"], folders)
    for name, theirs in load(work / "command").model.named_parameters():
        assert difference(weights.tensor(name), theirs.detach()) < TOLERANCE["float32"], name
    assert (
        AutoModelForCausalLM.from_pretrained(work / "command").generate(torch.tensor([[1, 2]]), max_new_tokens=4).any()
    )


def main(work: Path) -> str:
    """Each case in float32 and some in bfloat16, DARE's with heddle's draws, and one by the command."""
    folders = [folder_of("llama", work, seed=seed) for seed in (1, 2, 3)]
    said = []
    for dtype, cases in CASES_OF.items():
        found = {name: merged_by_mergekit(name, folders, dtype, work) for name in cases}
        if dtype == "float32":
            found |= {name: drawn(name, folders) for name in DRAWN}
        print("; ".join(f"{name} {worst:.0e}" for name, worst in found.items()), flush=True)
        said.append(f"{len(found)} merges in {dtype} within {max(found.values()):.0e}")
    by_command(folders, work)
    return ", ".join(said) + " of the largest weight"


if __name__ == "__main__":
    run_client(main, "mergekit")
