"""Latent attention from softmax attention: exact at full rank, the best that fits below it, or refused by name."""

import ast
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV3ForCausalLM

import heddle
from heddle.conversion.convert import Conversion, convert, open_source
from heddle.conversion.latent_factors import NormalizedHeads, complex_pairs
from heddle.conversion.latent_layer import (
    RopeComponents,
    _add_constant,
    full_rank_factors,
    latent_parameters,
    rope_rows,
)
from heddle.conversion.rewrites.latent_attention import LatentAttentionReplacement
from heddle.conversion.weights import CalibrationText, ModelWeights, layer_activations
from heddle.errors import ConfigError
from heddle.exchange.export import export
from heddle.exchange.family_match import match_report
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.parts.mixers.attention import Attention
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from tests.conversion.exactness import (
    VOCABULARY,
    converted_model,
    design,
    difference,
    greedy_text,
    random_text,
    source_model,
)
from tests.exchange.hf_models import config_of, drawn, write
from tests.laws.planting import assigned, calls, operator, result, wrapped

ROPE = {"kind": "rope", "layout": "half", "base": 50.0}
LLAMA3 = {"kind": "llama3", "factor": 4.0, "original_length": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 16}
MIXERS: dict[str, dict[str, Any]] = {
    "mha": {"kind": "attention", "heads": 4, "position": ROPE},
    "gqa-biases-partial": {
        "kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 6, "value_dim": 3, "bias": True, "scale": 0.3,
        "position": ROPE | {"rotary_dim": 4, "layout": "interleaved"},
    },
    "mqa-qkv-biases": {"kind": "attention", "heads": 4, "kv_heads": 1, "bias": "qkv", "position": ROPE},
    "few-dims-no-rope": {"kind": "attention", "heads": 2, "kv_heads": 1, "head_dim": 4},
    "yarn": {"kind": "attention", "heads": 2, "kv_heads": 2, "position": ROPE | {"scaling": YARN}},
    "llama3": {"kind": "attention", "heads": 2, "kv_heads": 2, "position": ROPE | {"scaling": LLAMA3}},
}  # fmt: skip
# All rotated dims, and a latent for the values and the other dims: nothing is left out.
WHOLE = {
    "mha": (16, 16),
    "gqa-biases-partial": (10, 8),
    "mqa-qkv-biases": (4, 4),
    "few-dims-no-rope": (8, None),
    "yarn": (16, 16),
    "llama3": (16, 16),
}


def text(rows: int = 8) -> CalibrationText:
    return random_text(rows=rows)


def mixers(model: Decoder) -> list[LatentAttentionConfig]:
    result = [layer.mixer for _, layer in model.config.expand()]
    assert all(isinstance(mixer, LatentAttentionConfig) for mixer in result)
    return result  # type: ignore[return-value]


@pytest.mark.parametrize("name", MIXERS)
def test_full_rank_keeps_logits_and_greedy_text(name: str) -> None:
    source = source_model(design(MIXERS[name]))
    rewrite = LatentAttentionReplacement()
    converted = converted_model(source, rewrite)
    assert rewrite.is_exact(source.config)
    assert not rewrite.needs_text
    assert difference(source, converted) < 1e-10
    prompt = random_text().batches[0]
    assert torch.equal(greedy_text(source, prompt), greedy_text(converted, prompt))


OTHER_LAYOUT = operator(rope_rows, ast.Eq, ast.NotEq)
PLANTED_AT_FULL_RANK = {
    "query heads in strided groups": calls(
        full_rank_factors, "repeat_interleave", lambda own, size, dim: own.repeat(size, 1)
    ),
    "biases of values left behind": result(
        full_rank_factors, lambda factors: replace(factors, value_shift=0 * factors.value_shift)
    ),
    "the other layout": OTHER_LAYOUT,
}


