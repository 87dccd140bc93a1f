"""Value embeddings: a plain loop over tokens and heads, tables that layers share, states, sizes, refusals."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.conversion.targets import parse_rewrite
from heddle.errors import ConfigError
from heddle.laws.harness import model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.parts.modules.value_embedding import ValueEmbedding
from tests.cases import Data, attention, by_day, case, design, differential, layer
from tests.conversion.exactness import converted_model, source_model
from tests.laws.planting import Plant, calls, reads, wrapped
from tests.parts.loops import DecoderLoop, Errors, assert_none, errors, normalized, rotated, sigmoid

WIDTH, LENGTH = 12, 7
KINDS = ("attention", "retention", "linear_attention", "differential_attention")


class TableLoop(DecoderLoop):
    """Hidden states of one document of ids. The table that a layer reads is found by walking back over the layers."""

    def of_tokens(self, tokens: list[int]) -> Tensor:
        """Ids [T] -> hidden states [T, width]."""
        self.tokens = tokens
        return self.hidden([self.parameters["embed.weight"][token] for token in tokens])

    @property
    def index(self) -> int:
        """Of the layer."""
        return int(self.prefix.split(".")[1])

    def table(self) -> Tensor:
        """E of the layer."""
        mixer: Any = self.layers[self.index].mixer
        for index in range(self.index, -1, -1):
            other: Any = self.layers[index].mixer
            found = other.value_embedding if other.kind == mixer.kind else None
            own = found is not None and not found.shared and found.table == mixer.value_embedding.table
            if own and (index == self.index or mixer.value_embedding.shared):
                return self.parameters[f"layers.{index}.mixer.value_embedding.weight"]
        raise AssertionError(self.prefix)

    def embedded(self, mixer: Any, inputs: list[Tensor], values: list[list[Tensor]]) -> list[list[Tensor]]:
        """v [token][head] with the rows added."""
        config = mixer.value_embedding
        if config is None:
            return values
        result = []
        for token, x, heads in zip(self.tokens, inputs, values, strict=True):
            row, added = self.table()[token], []
            for h, v in enumerate(heads):
                e = row[h * len(v) : (h + 1) * len(v)]
                if config.mix == "gate":
                    channels = config.gate_channels or min(32, len(x))
                    logit = (self.get("mixer.value_embedding.gate.weight")[h] * x[:channels]).sum()
                    added.append(v + (config.gate_bound or 2.0) * sigmoid(logit) * e)
                else:
                    a, b = self.get("mixer.value_embedding.mix") if config.mix == "learned" else config.mix
                    added.append(a * v + b * e)
            result.append(added)
        return result

    def own_values(self, mixer: Any, inputs: list[Tensor]) -> list[list[Tensor]]:
        """v of softmax attention."""
        return self.embedded(mixer, inputs, super().own_values(mixer, inputs))

    def attend(self, mixer: Any, inputs: list[Tensor]) -> list[Tensor]:
        """Any of the four mixers."""
        if mixer.kind == "attention":
            return super().attend(mixer, inputs)
        groups = mixer.kv_heads if mixer.kind == "differential_attention" else mixer.heads
        v = self.embedded(mixer, inputs, self.split("v", inputs, groups))
        outputs = []
        for t in range(len(inputs)):
            heads = [self.head(mixer, inputs, v, t, h, h // (mixer.heads // groups)) for h in range(mixer.heads)]
            outputs.append(self.get("mixer.out.weight") @ torch.cat(heads))
        return outputs

    def split(self, name: str, inputs: list[Tensor], heads: int) -> list[list[Tensor]]:
        """A projection [token][head]."""
        return [list((self.get(f"mixer.{name}.weight") @ x).chunk(heads)) for x in inputs]

    def head(self, mixer: Any, inputs: list[Tensor], v: list[list[Tensor]], t: int, h: int, g: int) -> Tensor:
        """The output of query head h for token t."""
        if mixer.kind == "differential_attention":
            q, k = self.split("q", inputs, 2 * mixer.heads), self.split("k", inputs, 2 * mixer.kv_heads)
            maps = []
            for i in range(2):
                scores = [rotated(q[t][2 * h + i], t) @ rotated(k[s][2 * g + i], s) for s in range(t + 1)]
                weights = (torch.stack(scores) / math.sqrt(mixer.head_dim)).exp()
                maps.append(weights / weights.sum())
            q1, k1, q2, k2 = (self.get(f"mixer.lambda_{name}") for name in ("q1", "k1", "q2", "k2"))
            initial = 0.8 - 0.6 * math.exp(-0.3 * self.index)
            weights = maps[0] - ((q1 @ k1).exp() - (q2 @ k2).exp() + initial) * maps[1]
            y = torch.stack([w * v[s][g] for s, w in enumerate(weights)]).sum(0)
            return normalized(y, self.get("mixer.norm.weight")) * (1 - initial)
        q, k = (self.split(name, inputs, mixer.heads) for name in ("q", "k"))
        if mixer.kind == "retention":
            decay = 1 - 2.0 ** (-5 - h)
            y = torch.stack([decay ** (t - s) * (q[t][h] @ k[s][h]) * v[s][h] for s in range(t + 1)]).sum(0)
            return normalized(y, self.get("mixer.norm.weight")[h])
        weights = torch.stack([elu_plus_1(q[t][h]) @ elu_plus_1(k[s][h]) for s in range(t + 1)])
        return torch.stack([w * v[s][h] for s, w in enumerate(weights / weights.sum())]).sum(0)


def elu_plus_1(x: Tensor) -> Tensor:
    """x + 1 above 0, exp(x) below."""
    return torch.where(x > 0, x + 1, x.exp())


def random_design(seed: int) -> Data:
    """Layers of one mixer, whose values have one shape; most add rows, of tables that some of them share."""
    draw = random.Random(seed)
    kind = KINDS[seed % 4] if seed >= 20 else "attention"
    kv_heads, value_dim = draw.choice((1, 2)), draw.randint(2, 5)
    pool = draw.sample(("plain", "own", "unnumbered", 0, 1), 2)
    roles = ["own", *(draw.choice(pool) for _ in range(draw.randint(2, 4)))]
    roles = ["own" if roles.count(role) == 1 and role != "plain" else role for role in roles]  # nobody shares it
    layers = []
    for index, role in enumerate(roles):
        fields: Data = {"mix": draw.choice(("gate", "learned", [round(draw.uniform(-1, 1), 3), 0.4]))}
        if fields["mix"] == "gate" and draw.random() < 0.5:
            fields |= {"gate_channels": draw.randint(1, WIDTH), "gate_bound": draw.choice((1.0, 3.0))}
        fields |= {"shared": role not in ("own", "plain") and role in roles[:index]}
        fields |= {"table": role} if isinstance(role, int) else {}
        mixer = mixer_of(kind, draw, kv_heads, value_dim, index)
        layers.append(layer(mixer if role == "plain" else mixer | {"value_embedding": fields}, None))
    return design(*layers, width=WIDTH)


def mixer_of(kind: str, draw: random.Random, kv_heads: int, value_dim: int, index: int) -> Data:
    """A mixer whose values have this shape."""
    if kind in ("retention", "linear_attention"):
        return {"kind": kind, "heads": kv_heads, "head_dim": draw.randint(1, 5), "value_dim": value_dim}
    shape: Data = {"kv_heads": kv_heads, "value_dim": value_dim, "head_dim": draw.choice((2, 4))}
    heads = kv_heads * draw.choice((1, 2))
    if kind == "differential_attention":
        return differential(heads, **shape)
    residual = draw.choice((None, "learned", [0.5, 0.8])) if index else None
    options = {"window": draw.choice((None, 2, 3)), "value_norm": draw.random() < 0.4, "value_residual": residual}
    return attention(heads, draw.choice((None, {"kind": "rope"})), **shape, **options)


def largest_errors(seed: int, length: int = LENGTH) -> Errors:
    """Of the hidden states, and of the gradients of all weights but the head's."""
    return errors_of(random_design(seed), seed, length)


