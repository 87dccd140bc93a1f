"""T5's relative bias against the attention of T5 and UMT5, and against plain loops; tables that layers share."""

import math
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.conversion.targets import parse_rewrite
from heddle.errors import ConfigError
from heddle.lab.explore.choices import explorer_design, kinds_of
from heddle.laws.harness import model_under_test, random_tokens
from heddle.laws.shrink import shrink
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.positions.relative_bias import RelativeBias, buckets_by_offset
from tests.cases import ALIBI, BUCKETS, LINEAR, SHARED, Data, alone, attention, by_day, case, design, layer
from tests.laws.planting import assigned, calls, operand_dropped
from tests.parts.loops import DecoderLoop, Errors, assert_none, decoder_errors

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


def bucket_of(gap: int, buckets: int, max_distance: int, causal: bool) -> int:
    """The bucket of a key `gap` tokens before its query."""
    n, d = buckets if causal else buckets // 2, abs(gap)
    bucket = d
    if d >= n // 2:
        bucket = n // 2 + int(math.log(d / (n // 2)) / math.log(max_distance / (n // 2)) * (n - n // 2))
    return min(bucket, n - 1) + (n if gap < 0 else 0)


def loops(mixer: Any, x: Tensor, layout: Layout, settings: tuple[int, int, bool, int]) -> Tensor:
    """The mixer in loops over queries, heads and keys. settings: buckets, max_distance, causal, window."""
    buckets, max_distance, causal, window = settings
    q, k, v = (
        (x @ mixer.get_parameter(f"{name}.weight").T).unflatten(-1, (HEADS, HEAD_DIM)) for name in ("q", "k", "v")
    )
    out = torch.zeros_like(q)
    for row, i, h in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        shares = {}
        for j in range(x.shape[1]):
            gap = int(layout.positions[row, i] - layout.positions[row, j])
            if not (0 <= gap < window if causal else abs(gap) <= window):
                continue
            bucket = bucket_of(gap, buckets, max_distance, causal)
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


class TableLoop(DecoderLoop):
    """Attention with relative biases. The table that a layer reads is found by walking back over the layers."""

    def table(self) -> Tensor:
        """The table of the layer [heads, buckets]."""
        index = int(self.prefix.split(".")[1])
        mixers: list[Any] = [each.mixer for each in self.layers]
        owners = [i for i, each in enumerate(mixers) if each.position is not None and not each.position.shared]
        return self.parameters[f"layers.{max(i for i in owners if i <= index)}.mixer.score_bias.weight"]

    def attend(self, mixer: Any, inputs: list[Tensor]) -> list[Tensor]:
        """Softmax attention, causal or not."""
        q, k, v = (self.heads(name, mixer, inputs, mixer.head_dim) for name in ("q", "k", "v"))
        window, outputs = mixer.window or len(inputs), []
        for t in range(len(inputs)):
            seen = [s for s in range(len(inputs)) if (0 <= t - s < window if mixer.causal else abs(t - s) <= window)]
            heads = []
            for h in range(mixer.heads):
                g, scores = h // (mixer.heads // mixer.kv_heads), []
                for s in seen:
                    score = mixer.scale * (q[t][h] @ k[s][g])
                    if mixer.position is not None:
                        sizes = mixer.position.buckets, mixer.position.max_distance
                        score = score + self.table()[h, bucket_of(t - s, *sizes, mixer.causal)]
                    scores.append(score.exp())
                heads.append(sum(score * v[s][g] for s, score in zip(seen, scores, strict=True)) / sum(scores))
            outputs.append(self.get("mixer.out.weight") @ torch.cat(heads))
        return outputs


def random_design(seed: int) -> Data:
    """Layers of attention; most have biases, of tables that some of them share."""
    draw = random.Random(seed)
    causal, layers, kind, heads = draw.random() < 0.5, [], {}, 0
    for index in range(draw.randint(3, 6)):
        role = "own" if index == 0 else draw.choice(("own", "shared", "shared", "none")) if index > 1 else "shared"
        if role == "own":
            heads = draw.choice((2, 4))
            kind = BUCKETS | {"buckets": draw.choice((4, 6, 8)), "max_distance": draw.choice((5, 7))}
        position = None if role == "none" else kind | {"shared": role == "shared"}
        others = {"window": draw.choice((None, 2, 3)), "kv_heads": draw.choice((1, 2)), "causal": causal}
        layers.append(layer(attention(heads, position=position, head_dim=draw.randint(2, 4), **others), None))
    return design(*layers, width=12)


