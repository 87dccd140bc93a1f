"""Attention functions of other libraries, which `attn_implementation` names."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import heddle
from heddle.errors import ConfigError
from heddle.exchange.transformers import HeddleForCausalLM, export
from heddle.exchange.transformers.config import HeddleConfig
from heddle.exchange.transformers.external_attention import ExternalAttention, attention_modules, unsupported_reasons
from heddle.exchange.transformers.modeling import HeddleModel
from heddle.laws.harness import forward_no_grad
from heddle.model.load_config import load_config
from tests.cases import ALIBI, LONG, ROPE, Data, attention, design, latent, layer
from tests.exchange.transformers.designs import MOE, padded, prompts
from tests.generation.loops import amplify_layers
from tests.laws.planting import calls, condition, result

SUPPORTED: dict[str, Data] = {
    "gqa": design(layer(attention(6, kv_heads=2), repeat=2)),
    "windows": design(layer(attention(window=3)), layer(attention()), head={"tied": False, "bias": True}),
    "normed": design(layer(attention(qk_norm="head", gate="head", scale=0.3), repeat=2), head={"softcap": 2.0}),
    "moe": design(layer(attention(3), MOE, repeat=2), head={"scale": 0.7, "softcap": 3.0}),
    "dual": design(layer(attention(position=ROPE)), layer(attention()), residual={"kind": "residual_dual"}),
    "learned": design(
        layer(attention(position=None)),
        embedding={"scale": True, "position": {"kind": "learned", "length": 64}},
        head={"tied": False},
    ),
}
LENGTHS = [11, 4, 1]
CALLS: list[dict[str, Any]] = []


@pytest.fixture(autouse=True, scope="module")
def recorder() -> None:
    """Register a function that computes plain attention and records its arguments."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        CALLS.append({"layer": module.layer_idx, "causal": module.is_causal, "mask": mask} | kwargs)
        k, v = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (k, v))
        scores = (q @ k.mT * kwargs["scaling"]).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2), None

    def always(*args: Any, **kwargs: Any) -> Any:
        return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})

    AttentionInterface.register("recorder", attend)
    AttentionMaskInterface.register("recorder", always)


@cache
def decoder(name: str) -> heddle.Decoder:
    return amplify_layers(heddle.build(load_config(SUPPORTED[name]), dtype=torch.float64, seed=1)).eval()


@torch.no_grad()
def alone(name: str, row: list[int]) -> Tensor:
    result: Tensor = decoder(name).head(forward_no_grad(decoder(name), torch.tensor([row])))[0]
    return result


def with_recorder(name: str) -> HeddleForCausalLM:
    """The model with the attention of the recorder. The decoder alone computes attention itself."""
    hf_model = HeddleForCausalLM.from_decoder(decoder(name))
    hf_model.set_attn_implementation("recorder")
    return hf_model


@torch.no_grad()
def check_logits(name: str) -> None:
    """Padded on either side, packed, and told the windows and what a caller says besides."""
    CALLS.clear()
    model = with_recorder(name)
    rows = prompts(LENGTHS)
    expected = [alone(name, row) for row in rows]
    for side in ("left", "right"):
        inputs = padded(rows, side)
        actual = model(**inputs, use_cache=False).logits
        for row, expected_row, mask in zip(actual, expected, inputs["attention_mask"].bool(), strict=True):
            torch.testing.assert_close(row[mask], expected_row, rtol=0, atol=1e-10)
    position_ids = torch.tensor([[position for row in rows for position in range(len(row))]])
    actual = model(
        torch.tensor([[token for row in rows for token in row]]), position_ids=position_ids, word="said"
    ).logits[0]
    torch.testing.assert_close(actual, torch.cat(expected), rtol=0, atol=1e-10)
    depth = len(decoder(name).layers)
    assert [call["layer"] for call in CALLS] == list(range(depth)) * 3
    assert {call["word"] for call in CALLS[-depth:]} == {"said"}
    windows = [mixer.window for mixer in decoder(name).mixers() if mixer is not None]
    assert [call["sliding_window"] for call in CALLS[:depth]] == windows


@pytest.mark.parametrize("name", SUPPORTED)
def test_attention_of_others_gives_the_same_logits(name: str) -> None:
    check_logits(name)


