"""linear_attention and retention against loops over tokens written from the papers; errors; the state."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import kind_class, kinds, parse_config
from heddle.errors import ConfigError
from heddle.laws import LAWS, DoesNotApply
from heddle.laws.harness import forward_in_chunks, model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.dispatch import DeviceSize
from heddle.numerics.recurrent import batched_chunks, chunked_sums, gated_delta, general_delta, selective_scan, ssd
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer, MixerConfig
from heddle.parts.mixers.retention import Retention
from tests.cases import CASES, LINEAR, RETENTION, ROPE, case, design, layer
from tests.laws.planting import Plant, assigned, calls, condition
from tests.parts.loops import rotated


def mixers_of(name: str) -> list[MixerConfig]:
    return [entry.mixer for _, entry in case(name).expand() if entry.mixer is not None]


def model_of(mixer: dict[str, Any], **fields: Any) -> Decoder:
    return model_under_test(parse_config(ModelConfig, design(layer({**mixer, **fields}))))


def mixer_of(model: Decoder) -> Mixer:
    mixer = model.mixers()[0]
    assert mixer is not None
    return mixer


def project(mixer: Mixer, name: str, x: Tensor, heads: int) -> Tensor:
    """One row's heads [H, T, d]."""
    weight = mixer.get_parameter(f"{name}.weight")
    return torch.stack([(x @ weight.T)[:, h * (d := len(weight) // heads) : (h + 1) * d] for h in range(heads)])


def turned(x: Tensor) -> Tensor:
    """One head [T, d] rotated by its positions."""
    return torch.stack([rotated(token, t) for t, token in enumerate(x)])


def features(x: Tensor, kind: str, weight: Tensor | None) -> Tensor:
    if kind == "relu":
        return x.clamp(min=0)
    if kind == "elu":
        return torch.where(x > 0, x + 1, x.exp())
    assert weight is not None
    scores = x @ weight.T
    return torch.cat((scores.softmax(1), (-scores).softmax(1)), dim=1)


MAPS = [("elu", "elu"), ("relu", "relu"), ("relu", "elu"), ("learned", "learned")]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position", [None, ROPE])
@pytest.mark.parametrize("maps", MAPS)
def test_linear_attention_equals_its_formula(maps: tuple[str, str], position: Any, causal: bool) -> None:
    """Loops over queries and keys: `Σ_j φ(q_i)·ψ(k_j) v_j / Σ_j φ(q_i)·ψ(k_j)`, rotated in the numerator only."""
    fields = {"feature_map": maps[0], "key_feature_map": maps[1], "causal": causal, "position": position}
    mixer = mixer_of(model_of(LINEAR, head_dim=6, value_dim=5, **fields))
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    with torch.no_grad():
        got, _ = mixer(x, Layout.causal(1, 9))
        heads = []
        for h in range(3):
            q, k, v = (project(mixer, name, x[0], 3)[h] for name in "qkv")
            weights = [mixer.get_parameter(f"{n}_map.weight")[h] if maps[0] == "learned" else None for n in "qk"]
            plain = [features(q, maps[0], weights[0]), features(k, maps[1], weights[1])]
            inputs = plain if position is None else [turned(z) for z in plain]
            rows = []
            for i in range(9):
                visible = range(i + 1) if causal else range(9)
                numerator = sum((float(inputs[0][i] @ inputs[1][j]) * v[j] for j in visible), torch.zeros(5).double())
                denominator = math.fsum(float(plain[0][i] @ plain[1][j]) for j in visible)
                rows.append(numerator / denominator if denominator else torch.zeros_like(numerator))
            heads.append(torch.stack(rows))
        want = torch.cat(heads, dim=1) @ mixer.get_parameter("out.weight").T
    torch.testing.assert_close(got[0], want, rtol=0, atol=1e-12)


def test_double_softmax_equals_its_formula() -> None:
    mixer = mixer_of(model_of(LINEAR, value_dim=5, normalization="double_softmax", causal=False))
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    with torch.no_grad():
        got, _ = mixer(x, Layout.causal(1, 9))
        q, k, v = (project(mixer, name, x[0], 3) for name in "qkv")
        heads = [q[h].softmax(1) @ (k[h].softmax(0).T @ v[h]) for h in range(3)]
        want = torch.cat(heads, dim=1) @ mixer.get_parameter("out.weight").T
    torch.testing.assert_close(got[0], want, rtol=0, atol=1e-12)


def retention_distance(**fields: Any) -> float:
    """Of the module from a loop over tokens: `W_out (norm(y) ⊙ g(W_g x))`, y from the activations of q, k and v."""
    mixer, x = mixer_of(model_of(RETENTION, value_dim=5, **fields)), torch.randn(1, 9, 24, dtype=torch.float64)
    decay, gate, eps = fields["decay"], fields["gate"], fields.get("norm", {"eps": 1e-5})["eps"]
    with torch.no_grad():
        got, _ = mixer(x, Layout.causal(1, 9))
        gammas = [1 - 2.0 ** (-5 - h) for h in range(3)] if decay is None else decay
        if decay == "learned":
            gammas = mixer.get_parameter("decay.weight").sigmoid().tolist()
        heads = []
        for h, gamma in enumerate(gammas):
            q, k, v = (project(mixer, name, x[0], 3)[h] for name in "qkv")
            if "activation" in fields:
                q, k, v = ((z * z.sigmoid() if fields["activation"] == "silu" else z.clamp(min=0)) for z in (q, k, v))
            if fields.get("position") is not None:
                q, k = turned(q), turned(k)
            state, rows = torch.zeros(8, 5, dtype=torch.float64), []
            for t in range(9):
                state = gamma * state + torch.outer(k[t], v[t])
                rows.append(q[t] @ state)
            heads.append(torch.stack(rows))
        gains = mixer.get_parameter("norm.weight").detach()
        if fields.get("output_norm") == "projection":
            heads, gains = [torch.cat(heads, dim=1)], gains[None]
        normed = [y / (y.pow(2).mean(1, keepdim=True) + eps).sqrt() * gains[h] for h, y in enumerate(heads)]
        want = torch.cat(normed, dim=1)
        if gate is not None:
            gate_logits = x[0] @ mixer.get_parameter("gate.weight").T
            want = want * (gate_logits.sigmoid() * (gate_logits if gate == "silu" else 1.0))
        return float((got[0] - want @ mixer.get_parameter("out.weight").T).abs().max())


@pytest.mark.parametrize("gate", [None, "silu", "sigmoid"])
@pytest.mark.parametrize("decay", [None, "learned", [1.0, 0.9, 0.25]])
@pytest.mark.parametrize("position", [None, ROPE])
def test_retention_equals_its_formula(position: Any, decay: Any, gate: str | None) -> None:
    assert retention_distance(position=position, decay=decay, gate=gate) < 1e-11


LIGHTNING: dict[str, Any] = {
    "activation": "silu",
    "gate": "sigmoid",
    "output_norm": "projection",
    "norm": {"kind": "rms", "eps": 0.1},
    "decay": [0.9, 0.5, 0.3],
}


@pytest.mark.parametrize("output_norm", ["per_head", "projection"])
@pytest.mark.parametrize("function", ["silu", "relu"])
def test_lightning_attention_equals_its_formula(function: str, output_norm: str) -> None:
    assert retention_distance(**LIGHTNING | {"activation": function, "output_norm": output_norm}) < 1e-11


@pytest.mark.parametrize(
    "plant",
    [
        condition(Retention.forward, "activation", False),
        assigned(Retention.forward, "projections", lambda y, *, projections: [*y[:2], projections[2]], nth=1),
        calls(Retention.forward, "norm", lambda mixer, y: mixer.norm(y.cumsum(1)), nth=1),
    ],
    ids=["no activation", "none of the values", "a norm of all tokens so far"],
)
def test_a_wrong_lightning_attention_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert retention_distance(**LIGHTNING) > 1e-3


FIRST_CASES = {  # of each kind of recurrence, the first that has no other mixer
    kind: next(name for name in CASES if {mixer.kind for mixer in mixers_of(name)} == {kind})
    for kind in kinds("mixers")
    if kind_class("mixers", kind).is_recurrent()  # type: ignore[attr-defined]
}
RECURRENT = {kind: (name,) for kind, name in FIRST_CASES.items()} | {
    "retention": ("retention-lightning", "retention-rope-gate", "retention-learned-decays"),
    "linear_attention": ("linear-attention-rope", "linear-attention-bidirectional"),
    "kda": ("kda-own-widths",),
    "gated_delta": ("delta-key-heads", "delta-negative-eigenvalues", "delta-steps"),
    "mamba": ("mamba-norms",),
    "mamba2": ("mamba2-groups",),
    "rg_lru": ("rg-lru-own-width",),
    "rwkv7": ("rwkv7-own-widths", "rwkv7-value-residual"),
}
OF_CHUNKS = (
    "chunked_ragged_batch",
    "document_packing",
    "causality",
    "document_isolation",
    "padding_gradients",
    "kernel_equivalence",
)


def of_each_kind() -> Iterator[Any]:
    """Every law on a case of each kind by day, in turn, and on its others in the night."""
    for turn, law in enumerate(OF_CHUNKS):
        for names in RECURRENT.values():
            for number, name in enumerate(names):
                marks = () if number == turn % len(names) else pytest.mark.nightly
                yield pytest.param(law, name, marks=marks, id=f"{law}-{name}")


@pytest.mark.parametrize(("law", "name"), list(of_each_kind()))
def test_laws_hold_over_many_chunks(law: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws' texts are shorter than a chunk; here a chunk has three tokens, and a group two chunks."""
    for module in (batched_chunks, chunked_sums, gated_delta, general_delta, ssd):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 3)
    monkeypatch.setattr(selective_scan, "STRETCH", DeviceSize(0, 0))
    monkeypatch.setattr(selective_scan, "LEAST_TOKENS", 5)
    monkeypatch.setattr(batched_chunks, "SUM_BLOCK", 2)
    monkeypatch.setattr(batched_chunks, "SCAN_BLOCK", 2)
    monkeypatch.setattr(chunked_sums, "MAX_PAIRS", 120)
    has_state = not name.endswith("bidirectional")
    with nullcontext() if has_state or law != "chunked_ragged_batch" else pytest.raises(DoesNotApply):
        LAWS[law].check(case(name))


def test_keys_without_features_give_zeros_and_finite_gradients() -> None:
    model = model_of(LINEAR, feature_map="relu")
    mixer = mixer_of(model)
    with torch.no_grad():
        mixer.get_parameter("k.weight").copy_(-mixer.get_parameter("q.weight").abs())
        mixer.get_parameter("q.weight").abs_()
    x = torch.rand(1, 7, 24, dtype=torch.float64, requires_grad=True)
    y, _ = mixer(x, Layout.causal(1, 7))
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert y.abs().max() == 0
    assert slope.abs().max() == 0


@pytest.mark.parametrize("factor", [0.0, 1e4])
@pytest.mark.parametrize(
    "mixer", [LINEAR, {**LINEAR, "feature_map": "relu", "position": ROPE}, {**RETENTION, "decay": [1.0, 0.5, 0.9]}]
)
def test_long_texts_of_opposite_or_huge_tokens_stay_finite(mixer: dict[str, Any], factor: float) -> None:
    """Keys that sum to zero, and huge ones, over 4,096 tokens in float32."""
    module = mixer_of(model_of(mixer).float())
    x = torch.randn(1, 1, 24) * torch.tensor([1.0, -1.0]).repeat(2048)[None, :, None] * max(factor, 1.0)
    x.requires_grad_()
    y, _ = module(x, Layout.causal(1, 4096))
    assert bool(y.isfinite().all())
    assert bool(torch.autograd.grad(y.sum(), x)[0].isfinite().all())


@pytest.mark.parametrize(
    ("mixer", "elements"),
    [
        (LINEAR, 3 * 8 * (8 + 1)),
        ({**LINEAR, "head_dim": 5, "value_dim": 7}, 3 * 5 * (7 + 1)),
        ({**LINEAR, "head_dim": 5, "feature_map": "learned"}, 3 * 10 * (5 + 1)),
        (RETENTION, 3 * 8 * 8),
        ({**RETENTION, "head_dim": 6, "value_dim": 4}, 3 * 6 * 4),
    ],
)
def test_the_state_has_a_fixed_size_and_at_least_float32(mixer: dict[str, Any], elements: int) -> None:
    config = parse_config(ModelConfig, design(layer(mixer)))
    for dtype in (torch.float32, torch.bfloat16):
        for context in (16, 100_000):
            sizes = heddle.size(config, context_length=context, batch=2, dtype=dtype)
            assert sizes.layers[0].state_bytes == 2 * elements * 4
            assert sizes.state_bytes_per_token == 0
        model = heddle.build(config, dtype=dtype)
        _, state = forward_in_chunks(model, random_tokens(config, 2, 7), [3, 4])
        assert state.layer_bytes == [2 * elements * 4]
        assert state.tensors()["layers.0.kv_sums"].dtype == torch.float32


@pytest.mark.parametrize("name", FIRST_CASES.values())
def test_no_position_is_stored_of_a_longer_text(name: str) -> None:
    short, long = (heddle.size(case(name), context_length=tokens) for tokens in (64, 1024))
    assert short.state_bytes == long.state_bytes
    assert short.position_table_bytes == long.position_table_bytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"normalization": "double_softmax"}, r"causal:.*double_softmax"),
        ({"normalization": "double_softmax", "causal": False, "feature_map": "elu"}, "feature_map:"),
        ({"normalization": "double_softmax", "causal": False, "position": ROPE}, "position:"),
        ({"normalization": "double_softmax", "causal": False, "head_dim": 1}, "head_dim: 1"),
        ({"feature_map": "learned", "key_feature_map": "elu"}, "key_feature_map:"),
        ({"heads": 5}, r"heads: 5.*24"),
        ({"head_dim": 5, "position": ROPE}, r"position\.rotary_dim: 5 dims"),
    ],
)
def test_errors_of_linear_attention(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^layers\[0\]\.mixer\.{message}"):
        heddle.load_config(design(layer({**LINEAR, **fields})))


@pytest.mark.parametrize(
    ("decay", "message"),
    [
        ([0.5, 0.5], "decay: 2 factors"),
        ([0.5, 0.5, 1.5], r"decay\[2\]:"),
        ([0.5, 0.5, 0.0], r"decay\[2\]:"),
        ("learnt", r"decay:.*'learned'.*'learnt'"),
        (0.5, "decay:"),
    ],
)
def test_errors_of_retention(decay: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^layers\[0\]\.mixer\.{message}"):
        heddle.load_config(design(layer({**RETENTION, "decay": decay})))


def test_learned_decays_start_near_the_fixed_ones() -> None:
    config = parse_config(ModelConfig, design(layer({**RETENTION, "decay": "learned"})))
    weight = heddle.build(config).get_parameter("layers.0.mixer.decay.weight")
    want = torch.tensor([math.log(2.0 ** (5 + h) - 1) for h in range(3)])
    torch.testing.assert_close(weight.detach(), want, rtol=0, atol=0.1)
    assert not torch.equal(weight.detach(), want)