def shared_errors(data: Data, seed: int = 0) -> Errors:
    """Of hidden states and of all gradients."""
    model = model_under_test(parse_config(ModelConfig, data))
    return decoder_errors(model, lambda ours, x: TableLoop(ours, ours.config).hidden(x), seed, length=9)


@pytest.mark.parametrize("seed", by_day(12, 48))
def test_shared_tables_are_those_of_a_plain_loop(seed: int) -> None:
    assert_none(shared_errors(random_design(seed), seed))


def biased(fields: Data, heads: int = 4, **others: Any) -> Data:
    """A layer with these biases."""
    return layer(attention(heads, position=BUCKETS | fields, **others), None)


TWO_TABLES = design(biased({}), biased({}), biased(SHARED), width=12)


def first_tables(config: ModelConfig) -> tuple[int | None, ...]:
    """A mistake: the first table in the place of the last."""
    return tuple(0 if each.mixer is not None and each.mixer.shares_bias else None for _, each in config.expand())


def test_the_loop_sees_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_errors(TWO_TABLES)[0] < 1e-10
    monkeypatch.setattr(ModelConfig, "bias_sources", property(first_tables))
    assert shared_errors(TWO_TABLES)[0] > 1e-3


def with_own_tables(config: ModelConfig) -> ModelConfig:
    """The design with a table in each layer."""
    data = config.dump()
    for entry in data["layers"]:
        entry["mixer"]["position"].pop("shared", None)
    return parse_config(ModelConfig, data)


@pytest.mark.parametrize("name", ["relative-bias-shared", "relative-bias-shared-bidirectional"])
def test_a_shared_table_is_equal_tables_whose_gradients_are_added(name: str) -> None:
    """Also in packed documents, and between mixers of two kinds."""
    config = case(name)
    shared, own = model_under_test(config), build(with_own_tables(config), dtype=torch.float64).eval()
    values, tables = dict(shared.named_parameters()), dict[str, list[Tensor]]()
    owner = ""
    with torch.no_grad():
        for path, parameter in own.named_parameters():
            owner = path if path in values and path.endswith("score_bias.weight") else owner
            if path.endswith("score_bias.weight"):
                tables.setdefault(owner, []).append(parameter)
            parameter.copy_(values[path if path in values else owner])
    tokens, layout = random_tokens(config, 2, 11), Layout.packed([[4, 7], [9, 2]])
    outputs = [model(tokens, layout)[0] for model in (shared, own)]
    assert float((outputs[0] - outputs[1]).detach().abs().max()) < 1e-10
    for y in outputs:
        y.square().sum().backward()
    assert tables.keys() == {path for path in values if path.endswith("score_bias.weight")}
    for path, copies in tables.items():
        gradients = [copy.grad for copy in copies if copy.grad is not None]
        assert len(gradients) == len(copies) > 1
        assert torch.allclose(values[path].grad, sum(gradients), rtol=0, atol=1e-9)  # type: ignore[arg-type]


def test_a_shared_table_is_stored_once() -> None:
    config = case("relative-bias-shared")
    assert config.bias_sources == (None, 0, 0, None, 3, 3)
    assert config.layer_order == (0, 1, 2, 3, 4, 4)
    model, sizes = build(config), heddle.size(config, 20)
    owners = [name for name, _ in model.named_parameters() if "score_bias" in name]
    assert owners == ["layers.0.mixer.score_bias.weight", "layers.3.mixer.score_bias.weight"]
    own = heddle.size(with_own_tables(config), 20)
    assert sizes.parameters == sum(each.numel() for each in model.parameters())
    assert own.parameters - sizes.parameters == 2 * 6 * 6 + 2 * 3 * 4
    assert own.active_parameters - sizes.active_parameters == 2 * 6 * 6 + 2 * 3 * 4
    assert (sizes.state_bytes, sizes.flops_per_token) == (own.state_bytes, own.flops_per_token)