def test_what_others_cannot_do_is_refused() -> None:
    model = with_recorder("gqa")
    tokens = torch.tensor(prompts([4]))
    with pytest.raises(ConfigError, match="use_cache:"):
        model(tokens, use_cache=True)
    with pytest.raises(ConfigError, match="set it to False"):
        model.generate(tokens, max_new_tokens=2)
    written = model.generate(tokens, max_new_tokens=5, do_sample=False, use_cache=False)
    model.set_attn_implementation("sdpa")
    CALLS.clear()
    assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), written)
    assert not CALLS


UNSUPPORTED: dict[str, Data] = {
    r"layers\[1\].mixer.*LatentAttention": design(layer(attention()), layer(latent())),
    r"layers\[0\].mixer.*GatedDelta": design(layer({"kind": "gated_delta", "heads": 2})),
    r"layers\[0\].mixer.sink": design(layer(attention(sink=True))),
    r"layers\[0\].mixer.softcap": design(layer(attention(softcap=3.0))),
    "distance bias": design(layer(attention(position=ALIBI))),
    r"layers\[0\].mixer.causal": design(layer(attention(causal=False))),
    r"layers\[0\].mixer.value_dim.*5": design(layer(attention(value_dim=5))),
    r"layers\[1\].mixer.*heads": design(layer(attention()), layer(attention(kv_heads=1))),
    r"windows differ: \[2, 3\]": design(layer(attention(window=2)), layer(attention(window=3))),
    "final length of the text": design(layer(attention(position=ROPE | {"scaling": LONG | {"original_length": 20}}))),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_designs_that_others_cannot_run_are_told(reason: str) -> None:
    decoder_under_test = heddle.build(load_config(UNSUPPORTED[reason]))
    (reasons,) = unsupported_reasons(decoder_under_test)
    model = HeddleForCausalLM.from_decoder(decoder_under_test)
    model.set_attn_implementation("recorder")
    with pytest.raises(ConfigError, match=reason):
        model(torch.tensor([[1, 2]]))
    assert reasons


# The bug, and a design for which the check must then fail.
BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a window forgotten": (condition(ExternalAttention._mask, "window", True, nth=1), "windows"),
    "a scale forgotten": (
        calls(
            ExternalAttention.__call__,
            "function",
            lambda function, module, q, *rest, **options: function(
                module, q, *rest, **options | {"scaling": q.shape[3] ** -0.5}
            ),
        ),
        "normed",
    ),
    "heads before tokens": (
        calls(ExternalAttention.__call__, "transpose", lambda heads_last, *dims, q: heads_last.reshape(q.shape)),
        "gqa",
    ),
    "keywords kept": (
        calls(
            ExternalAttention.__call__,
            "function",
            lambda function, *inputs, scaling, sliding_window, dropout, **_: function(
                *inputs, scaling=scaling, sliding_window=sliding_window, dropout=dropout
            ),
        ),
        "gqa",
    ),
    "padding seen": (
        calls(HeddleModel._run, "ExternalAttention", lambda make, modules, mask, *rest: make(modules, None, *rest)),
        "gqa",
    ),
    "another window told": (
        result(HeddleConfig.sliding_window, lambda window: None if window is None else 1 + window),
        "windows",
    ),
    "one cache for all layers": (
        calls(
            attention_modules,
            "AttentionModule",
            lambda make, mixer, layer_idx, config: make(mixer, layer_idx=0, config=config),
        ),
        "gqa",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name = BUGS[bug]
    decoder(name), [alone(name, row) for row in prompts(LENGTHS)]
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises((AssertionError, KeyError, RuntimeError, ConfigError)):
            check_logits(name)


def test_the_folder_says_nothing_of_others(tmp_path: Path) -> None:
    """What config.json holds does not depend on who computes attention."""
    export(heddle.build(load_config(SUPPORTED["dual"])), tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one", attn_implementation="recorder")
    assert model.config.layer_types == ["full_attention"] * 2
    model.save_pretrained(tmp_path / "two")
    again = AutoConfig.from_pretrained(tmp_path / "two")
    assert not {"layer_types", "sliding_window"} & again.to_dict().keys()
    assert getattr(again, "layer_types", None) is None
