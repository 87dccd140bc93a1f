"""Merging models of one design: each method against a plain loop over numbers, and what is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heddle
from heddle.conversion.convert import Conversion, convert, open_source
from heddle.conversion.rewrites import merge_models
from heddle.conversion.rewrites.merge_models import MergeModels, slerp
from heddle.conversion.targets import parse_rewrite
from heddle.errors import ConfigError
from heddle.numerics.random import RandomStream
from heddle.storage.model import save
from heddle.tokenization.tokenizer import Tokenizer

DESIGN = ["vocab_size=300", "width=24", "layers.0.repeat=2", "layers.0.feedforward.hidden=16"]
Arrays = list[np.ndarray[Any, Any]]


def folder(path: Path, seed: int, *overrides: str, tokenizer: Tokenizer | None = None) -> Path:
    """A model whose parameters are drawn by a seed, gains too."""
    model = heddle.build(heddle.load_config("preset:gqa-tiny", [*DESIGN, *overrides]), seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 8)
    save(model, path, tokenizer=tokenizer)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Three models of one design."""
    root = tmp_path_factory.mktemp("models")
    return tuple(folder(root / str(seed), seed) for seed in range(3))


def merged(models: tuple[Path, ...], **fields: Any) -> dict[str, torch.Tensor]:
    """The tensors of the first model merged with the others."""
    rewrite = MergeModels(models=tuple(map(str, models[1:])), **fields)
    weights = Conversion(open_source(models[0]), (rewrite,)).plan()
    return {name: weights.tensor(name) for name in weights.names}


def plain(name: str, models: tuple[Path, ...], fields: dict[str, Any]) -> np.ndarray[Any, Any]:
    """One tensor as the papers say, number by number."""
    first, *others = (open_source(path).weights.tensor(name).double().numpy().ravel() for path in models)
    method, density = fields["method"], fields.get("density", 1.0)
    if method == "linear":
        weights = fields.get("weights", (1.0,) * len(models))
        total = sum(w * x for w, x in zip(weights, (first, *others), strict=True))
        return np.asarray(total / sum(weights) if fields.get("normalize", True) else total)
    if method == "slerp":
        return plain_slerp(first, others[0], fields["t"])
    weights = fields.get("weights", (1.0,) * len(others))
    densities = fields.get("densities", (density,) * len(others))
    changes: Arrays = [other - first for other in others]
    if method == "ties":
        changes = [trimmed(change, share) for change, share in zip(changes, densities, strict=True)]
    if method.startswith("dare"):
        changes = [dropped(name, i, change, densities[i], fields) for i, change in enumerate(changes)]
    result = []
    for place in range(len(first)):
        values = [w * change[place] for w, change in zip(weights, changes, strict=True)]
        taken = list(zip(weights, values, strict=True))
        if method.endswith("ties"):
            positive = sum(values) >= 0
            taken = [(w, v) for w, v in taken if v != 0 and (v > 0) == positive]
        total, parts = sum(v for _, v in taken), sum(w for w, _ in taken)
        result.append(total / parts if fields.get("normalize", method == "ties") and parts else total)
    return first + fields.get("scale", 1.0) * np.array(result)


def trimmed(change: np.ndarray[Any, Any], density: float) -> np.ndarray[Any, Any]:
    """The largest numbers of a change."""
    order = sorted(range(len(change)), key=lambda place: -abs(change[place]))
    kept = set(order[: max(int(density * len(change)), 1)])
    return np.array([value if place in kept else 0.0 for place, value in enumerate(change)])


def dropped(
    name: str, index: int, change: np.ndarray[Any, Any], density: float, fields: dict[str, Any]
) -> np.ndarray[Any, Any]:
    """What the draws of a seed leave of a change, rescaled."""
    draws = RandomStream.of(fields["seed"], "dare", index, name).uniform(0, len(change)).tolist()
    kept = np.array([value if draw < density else 0.0 for value, draw in zip(change, draws, strict=True)])
    if fields.get("rescale") == "density":
        return kept / density
    after = sum(map(abs, kept))
    return np.asarray(kept * (sum(map(abs, change)) / after) if after else kept)


def plain_slerp(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any], t: float) -> np.ndarray[Any, Any]:
    """The arc between two vectors."""
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    angle = math.acos(dot / math.sqrt(sum(a * a for a in first) * sum(b * b for b in second)))
    return np.asarray((math.sin((1 - t) * angle) * first + math.sin(t * angle) * second) / math.sin(angle))


METHODS: list[dict[str, Any]] = [
    {"method": "linear"},
    {"method": "linear", "weights": (0.5, 2.0, -0.25)},
    {"method": "task_arithmetic", "weights": (0.7, -0.4), "scale": 0.6},
    {"method": "ties", "weights": (0.7, 0.4), "density": 0.3, "scale": 0.9},
    {"method": "ties", "weights": (0.7, -0.4)},
    {"method": "linear", "weights": (0.5, 1.0, -1.5), "normalize": False},
    {"method": "task_arithmetic", "weights": (0.7, 0.4), "normalize": True},
    {"method": "task_arithmetic", "weights": (0.5, -0.5), "normalize": True},
    {"method": "ties", "weights": (0.7, 0.4), "densities": (0.2, 0.6), "normalize": False},
    {"method": "dare", "weights": (0.7, 0.4), "density": 0.4, "seed": 3},
    {"method": "dare", "weights": (0.7, 0.4), "densities": (0.4, 0.9), "seed": 3, "rescale": "density"},
    {"method": "dare_ties", "weights": (0.7, 0.4), "density": 0.4, "seed": 4, "normalize": True},
    {"method": "dare_ties", "weights": (0.7, 0.4), "density": 0.4, "seed": 3, "scale": 1.2},
]
SLERPS: list[dict[str, Any]] = [{"method": "slerp", "t": t} for t in (0.0, 0.3, 1.0)]


