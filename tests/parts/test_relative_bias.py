"""T5's relative bias against the attention of T5 and UMT5, and against plain loops."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.positions.relative_bias import RelativeBias, buckets_by_offset
from tests.cases import LINEAR, alone, design, layer
from tests.laws.planting import assigned, calls, operand_dropped

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # third-party warnings at import
    from transformers import T5Config, UMT5Config
    from transformers.models.t5.modeling_t5 import T5Attention
    from transformers.models.umt5.modeling_umt5 import UMT5Attention

WIDTH, HEADS, HEAD_DIM, ROWS, LENGTH = 24, 4, 5, 2, 45
THEIRS = {"t5": (T5Config, T5Attention), "umt5": (UMT5Config, UMT5Attention)}


def part(buckets: int, max_distance: int, **fields: Any) -> Any:
    """An attention mixer in float64 with large random parameters."""
    slot: Any = MixerConfig
    position = {"kind": "relative_bias", "buckets": buckets, "max_distance": max_distance}
    data = {"kind": "attention", "heads": HEADS, "head_dim": HEAD_DIM, "scale": 1.0, "position": position, **fields}
    mixer = parse_config(slot, data).build(BuildContext(WIDTH, RMSConfig())).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return mixer


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (10, 37), (16, 64), (64, 300), (4, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_buckets_are_those_of_t5(buckets: int, max_distance: int, causal: bool) -> None:
    offsets = torch.arange(-max_distance - 5, max_distance + 6)
    want = T5Attention._relative_position_bucket(-offsets, not causal, buckets, max_distance)
    ours = torch.tensor(buckets_by_offset(buckets if causal else buckets // 2, max_distance, causal))
    assert torch.equal(ours[offsets.clamp(-max_distance, max_distance) + max_distance], want)


def error_against_transformers(family: str, causal: bool, buckets: int, max_distance: int) -> float:
    config_class, attention_class = THEIRS[family]
    config = config_class(
        d_model=WIDTH,
        d_kv=HEAD_DIM,
        num_heads=HEADS,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=causal,
        dropout_rate=0.0,
        attn_implementation="eager",
    )
    theirs: Any = attention_class(config, has_relative_attention_bias=True, layer_idx=0).double().eval()
    mine = part(buckets, max_distance, causal=causal)
    names = {"q": "q", "k": "k", "v": "v", "out": "o"}
    with torch.no_grad():
        for name, their_name in names.items():
            getattr(theirs, their_name).weight.copy_(getattr(mine, name).weight)
        theirs.relative_attention_bias.weight.copy_(mine.score_bias.weight.T)
        x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
        hidden = torch.full((LENGTH, LENGTH), float("-inf"), dtype=x.dtype).triu(1) if causal else x.new_zeros(1, 1)
        mask = hidden.expand(1, 1, LENGTH, LENGTH)
        want = theirs(x, mask)[0] if family == "t5" else theirs(x, attention_mask=mask)[0]
        got, _ = mine(x, Layout.causal(ROWS, LENGTH))
    assert float(want.std()) > 0.3
    return float((got - want).abs().max())


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("family", THEIRS)
def test_output_equals_that_of_transformers(family: str, causal: bool, buckets: int, max_distance: int) -> None:
    assert error_against_transformers(family, causal, buckets, max_distance) < 1e-10


def loops(mixer: Any, x: Tensor, layout: Layout, settings: tuple[int, int, bool, int]) -> Tensor:
    """The mixer in loops over queries, heads and keys. settings: buckets, max_distance, causal, window."""
    buckets, max_distance, causal, window = settings
    q, k, v = (
        (x @ mixer.get_parameter(f"{name}.weight").T).unflatten(-1, (HEADS, HEAD_DIM)) for name in ("q", "k", "v")
    )
    out, n = torch.zeros_like(q), buckets if causal else buckets // 2
    for row, i, h in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        shares = {}
        for j in range(x.shape[1]):
            gap = int(layout.positions[row, i] - layout.positions[row, j])
            if not (0 <= gap < window if causal else abs(gap) <= window):
                continue
            d = abs(gap)
            bucket = d
            if d >= n // 2:
                bucket = n // 2 + int(math.log(d / (n // 2)) / math.log(max_distance / (n // 2)) * (n - n // 2))
            bucket = min(bucket, n - 1) + (n if gap < 0 else 0)
            shares[j] = math.exp(float(q[row, i, h] @ k[row, j, h]) + float(mixer.score_bias.weight[h, bucket]))
        for j, share in shares.items():
            out[row, i, h] += share / sum(shares.values()) * v[row, j, h]
    return out.flatten(-2) @ mixer.out.weight.T


def loop_error(causal: bool) -> float:
    mixer, window = part(8, 21, causal=causal, window=30), 30
    x = torch.randn(ROWS, 40, WIDTH, dtype=torch.float64)
    gaps = torch.tensor([[*range(20), *range(33, 53)], list(range(7, 47))])
    layout = Layout(gaps)
    with torch.no_grad():
        got, _ = mixer(x, layout)
        return float((got - loops(mixer, x, layout, (8, 21, causal, window))).abs().max())


@pytest.mark.parametrize("causal", [True, False])
def test_the_mixer_equals_plain_loops(causal: bool) -> None:
    assert loop_error(causal) < 1e-10


BUGS = {
    "keys and queries exchanged": calls(
        RelativeBias.forward, "clamp", lambda offsets, *limits: (-offsets).clamp(*limits)
    ),
    "half of the buckets for single distances of both directions": assigned(
        buckets_by_offset, "exact", lambda exact, *, buckets: buckets
    ),
    "later keys in the buckets of earlier ones": assigned(
        buckets_by_offset, "future", lambda future, *, buckets: [bucket - buckets for bucket in future]
    ),
    "distances below max_distance in the last bucket": operand_dropped(buckets_by_offset, "exact", nth=2),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buckets_by_offset.cache_clear()
    BUGS[bug](monkeypatch)
    try:
        assert loop_error(False) > 1e-2
        assert error_against_transformers("t5", False, 8, 20) > 1e-2
    finally:
        buckets_by_offset.cache_clear()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"buckets": 1}, "buckets: 1"),
        ({"buckets": 7, "causal": False}, "buckets: 7"),
        ({"buckets": 20, "max_distance": 10}, r"max_distance: 10.*10 buckets"),
    ],
)
def test_errors(fields: dict[str, Any], message: str) -> None:
    position = {"kind": "relative_bias", **{name: value for name, value in fields.items() if name != "causal"}}
    data = alone(position=position, causal=fields.get("causal", True))
    with pytest.raises(ConfigError, match=rf"^layers\[0\]\.mixer\.position\.{message}"):
        build(load_config(data), device="meta")


def test_mixers_without_scores_refuse_it() -> None:
    with pytest.raises(ConfigError, match=r"position:.*'relative_bias'.*axial_rope"):
        load_config(design(layer({**LINEAR, "position": {"kind": "relative_bias"}})))
