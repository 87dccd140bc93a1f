"""The scores of a search: exact rewrites score 0, and all else is what a plain loop over whole models says."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heddle.conversion.mixer_replacement import MixerReplacement
from heddle.conversion.rewrite import rewrites
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import ModelWeights, build_model
from heddle.errors import ConfigError
from heddle.lab.search import scores
from heddle.lab.search.scores import (
    Evaluator,
    Replacement,
    Replacements,
    chosen_targets,
    costs_of,
    measure_singles,
    put_together,
    saved_costs,
    single_scores,
)
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.storage.tensor_file import read_tensor_file, write_tensor_file
from tests.conversion.exactness import design, difference, logits, random_text, source_model

MIXER: dict[str, Any] = {"kind": "attention", "heads": 4, "kv_heads": 2, "position": {"kind": "rope"}}
TEXT = random_text(rows=3, length=16, batches=2)
LOSSY = ("kv_heads=1", "window=4", "shared_kv,fit_steps=2", "gated_delta,fit_steps=2")
EXACT = ("kv_heads=4", "window=16", "latent_attention")


class Scored:
    """A small model in float64 and its replacements, fitted and scored in a folder."""

    def __init__(self, folder: Path, targets: tuple[str, ...], keep: tuple[int, ...] = ()) -> None:
        self.folder, self.model = folder, source_model(design(MIXER, depth=3))
        self.source = ModelWeights(self.model)
        replacements = Replacements(self.source, TEXT, targets, keep)
        self.items = replacements.items
        self.fitted = list(replacements.fit_all(folder))
        self.evaluator = Evaluator(self.source, TEXT, folder)
        self.scored = list(single_scores(self.evaluator, self.items, folder))
        self.kl, self.gram = measure_singles(self.evaluator, self.items, folder)

    def whole(self, *items: Replacement) -> Decoder:
        """The model that the ordinary conversion makes."""
        choices = tuple(f"layers.{item.layer}.{item.target}" for item in items)
        rewrite = parse_rewrite(f"layerwise,choices={list(choices)}".replace("'", '"'))
        return build_model(rewrite.apply(self.source, TEXT))


def check_exact(scored: Scored) -> None:
    assert len(scored.items) == 9
    assert np.abs(scored.kl).max() < 1e-10
    assert np.abs(scored.gram).max() < 1e-10


def check_by_loops(scored: Scored) -> None:
    changed = [scored.whole(item) for item in scored.items]
    kl, gram, tokens = np.zeros(scored.kl.shape), np.zeros(scored.gram.shape), 0
    for start, batch in zip((0, 3), TEXT.batches, strict=True):
        old, new = logits(scored.model, batch), [logits(model, batch) for model in changed]
        for row in range(3):
            for place in range(16):
                p = old[row, place].softmax(0)
                changes = torch.stack([each[row, place] - old[row, place] for each in new])
                covariance = changes @ (p.diag() - torch.outer(p, p)) @ changes.T
                gram, tokens = gram + covariance.numpy(), tokens + 1
                for number, each in enumerate(new):
                    ratio = p.log() - each[row, place].softmax(0).log()
                    kl[number, start + row] += float((p * ratio).sum()) / 16
    assert np.abs(scored.kl - kl).max() < 1e-10
    assert np.abs(scored.gram - gram / tokens).max() < 1e-10


def test_exact_rewrites_score_zero(tmp_path: Path) -> None:
    check_exact(Scored(tmp_path, EXACT))


def test_a_fault_in_an_exact_layer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(path: Path) -> Any:
        return ((name, value + 1e-4 * (name == "mixer.out.weight")) for name, value in read(path))

    read = read_tensor_file
    monkeypatch.setattr(scores, "read_tensor_file", shifted)
    with pytest.raises(AssertionError):
        check_exact(Scored(tmp_path, EXACT))


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    return Scored(tmp_path_factory.mktemp("lossy"), LOSSY)


def test_scores_are_those_of_whole_models(lossy: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", 7 * 16 * 12)  # several chunks of tokens
    monkeypatch.setattr(scores, "VOCABULARY_BLOCK", 16)  # and of the vocabulary
    scored = copy.copy(lossy)
    scored.kl, scored.gram = measure_singles(lossy.evaluator, lossy.items, lossy.folder)
    assert [(item.layer, item.target.split("=")[0].split(",")[0]) for item in scored.items][:5] == [
        *((0, name) for name in ("kv_heads", "window", "gated_delta")), (1, "kv_heads"), (1, "window"),
    ]  # fmt: skip
    assert (np.diag(scored.gram) > 1e-6).all()
    check_by_loops(scored)
    scored.gram = scored.gram + np.ones_like(scored.gram) * 1e-9  # what a wrong Gram matrix would be
    with pytest.raises(AssertionError):
        check_by_loops(scored)


def test_layers_are_put_together_as_they_were_scored(lossy: Scored) -> None:
    scored, tmp_path = lossy, lossy.folder
    by_name = {(item.layer, item.target.split(",")[0]): item for item in scored.items}
    chosen = [by_name[0, "gated_delta"], by_name[1, "kv_heads=1"], by_name[2, "window=4"]]
    whole = scored.whole(*chosen)
    assert difference(whole, build_model(put_together(scored.source, chosen, tmp_path))) == 0.0
    assert difference(whole, scored.evaluator.replaced(chosen)) == 0.0
    costs, totals = saved_costs(scored.source, scored.items, (16, 512))
    at_lengths = {f"{cost}@{length}" for cost in ("state", "flops", "reads") for length in (16, 512)}
    assert set(totals) == {"parameters"} | at_lengths
    numbers = [scored.items.index(item) for item in chosen]
    for name, total in costs_of(whole.config, (16, 512), torch.float64).items():
        assert totals[name] + costs[name][numbers].sum() == pytest.approx(total, rel=1e-12)
    assert costs["state@512"].max() < 0
    with pytest.raises(ConfigError, match=r"layers\.2"):
        put_together(scored.source, [by_name[1, "kv_heads=1"], by_name[2, "shared_kv"]], tmp_path)


def test_fits_and_scores_continue_with_the_same_bits(
    lossy: Scored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lossy
    write, left = write_tensor_file, [4]

    def killed(path: Path, tensors: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return write(path, tensors)

    monkeypatch.setattr(scores, "write_tensor_file", killed)
    for _ in range(2):  # two kills, after four fits each
        left[0] = 4
        with pytest.raises(KeyboardInterrupt):
            Scored(tmp_path / "killed", LOSSY)
    left[0] = 100
    continued = Scored(tmp_path / "killed", LOSSY)
    assert len(continued.fitted) == len(whole.items) - 8
    assert (continued.kl == whole.kl).all()
    assert (continued.gram == whole.gram).all()
    assert not Scored(tmp_path / "killed", LOSSY).scored  # a second call reads all


def test_which_layers_and_targets(tmp_path: Path) -> None:
    config = design(MIXER, depth=3).resolved()
    mixers = [name for name, cls in rewrites().items() if issubclass(cls, MixerReplacement)]
    assert {"gated_delta", "mamba2"} < set(mixers)
    assert chosen_targets(config, 16, ()) == [
        *("kv_heads=1", "latent_attention,kv_rank=6,rope_dim=2", "latent_attention,kv_rank=4"),
        *("window=8", "window=4", "sparse_index,top_k=4,heads=1,head_dim=4", "shared_kv"),
        *mixers, "hidden=18", "hidden=12",
        *("remove=feedforward", "remove=mixer"),
    ]  # fmt: skip
    assert chosen_targets(config, 16, ("window", "kv_heads=4")) == ["window=8", "window=4", "kv_heads=4"]
    with pytest.raises(ConfigError, match="banana"):
        chosen_targets(config, 16, ("banana",))
    mixed = Replacements(ModelWeights(source_model(config)), TEXT, ("window=4", "kv_heads=3"), keep=(1,))
    assert [item.layer for item in mixed.items] == [0, 2]
    assert set(mixed.left_out) == {"kv_heads=3"}
    with pytest.raises(ConfigError, match="vocab_size"):
        Replacements(ModelWeights(source_model(config)), TEXT, ("vocab_size=99",))


def test_all_reasons_why_a_target_is_left_out_are_named() -> None:
    layers = [{"mixer": MIXER | {"window": 4}}, {"repeat": 2, "mixer": MIXER}]
    source = ModelWeights(source_model(load_config({"vocab_size": 40, "width": 16, "layers": layers})))
    target = "latent_attention,kv_rank=4,rope_dim=2"
    found = Replacements(source, random_text(rows=2, length=16), (target, "kv_heads=1"))
    windowed, short = found.left_out[target].split("; ")[0], found.left_out[target]
    assert windowed.startswith("layers.0.mixer")
    assert "window" in windowed
    assert "--calibration-tokens" in short
    assert short.count("--calibration-tokens") == 1  # not once for each layer
