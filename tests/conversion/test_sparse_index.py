"""Dense attention made sparse: exact where all keys are selected, nearer to attention by a fit, all else kept."""

from typing import Any

import pytest
import torch

from heddle.conversion.fit import Chunk, relative_error
from heddle.conversion.rewrites.sparse_index import SparseIndex
from heddle.conversion.weights import ModelWeights, layer_activations
from heddle.errors import ConfigError
from tests.conversion.exactness import (
    converted_model,
    design,
    difference,
    fit_results,
    greedy_text,
    logits,
    random_text,
    source_model,
)

GQA: dict[str, Any] = {"kind": "attention", "heads": 4, "kv_heads": 2, "bias": True, "position": {"kind": "rope"}}
MLA: dict[str, Any] = {
    "kind": "latent_attention", "heads": 2, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "position": {"kind": "rope"},
}  # fmt: skip
LEARNED: dict[str, Any] = {"heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    "mixer", [GQA, GQA | {"causal": False, "qk_norm": "head"}, MLA], ids=["gqa", "both-ways", "mla"]
)
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 17, **LEARNED},
        {"top_k": 6, "block": 3, "local": 2, **LEARNED},
        {"top_k": 4, "block": 5, "per_head": True, **LEARNED},
        {"top_k": 6, "block": 3, "block_score": "mean"},
    ],
    ids=["keys", "blocks", "per-head", "own-keys"],
)
def test_it_is_exact_where_all_keys_are_selected(mixer: dict[str, Any], fields: dict[str, Any]) -> None:
    source, rewrite = source_model(design(mixer)), SparseIndex(longest_text=17, fit_steps=1, **fields)
    assert rewrite.is_exact(source.config)
    for text in (None, random_text(4, 17)):
        assert difference(source, converted_model(source, rewrite, text=text)) < 1e-10


def test_longer_texts_are_not_exact() -> None:
    source, rewrite = source_model(design(GQA)), SparseIndex(top_k=5, block=3, longest_text=16, fit_steps=1, **LEARNED)
    assert not rewrite.is_exact(source.config)
    assert not SparseIndex(top_k=99).is_exact(source.config)
    assert difference(source, converted_model(source, rewrite, text=random_text(4, 16))) > 1e-3


@pytest.mark.parametrize("mixer", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("per_head", [False, True])
def test_the_index_comes_nearer_to_attention_on_other_text(mixer: dict[str, Any], per_head: bool) -> None:
    """Only its parameters change, to the bit."""
    source = source_model(design(mixer))
    other = next(layer_activations(ModelWeights(source), random_text(rows=8, length=16, seed=7)))
    chunks = [Chunk(other.mixer_inputs[0], other.mixer_outputs[0], other.layouts[0])]
    divergences = []
    for steps in (1, 60):
        rewrite = SparseIndex(top_k=4, fit_steps=steps, layers=(0,), per_head=per_head, **LEARNED)
        converted = converted_model(source, rewrite, text=random_text(rows=32, length=16))
        mixer_module: Any = converted.mixers()[0]
        assert mixer_module.indexer.loss_keys == "selected"
        divergences.append(relative_error(mixer_module, chunks, rewrite.lowered))
        parameters = dict(converted.named_parameters())
        assert {name for name in parameters if ".indexer." in name} == set(parameters) - set(source.state_dict())
        for name, value in source.named_parameters():
            assert torch.equal(value, parameters[name]), name
    assert divergences[1] < 0.8 * divergences[0]


def test_it_decodes_as_it_reads_and_keeps_the_layers_that_need_all_keys() -> None:
    source = source_model(design(GQA, depth=3))
    rewrite = SparseIndex(top_k=2, block=3, local=1, fit_steps=2, keep=1, **LEARNED)
    converted = converted_model(source, rewrite, text=random_text(8, 16))
    dense = [layer.mixer for layer in converted.config.layers if getattr(layer.mixer, "indexer", None) is None]
    assert len(dense) == 1
    prompt = random_text().batches[0]
    text = torch.cat((prompt, greedy_text(converted, prompt)), dim=1)
    predicted = logits(converted, text).argmax(-1)[:, prompt.shape[1] - 1 : -1]
    assert torch.equal(predicted, text[:, prompt.shape[1] :])


def test_without_parameters_nothing_is_fitted() -> None:
    source, rewrite = source_model(design(GQA)), SparseIndex(top_k=2, block=3, block_score="mean", local=1)
    assert not rewrite.needs_text
    weights = rewrite.apply(ModelWeights(source), None)
    assert {name: value.tolist() for name, value in weights.layer(0).items()} == {
        name: value.tolist() for name, value in ModelWeights(source).layer(0).items()
    }
    assert fit_results(weights) == {}


@pytest.mark.parametrize(
    ("mixer", "fields", "reason"),
    [
        (GQA | {"window": 8}, {}, "layers: .* each has a window"),
        (GQA | {"indexer": {"top_k": 2}}, {}, "layers: .* each has an indexer"),
        ({"kind": "gated_delta", "heads": 2}, {}, "gated_delta"),
        (GQA | {"window": 8}, {"layers": (1,)}, r"layers.1.mixer: .*name layers of softmax attention"),
        (GQA, {"head_dim": 2}, r"layers\[0\].mixer.indexer.head_dim"),
        (GQA, {"local": 2}, r"local: 2 leaves none of the 2"),
        (GQA, {"heads": 3, "per_head": True}, r"heads: 3 does not divide"),
    ],
    ids=["window", "indexed", "recurrent", "named-layer", "rotation", "local", "share"],
)
def test_what_cannot_be_converted_is_refused(mixer: dict[str, Any], fields: dict[str, Any], reason: str) -> None:
    rewrite = SparseIndex(**{"top_k": 2, **LEARNED, **fields})
    with pytest.raises(ConfigError, match=reason):
        rewrite.apply(ModelWeights(source_model(design(mixer))), random_text())


def test_layers_that_read_a_selection_are_refused() -> None:
    layers = [{"mixer": MLA | each} for each in ({"indexer": {"top_k": 2, **LEARNED}}, {"shared_index": True}, {})]
    source = source_model(design(MLA, layers=layers))
    with pytest.raises(ConfigError, match=r"layers.1.mixer.shared_index: reads the selection"):
        SparseIndex(top_k=2, **LEARNED).apply(ModelWeights(source), random_text())


def test_a_half_given_index_is_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim: is missing"):
        SparseIndex(top_k=2, heads=2)


def test_a_fit_that_moves_attention_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparseIndex, "start", lambda self, source, index, mixer: {})
    with pytest.raises(AssertionError):
        test_the_index_comes_nearer_to_attention_on_other_text(GQA, False)
