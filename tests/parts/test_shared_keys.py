"""Keys and values that a layer reads from an earlier one: a plain loop, states, sizes, and what is refused."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.conversion.convert import Conversion
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import ModelWeights
from heddle.errors import ConfigError
from heddle.exchange.family_match import chosen_match
from heddle.laws.harness import model_under_test, normal_tensor, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from tests.cases import Data, attention, by_day, case, design, layer
from tests.conversion.exactness import converted_model, difference, source_model
from tests.laws.planting import calls

WIDTH, LENGTH = 12, 7


def normalized(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm of one vector."""
    return x / (x.square().mean() + 1e-5).sqrt() * gain


def rotated(x: Tensor, position: int) -> Tensor:
    """RoPE of one head, each dim of the first half with one of the second."""
    half, parts = len(x) // 2, []
    angles = [position * 10000.0 ** (-i / half) for i in range(half)]
    parts += [x[i] * math.cos(angle) - x[i + half] * math.sin(angle) for i, angle in enumerate(angles)]
    parts += [x[i + half] * math.cos(angle) + x[i] * math.sin(angle) for i, angle in enumerate(angles)]
    return torch.stack(parts)


def loop(model: Decoder, stream: list[Tensor]) -> list[Tensor]:
    """The hidden states of one sequence of embeddings, a layer, a head and a token at a time.

    What a layer reads is found here by walking back over the layers.
    """
    kept: list[tuple[Any, list[list[Tensor]], list[list[Tensor]]]] = []  # window, keys and values [token][head]
    parameters = dict(model.named_parameters())
    for index, config in enumerate(model.config.resolved().layers):
        mixer: Any = config.mixer
        get = lambda name, index=index: parameters[f"layers.{index}.{name}"]  # noqa: E731
        inputs = [normalized(x, get("residual.norms.mixer.weight")) for x in stream]
        d, d_v, size = mixer.head_dim, mixer.value_dim, mixer.heads // mixer.kv_heads

        def head(name: str, x: Tensor, number: int, t: int, get: Any = get, mixer: Any = mixer, d: int = d) -> Tensor:
            y = get(f"mixer.{name}.weight")[number * d : (number + 1) * d] @ x
            y = y if mixer.qk_norm is None else normalized(y, get(f"mixer.{name}_norm.weight"))
            return y if mixer.position is None else rotated(y, t)

        if mixer.shared_kv:
            keys, values = next((k, v) for window, k, v in reversed(kept) if window == mixer.window)
        else:
            keys = [[head("k", x, g, t) for g in range(mixer.kv_heads)] for t, x in enumerate(inputs)]
            w = get("mixer.k.weight" if mixer.k_eq_v else "mixer.v.weight")
            values = [[w[g * d_v : (g + 1) * d_v] @ x for g in range(mixer.kv_heads)] for x in inputs]
            if mixer.value_norm:
                values = [[normalized(v, torch.ones(d_v)) for v in heads] for heads in values]
            kept.append((mixer.window, keys, values))
        outputs = []
        for t, x in enumerate(inputs):
            first, heads = 0 if mixer.window is None else max(0, t + 1 - mixer.window), []
            for number in range(mixer.heads):
                q, g = head("q", x, number, t), number // size
                scores = torch.stack([q @ keys[s][g] for s in range(first, t + 1)]) / math.sqrt(d)
                weights = scores.exp() / scores.exp().sum()
                heads.append(sum((weights[s - first] * values[s][g] for s in range(first, t + 1)), torch.zeros(d_v)))
            outputs.append(get("mixer.out.weight") @ torch.cat(heads))
        stream = [x + y for x, y in zip(stream, outputs, strict=True)]
    return [normalized(x, parameters["final_norm.norm.weight"]) for x in stream]


def random_design(seed: int) -> Data:
    """Layers of attention alone, of two windows; some read the keys and values of others."""
    draw = random.Random(seed)
    window = draw.choice((2, 3))
    kinds: dict[int | None, Data] = {}
    for each in (None, window):
        kinds[each] = {
            "kv_heads": draw.choice((1, 2)), "head_dim": draw.choice((2, 4, 6)), "value_dim": draw.randint(2, 5),
            "position": draw.choice((None, {"kind": "rope"})), "qk_norm": draw.choice((None, "head")),
            "k_eq_v": draw.random() < 0.3, "value_norm": draw.random() < 0.3,
        }  # fmt: skip
        if kinds[each]["k_eq_v"]:
            kinds[each]["value_dim"] = kinds[each]["head_dim"]
    layers, seen = [], set[int | None]()
    for index in range(draw.randint(2, 6)):
        each = draw.choice((None, window)) if index != 1 else next(iter(seen))
        shares = each in seen and (index == 1 or draw.random() < 0.6)
        seen.add(each)
        fields = kinds[each] | {"heads": kinds[each]["kv_heads"] * draw.choice((1, 2)), "window": each}
        own = {} if shares else fields
        fields |= {name: own.get(name, False) for name in ("k_eq_v", "value_norm")}
        layers.append(layer(attention(**fields, shared_kv=shares), None))
    return design(*layers, width=WIDTH)


