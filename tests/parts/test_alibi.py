"""ALiBi: slopes of query heads and distances of positions, against plain loops."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import forward_no_grad, model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig
from heddle.parts.norms import NormConfig
from tests.cases import ALIBI, LINEAR, RETENTION, alone, attention, design, latent, layer

WIDTH, ROWS, LENGTH = 32, 2, 13


def part(heads: int, **fields: Any) -> Any:
    """An attention mixer in float64 with large random parameters."""
    kind: Any = MixerConfig
    slot: Any = NormConfig
    context = BuildContext(WIDTH, parse_config(slot, {"kind": "rms"}))
    mixer = (
        parse_config(kind, {"kind": "attention", "heads": heads, "position": ALIBI, **fields}).build(context).double()
    )
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return mixer


def test_slopes_halve_from_head_to_head() -> None:
    def slopes(mixer: Any, dtype: torch.dtype = torch.float64) -> Tensor:
        bias: Tensor = mixer.score_bias(Layout.causal(1, 1), dtype)(torch.tensor(-1))
        return -bias

    assert slopes(part(8)).tolist() == [2.0**-h for h in range(1, 9)]
    assert slopes(part(16)).tolist() == [2.0 ** (-h / 2) for h in range(1, 17)]
    assert slopes(part(4), torch.bfloat16).dtype == torch.float32
    assert list(part(8).to(torch.bfloat16).score_bias.slopes) == [2.0**-h for h in range(1, 9)]


def loops(mixer: Any, x: Tensor, positions: Tensor, causal: bool, window: int | None) -> Tensor:
    """The mixer in loops over queries, heads and keys."""
    heads, groups = mixer.heads, mixer.kv_heads
    q, k, v = ((x @ way.weight.T).unflatten(-1, (count, -1)) for way, count in
               ((mixer.q, heads), (mixer.k, groups), (mixer.v, groups)))  # fmt: skip
    out = torch.zeros(*x.shape[:2], heads, v.shape[-1], dtype=x.dtype)
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            for h in range(heads):
                g, shares = h // (heads // groups), []
                for j in range(x.shape[1]):
                    gap = int(positions[row, i] - positions[row, j])
                    seen = 0 <= gap < (window or 10**9) if causal else abs(gap) <= (window or 10**9)
                    score = float(q[row, i, h] @ k[row, j, g]) / math.sqrt(q.shape[-1])
                    shares.append(math.exp(score - 2.0 ** (-8 * (h + 1) / heads) * abs(gap)) if seen else 0.0)
                for j, share in enumerate(shares):
                    out[row, i, h] += share / sum(shares) * v[row, j, g]
    return out.flatten(-2) @ mixer.out.weight.T


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (8, 2), (4, 1)])
def test_the_mixer_equals_plain_loops(heads: int, groups: int, causal: bool, window: int | None) -> None:
    mixer = part(heads, kv_heads=groups, causal=causal, window=window)
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    gaps = torch.tensor([[0, 1, 2, 3, 4, 9, 10, 11, 15, 40, 41, 42, 43], list(range(5, 18))])
    for layout in (Layout.causal(ROWS, LENGTH), Layout(gaps, has_padding=False)):
        with torch.no_grad():
            got, _ = mixer(x, layout)
            want = loops(mixer, x, layout.positions, causal, window)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_attention_weights_include_the_bias() -> None:
    """With zero queries, the logarithm of each weight is the distance times the slope, up to a constant."""
    model = model_under_test(parse_config(ModelConfig, alone(kv_heads=2, position=ALIBI)))
    with torch.no_grad():
        for index in range(2):
            model.get_parameter(f"layers.{index}.mixer.q.weight").zero_()
    layer_weights = heddle.attention_weights(model, random_tokens(model.config, 1, 7))
    gap = torch.arange(7)
    for weights in layer_weights:
        assert weights is not None
        for head in range(4):
            last = weights[0, head, -1].log()
            want = 2.0 ** (-2 * (head + 1)) * gap.double()
            torch.testing.assert_close(last - last[0], want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "mixer",
    [latent(ALIBI, rope_dim=4), {**LINEAR, "position": ALIBI}, {**RETENTION, "position": ALIBI}],
    ids=lambda mixer: mixer["kind"],
)
def test_other_mixers_refuse_it(mixer: dict[str, Any]) -> None:
    sentence = r"^layers\[0\]\.mixer\.position:.*'alibi'.*axial_rope, rope, rotary"
    with pytest.raises(ConfigError, match=sentence):
        load_config(design(layer(mixer)))


def test_the_embedding_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"^embedding\.position:.*'alibi'"):
        load_config(design(layer(attention()), embedding={"position": ALIBI}))


def test_a_long_text_in_low_precision_stays_close() -> None:
    """At position 3,000 the bias is as exact as at the start, since it depends on distances, not on positions."""
    config = parse_config(ModelConfig, alone(kv_heads=2, position=ALIBI))
    tokens = random_tokens(config, 1, 600)
    exact = model_under_test(config, torch.bfloat16).double()
    want = forward_no_grad(exact, tokens)
    for dtype, bound in ((torch.float32, 1e-10), (torch.bfloat16, 1e-2)):
        model = model_under_test(config, torch.bfloat16).to(dtype)
        for layout in (None, Layout(Layout.causal(1, 600, start=3000).positions)):
            error = (forward_no_grad(model, tokens, layout).double() - want).square().mean() / want.square().mean()
            assert float(error) <= bound
