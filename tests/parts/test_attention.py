"""The attention mixer: groups of heads, the size of its state, parameter shapes."""

import math
import random
from typing import Any

import pytest
import torch

import heddle
from heddle.config import parse_config
from heddle.laws.harness import forward_no_grad, model_under_test, normal_tensor, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.build import BuildContext
from heddle.parts.mixers.attention import (
    LEAST_NORM,
    Attention,
    AttentionConfig,
    Growth,
    query_temperature,
    without_own_values,
)
from heddle.parts.norms.rms import RMSConfig
from tests.cases import alone, by_day
from tests.laws.planting import Plant, calls, condition, reads
from tests.parts.loops import (
    Errors,
    assert_none,
    errors,
    mixer_errors,
    normalized,
    rotated,
    with_large_weights,
)

ALIBI = {"kind": "alibi"}


def model_of(**fields: Any) -> Decoder:
    return model_under_test(parse_config(ModelConfig, alone(**fields)))


def repeated(weights: dict[str, torch.Tensor], groups: int, times: int) -> dict[str, torch.Tensor]:
    """The weights with each group's keys and values repeated for every head that reads them."""
    full = dict(weights)
    for name, value in weights.items():
        if name.rsplit(".", 2)[-2] in ("k", "v") and ".mixer." in name:
            full[name] = value.unflatten(0, (groups, -1)).repeat_interleave(times, dim=0).flatten(0, 1)
    return full


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 2), (6, 3), (4, 1), (3, 3)])
def test_groups_are_heads_with_repeated_weights(heads: int, groups: int) -> None:
    grouped = model_of(heads=heads, kv_heads=groups, head_dim=6, value_dim=5, bias="qkv")
    full = model_of(heads=heads, head_dim=6, value_dim=5, bias="qkv")
    full.load_state_dict(repeated(grouped.state_dict(), groups, heads // groups))
    tokens = random_tokens(grouped.config, 2, 9)
    torch.testing.assert_close(forward_no_grad(full, tokens), forward_no_grad(grouped, tokens), rtol=0, atol=1e-12)
    if 1 < groups < heads:  # the other order of heads is another function
        wrong = {
            name: value.unflatten(0, (groups, -1)).repeat(heads // groups, 1, *[1] * (value.dim() - 1)).flatten(0, 1)
            if ".mixer.k.w" in name or ".mixer.v.w" in name
            else full.state_dict()[name]
            for name, value in grouped.state_dict().items()
        }
        full.load_state_dict(wrong)
        assert float((forward_no_grad(full, tokens) - forward_no_grad(grouped, tokens)).abs().max()) > 1e-3


def test_as_many_groups_as_heads_is_the_default() -> None:
    tokens = random_tokens(model_of().config, 2, 9)
    assert torch.equal(forward_no_grad(model_of(kv_heads=4), tokens), forward_no_grad(model_of(), tokens))


def test_the_default_scale_is_that_of_the_key_width() -> None:
    tokens = random_tokens(model_of().config, 2, 9)
    default = forward_no_grad(model_of(head_dim=6, value_dim=10), tokens)
    assert torch.equal(forward_no_grad(model_of(head_dim=6, value_dim=10, scale=6**-0.5), tokens), default)
    assert not torch.equal(forward_no_grad(model_of(head_dim=6, value_dim=10, scale=10**-0.5), tokens), default)


@pytest.mark.parametrize("window", [None, 3, 7, 40])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_the_state_has_one_slot_per_group_and_token_of_the_window(groups: int, window: int | None) -> None:
    config = parse_config(ModelConfig, alone(heads=6, kv_heads=groups, head_dim=10, value_dim=7, window=window))
    state = heddle.build(config).init_state(2, 20)
    slots = 20 if window is None else min(window, 20)
    assert state.layer_bytes == [2 * groups * (10 + 7) * slots * 4] * 2
    for name, tensor in state.tensors().items():
        assert tensor.shape[0] == 2, name


def test_parameter_shapes() -> None:
    mixer = model_of(heads=6, kv_heads=2, head_dim=10, value_dim=7, bias=True).layers[0].mixer
    shapes = {name: tuple(value.shape) for name, value in mixer.named_parameters()}  # type: ignore[union-attr]
    assert shapes == {
        "q.weight": (60, 24),
        "q.bias": (60,),
        "k.weight": (20, 24),
        "k.bias": (20,),
        "v.weight": (14, 24),
        "v.bias": (14,),
        "out.weight": (24, 42),
        "out.bias": (24,),
    }


@pytest.mark.parametrize(
    ("kind", "shapes"), [("head", [(6,), (6,)]), ("per_head", [(4, 6), (2, 6)]), ("projection", [(24,), (12,)])]
)
def test_qk_norms(kind: str, shapes: list[tuple[int, ...]]) -> None:
    model = model_of(kv_heads=2, qk_norm=kind)
    names = [f"layers.0.mixer.{which}_norm.weight" for which in "qk"]
    assert [tuple(model.get_parameter(name).shape) for name in names] == shapes


@pytest.mark.parametrize("kind", ["head", "per_head", "projection"])
def test_norms_after_the_rotation(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is normed are rotated heads, as in a formula of its own; heads that are normed first are others."""
    model = model_of(kv_heads=2, qk_norm=kind, norm_after_rotation=True)
    mixer, x, layout = (
        model.layers[0].mixer,
        normal_tensor((2, 7, 24), torch.Generator().manual_seed(4)),
        heddle.Layout.causal(2, 7, start=3),
    )
    assert isinstance(mixer, Attention)
    assert mixer.position is not None
    for projection, norm, heads in ((mixer.q, mixer.q_norm, 4), (mixer.k, mixer.k_norm, 2)):
        assert norm is not None
        assert projection is not None
        gain = norm.get_parameter("weight")
        with torch.no_grad():
            gain.copy_(1.0 + 0.4 * torch.arange(gain.numel()).sin().view_as(gain))
            rotated = mixer.position(projection(x).unflatten(-1, (heads, 6)).transpose(1, 2), layout).transpose(1, 2)
            dims = rotated.flatten(-2) if kind == "projection" else rotated
            expected = (dims / (dims.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain).reshape(rotated.shape)
            actual = mixer._heads(projection(x), norm, heads, layout).transpose(1, 2)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
            with monkeypatch.context() as patch:
                condition(Attention._heads, "norm_after_rotation", False)(patch)
                wrong = mixer._heads(projection(x), norm, heads, layout).transpose(1, 2)
            assert float((wrong - expected).abs().max()) > 0.01


@pytest.mark.parametrize("fields", [{}, {"qk_norm": "head", "position": None}, {"qk_norm": "head", "position": ALIBI}])
def test_a_norm_after_no_rotation_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(heddle.errors.ConfigError, match=r"norm_after_rotation:.*qk_norm"):
        model_of(norm_after_rotation=True, **fields)


@pytest.mark.parametrize("growth", ["stepwise", "stepwise_from_one", "smooth"])
@pytest.mark.parametrize("start", [0, 5])
def test_temperatures_grow_with_lengths_of_tokens(start: int, growth: Growth) -> None:
    """`1 + beta ln(1 + floor(p / length))`, the same of p + 1, or `1 + beta ln(max(1, (p + 1) / length))`, by token."""
    layout = heddle.Layout.padded([9, 4], side="left") if start == 0 else heddle.Layout.causal(2, 9, start=start)
    actual = query_temperature(layout, 3, 0.6, torch.float64, growth)
    assert actual.shape == (2, 1, 9, 1)
    for row, positions in enumerate(layout.positions.tolist()):
        tokens = [max(position, 0) for position in positions]
        first = 0 if growth == "stepwise" else 1
        lengths = [max(1.0, (p + 1) / 3) if growth == "smooth" else 1 + (p + first) // 3 for p in tokens]
        expected = [1.0 + 0.6 * math.log(length) for length in lengths]
        torch.testing.assert_close(actual[row, 0, :, 0].tolist(), expected, rtol=0, atol=1e-15)


def test_a_temperature_is_that_of_queries_alone() -> None:
    """The same as projections of queries that are multiplied, for a text whose every token has the same factor."""
    model, plain = model_of(temperature_beta=0.6, temperature_length=3), model_of()
    plain.load_state_dict(model.state_dict())
    tokens, layout = random_tokens(model.config, 2, 3), heddle.Layout.causal(2, 3, start=6)
    with torch.no_grad():
        for mixer in plain.mixers():
            assert isinstance(mixer, Attention)
            mixer.q.weight.mul_(1.0 + 0.6 * math.log(3.0))
    expected = forward_no_grad(plain, tokens, layout)
    torch.testing.assert_close(forward_no_grad(model, tokens, layout), expected, rtol=0, atol=1e-12)
    assert not torch.equal(forward_no_grad(model, tokens), expected)


def test_half_a_temperature_is_refused() -> None:
    with pytest.raises(heddle.errors.ConfigError, match="temperature_length:"):
        model_of(temperature_beta=0.6)


def test_a_growth_without_a_temperature_is_refused() -> None:
    with pytest.raises(heddle.errors.ConfigError, match="temperature_growth:"):
        model_of(temperature_growth="smooth")


WIDTH, EPS = 10, 1e-5
# Of options of this loop: the fields that make a design have it.
OPTIONS: dict[str, Any] = {
    "chunked": {"chunked": True},
    "temperature": {"temperature_beta": 0.6},
    "relative": {"relative_dim": 3},
    "k_eq_v": {"k_eq_v": True},
}


def options_loop(x: torch.Tensor, mixer: Any) -> torch.Tensor:
    """One document x [T, width] -> [T, width]: a head and a token at a time, without masks, groups and tables."""

    def projected(name: str, token: int, heads: int) -> torch.Tensor:
        y = mixer.get_submodule(name).weight @ x[token]
        return (y if mixer.qkv_clip is None else y.clamp(-mixer.qkv_clip, mixer.qkv_clip)).view(heads, -1)

    def turned(y: torch.Tensor, gain: Any, position: int) -> torch.Tensor:
        y = normalized(y, 1.0 if gain.weight is None else gain.weight) if gain is not None else y
        return y if mixer.position is None else rotated(y, position)

    def value(token: int, group: int) -> torch.Tensor:
        y = projected("k" if mixer.v is None else "v", token, mixer.kv_heads)[group]
        y = normalized(y) if mixer.value_eps is not None else y
        return y * (1.0 if mixer.value_multiplier is None else mixer.value_multiplier)

    rows, n = [], mixer.temperature_length
    for t in range(len(x)):
        growth = {"stepwise": 1 + t // (n or 1), "stepwise_from_one": 1 + (t + 1) // (n or 1)}
        lengths = growth.get(mixer.temperature_growth, max(1.0, (t + 1) / (n or 1)))
        sharper = 1.0 if n is None else 1.0 + mixer.temperature_beta * math.log(lengths)
        first = 0 if mixer.window is None else t // mixer.window * mixer.window
        if not mixer.chunked:
            first = 0 if mixer.window is None else max(0, t + 1 - mixer.window)
        heads = []
        for head in range(mixer.heads):
            group = head // (mixer.heads // mixer.kv_heads)
            q = sharper * turned(projected("q", t, mixer.heads)[head], mixer.q_norm, t)
            scores = []
            for s in range(first, t + 1):
                k = turned(projected("k", s, mixer.kv_heads)[group], mixer.k_norm, s)
                score = q @ k / math.sqrt(mixer.head_dim)
                if mixer.relative is not None and t - s < len(mixer.relative_logits.weight):
                    r = mixer.relative.weight.view(mixer.heads, -1, WIDTH)[head] @ x[t]
                    score = score + sharper * (mixer.relative_logits.weight[t - s] @ r)
                scores.append(score)
            weights = torch.stack(scores).softmax(0)
            heads.append(sum(w * value(first + i, group) for i, w in enumerate(weights)))
        rows.append(mixer.out.weight @ torch.cat(heads))
    return torch.stack(rows)


def random_fields(draw: random.Random) -> dict[str, Any]:
    """Each option of the loop, or not."""
    groups, norm, window = draw.choice((1, 2)), draw.choice((None, "head")), draw.choice((None, 2, 3, 4))
    fields: dict[str, Any] = {
        "heads": groups * draw.choice((1, 2)), "kv_heads": groups, "head_dim": draw.choice((2, 4)), "qk_norm": norm,
        "qk_norm_weight": norm is None or draw.random() < 0.5, "window": window,
        "qkv_clip": draw.choice((None, 0.9)), "value_norm": draw.random() < 0.5,
        "value_scale": draw.choice((None, 0.7)), "position": draw.choice((None, {"kind": "rope"})),
        "k_eq_v": draw.random() < 0.3, "chunked": window is not None and draw.random() < 0.5,
    }  # fmt: skip
    if draw.random() < 0.5:
        growth = draw.choice(("stepwise", "stepwise_from_one", "smooth"))
        fields |= {"temperature_beta": 0.6, "temperature_length": draw.randint(1, 3), "temperature_growth": growth}
    if draw.random() < 0.5:
        fields |= {"relative_dim": draw.randint(1, 3), "relative_extent": draw.randint(1, 5)}
    return fields


def built(option: str, draw: random.Random) -> Attention:
    """A random mixer in float64 with large parameters, and this option."""
    while True:
        fields = random_fields(draw)
        if OPTIONS[option].keys() <= {name for name, value in fields.items() if value}:
            config = parse_config(AttentionConfig, fields)
            return with_large_weights(config.build(BuildContext(WIDTH, RMSConfig(eps=EPS))), draw)


def largest_errors(option: str, seed: int) -> Errors:
    """Of the outputs, with and without a state, and of the gradients, for two packed documents."""
    draw = random.Random(seed)
    return mixer_errors(built(option, draw), options_loop, WIDTH, [draw.randint(2, 5), draw.randint(3, 7)], draw)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("seed", by_day(10, 40))
def test_options_are_those_of_a_plain_loop(seed: int, option: str) -> None:
    assert_none(largest_errors(option, seed))


BUGS: dict[str, tuple[str, Plant]] = {
    "a window, no chunks": ("chunked", calls(Attention._attend, "in_chunks", lambda _layout, mask, _width: mask)),
    "queries that are not sharper": ("temperature", calls(Attention.forward, "_temperatures", lambda *_: 1.0)),
    "relative logits that are not sharper": (
        "temperature", calls(Attention._token_bias, "_temperatures", lambda *_: 1.0)
    ),
    "values in another order": (
        "k_eq_v", reads(Attention.forward, "unconvolved_keys", lambda keys: [keys[0].flip(-1)])
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_the_loop_sees(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    option, plant = BUGS[bug]
    plant(monkeypatch)
    assert max(largest_errors(option, seed)[0] for seed in range(6)) > 1e-3


LAYOUTS = {
    "from 6 on": heddle.Layout.causal(2, 9, start=6),
    "padded": heddle.Layout.padded([9, 4]),
    "packed": heddle.Layout.packed([[5, 4], [9]]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_chunks_begin_at_multiples_of_their_width_in_each_document(name: str, causal: bool) -> None:
    layout, width = LAYOUTS[name], 4
    mask = layout.attention_mask(width, causal, chunked=True)
    positions, ids = layout.positions.tolist(), layout.dense_segment_ids.tolist()
    for row, seen in enumerate(mask.materialize().expand(2, -1, -1).tolist()):
        for i, query in enumerate(positions[row]):
            for j, key in enumerate(positions[row]):
                same = min(query, key) >= 0 and query // width == key // width and ids[row][i] == ids[row][j]
                assert seen[i][j] == (same and (key <= query or not causal)), (row, i, j)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("most", [None, 2])
def test_pairs_of_chunks(causal: bool, most: int | None) -> None:
    mask = heddle.Layout.causal(1, 11).attention_mask(4, causal, chunked=True)
    mask = mask if most is None else mask.selecting(mask.materialize(), most)
    seen = heddle.Layout.causal(1, 11).attention_mask(4, causal, chunked=True).materialize()[0].sum(1)
    assert mask.pairs(11, 11) == int(seen.clamp(max=most or 99).sum())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunked": True}, "chunked: needs a window"),
        ({"chunked": True, "window": 1}, "chunked: needs a window"),
        ({"qk_norm_weight": False}, "qk_norm_weight: cannot be false, since there are no norms"),
        ({"qk_norm_weight": False, "qk_norm": "per_head"}, "qk_norm_weight: cannot be false, since per_head"),
    ],
)
def test_options_without_effect_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(heddle.errors.ConfigError, match=message):
        model_of(**fields)


def exclusive_loop(x: torch.Tensor, mixer: Attention) -> torch.Tensor:
    """x [T, width] -> [T, width]: causal attention less each head's part along the own value, a token at a time.

    Apart from the code under test: no mask, no groups of tensors, no rotation, scores of plain numbers.
    """
    k_weight, v_weight = mixer.get_parameter("k.weight"), mixer.get_parameter("v.weight")
    size, d, d_v = mixer.heads // mixer.kv_heads, mixer.head_dim, mixer.value_dim
    rows = []
    for t in range(len(x)):
        heads = []
        for head in range(mixer.heads):
            own = slice(head // size * d, (head // size + 1) * d)
            values = slice(head // size * d_v, (head // size + 1) * d_v)
            first = 0 if mixer.window is None else max(0, t + 1 - mixer.window)
            q = mixer.q.weight[head * d : (head + 1) * d] @ x[t]
            scores = torch.stack([q @ (k_weight[own] @ x[s]) for s in range(first, t + 1)]) / math.sqrt(d)
            weights = scores.exp() / scores.exp().sum()
            y = sum(weight * (v_weight[values] @ x[first + s]) for s, weight in enumerate(weights))
            v = v_weight[values] @ x[t]
            heads.append(y - (y @ v) / (v @ v) * v)
        rows.append(mixer.out.weight @ torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(12))
def test_exclusive_heads_are_those_of_a_plain_loop(seed: int) -> None:
    """Values and gradients, of random heads, groups, widths and windows."""
    draw = random.Random(seed)
    groups = draw.choice((1, 2, 3))
    fields = {
        "heads": groups * draw.choice((1, 2)), "kv_heads": groups, "head_dim": draw.randint(2, 6),
        "value_dim": draw.randint(2, 7), "window": draw.choice((None, 2, 4)), "position": None,
    }  # fmt: skip
    mixer = model_of(exclusive=True, **fields).layers[0].mixer
    assert isinstance(mixer, Attention)
    x = normal_tensor((7, 24), torch.Generator().manual_seed(seed)).requires_grad_()
    actual = mixer(x[None], heddle.Layout.causal(1, 7))[0][0]
    assert_none(errors(actual, exclusive_loop(x, mixer), [x, *mixer.parameters()]))


def test_a_value_of_zero_takes_nothing_away() -> None:
    """Nor does it make gradients that are not finite. A short value counts as if it had the least length."""
    y = normal_tensor((1, 4, 3, 5), torch.Generator().manual_seed(1))
    v = normal_tensor((1, 2, 3, 5), torch.Generator().manual_seed(2))
    v[:, 0, 1], v[:, 1, 2] = 0.0, v[:, 1, 2] / v[:, 1, 2].norm() * LEAST_NORM / 2
    y.requires_grad_(), v.requires_grad_()
    z = without_own_values(y, v)
    assert torch.equal(z[:, :2, 1], y[:, :2, 1])
    unit = v[0, 1, 2] / v[0, 1, 2].norm()
    expected = y[0, 2:, 2] - (y[0, 2:, 2] @ unit)[:, None] * unit / 4
    torch.testing.assert_close(z[0, 2:, 2], expected, rtol=0, atol=1e-14)
    assert all(bool(gradient.isfinite().all()) for gradient in torch.autograd.grad(z.square().sum(), (y, v)))


def test_sums_of_exclusive_heads_are_wide() -> None:
    """In bfloat16 only the result is rounded."""
    generator = torch.Generator().manual_seed(3)
    y, v = (normal_tensor(shape, generator).bfloat16() for shape in ((1, 4, 3, 32), (1, 2, 3, 32)))
    assert torch.equal(without_own_values(y, v), without_own_values(y.float(), v.float()).bfloat16())


@pytest.mark.parametrize("fields", [{"window": 1}, {"value_dim": 1}, {"head_dim": 1, "position": None}])
def test_exclusive_heads_of_which_nothing_is_left_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(heddle.errors.ConfigError, match="exclusive: leaves nothing"):
        model_of(exclusive=True, **fields)