def largest_errors(model: Decoder, seed: int) -> tuple[float, float]:
    """The largest difference of the hidden states, and of the gradients of all weights and embeddings."""
    generator = torch.Generator().manual_seed(seed)
    embedded = normal_tensor((1, LENGTH, WIDTH), generator).requires_grad_()
    probe = normal_tensor((LENGTH, WIDTH), generator)
    actual, expected = model(embedded)[0][0], torch.stack(loop(model, list(embedded[0])))
    inputs = [embedded, *model.layers.parameters()]
    gradients = [torch.autograd.grad((y * probe).sum(), inputs) for y in (actual, expected)]
    return (
        float((actual - expected).detach().abs().max()),
        max(float((got - want).abs().max()) for got, want in zip(*gradients, strict=True)),
    )


@pytest.mark.parametrize("seed", by_day(12, 48))
def test_shared_keys_are_those_of_a_plain_loop(seed: int) -> None:
    config = parse_config(ModelConfig, random_design(seed))
    assert any(source is not None for source in config.kv_sources)
    with torch.device("cpu"):
        model = model_under_test(config)
    torch.set_default_dtype(torch.float64)
    try:
        errors = largest_errors(model, seed)
    finally:
        torch.set_default_dtype(torch.float32)
    assert errors[0] < 1e-10
    assert errors[1] < 1e-9


READERS = design(
    layer(attention(kv_heads=2, window=3)),
    layer(attention(kv_heads=1, value_dim=5)),
    layer(attention(kv_heads=2, window=3, shared_kv=True)),
    layer(attention(kv_heads=1, value_dim=5, shared_kv=True), repeat=2),
)


def test_readers_have_no_projections_and_no_state() -> None:
    model = heddle.build(parse_config(ModelConfig, READERS))
    assert model.config.kv_sources == (None, None, 0, 1, 1)
    names = {name.split(".", 2)[2] for name, _ in model.layers.named_parameters(prefix="layers") if ".3.mixer" in name}
    assert names == {"mixer.q.weight", "mixer.out.weight"}
    assert model.init_state(2, 20).layer_bytes == [2 * 2 * 12 * 3 * 4, 2 * 1 * 11 * 20 * 4, 0, 0, 0]
    own = parse_config(
        ModelConfig, design(*(each | {"mixer": each["mixer"] | {"shared_kv": False}} for each in READERS["layers"]))
    )
    shared_size, own_size = (heddle.size(each, 20) for each in (model.config, own))
    assert own_size.parameters - shared_size.parameters == 24 * (2 * 12 + 2 * 11)
    assert shared_size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (own_size.flops_per_token - shared_size.flops_per_token) == 2 * 24 * (2 * 12 + 2 * 11)
    assert own_size.state_bytes - shared_size.state_bytes == 4 * (2 * 12 * 3 + 2 * 11 * 20)


