"""Exact rewrites: random designs convert exactly or are refused, and so do chains; planted mistakes are caught."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heddle
from heddle.config import DesignError
from heddle.conversion.branches import branch_names, input_projections, layer_modules
from heddle.conversion.convert import Conversion, ConversionSource
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.rewrites.dense import Dense
from heddle.conversion.rewrites.depth import Depth, _Deeper
from heddle.conversion.rewrites.drop_multi_token import DropMultiToken
from heddle.conversion.rewrites.experts import Experts
from heddle.conversion.rewrites.fold_norms import FoldNorms, _Folded, _readers
from heddle.conversion.rewrites.merge_adapters import MergeAdapters
from heddle.conversion.rewrites.tied import Tied
from heddle.conversion.rewrites.vocab_size import MASKED_LOGIT, VocabSize, _Vocabulary
from heddle.conversion.rewrites.width import StreamWidth, _Wider
from heddle.conversion.weights import ModelWeights, build_model
from heddle.errors import CheckpointError, ConfigError
from heddle.laws.harness import model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, Layer, build
from heddle.model.lora import add_lora, lora_tensors, merge_lora
from heddle.parts.feedforwards.ngram_memory import NGramMemory
from heddle.parts.mixers.rwkv7 import RWKV7
from heddle.parts.norms.rms import RMSConfig
from heddle.storage.model import save_lora
from heddle.tokenization.tokenizer import Tokenizer
from tests.cases import case
from tests.conversion.exactness import logits
from tests.conversion.random_designs import ATTENTION, EXACT, convert_exactly, random_design
from tests.covering import each_option
from tests.laws.planting import Plant, assigned, calls, condition, replaced, result

QUICK, THOROUGH = 12, 200
# About this share of random designs converts; the others are refused.
LEAST_SHARE = {
    "rope_layout": 0.2,
    "kv_heads": 0.1,
    "latent_attention": 0.0,
    "window": 0.2,
    "experts": 0.3,
    "dense": 0.3,
    "width": 0.3,
    "layerwise": 0.3,  # of experts in the first layer
}


def converted(config: ModelConfig, *rewrites: Rewrite) -> Decoder:
    """The model after these rewrites."""
    weights: Any = ModelWeights(model_under_test(config))
    for rewrite in rewrites:
        weights = rewrite.apply(weights, None)
    return build_model(weights)


def check_designs(name: str, numbers: range) -> None:
    """Convert random designs, and count those that are refused."""
    outcomes = []
    for number in numbers:
        config = random_design(number, name in ATTENTION)
        if rewrites := EXACT[name](config):
            outcomes.append(convert_exactly(config, rewrites))
    least = int(LEAST_SHARE.get(name, 0.5) * len(outcomes) / 2)  # few designs may have half of the share
    assert sum(outcomes) >= least, f"{sum(outcomes)} of {len(outcomes)} convert"


@pytest.mark.parametrize("name", EXACT)
def test_random_designs(name: str) -> None:
    check_designs(name, range(QUICK))


@pytest.mark.soak
@pytest.mark.parametrize("name", EXACT)
def test_many_random_designs(name: str) -> None:
    check_designs(name, range(QUICK, QUICK + THOROUGH))


def test_multi_token_modules_are_dropped_and_nothing_else_keeps_them() -> None:
    config = case("multi-token")
    model, dropped = model_under_test(config), converted(config, DropMultiToken())
    assert dropped.config.multi_token is None
    tokens = random_tokens(config, 2, 9)
    assert torch.equal(logits(model, tokens), logits(dropped, tokens))
    source = ConversionSource(Path(), ModelWeights(model), lambda: "", None)
    for rewrite in (VocabSize(vocab_size=80), Depth(depth=9), StreamWidth(width=48)):
        with pytest.raises(ConfigError, match=r"multi_token: .* would leave the modules"):
            Conversion(source, (rewrite,)).plan()
        assert Conversion(source, (DropMultiToken(), rewrite)).plan().design.multi_token is None
    untied = build_model(Conversion(source, (Tied(tied=False),)).plan())
    kept = [name for name, value in model.named_parameters() if torch.equal(value, untied.get_parameter(name))]
    assert any(name.startswith("multi_token.") for name in kept)
    assert kept == [name for name, _ in model.named_parameters()]
    with pytest.raises(ConfigError, match="no modules to drop"):
        converted(case("attention-gqa"), DropMultiToken())


@pytest.mark.parametrize("rewrite", [FoldNorms(final_norm=False), Depth(depth=5)])
def test_norms_stand_where_each_layers_mixer_says(rewrite: Rewrite) -> None:
    """A norm before a branch is folded into what reads it; one after a new branch has a gain of zero."""
    config = case("residual-reordered-norms-first").replace(norm=RMSConfig())
    assert convert_exactly(config, [rewrite])


def chain(number: int) -> tuple[ModelConfig, list[Rewrite]]:
    """Two or three exact rewrites in random order. Each is made for the design that the ones before it leave."""
    generator, config = random.Random(f"chain {number}"), random_design(number, number % 2 == 1)
    rewrites: list[Rewrite] = []
    weights: Any = ModelWeights(model_under_test(config))
    for name in generator.sample(sorted(set(EXACT) - {"tied", "dense"}), generator.choice((2, 3))):
        for rewrite in EXACT[name](weights.design):
            try:
                rewrite.check_layers(weights.design)
                weights = rewrite.apply(weights, None)
            except ConfigError:
                continue
            rewrites.append(rewrite)
    return config, rewrites


def check_chain(number: int) -> None:
    config, rewrites = chain(number)
    if rewrites:
        assert convert_exactly(config, rewrites), [rewrite.name for rewrite in rewrites]


@pytest.mark.parametrize("number", range(4))
def test_chains(number: int) -> None:
    check_chain(number)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(4, 204))
def test_many_chains(number: int) -> None:
    check_chain(number)


NORMED = {"width": 24, "norm": {"kind": "rms", "eps": 0.1, "offset": 1.0}, "residual": {"kind": "sandwich"}}
PRE_NORM = {"residual": {"kind": "pre_norm"}}
WIDER: list[Rewrite] = [StreamWidth(width=48)]
FOLD: list[Rewrite] = [Tied(tied=False), FoldNorms()]
WRITES = calls(_Deeper._silent, "full_like", lambda torch, weight, value: weight)
# The rewrites, what differs from NORMED, and the mistake.
MISTAKES: dict[str, tuple[list[Rewrite], dict[str, Any], Plant]] = {
    "γ stays in the norm": (FOLD, {}, calls(
        _Folded.convert_layer, "full_like", lambda torch, gain, value, *, self: gain - self.offset)),
    "1 + γ is read as γ": (FOLD, {}, replaced(_Folded._gain, lambda folded, weight: weight.double())),
    "the head is forgotten": (FOLD, {}, condition(_Folded.convert_other, "HEAD", False, nth=0)),
    "a reader is missed": (FOLD, {}, calls(
        _readers, "input_projections", lambda projections, *arguments: projections(*arguments)[1:])),
    "ε is not scaled": (WIDER, {}, assigned(
        StreamWidth.apply, "wider_norm", lambda _, *, norm: norm.replace(eps=norm.eps * (1 - 1e-12)))),
    "γ is not scaled": (WIDER, {}, calls(_Wider._extended, "mul_", lambda gain, factor: gain)),
    "normalized heads are not scaled": (WIDER, {}, calls(
        _Wider.convert_parameter, "scale_weight", lambda scale, weight, factor: weight)),
    "new channels are written": (WIDER, {}, condition(_Wider._extended, "readers", False)),
    "a new layer writes": ([Depth(depth=5)], PRE_NORM, WRITES),
    "a norm after a new branch writes": ([Depth(depth=5)], {}, WRITES),
    "1 + γ is not zero": ([Depth(depth=5)], {}, calls(_Deeper._silent, "gain_offset", lambda *_: 0.0)),
    "gates do not sum to 1": ([Experts(experts=4)], {}, result(
        Experts.mixture, lambda config: config.replace(renormalize=False))),
    "rows of ids are shifted": ([VocabSize(vocab_size=72)], {}, assigned(
        _Vocabulary.convert_other, "result", lambda rows: rows.roll(1, 0), nth=1)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrites, fields, plant = MISTAKES[mistake]
    layers = case("attention-qk-norm-head").dump()["layers"]
    config = heddle.load_config(NORMED | {"vocab_size": 61, "layers": layers} | fields)
    assert convert_exactly(config, rewrites)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        convert_exactly(config, rewrites)


def read_by(module: nn.Module, wider: nn.Module) -> set[str]:
    """The parameters of a part whose inputs grow with the model's width."""
    shapes = dict(wider.named_parameters())
    return {
        name
        for name, value in module.named_parameters()
        if name.endswith("weight")
        and value.shape[-1] != shapes[name].shape[-1]
        # a branch as wide as the model may end with a norm, and ends with a projection, of what the branch made
        and name != "output_norm.weight"
        and not getattr(module.get_submodule(name.rpartition(".")[0]), "output_projection", False)
    }