def errors_of(data: Data, seed: int = 0, length: int = LENGTH) -> Errors:
    """The same, of a design."""
    model = model_under_test(parse_config(ModelConfig, data))
    tokens = random_tokens(model.config, 1, length, seed)
    weights = [parameter for name, parameter in model.named_parameters() if not name.startswith("head")]
    return errors(model(tokens)[0][0], TableLoop(model, model.config).of_tokens(tokens[0].tolist()), weights)


@pytest.mark.parametrize("seed", by_day(12, 48))
def test_values_and_gradients_are_those_of_a_plain_loop(seed: int) -> None:
    assert_none(largest_errors(seed))


def test_the_random_designs_share_tables_and_mix_in_each_way() -> None:
    configs = [parse_config(ModelConfig, random_design(seed)) for seed in range(48)]
    tables = [layer.mixer.value_table for config in configs for layer in config.layers if layer.mixer is not None]
    assert sum(any(source is not None for source in config.table_sources) for config in configs) >= 15
    assert {"gate", "learned"} <= {str(table.mix) for table in tables if table is not None}
    assert {layer.mixer.kind for config in configs for layer in config.layers if layer.mixer} == set(KINDS)


THREE = ("learned", "gate", "learned")
PLAIN = design(
    *(layer(attention(2, value_dim=3, value_embedding={"mix": mix, "shared": index == 2}), None)
      for index, mix in enumerate(THREE)), width=WIDTH
)  # fmt: skip
WRONG: dict[str, Plant] = {
    "the two factors in each other's place": calls(ValueEmbedding.forward, "unbind", lambda x: x.flip(0).unbind()),
    "a gate without its bound": reads(ValueEmbedding.forward, "bound", lambda bound: 1.0, nth=1),
    "a gate of the last channels": reads(ValueEmbedding.forward, "x", lambda x: x.flip(-1), nth=0),
    "the rows of the next token": calls(ValueEmbedding._rows, "token_ids", lambda ids, *call: ids(*call).roll(-1, 1)),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_a_wrong_formula(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[bug](monkeypatch)
    assert errors_of(PLAIN)[0] > 1e-3


def first_tables(config: ModelConfig) -> tuple[int | None, ...]:
    """A mistake: the first table in the place of the last."""
    tables = [None if each.mixer is None else each.mixer.value_table for _, each in config.expand()]
    return tuple(0 if table is not None and table.shared else None for table in tables)


def test_the_loop_sees_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "table_sources", property(first_tables))
    assert errors_of(PLAIN)[0] > 1e-3


def test_the_loop_sees_a_table_that_is_mixed_after_the_first_values(monkeypatch: pytest.MonkeyPatch) -> None:
    data = design(
        layer(attention(2), None), layer(attention(2, value_residual=[0.5, 2.0], value_embedding={}), None), width=WIDTH
    )
    assert errors_of(data)[0] < 1e-10
    twice = wrapped(ValueEmbedding.forward, lambda add, module, x, v, *call: v + 2 * (add(module, x, v, *call) - v))
    twice(monkeypatch)  # as if added after the first factor of the residual
    assert errors_of(data)[0] > 1e-3


def test_a_shared_table_is_stored_once() -> None:
    u_net = [0, 1, None, 0, 1]
    entries = [
        layer(attention(kv_heads=2, value_dim=5, value_embedding=None if number is None else {
            "table": number, "shared": index > 2, "mix": "learned"})) for index, number in enumerate(u_net)
    ]  # fmt: skip
    config = parse_config(ModelConfig, design(*entries))
    assert config.table_sources == (None, None, None, 0, 1)
    model, sizes = heddle.build(config), heddle.size(config, 20)
    owners = [name for name, _ in model.named_parameters() if name.endswith("value_embedding.weight")]
    assert owners == ["layers.0.mixer.value_embedding.weight", "layers.1.mixer.value_embedding.weight"]
    plain = [each | {"mixer": each["mixer"] | {"value_embedding": None}} for each in entries]
    without = heddle.size(parse_config(ModelConfig, design(*plain)), 20)
    assert sizes.parameters - without.parameters == 2 * 61 * 10 + 4 * 2
    assert sizes.parameters == sum(each.numel() for each in model.parameters())
    assert sizes.active_parameters - without.active_parameters == 2 * 10 + 4 * 2
    assert (sizes.state_bytes, sizes.flops_per_token) == (without.state_bytes, without.flops_per_token)


def test_a_gate_costs_its_product() -> None:
    both: tuple[Data | None, ...] = ({}, None)
    config, plain = (
        parse_config(ModelConfig, design(layer(attention(kv_heads=2, value_embedding=each)))) for each in both
    )
    assert heddle.size(config, 20).flops_per_token - heddle.size(plain, 20).flops_per_token == 2 * 24 * 2
    assert heddle.size(config, 20).parameters - heddle.size(plain, 20).parameters == 61 * 12 + 24 * 2


def test_first_weights_are_as_published() -> None:
    """The table as the projection to values, a gate of 1, or two factors of one half."""
    model = heddle.build(case("attention-value-embedding").replace(vocab_size=4000))
    for name in ("v", "value_embedding"):
        weight = model.get_parameter(f"layers.0.mixer.{name}.weight").detach()
        assert float(weight.std()) == pytest.approx(0.02, rel=4 / (2 * weight.numel()) ** 0.5)  # 4 standard errors
    assert not model.get_parameter("layers.0.mixer.value_embedding.gate.weight").any()
    assert model.get_parameter("layers.1.mixer.value_embedding.mix").tolist() == [0.5, 0.5]


def test_new_ids_have_rows_of_zero() -> None:
    model = source_model(case("attention-value-embedding"))
    for size in (70, 50):
        other = converted_model(model, parse_rewrite(f"vocab_size={size}"))
        table = other.get_parameter("layers.0.mixer.value_embedding.weight")
        assert len(table) == size
        assert not table[61:].any()
        tokens = random_tokens(other.config.replace(vocab_size=50), 2, LENGTH)
        torch.testing.assert_close(other(tokens)[0], model(tokens)[0], rtol=0, atol=1e-10)


def test_vectors_in_place_of_tokens_are_refused() -> None:
    model = heddle.build(parse_config(ModelConfig, PLAIN))
    with pytest.raises(ConfigError, match=r"^tokens: are vectors, but a layer reads ids"):
        model(torch.zeros(1, 3, WIDTH))


def values(fields: Data, **others: Any) -> Data:
    """A layer with this value embedding."""
    return layer(attention(value_embedding=fields, **others))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (design(values({"mix": [1.0]})), r"layers\[0\].mixer.value_embedding.mix: \[1.0\] should be two numbers"),
        (design(values({"mix": [1.0, 0.0]})), r"layers\[0\].mixer.value_embedding.mix: adds nothing"),
        (
            design(values({"mix": "learned", "gate_bound": 2.0})),
            r"layers\[0\].mixer.value_embedding.gate_bound: is for a gate",
        ),
        (
            design(values({"gate_channels": 25})),
            r"layers\[0\].mixer.value_embedding.gate_channels: 25 is more than width = 24",
        ),
        (
            design(values({}, shared_kv=True)),
            r"layers\[0\].mixer.value_embedding: has no effect with shared_kv",
        ),
        (design(values({"shared": True})), r"layers\[0\].mixer.value_embedding.shared: no earlier layer has attention"),
        (
            design(values({"table": 1}), values({"table": 2, "shared": True})),
            r"layers\[0\].mixer.value_embedding.table: no later layer shares the table 1",
        ),
        (
            design(values({}), values({"table": 2, "shared": True})),
            r"layers\[1\].mixer.value_embedding.shared: no earlier layer has attention .* with the number 2",
        ),
        (
            design(values({}), layer({"kind": "retention", "heads": 4, "value_embedding": {"shared": True}})),
            r"layers\[1\].mixer.value_embedding.shared: no earlier layer has retention",
        ),
        (
            design(values({}), values({"shared": True}, value_dim=5)),
            r"layers\[1\].mixer.value_dim: differs from layers\[0\]'s, whose value embeddings it shares",
        ),
        (
            design(
                layer({"kind": "pair", "first": attention(), "second": attention(value_embedding={"shared": True})})
            ),
            r"layers\[0\].mixer.second.value_embedding.shared: is for a layer",
        ),
        (design(values({}), multi_token={}), "multi_token: the last layer reads the ids of tokens"),
    ],
)
def test_what_does_not_fit_is_refused(data: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        heddle.load_config(data)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("latent_attention", {"heads": 2, "kv_rank": 4, "nope_dim": 4}, "only a latent of them is cached"),
        ("gated_delta", {"heads": 2}, "these are convolved"),
        ("kda", {"heads": 2}, "these are convolved"),
        ("cross_attention", {"heads": 2}, "values are the encoder's"),
        ("compressed_attention", {"heads": 2, "window": 4}, "keys are values"),
        ("mamba2", {"heads": 2}, "is for attention, differential_attention, linear_attention and retention"),
    ],
)
def test_mixers_without_such_values_say_why(kind: str, fields: Data, reason: str) -> None:
    data = design(layer({"kind": kind, "value_embedding": {}, **fields}))
    with pytest.raises(ConfigError, match=rf"^layers\[0\].mixer.value_embedding: .*{reason}"):
        heddle.load_config(data)


@pytest.mark.parametrize("rewrite", ["kv_heads=1", "depth=6", "width=48"])
def test_conversions_of_layers_refuse(rewrite: str) -> None:
    config = parse_config(ModelConfig, design(values({}), values({})))
    with pytest.raises(ConfigError, match=r"^layers.0.mixer: reads the ids of tokens"):
        parse_rewrite(rewrite).check_layers(config)