def test_equal_readers_of_different_layers_are_different_layers() -> None:
    """Built once each, they find a source of the same shapes."""
    plain, capped = attention(kv_heads=2), attention(kv_heads=2, softcap=2.0)
    reader = layer(attention(kv_heads=2, shared_kv=True))
    config = parse_config(ModelConfig, design(layer(plain), layer(capped), layer(plain), reader, layer(capped), reader))
    assert config.kv_sources == (None, None, None, 2, None, 4)
    assert config.layer_order == (0, 1, 0, 2, 1, 3)
    assert heddle.size(config, 8).parameters == sum(each.numel() for each in heddle.build(config).parameters())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (design(layer(attention(shared_kv=True))), r"layers\[0\].mixer.shared_kv: no earlier layer has keys"),
        (
            design(layer(attention(window=3)), layer(attention(window=4, shared_kv=True))),
            r"layers\[1\].mixer.shared_kv: no earlier layer has keys",
        ),
        (
            design(layer(attention(kv_heads=2)), layer(attention(kv_heads=1, shared_kv=True))),
            r"layers\[1\].mixer.kv_heads: differs from that of layers\[0\], whose keys and values it reads; make",
        ),
        (
            design(layer(attention()), layer(attention(shared_kv=True, value_norm=True))),
            r"layers\[1\].mixer.value_norm: has no effect with shared_kv",
        ),
        (
            design(layer(attention(k_eq_v=True, value_dim=5))),
            r"layers\[0\].mixer.value_dim: 5 is not head_dim = 6, but k_eq_v makes values of keys",
        ),
        (
            design(layer(attention(value_norm=True, value_dim=1))),
            r"layers\[0\].mixer.value_norm: leaves the norm one number per head",
        ),
        (
            design(layer(attention(k_eq_v=True, short_convolution={"of": ["v"]}))),
            r"layers\[0\].mixer.short_convolution.of: v is not projected with k_eq_v",
        ),
        (
            design(layer(attention(qk_norm="head")), layer(attention(shared_kv=True))),
            r"layers\[1\].mixer.qk_norm: differs from",
        ),
        (
            design(layer(attention()), layer(attention(position={"kind": "rope", "base": 5.0}, shared_kv=True))),
            r"layers\[1\].mixer.position: differs from",
        ),
        (
            design(
                layer(attention()), layer({"kind": "pair", "first": attention(shared_kv=True), "second": attention()})
            ),
            r"layers\[1\].mixer.first.shared_kv: is for a layer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(data: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        heddle.load_config(data)


def test_a_call_leaves_nothing_behind() -> None:
    """Keys of one call are not those of the next, even if both have one layout; nor does the layout keep them."""
    model = model_under_test(parse_config(ModelConfig, READERS))
    layout, tokens, others = heddle.Layout.causal(2, 9), *(random_tokens(model.config, 2, 9, seed) for seed in (0, 1))
    with torch.no_grad():
        first = model(tokens, layout)[0]
        model(others, layout)
        assert torch.equal(model(tokens, layout)[0], first)
    assert layout.handed_over is None


def test_recomputed_layers_have_the_same_gradients() -> None:
    """A checkpointed reader finds in the backward pass what its source handed over in the forward pass."""
    model = model_under_test(parse_config(ModelConfig, READERS)).train()
    tokens, gradients = random_tokens(model.config, 2, 9), []
    for model.checkpointing in (False, True):
        model(tokens)[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None
        assert recomputed is not None
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=1e-12)


def test_no_family_takes_them() -> None:
    with pytest.raises(ConfigError, match="shared_kv is true"):
        chosen_match(case("attention-shared-keys-repeated"), "llama")


@pytest.mark.parametrize("target", ["width=32", "head.tied=false", "fold_norms,final_norm=false"])
def test_conversions_that_leave_attention_alone_keep_the_logits(target: str) -> None:
    source = source_model(parse_config(ModelConfig, READERS))
    assert difference(source, converted_model(source, parse_rewrite(target))) < 1e-10


@pytest.mark.parametrize(
    "target", ["kv_heads=1,groups=contiguous,merge=mean", "window,window=2", "rope_layout,layout=interleaved"]
)
def test_other_conversions_are_refused(target: str) -> None:
    source: Any = SimpleNamespace(
        weights=ModelWeights(source_model(parse_config(ModelConfig, READERS))), tokenizer=None
    )
    with pytest.raises(ConfigError, match=r"layers.2.mixer.shared_kv .*: reads the keys and values of layer 0"):
        Conversion(source, (parse_rewrite(target),)).plan()


def first_sources(config: ModelConfig) -> tuple[int | None, ...]:
    """A mistake: the first layer of a window in the place of the last."""
    first: dict[Any, int] = {}
    sources: list[int | None] = []
    for index, (_, entry) in enumerate(config.expand()):
        assert entry.mixer is not None
        source = first.setdefault(entry.mixer.kv_kind, index)
        sources.append(source if entry.mixer.reads_kv else None)
    return tuple(sources)


def test_the_loop_sees_another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "kv_sources", property(first_sources))
    config = parse_config(
        ModelConfig, design(*(layer(attention(2, shared_kv=i == 2), None) for i in range(3)), width=12)
    )
    torch.set_default_dtype(torch.float64)
    try:
        assert largest_errors(model_under_test(config), 0)[0] > 1e-3
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_kept_dictionary_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls(Decoder._run, "replace", lambda change, layout, **_: layout)(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_call_leaves_nothing_behind()