@pytest.mark.parametrize("name", each_option())
def test_parts_state_what_reads_their_input(name: str) -> None:
    config = case(name).resolved()
    model = build(config, device="meta")
    for index, (_, entry) in enumerate(config.expand()):
        layer = layer_modules(model, index)
        wider = Layer(entry, config.replace(width=2 * config.width), index).to("meta")
        for branch in branch_names(layer):
            part = layer.get_submodule(branch)
            # One reads mixes of a token and the one before it, one multiplies keys, and gates of value embeddings read
            # a part of the input: conversions refuse them.
            has_table = branch == "mixer" and entry.mixer is not None and entry.mixer.reads_tokens
            if has_table or isinstance(part, RWKV7 | NGramMemory):
                with pytest.raises(DesignError, match=f"{type(part).__name__} does not state its input_projections"):
                    input_projections(layer, branch, "")
                continue
            stated = {f"{name}.weight" for name in input_projections(layer, branch, "")}
            assert {name.removeprefix(f"{branch}.") for name in stated} == read_by(part, wider.get_submodule(branch))


def test_masked_ids_have_no_probability() -> None:
    config = case("attention-gqa")
    model = converted(config, VocabSize(vocab_size=64))
    probabilities = logits(model, random_tokens(config, 2, 5)).float().softmax(-1)
    assert bool((probabilities[..., 61:] == 0).all())
    assert torch.allclose(probabilities.sum(-1), torch.ones(2, 5))
    assert bool((model.head.get_parameter("bias")[61:] == MASKED_LOGIT).all())
    free = logits(converted(config, VocabSize(vocab_size=64, mask=False)), random_tokens(config, 2, 5))
    assert bool((free[..., 61:] == 0).all())
    assert not VocabSize(vocab_size=64, mask=False).is_exact(config)