def largest_error(models: tuple[Path, ...], fields: dict[str, Any]) -> float:
    """Between the rewrite and the plain loop, over all tensors."""
    return max(
        float(np.abs(tensor.double().numpy().ravel() - plain(name, models, fields)).max())
        for name, tensor in merged(models, **fields).items()
    )


@pytest.mark.parametrize("fields", METHODS, ids=str)
def test_each_method_is_the_plain_loop(models: tuple[Path, ...], fields: dict[str, Any]) -> None:
    assert largest_error(models, fields) < 1e-12


@pytest.mark.parametrize("fields", SLERPS, ids=str)
def test_slerp_is_the_plain_loop(models: tuple[Path, ...], fields: dict[str, Any]) -> None:
    assert largest_error(models[:2], fields) < 1e-12


def test_slerp_is_linear_where_two_tensors_are_nearly_parallel() -> None:
    first = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert torch.equal(slerp(first, 3 * first, 0.25), 1.5 * first)
    assert torch.equal(slerp(first, torch.zeros_like(first), 0.25), 0.75 * first)


def test_a_mistake_is_noticed(models: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trimming by value instead of magnitude."""
    monkeypatch.setattr(merge_models, "_largest", lambda change, density: change * (change > 0))
    assert largest_error(models, {"method": "ties", "weights": (0.7, 0.4), "density": 0.3, "scale": 0.9}) > 1e-3


def test_draws_that_are_not_rescaled_are_noticed(models: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_models, "NO_RESCALING", math.inf)
    assert largest_error(models, {"method": "dare", "density": 0.4, "seed": 3}) > 1e-3


@pytest.mark.parametrize("method", ["linear", "slerp", "task_arithmetic", "ties", "dare", "dare_ties"])
def test_a_model_merged_with_itself_is_itself(models: tuple[Path, ...], method: str) -> None:
    same = merged((models[0], models[0]), method=method)
    for name, tensor in same.items():
        torch.testing.assert_close(tensor, open_source(models[0]).weights.tensor(name), rtol=0, atol=1e-15)


def test_it_is_converted_into_a_folder_that_knows_its_sources(models: tuple[Path, ...], tmp_path: Path) -> None:
    rewrite = parse_rewrite(f"merge=ties,models=[{models[1]}, {models[2]}],weights=[0.5, 1.0],density=0.5")
    conversion = Conversion(open_source(models[0]), (rewrite,))
    convert(conversion, tmp_path / "out")
    record = conversion.describe()["rewrites"][0]
    assert record["models_sha256"] == [open_source(path).weights_sha256 for path in models[1:]]
    model, _ = heddle.load(tmp_path / "out")
    assert torch.equal(model.state_dict()["embed.weight"], conversion.plan().tensor("embed.weight"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("slerp,models=[{0}, {1}]", "slerp needs one other model"),
        ("linear,models=[]", "linear needs the folder of at least one other model"),
        ("linear,models=[{0}],weights=[1]", "takes 2 weights"),
        ("ties,models=[{0}],weights=[1, 2]", "takes 1 weights"),
        ("slerp,models=[{0}],weights=[1]", "takes t, not weights"),
        ("ties,models=[{0}],densities=[0.5, 0.2]", "takes one density, or 1 densities"),
        ("ties,models=[{0}],density=0.5,densities=[0.2]", "takes one density, or 1 densities"),
        ("linear,models=[{0}],density=0.5", "linear takes no density; ties, dare, dare_ties do"),
        ("ties,models=[{0}],seed=1", "ties takes no seed"),
        ("linear,models=[{0}],weights=[1, -1]", "add up to 0"),
        ("linear,models=[{2}]", "has a different design"),
    ],
)
def test_what_cannot_be_merged_is_refused(models: tuple[Path, ...], tmp_path: Path, options: str, why: str) -> None:
    other = folder(tmp_path / "other", 0, "layers.0.repeat=3")
    text = f"merge={options.format(models[1], models[2], other)}"
    with pytest.raises(ConfigError, match=why):
        Conversion(open_source(models[0]), (parse_rewrite(text),)).plan()


def test_models_of_other_tokenizers_are_refused(tmp_path: Path) -> None:
    texts = (["one two three"] * 3, ["four five six"] * 3)
    paths = [
        folder(tmp_path / str(number), number, tokenizer=Tokenizer.train(lines, 270))
        for number, lines in enumerate(texts)
    ]
    conversion = Conversion(open_source(paths[0]), (MergeModels(method="linear", models=(str(paths[1]),)),))
    with pytest.raises(ConfigError, match="has a different tokenizer"):
        conversion.plan()