def test_equal_readers_of_different_tables_are_different_layers() -> None:
    """Built once each, they find a table of the same shape."""
    config = parse_config(ModelConfig, design(biased({}), biased(SHARED), biased({}, softcap=2.0), biased(SHARED)))
    assert config.bias_sources == (None, 0, None, 2)
    assert config.layer_order == (0, 1, 2, 3)
    assert heddle.size(config, 8).parameters == sum(each.numel() for each in build(config).parameters())


def test_a_design_from_before_the_option_is_unchanged() -> None:
    assert "shared" not in case("relative-bias").dump()["layers"][0]["mixer"]["position"]


def test_a_call_leaves_nothing_behind() -> None:
    model = model_under_test(case("relative-bias-shared"))
    layout, tokens = Layout.causal(2, 9), random_tokens(model.config, 2, 9)
    with torch.no_grad():
        first = model(tokens, layout)[0]
        model.get_parameter("layers.0.mixer.score_bias.weight").mul_(2.0)
        assert float((model(tokens, layout)[0] - first).abs().max()) > 1e-3
    assert layout.handed_over is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (design(biased(SHARED)), r"layers\[0\].mixer.position.shared: no earlier layer has relative biases"),
        (
            design(layer(attention(position=ALIBI)), biased(SHARED)),
            r"layers\[1\].mixer.position.shared: no earlier layer has relative biases",
        ),
        (design(biased({}), biased(SHARED, 3)), r"layers\[1\].mixer.heads: differs from layers\[0\]'s, whose relative"),
        (
            design(biased({}), biased(SHARED | {"buckets": 4})),
            r"layers\[1\].mixer.position.buckets: differs from layers\[0\]'s, whose relative biases it shares",
        ),
        (
            design(biased({}), biased(SHARED | {"max_distance": 4})),
            r"layers\[1\].mixer.position.max_distance: differs from layers\[0\]'s",
        ),
        (design(biased({}), biased(SHARED, causal=False)), r"layers\[1\].mixer.causal: differs from layers\[0\]'s"),
        (
            design(biased({}), layer({"kind": "pair", "first": attention(), "second": biased(SHARED)["mixer"]})),
            r"layers\[1\].mixer.second.position.shared: is for a layer",
        ),
        (
            design(layer({"kind": "pair", "first": attention(), "second": biased({})["mixer"]}), biased(SHARED)),
            r"layers\[1\].mixer.position.shared: no earlier layer",
        ),
        (
            design(biased({}), biased(SHARED), multi_token={}),
            "multi_token: the last layer reads the position table of another layer; give it its own",
        ),
    ],
)
def test_a_table_that_cannot_be_shared_is_refused(data: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        build(heddle.load_config(data), device="meta")


@pytest.mark.parametrize("rewrite", ["kv_heads=1", "depth=6", "gated_delta,keep=1", "window=4"])
def test_conversions_of_attention_refuse_it(rewrite: str) -> None:
    config = parse_config(ModelConfig, design(biased({}), biased(SHARED)))
    reason = "reads the table of relative positions of layer 0, but .* would change only one of the two"
    with pytest.raises(ConfigError, match=rf"^layers\.1\.mixer\.position\.shared: {reason}"):
        parse_rewrite(rewrite).check_layers(config)


def test_a_small_design_shares_as_well() -> None:
    layers = (
        biased({"buckets": 32, "max_distance": 128}, 12),
        biased({"buckets": 32, "max_distance": 128} | SHARED, 12),
    )
    small = shrink(parse_config(ModelConfig, design(layers[0], layers[1] | {"repeat": 11}, width=768)))
    assert small.bias_sources == (None, 0)
    assert small.width < 100


def test_the_explorer_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"^layers\[1\]\.mixer\.position\.shared: is not known to the explorer"):
        explorer_design(parse_config(ModelConfig, design(biased({}), biased(SHARED))))
    explorer_design(parse_config(ModelConfig, design(biased({}))))
    fields = {kind.kind: {field.name for field in kind.fields} for kind in kinds_of("positions")}
    assert fields["relative_bias"] == {"buckets", "max_distance"}
    assert "shared" in {field.name for kind in kinds_of("feedforwards") for field in kind.fields}