def test_fewer_ids_keep_their_logits() -> None:
    config = case("attention-gqa")
    tokens = random_tokens(config, 2, 5) % 40
    cut = converted(config, VocabSize(vocab_size=40))
    expected = logits(model_under_test(config), tokens)[..., :40]
    torch.testing.assert_close(logits(cut, tokens), expected, rtol=0, atol=1e-12)


def test_tokens_keep_their_embeddings(tmp_path: Path) -> None:
    weights = ModelWeights(build(case("attention-gqa").replace(vocab_size=300)))
    source = ConversionSource(tmp_path, weights, lambda: "", Tokenizer.train(["warp and weft"], 260))
    assert source.tokenizer is not None
    tokens = source.tokenizer.vocab_size
    assert Conversion(source, (VocabSize(vocab_size=tokens),)).plan().design.vocab_size == tokens
    with pytest.raises(ConfigError, match=f"vocab_size: {tokens - 1}.*{tokens} tokens"):
        Conversion(source, (VocabSize(vocab_size=tokens - 1),)).plan()


def test_new_weights_can_be_learned() -> None:
    """Where a projection writes zeros, something random reads them, else no gradient would ever reach it."""
    config = case("attention-gqa")
    for rewrite in (StreamWidth(width=32), Depth(depth=4), Experts(experts=3)):
        model = converted(config, rewrite)
        for _ in range(2):  # after one step nothing is zero any more
            loss = model.head(model(random_tokens(config, 2, 9))[0]).logsumexp(-1).sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.add_(gradient, alpha=-1e-3)
        names = [name for name, _ in model.named_parameters()]
        assert [name for name, gradient in zip(names, gradients, strict=True) if not bool(gradient.any())] == []


def test_adapters_are_merged(tmp_path: Path) -> None:
    for name in ("attention-gqa", "encoder"):
        model = build(case(name))
        adapted = add_lora(model, rank=2)
        for parameter in lora_tensors(adapted).values():
            parameter.normal_(generator=torch.Generator().manual_seed(3))
        save_lora(adapted, tmp_path / name)
        weights = MergeAdapters(folder=str(tmp_path / name)).apply(ModelWeights(model), None)
        expected = dict(merge_lora(adapted).named_parameters())
        assert all(torch.equal(weights.tensor(name), expected[name]) for name in weights.names)
    other = ModelWeights(build(case("attention-gqa"), seed=1))
    with pytest.raises(CheckpointError, match="other weights"):
        MergeAdapters(folder=str(tmp_path / "attention-gqa")).apply(other, None)


@pytest.mark.parametrize(
    ("name", "content"), [("checkpoints/step-00000001/x", "use the run"), ("adapter_config.json", "merge_and_unload")]
)
def test_what_holds_no_adapters_of_ours_says_what_to_do(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError) as refusal:
        MergeAdapters(folder=str(tmp_path)).apply(ModelWeights(build(case("attention-gqa"))), None)
    assert content in str(refusal.value)