@pytest.mark.parametrize("planted", PLANTED_AT_FULL_RANK)
def test_errors_at_full_rank_are_caught(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED_AT_FULL_RANK[planted](monkeypatch)
    source = source_model(design(MIXERS["gqa-biases-partial"]))
    assert difference(source, converted_model(source, LatentAttentionReplacement())) > 0.1


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_full_rank_keeps_logits_of_random_designs(seed: int) -> None:
    rng = random.Random(seed)
    kv_heads, head_dim = rng.choice([1, 2, 3]), rng.choice([2, 4, 6, 8])
    scaling = rng.choice([{}, {}, {"scaling": YARN}, {"scaling": LLAMA3}])
    position = {
        "kind": "rope", "base": rng.choice([10.0, 10000.0]), "layout": rng.choice(["half", "interleaved"]),
        "rotary_dim": rng.randrange(2, head_dim + 1, 2), **scaling,
    }  # fmt: skip
    mixer = {
        "kind": "attention", "heads": kv_heads * rng.choice([1, 2, 3]), "kv_heads": kv_heads, "head_dim": head_dim,
        "value_dim": rng.choice([1, 3, 8]), "bias": rng.choice([False, True, "qkv"]),
        "position": rng.choice([None, position, position]),
    }  # fmt: skip
    source = source_model(design(mixer, depth=rng.choice([1, 3]), width=rng.choice([9, 16, 40])))
    converted = converted_model(source, LatentAttentionReplacement())
    assert difference(source, converted) < 1e-10
    prompt = random_text(seed=seed).batches[0]
    assert torch.equal(greedy_text(source, prompt), greedy_text(converted, prompt))


@pytest.mark.parametrize("name", MIXERS)
def test_a_rank_and_rotated_dims_that_hold_all_lose_nothing(name: str) -> None:
    source = source_model(design(MIXERS[name]))
    kv_rank, rope_dim = WHOLE[name]
    converted = converted_model(source, LatentAttentionReplacement(kv_rank=kv_rank, rope_dim=rope_dim), text=text())
    assert difference(source, converted) < 1e-9


def make_equal_up_to_rotation(source: Decoder, across_pairs: bool = False) -> None:
    """Make the keys of all heads at each frequency, or at all, multiples of one, and the values of rank 5."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in source.layers:
            mixer = layer.mixer
            assert isinstance(mixer, Attention)
            k, v = mixer.get_parameter("k.weight"), mixer.get_parameter("v.weight")
            pairs = torch.complex(*k.view(4, 2, 2, 16).unbind(1))  # [heads, half, pairs, inputs]
            factors = torch.randn(4, 2, dtype=torch.complex128, generator=generator)
            pairs = factors[:, :, None] * (pairs[0, :1] if across_pairs else pairs[0])
            k.copy_(torch.stack((pairs.real, pairs.imag), dim=1).reshape(16, 16))
            down = torch.randn(5, 16, dtype=torch.float64, generator=generator)
            v.copy_(v[:, :5] @ down)


PLANTED = {
    "real and imaginary parts of different pairs": calls(
        complex_pairs, "complex", lambda torch, real, imaginary: torch.complex(real, imaginary.flip(-2))
    ),
    "folded into keys only": assigned(RopeComponents.slots, "back", torch.ones_like),
    "queries not conjugated": calls(RopeComponents.slots, "conj", lambda per_head: per_head),
    "rows in the other layout": OTHER_LAYOUT,
}


@pytest.mark.parametrize("planted", [None, *PLANTED])
def test_keys_that_are_equal_up_to_rotation_need_one_slot_for_each_frequency(
    planted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_model(design(MIXERS["mha"]))
    make_equal_up_to_rotation(source)
    if planted is not None:
        PLANTED[planted](monkeypatch)
    converted = converted_model(source, LatentAttentionReplacement(kv_rank=5, rope_dim=4), text=text())
    error = difference(source, converted)
    assert error < 1e-8 if planted is None else error > 1e-4


def test_equal_frequencies_can_be_folded_into_one_slot() -> None:
    position = {"kind": "rope", "inv_freq": [0.5, 0.5]}
    source = source_model(design(MIXERS["mha"] | {"position": position}))
    make_equal_up_to_rotation(source, across_pairs=True)
    folded = converted_model(source, LatentAttentionReplacement(kv_rank=5, rope_dim=2, fold=2), text=text())
    apart = converted_model(source, LatentAttentionReplacement(kv_rank=5, rope_dim=2), text=text())
    assert difference(source, folded) < 1e-8
    assert difference(source, apart) > 1e-3


def errors_by_size(sizes: list[tuple[int, int]], **options: Any) -> list[float]:
    """Squared errors of the first mixer's output on the calibration text, by (kv_rank, rope_dim)."""
    source = source_model(design(MIXERS["mha"], depth=1))
    calibration = text()
    (before,) = layer_activations(ModelWeights(source), calibration)
    result = []
    for kv_rank, rope_dim in sizes:
        rewrite = LatentAttentionReplacement(kv_rank=kv_rank, rope_dim=rope_dim, **options)
        (after,) = layer_activations(rewrite.apply(ModelWeights(source), calibration), calibration)
        pairs = zip(before.mixer_outputs, after.mixer_outputs, strict=True)
        result.append(sum(float((x - y).square().sum()) for x, y in pairs))
    return result


def test_the_error_falls_with_the_rank() -> None:
    errors = errors_by_size([(rank, 16) for rank in (1, 3, 6, 9, 12, 16)])
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-18 * errors[0]


def test_the_error_falls_with_the_rotated_dims() -> None:
    errors = errors_by_size([(16, rope_dim) for rope_dim in (2, 6, 10, 16)])
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-18 * errors[0]


def loop_attention(parameters: dict[str, Any], config: LatentAttentionConfig, x: Any) -> Any:
    """Latent attention of one row of tokens x [T, D], one query and one key at a time."""
    (tokens, _), nope, rope = x.shape, config.nope_dim, config.rope_dim or 0
    inv_freq = config.position.inv_freq  # type: ignore[union-attr]

    def rotated(dims: Any, position: int) -> Any:
        half = len(dims) // 2
        z = (dims[:half] + 1j * dims[half:]) * np.exp(1j * position * np.array(inv_freq))
        return np.concatenate((z.real, z.imag))

    y = np.zeros((tokens, config.heads, config.value_dim or nope))
    latents = x @ parameters["kv_down.weight"].T + parameters["kv_down.bias"]
    k_rope = x @ parameters["k_rope.weight"].T + parameters["k_rope.bias"]
    k_rope = [rotated(k_rope[j], j) for j in range(tokens)]
    k_up, v_up = (parameters[f"{name}_up.weight"].reshape(config.heads, -1, config.kv_rank) for name in "kv")
    for i in range(tokens):
        queries = (parameters["q.weight"] @ x[i]).reshape(config.heads, nope + rope)
        for head, query in enumerate(queries):
            q_rope = rotated(query[nope:], i)
            nope_scores = [query[:nope] @ (k_up[head] @ latents[j]) for j in range(i + 1)]
            scores = [(nope_scores[j] + q_rope @ k_rope[j]) * config.scale for j in range(i + 1)]
            weights = np.exp(np.array(scores) - max(scores))
            y[i, head] = sum(w * (v_up[head] @ latents[j]) for j, w in enumerate(weights / weights.sum()))
    return y.reshape(tokens, -1) @ parameters["out.weight"].T + parameters["out.bias"]


def test_a_plain_loop_computes_the_same_output() -> None:
    source, calibration = source_model(design(MIXERS["mha"], depth=1)), text()
    converted = LatentAttentionReplacement(kv_rank=6, rope_dim=4).apply(ModelWeights(source), calibration)
    (activations,) = layer_activations(converted, calibration)
    config = converted.design.layers[0].mixer
    assert isinstance(config, LatentAttentionConfig)
    parameters = {name.removeprefix("mixer."): value.numpy() for name, value in converted.layer(0).items()}
    expected = loop_attention(parameters, config, activations.mixer_inputs[0][0].numpy())
    assert np.abs(expected - activations.mixer_outputs[0][0].numpy()).max() < 1e-10


def test_the_state_budget_is_kept_and_more_of_it_loses_less() -> None:
    source = source_model(design(MIXERS["mha"], depth=3))
    losses = []
    for share in ("25%", 0.5, "75%"):
        converted = converted_model(source, LatentAttentionReplacement(state_budget=share), text=text())  # type: ignore[arg-type]
        elements = sum(mixer.kv_rank + (mixer.rope_dim or 0) for mixer in mixers(converted))
        part = float(str(share).rstrip("%")) / (100 if isinstance(share, str) else 1)
        assert 0.9 * part < elements / (3 * 32) <= part
        losses.append(difference(source, converted, text()))
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("qk_norm", ["head", "per_head", "projection"])
def test_query_key_norms_are_fitted(qk_norm: str) -> None:
    source = source_model(design(MIXERS["mha"] | {"qk_norm": qk_norm, "kv_heads": 1}, depth=1))
    whole = converted_model(source, LatentAttentionReplacement(kv_rank=4, rope_dim=4), text=text())
    exportable = converted_model(
        source, LatentAttentionReplacement(kv_rank=5, rope_dim=4, exportable=True), text=text()
    )
    part = converted_model(source, LatentAttentionReplacement(kv_rank=2, rope_dim=2), text=text())
    error = difference(source, whole, text())
    assert 1e-3 < error < difference(source, part, text())
    assert error == pytest.approx(difference(source, exportable, text()), rel=0.02)


@pytest.mark.parametrize("planted", [None, "gain left behind"])
@pytest.mark.parametrize("qk_norm", ["head", "per_head", "projection"])
def test_norms_that_are_nearly_linear_lose_nearly_nothing(
    qk_norm: str, planted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so large an epsilon a norm divides by a constant, and gains as large undo that."""
    if planted is not None:
        left_behind = calls(
            NormalizedHeads.heads, "norm", lambda norm, x: norm.weight.flatten()[0] / norm.weight * norm(x)
        )
        left_behind(monkeypatch)
    norm = {"kind": "rms", "eps": 1e6}
    position = ROPE | {"layout": "interleaved", "scaling": YARN}
    source = source_model(design(MIXERS["mha"] | {"qk_norm": qk_norm, "kv_heads": 2, "position": position}, norm=norm))
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            parameter.mul_(1000.0 if "norm" in name else 1.0)
    converted = converted_model(source, LatentAttentionReplacement(kv_rank=8, rope_dim=8), text=text())
    error = difference(source, converted)
    assert error < 1e-3 if planted is None else error > 0.02


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "window": ({"window": 4}, {}, "layers.0.mixer: has window, which latent attention cannot express"),
    "sink": ({"sink": True}, {}, "has sink, which"),
    "gate": ({"gate": "head"}, {}, "has gate, which"),
    "softcap": ({"softcap": 5.0}, {}, "has softcap, which"),
    "bidirectional": ({"causal": False}, {}, "has causal: false, which"),
    "dropout": ({"dropout": 0.1}, {}, "has dropout, which"),
    "alibi": ({"position": {"kind": "alibi"}}, {}, "has position alibi, which"),
    "axial": ({"position": {"kind": "axial_rope"}}, {}, "has position axial_rope, which"),
    "ntk": (
        {"position": ROPE | {"scaling": {"kind": "ntk", "factor": 2.0, "original_length": 16}}}, {},
        "has scaling ntk, which",
    ),
    "exclusive": ({"exclusive": True}, {}, "has exclusive, which"),
    "forget": ({"forget": True}, {}, "has forget, which"),
    "relative-logits": ({"relative_dim": 2, "relative_extent": 3}, {}, "has relative_dim, which"),
    "norms-of-rotated": ({"qk_norm": "head", "norm_after_rotation": True}, {}, "has norm_after_rotation, which"),
    "norms-exactly": ({"qk_norm": "head"}, {}, "has query-key norms, which no latent holds exactly"),
    "rank": ({}, {"kv_rank": 17, "rope_dim": 2}, "kv_rank: 17 is more than the 16 dims"),
    "rope": ({}, {"kv_rank": 8, "rope_dim": 18}, "rope_dim: 18 is more than the 16 rotated dims"),
    "no-rope": ({"position": None}, {"kv_rank": 8, "rope_dim": 2}, "has no RoPE; leave it out"),
    "rope-missing": ({}, {"kv_rank": 8}, "rope_dim: is missing, but layers.0.mixer has RoPE"),
    "budget": ({}, {"state_budget": 0.01}, "state_budget: 0.01 of the state per token leaves 0 elements for 2 layers"),
    "frequencies": (
        {"heads": 1, "head_dim": 8}, {"kv_rank": 8, "rope_dim": 6, "exportable": True}, "choices: 2, 4, 8"
    ),
    "biases": ({"bias": True}, {"kv_rank": 8, "rope_dim": 2, "exportable": True}, "has query biases"),
    "layer": ({}, {"layers": (5,)}, "layers.5: the design has layers 0 to 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_latent_attention_cannot_hold_is_named(name: str) -> None:
    fields, options, message = REFUSED[name]
    source = source_model(design(MIXERS["mha"] | fields))
    with pytest.raises(ConfigError) as caught:
        converted_model(source, LatentAttentionReplacement(**options), text=text())
    assert message in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"kv_rank": 8, "rope_dim": 4}, {"state_budget": 0.5}])
def test_layers_with_a_window_stay_as_they_are(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """As in Gemma, where most layers have one: the others are converted, and what they compute stays at full rank."""
    feedforward = {"kind": "gated", "hidden": 24}
    layers = [{"mixer": MIXERS["mha"] | fields, "feedforward": feedforward} for fields in ({}, {"window": 4}, {})]
    source = source_model(load_config({"vocab_size": VOCABULARY, "width": 16, "layers": layers}))
    converted = converted_model(source, LatentAttentionReplacement(**options), text=text())
    kinds = [getattr(layer.mixer, "kind", None) for _, layer in converted.config.expand()]
    assert kinds == ["latent_attention", "attention", "latent_attention"]
    assert "layers with a window are unchanged: [1]" in capsys.readouterr().err
    if not options:
        assert difference(source, converted) < 1e-10
    with pytest.raises(ConfigError, match=r"layers\.1\.mixer: has window"):
        converted_model(source, LatentAttentionReplacement(layers=(1,), **options), text=text())


def test_a_text_that_is_too_short_says_how_much_is_needed() -> None:
    source = source_model(design(MIXERS["mha"]))
    with pytest.raises(ConfigError, match=r"51 tokens.*16.*--calibration-tokens 64"):
        converted_model(source, LatentAttentionReplacement(kv_rank=8, rope_dim=2), text=random_text())


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "two sizes": ({"kv_rank": 8, "state_budget": 0.5}, "kv_rank: conflicts with state_budget"),
    "no latent": ({"rope_dim": 4}, "rope_dim: needs a size of the latent"),
    "odd": ({"kv_rank": 8, "rope_dim": 3}, "rope_dim: 3 is odd"),
    "fold": ({"fold": 2}, "fold: applies to a smaller state only"),
    "exportable": ({"exportable": True}, "exportable: applies to a smaller state only"),
    "both": ({"exportable": True, "fold": 2, "kv_rank": 4, "rope_dim": 2}, "fold: follows from rope_dim"),
    "share": ({"state_budget": "much"}, "state_budget: 'much' is not a share of the state per token; write 25%"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_contradict_are_refused(name: str) -> None:
    fields, message = OPTIONS[name]
    with pytest.raises(ConfigError) as caught:
        LatentAttentionReplacement(**fields)
    assert str(caught.value).startswith(message)


EXPORTABLE = {"kind": "attention", "heads": 4, "kv_heads": 1, "position": ROPE}


@pytest.mark.parametrize("planted", [None, "gain left behind", "scale left behind"])
def test_a_latent_norm_costs_next_to_nothing(planted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rotated dims and values of one key head: only the norm is not exact."""
    if planted == "gain left behind":
        assigned(_add_constant, "weight", torch.ones_like)(monkeypatch)
    if planted == "scale left behind":
        left_behind = wrapped(
            latent_parameters,
            lambda parameters, factors, latent, config: parameters(
                replace(factors, scale=config.scale), latent, config
            ),
        )
        left_behind(monkeypatch)
    source = source_model(design(EXPORTABLE))
    converted = converted_model(source, LatentAttentionReplacement(kv_rank=5, rope_dim=4, exportable=True), text=text())
    error = difference(source, converted)
    assert error < 5e-3 if planted is None else error > 0.05


def test_a_llama_becomes_a_deepseek_that_transformers_generates_with(tmp_path: Path) -> None:
    llama = write(drawn(config_of("llama", "plain", num_key_value_heads=2)))
    rows = random_text(rows=12)
    rewrite = LatentAttentionReplacement(kv_rank=20, rope_dim=8, exportable=True)
    convert(Conversion(open_source(llama), (rewrite,), rows), tmp_path / "converted")
    model, _ = heddle.load(tmp_path / "converted")
    match = export(model, tmp_path / "exported")
    assert match.family.architecture == "DeepseekV3ForCausalLM"
    theirs = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "exported", attn_implementation="eager")
    prompt = rows.batches[0][:4]
    expected = heddle.generate(model, prompt.tolist(), max_new_tokens=24)
    written = theirs.generate(prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    assert written[:, prompt.shape[1] :].tolist() == expected


def test_equal_sizes_are_chosen_among_those_that_all_layers_can_have() -> None:
    """The layers have one to four pairs of rotated dims."""
    mixer = MIXERS["mha"] | {"head_dim": 8}
    layers = [{"mixer": mixer | {"position": ROPE | {"rotary_dim": dims}}} for dims in (8, 4)]
    source = source_model(load_config({"vocab_size": VOCABULARY, "width": 16, "layers": layers}))
    rewrite = LatentAttentionReplacement(state_budget=0.5, exportable=True)
    assert len({mixer.rope_dim for mixer in mixers(converted_model(source, rewrite, text=text()))}) == 1


def test_equal_budgets_for_all_layers_export() -> None:
    source = source_model(design(MIXERS["mha"], depth=3))
    converted = converted_model(source, LatentAttentionReplacement(state_budget=0.5, exportable=True), text=text())
    (mixer,) = set(mixers(converted))
    assert mixer.kv_rank + (mixer.rope_dim or 0) <= 16
    assert match_report(converted.config).architecture == "DeepseekV3ForCausalLM"


def test_each_row_that_measures_a_layer_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("heddle.progress.LINE_SECONDS", 0.0)
    converted_model(source_model(design(MIXERS["mha"])), LatentAttentionReplacement(kv_rank=8, rope_dim=8), text=text())
    shown = capsys.readouterr().err
    assert "statistics of a layer: 3 of 8 rows" in shown
    assert "reading the text, layer 0: 1 of 1 batches" in shown
