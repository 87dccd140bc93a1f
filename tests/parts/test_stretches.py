"""Scalings against transformers' frequencies, and length-dependent scalings with and without a state."""

import math
from typing import Any

import pytest
import torch

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import assert_close, forward_no_grad, forward_with_state, model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.parts.layout import Layout
from heddle.parts.positions.rope import Rope, RopeConfig
from tests.cases import alone
from tests.generation.loops import amplify_layers
from tests.parity import reference


def rope(kind: str, sizes: tuple[int, float], fields: dict[str, Any], dim: int | None = None) -> Rope:
    """A rotary embedding for heads of (width, base)."""
    scaling = {"kind": kind, **fields}
    rotary_dim = {} if dim is None else {"rotary_dim": dim}
    return parse_config(RopeConfig, {"base": sizes[1], "scaling": scaling, **rotary_dim}).build(sizes[0])


SIZES = [(64, 10000.0), (128, 500000.0), (96, 1000000.0), (8, 100.0)]
FIXED: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 1.0}),
    ("linear", {"factor": 2.5}),
    ("linear", {"factor": 16.0}),
    ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192}),
    ("llama3", {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192}),
    ("llama3", {"factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 9.0, "original_length": 100}),
]


@pytest.mark.parametrize("part", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("kind", "fields"), FIXED)
def test_tables_equal_those_of_transformers(
    kind: str, fields: dict[str, Any], sizes: tuple[int, float], part: float
) -> None:
    theirs, factor = reference.scaled(kind, sizes, fields, part=part)
    mine = rope(kind, sizes, fields, int(sizes[0] * part))
    assert mine.scaled_frequencies(1) == mine.scaled_frequencies(10**6)
    assert list(mine.scaled_frequencies(1).inv_freq) == pytest.approx(theirs.tolist(), rel=1e-6)
    assert list(mine.scaled_frequencies(1, torch.float32).inv_freq) == theirs.tolist()
    assert (mine.attention_factor, mine.score_scale) == (factor, 1.0)


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("length", [1, 99, 100, 101, 250, 4000])
@pytest.mark.parametrize("sizes", SIZES)
def test_dynamic_ntk_equals_that_of_transformers(sizes: tuple[int, float], length: int, part: float) -> None:
    fields = {"factor": 3.0, "original_length": 100}
    theirs, _ = reference.scaled("dynamic", sizes, fields, length, part)
    mine = rope("ntk", sizes, fields, int(sizes[0] * part))
    assert list(mine.scaled_frequencies(length).inv_freq) == pytest.approx(theirs.tolist(), rel=1e-6)
    assert mine.attention_factor == 1.0


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
@pytest.mark.parametrize(("dim", "base"), SIZES)
def test_fixed_ntk_changes_the_base(dim: int, base: float, factor: float) -> None:
    larger_base = base * factor ** (dim / (dim - 2))
    inv_freq = rope("ntk", (dim, base), {"factor": factor}).scaled_frequencies(1).inv_freq
    assert list(inv_freq) == pytest.approx([larger_base ** (-2 * i / dim) for i in range(dim // 2)], rel=1e-12)
    assert inv_freq[0] == 1.0
    assert inv_freq[-1] == pytest.approx(base ** (2 / dim - 1) / factor, rel=1e-12)


LONGROPES: dict[str, dict[str, Any]] = {
    "factor": {"factor": 32.0},
    "no growth": {"factor": 1.0},
    "attention factor": {"attention_factor": 1.3},
}


@pytest.mark.parametrize("part", [1.0, 0.75])
@pytest.mark.parametrize("length", [1, 4096, 4097])
@pytest.mark.parametrize("name", LONGROPES)
def test_longrope_equals_that_of_transformers(name: str, length: int, part: float) -> None:
    sizes, pairs = (32, 10000.0), int(16 * part)
    lists = {"short_factor": [1.0 + i / 40 for i in range(pairs)], "long_factor": [1.1 * 1.2**i for i in range(pairs)]}
    fields = {"original_length": 4096, **lists, **LONGROPES[name]}
    theirs, factor = reference.scaled("longrope", sizes, fields, length, part)
    mine = rope("longrope", sizes, fields, 2 * pairs)
    assert list(mine.scaled_frequencies(length, torch.float32).inv_freq) == theirs.tolist()
    assert list(mine.scaled_frequencies(length).inv_freq) == pytest.approx(theirs.tolist(), rel=1e-6)
    assert mine.attention_factor == pytest.approx(factor, rel=1e-12)
    assert mine.scaled_frequencies(length).attention_factor == mine.attention_factor


THREE = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 4.0, 9.0]}
LONG = {"kind": "longrope", **THREE, "original_length": 12, "factor": 4.0}
DYNAMIC = {"kind": "ntk", "factor": 4.0, "original_length": 12}
LENGTHS = {"longrope": LONG, "dynamic ntk": DYNAMIC}


def with_scaling(scaling: dict[str, Any], **fields: Any) -> ModelConfig:
    return parse_config(
        ModelConfig, alone(kv_heads=2, position={"kind": "rope", "base": 30.0, "scaling": scaling}, **fields)
    )


@pytest.mark.parametrize("length", [11, 12, 13, 40])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_state_uses_the_frequencies_of_its_cache_length(name: str, length: int) -> None:
    """Below and above the switch, for any chunks: equal to one call on a text of that length."""
    config = with_scaling(LENGTHS[name])
    model = model_under_test(config)
    tokens = random_tokens(config, 2, length)
    whole = forward_no_grad(model, tokens)
    for sizes in ([length], [1] * length, [5, 1, length - 6]):
        state, out = model.init_state(2, length), []
        for chunk in tokens.split(sizes, dim=1):
            hidden, state = forward_with_state(model, state, chunk)
            out.append(hidden)
        assert_close(torch.cat(out, dim=1), whole, f"{length} tokens in chunks {sizes}")


@pytest.mark.parametrize("name", LENGTHS)
def test_a_longer_cache_uses_the_frequencies_of_a_long_text(name: str) -> None:
    config = with_scaling(LENGTHS[name])
    model = model_under_test(config)
    tokens = random_tokens(config, 1, 20)
    short, _ = forward_with_state(model, model.init_state(1, 12), tokens[:, :8])
    long, state = forward_with_state(model, model.init_state(1, 20), tokens[:, :8])
    assert_close(short, forward_no_grad(model, tokens[:, :8]), "a short text with a short state")
    assert_close(long, forward_no_grad(model, tokens)[:, :8], "the beginning of a long text")
    assert float((long - short).abs().max()) > 1e-3
    forked = state.fork().select([0, 0])
    hidden, _ = forward_with_state(model, forked, tokens[:, 8:].expand(2, -1))
    assert_close(hidden[:1], forward_no_grad(model, tokens)[:, 8:], "a fork keeps the cache length")


def test_each_packed_document_decides_for_itself() -> None:
    config = with_scaling(LONG)
    model = model_under_test(config)
    tokens = random_tokens(config, 1, 20)
    packed = forward_no_grad(model, tokens, Layout.packed([[11, 9]]))
    assert_close(packed[:, :11], forward_no_grad(model, tokens[:, :11]), "short documents in a long row")


@pytest.mark.parametrize("name", LENGTHS)
def test_a_state_without_a_cache_length_is_refused(name: str) -> None:
    model = heddle.build(with_scaling(LENGTHS[name]))
    depends = r".*rotary embedding"
    with pytest.raises(ConfigError, match=f"^state: {depends}.*init_state.*cache_length"):
        model.init_state(2)
    with pytest.raises(ConfigError, match=f"^prefix: {depends}"):
        heddle.prefix(model, [1, 2, 3])


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("steps", [4, 9])
def test_generation_decides_by_prompt_and_new_tokens(name: str, steps: int) -> None:
    """Five tokens, then four or nine more: the final length is below or above the switch and decides for all tokens."""
    model = heddle.build(with_scaling(LENGTHS[name]), dtype=torch.float64)
    prompt = random_tokens(model.config, 1, 5)
    tokens, state = prompt, model.init_state(1, 5 + steps - 1)
    want: list[int] = []
    for _ in range(steps):
        hidden, state = forward_with_state(model, state, tokens)
        tokens = model.head(hidden[:, -1:]).argmax(-1)
        want.append(int(tokens))
    assert heddle.generate(model, prompt.tolist(), max_new_tokens=steps) == [want]
    speculative = heddle.generate(model, prompt.tolist(), max_new_tokens=steps, draft_model=model, speculative_tokens=2)
    assert speculative == [want]


@pytest.mark.parametrize("name", LENGTHS)
def test_a_longer_prompt_in_the_batch_changes_no_text(name: str) -> None:
    """The final lengths are 8, 22 and 30 or, after a common beginning, 22, 24 and 22; the switch is at 12 or 23."""
    for lengths, common, switch in (((5, 19, 27), 0, 12), ((19, 21, 19), 17, 23)):
        model = amplify_layers(heddle.build(with_scaling(LENGTHS[name] | {"original_length": switch}), torch.float64))
        prompts = [random_tokens(model.config, 1, length, seed=length)[0].tolist() for length in lengths]
        prompts = [prompts[0][:common] + prompt[common:] for prompt in prompts]
        alone = [heddle.generate(model, [prompt], max_new_tokens=4)[0] for prompt in prompts]
        assert heddle.generate(model, prompts, max_new_tokens=4) == alone
        settings: dict[str, Any] = {"draft_model": model, "speculative_tokens": 2}
        assert heddle.generate(model, prompts, max_new_tokens=4, **settings) == alone
        assert heddle.generate(model, prompts[::2], max_new_tokens=4) == alone[::2]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a factor below 1": (
        {"kind": "linear", "factor": 0.5},
        "scaling.factor: should be greater than or equal to 1, got 0.5 (a number)",
    ),
    "a ramp that falls": (
        {"kind": "llama3", "factor": 8.0, "original_length": 9, "low_freq_factor": 4.0},
        "scaling.high_freq_factor: 4.0 is not above low_freq_factor = 4.0; raise it",
    ),
    "nothing says how attention grows": (
        LONG | {"factor": None},
        "scaling.factor: is missing, and so is attention_factor, so the scale of cosines is unknown; give one",
    ),
    "both say how attention grows": (
        LONG | {"attention_factor": 1.1},
        "scaling.attention_factor: is given together with factor, which determines it; keep one of the two",
    ),
    "a logarithm of 1": (
        LONG | {"original_length": 1},
        "scaling.factor: 4.0 is divided by ln(original_length) = 0; give attention_factor instead",
    ),
    "too few factors": (
        LONG | {"long_factor": [1.0, 2.0]},
        "scaling.long_factor: 2 given; 6 rotary dims need 3",
    ),
    "no factors": (LONG | {"short_factor": []}, "scaling.short_factor: 0 given; 6 rotary dims need 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_fields_raise(name: str) -> None:
    scaling, message = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        parse_config(RopeConfig, {"scaling": scaling}).build(6)
    assert str(error.value) == message


def test_ntk_refuses_a_single_pair() -> None:
    with pytest.raises(ConfigError, match=r"^scaling: ntk"):
        parse_config(RopeConfig, {"scaling": {"kind": "ntk", "factor": 2.0}}).build(2)


@pytest.mark.parametrize("factor", [1.0, 1e308])
@pytest.mark.parametrize("kind", ["linear", "ntk", "llama3", "dynamic"])
def test_extreme_factors_give_finite_frequencies(kind: str, factor: float) -> None:
    options = {"original_length": 2} if kind in ("llama3", "dynamic") else {}
    mine = rope("ntk" if kind == "dynamic" else kind, (8, 1e4), {"factor": factor, **options})
    assert all(math.isfinite(inv_freq) for inv_freq in mine.scaled_frequencies(2**31).inv_freq)