REFUSALS: dict[str, tuple[str, list[Rewrite], str]] = {
    "tied already": ("attention-gqa", [Tied(tied=True)], "head.tied: the head is tied already"),
    "different heads": ("head-untied", [Tied(tied=True)], "head.tied: the head's weight differs from the embedding's"),
    "final norm of a tied head": ("attention-gqa", [FoldNorms()], "head.tied: the embedding shares the head's weight"),
    "no biases": ("attention-qk-layer-norm-per-head", [Tied(tied=False), FoldNorms()], "layers.0.mixer.q: has no bias"),
    "no norms before branches": ("residual-post-norm", [FoldNorms()], "residual: kind post_norm has no norm"),
    "post-norm does not grow": ("residual-post-norm", [Depth(depth=9)], "residual: kind post_norm changes the stream"),
    "a copy of a layer without a norm": (
        "residual-pre-norm-no-first",
        [Depth(depth=9)],
        "residual.first_norm: leaves the first layer without a norm",
    ),
    "a head that transforms": (
        "residual-pre-norm-no-first",
        [FoldNorms()],
        "head.transform: stands between the final norm",
    ),
    "fewer layers": ("attention-gqa", [Depth(depth=1)], "depth: 1 is less than the design's 2"),
    "layers and a whole": ("attention-gqa", [Depth(depth=9, layers=(0,))], "depth: applies to the whole design"),
    "numbered layers": ("differential", [Depth(depth=4)], "layers.1.mixer: kind differential_attention depends on"),
    "same width": ("attention-gqa", [StreamWidth(width=24)], "width: the design has 24 already"),
    "queries of sources": (
        "residual-attention-apart",
        [StreamWidth(width=32)],
        "residual: kind attention_residuals weighs outputs by a norm",
    ),
    "a stream that grows": ("residual-attention", [Depth(depth=9)], "residual: kind attention_residuals changes"),
    "streams that are predicted": ("residual-altup", [Depth(depth=9)], "residual: kind sandwich changes"),
    "parts of the embedding": ("per-layer-embedding-shared", [Depth(depth=9)], "embedding.per_layer: holds a part for"),
    "layer norm": ("delta-convolution-2", [StreamWidth(width=32)], "norm: kind layer cannot undo added zeros"),
    "no gain to fold": ("norm-rms-no-weight", [Tied(tied=False), FoldNorms()], "norm.weight: is false, so there is no"),
    "no gain to grow": ("norm-rms-no-weight", [StreamWidth(width=32)], "norm.weight: is false, so there is no gain"),
    "experts of a multiplied layer": (
        "pair-multipliers",
        [Experts(experts=4)],
        "layers.0.feedforward.gate_multiplier: is not supported in experts",
    ),
    "sparse experts": ("gated-sparse", [Experts(experts=4)], "layers.0.feedforward.sparsity: is not supported in exp"),
    "experts of experts": ("moe", [Experts(experts=4, layers=(0,))], "layers.0.feedforward: is neither mlp nor gated"),
    "different experts": ("moe", [Dense()], "layers.0.feedforward: expert 1 differs from expert 0"),
    "a norm of experts": ("moe-output-norm-layer", [Dense()], "layers.0.feedforward.output_norm: normalizes the exp"),
    "no experts": ("attention-gqa", [Dense()], "feedforward: no layer has experts"),
    "values under key norms": (
        "attention-values-are-keys",
        [StreamWidth(width=32)],
        "layers.0.mixer.k_eq_v: reads",
    ),
    "norms of bounded keys": (
        "attention-clip-norm",
        [StreamWidth(width=32)],
        "layers.0.mixer.qkv_clip: reads what the",
    ),
    "same ids": ("attention-gqa", [VocabSize(vocab_size=61)], "vocab_size: the design has 61 already"),
    "bounded logits": ("head-bias-scale-softcap", [VocabSize(vocab_size=64)], "head.softcap: bounds every logit"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    design, rewrites, message = REFUSALS[name]
    with pytest.raises(ConfigError) as caught:
        converted(case(design), *rewrites)
    assert str(caught.value).startswith(message)


def test_a_first_layer_without_a_norm_is_folded_around() -> None:
    config = case("residual-pre-norm-no-first")
    model, folded = model_under_test(config), converted(config, FoldNorms(final_norm=False))
    tokens = random_tokens(config, 2, 9)
    with torch.no_grad():
        assert float((model(tokens)[0] - folded(tokens)[0]).abs().max()) < 1e-9
    assert folded.state_dict().keys() == model.state_dict().keys()
    gains = [value for name, value in folded.named_parameters() if "residual.norms" in name]
    assert len(gains) == 5
    assert all(bool((gain == 1.0).all()) for gain in gains)


def test_dense_takes_the_scale_of_the_gates() -> None:
    config = heddle.load_config(
        case("moe").dump(), ["layers.0.feedforward.scale=1.5", "layers.0.feedforward.bias=true"]
    )
    model = model_under_test(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "feedforward" in name and "router" not in name:
                parameter.copy_(parameter[:1].expand_as(parameter))
    tokens = random_tokens(config, 2, 9)
    dense = build_model(Dense().apply(ModelWeights(model), None))
    assert torch.allclose(logits(dense, tokens), logits(model, tokens), rtol=0, atol=1e-10)
