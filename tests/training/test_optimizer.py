"""AdamW and Muon against plain loops from their papers, which weights each takes, and rates of one's own by path."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.training.optimizer import Optimizer, factors, make_optimizer
from heddle.training.settings import OPTIMIZERS
from heddle.training.step import BatchResult, apply
from tests import small
from tests.cases import CASES

RATE, DECAY = 0.02, 0.1
LEARNED_MAP = {"kind": "linear_attention", "heads": 2, "feature_map": "learned"}


def model(mixer: dict[str, Any] | None = None, **fields: Any) -> Decoder:
    """A stack of matrices (the learned map, one a head), wide and tall matrices, norms and a tied head."""
    layer = {"mixer": mixer or LEARNED_MAP, "feedforward": {"kind": "gated", "hidden": 24, "bias": True}}
    return build(small.config(small.design(layers=[layer, layer], **fields)), dtype=torch.float64)


def weights(given: Decoder) -> dict[str, np.ndarray]:
    return {name: one.detach().numpy().copy() for name, one in given.named_parameters()}


def draw_gradients(given: Decoder, seed: int) -> dict[str, np.ndarray]:
    """Random gradients of very different sizes."""
    draw = np.random.default_rng(seed)
    found = {}
    for place, (name, one) in enumerate(given.named_parameters()):
        found[name] = draw.normal(0, 10.0 ** (place % 5 - 3), one.shape)
        one.grad = torch.from_numpy(found[name].copy())
    return found


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Five Newton–Schulz steps (Jordan 2024) that bring the singular values near 1, on the smaller side."""
    turned = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = turned / max(float(np.sqrt((turned**2).sum())), 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class PlainMuon:
    """Of one matrix."""

    def __init__(self, weight: np.ndarray) -> None:
        self.weight, self.momentum = weight, np.zeros_like(weight)

    def step(self, gradient: np.ndarray, rate: float = RATE, decay: float = DECAY) -> None:
        self.momentum = 0.95 * self.momentum + 0.05 * gradient
        wanted = orthogonal(0.05 * gradient + 0.95 * self.momentum)
        scale = 0.2 * math.sqrt(max(self.weight.shape))
        self.weight = self.weight - rate * decay * self.weight - rate * scale * wanted


class PlainAdamW:
    """Of one parameter of any shape."""

    def __init__(self, weight: np.ndarray) -> None:
        self.weight, self.steps = weight, 0
        self.first, self.second = np.zeros_like(weight), np.zeros_like(weight)

    def step(self, gradient: np.ndarray, rate: float = RATE, decay: float = DECAY) -> None:
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.95 * self.second + 0.05 * gradient**2
        first, second = self.first / (1 - 0.9**self.steps), self.second / (1 - 0.95**self.steps)
        decayed = self.weight * (1 - rate * (decay if self.weight.ndim > 1 else 0.0))
        self.weight = decayed - rate * first / (np.sqrt(second) + 1e-8)


class Plain:
    """A whole model's weights: each matrix of a layer, and of a stack, by one rule, the rest by the other."""

    def __init__(self, given: Decoder, kind: str) -> None:
        self.held: dict[str, list[PlainMuon | PlainAdamW]] = {}
        for name, weight in weights(given).items():
            matrix = kind == "muon" and name.startswith("layers.") and weight.ndim > 1
            ones = list(weight) if weight.ndim == 3 else [weight]
            self.held[name] = [PlainMuon(one) for one in ones] if matrix else [PlainAdamW(weight)]

    def step(self, gradients: dict[str, np.ndarray], rates: dict[str, float] | None = None) -> None:
        for name, ones in self.held.items():
            pieces = list(gradients[name]) if len(ones) > 1 else [gradients[name]]
            for one, gradient in zip(ones, pieces, strict=True):
                one.step(gradient, RATE * (rates or {}).get(name, 1.0))

    def furthest(self, given: Decoder) -> float:
        """The largest difference to a model's weights."""
        found = weights(given)
        return max(
            float(np.abs(np.stack([one.weight for one in ones]).reshape(found[name].shape) - found[name]).max())
            for name, ones in self.held.items()
        )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_three_steps_are_those_of_the_paper(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch iterates Muon's matrices in bfloat16; without that it is the plain loop."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    given = model()
    plain, optimizer = Plain(given, kind), make_optimizer(given, DECAY, kind)
    for seed in range(3):
        plain.step(draw_gradients(given, seed))
        optimizer.step(RATE)
        assert plain.furthest(given) <= 1e-12


def test_in_bfloat16_an_update_is_as_large_and_nearly_the_same() -> None:
    given = model()
    before = weights(given)
    plain, optimizer = Plain(given, "muon"), make_optimizer(given, DECAY, "muon")
    plain.step(draw_gradients(given, 1))
    optimizer.step(RATE)
    after = weights(given)
    for name, ones in plain.held.items():
        for place, one in enumerate(ones):
            if isinstance(one, PlainMuon):
                old, new = (held[name] if len(ones) == 1 else held[name][place] for held in (before, after))
                update, wanted = new - (1 - RATE * DECAY) * old, one.weight - (1 - RATE * DECAY) * old
                assert np.sqrt((update**2).mean()) == pytest.approx(0.2 * RATE, rel=0.25)  # AdamW's is about this
                assert np.sqrt(((update - wanted) ** 2).sum() / (wanted**2).sum()) < 0.05


@pytest.mark.parametrize("planted", ["scale", "decay", "iteration", "stack"])
def test_a_mistake_in_muon_is_caught(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    given = model()
    plain, optimizer = Plain(given, "muon"), make_optimizer(given, 0.0 if planted == "decay" else DECAY, "muon")
    if planted == "scale":
        for group in optimizer.parts[1].param_groups:
            group["adjust_lr_fn"] = "original"
    if planted == "iteration":
        for group in optimizer.parts[1].param_groups:
            group["ns_steps"] = 4
    if planted == "stack":  # one gradient for all slices
        name = "layers.0.mixer.k_map.weight"
        monkeypatch.setattr(Tensor, "unbind", lambda stack: (stack[0],) * len(stack))
        assert given.get_parameter(name).dim() == 3
    plain.step(draw_gradients(given, 1))
    optimizer.step(RATE)
    assert plain.furthest(given) > 1e-6


def leaves(name: str) -> list[tuple[bool, str, str, int]]:
    """(taken by Muon, kind of module, name, dims) of each parameter of a case."""
    given = build(load_config(CASES[name]), device="meta")
    optimizer = make_optimizer(given, DECAY, "muon")
    of = {id(one): part for part in optimizer.parts for group in part.param_groups for one in group["params"]}
    found = []
    for path, one in optimizer.learned.items():
        held = next(tensor for tag, tensor in optimizer.held.items() if tag in (path, f"{path}.0"))
        owner = type(given.get_submodule(path.rpartition(".")[0])).__name__
        found.append((isinstance(of[id(held)], torch.optim.Muon), owner, path, one.dim()))
    return found


# What has two dims and is no matrix that acts on vectors.
TABLES = {"Embedding", "Head", "Learned", "Convolution", "LayerNorm", "RMSNorm"}


def test_muon_takes_every_matrix_of_a_layer_and_nothing_else() -> None:
    """A new kind of module with parameters of two dims must say which are matrices: `Leaf.maps`."""
    told = list(itertools.chain.from_iterable(leaves(name) for name in CASES))
    assert {dims for muon, _, _, dims in told if muon} == {2, 3}
    assert [row for row in told if row[0] and (row[1] in TABLES or "layers." not in row[2])] == []
    others = [row for row in told if not row[0] and row[3] >= 2 and not row[2].endswith(".bias")]
    assert [row for row in others if row[1] not in TABLES] == []


def test_states_are_kept_by_name_those_of_a_stack_by_slice() -> None:
    endings = []
    for keeps in ([], ["embed"], ["layers", "close", "embed"]):  # what of the state another optimizer takes over
        given = model()
        optimizer = make_optimizer(given, DECAY, "muon")
        draw_gradients(given, 1)
        optimizer.step(RATE)
        if keeps:
            state = {name: held for name, held in optimizer.state.items() if name.split(".")[0] in keeps}
            optimizer = make_optimizer(given, DECAY, "muon")
            optimizer.load(state)
        draw_gradients(given, 2)
        optimizer.step(RATE)
        endings.append(weights(given))
    whole, partly, loaded = endings
    assert all(np.array_equal(whole[name], loaded[name]) for name in whole)
    stack = "layers.0.mixer.k_map.weight"
    assert [np.array_equal(whole[name], partly[name]) for name in ("embed.weight", stack)] == [True, False]
    assert state.keys() >= {f"{stack}.0", f"{stack}.1", "embed.weight"}
    assert stack not in state
    assert state[f"{stack}.1"]["momentum_buffer"].shape == (8, 8)


def test_only_matrices_decay() -> None:
    given = model({"kind": "attention", "heads": 2, "qk_norm": "per_head"}, norm={"kind": "layer"})
    matrices, others = make_optimizer(given, 0.3).parts[0].param_groups
    assert matrices["weight_decay"] == 0.3
    assert others["weight_decay"] == 0.0
    assert {parameter.dim() for parameter in matrices["params"]} == {2}
    bias = given.get_parameter("layers.0.mixer.q_norm.bias")  # of each head
    assert bias.dim() == 2
    assert [one.dim() for one in others["params"] if one is bias] == [2]
    assert all(one.dim() == 1 for one in others["params"] if one.shape != bias.shape)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_norm_is_clipped_over_all(kind: str) -> None:
    given = model()
    optimizer = make_optimizer(given, 0.0, kind)
    found = draw_gradients(given, 1)
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in found.values()))
    seen: list[Tensor] = []
    for part in optimizer.parts:
        part.register_step_pre_hook(
            lambda one, *_: seen.extend(p.grad.clone() for group in one.param_groups for p in group["params"])
        )
    result = apply(given, optimizer, BatchResult(torch.tensor(1.0)), RATE, clip=norm / 4)
    assert result.norm == pytest.approx(norm, rel=1e-12)
    assert math.sqrt(sum(float(g.square().sum()) for g in seen)) == pytest.approx(norm / 4, rel=1e-5)


SCALES = [("layers.*.mixer", 0.5), ("embed", 2.0), ("layers.1.mixer.q", 0.25), ("layers.*.residual.norms", 0.0)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_factor_is_a_rate_of_ones_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    given = model()
    found = factors(given, SCALES)
    assert found["layers.0.mixer.k_map.weight"] == found["layers.1.mixer.v.weight"] == 0.5
    assert (found["embed.weight"], found["layers.1.mixer.q.weight"]) == (2.0, 0.25)
    assert (found["layers.0.mixer.q.weight"], found["close.norm.weight"]) == (0.5, 1.0)
    before = weights(given)
    plain, optimizer = Plain(given, kind), make_optimizer(given, DECAY, kind, SCALES)
    for seed in range(2):
        plain.step(draw_gradients(given, seed), found)
        optimizer.step(RATE)
    assert plain.furthest(given) <= 1e-12
    frozen = [name for name in before if ".residual.norms." in name]
    assert len(frozen) == 4
    assert all(np.array_equal(before[name], weights(given)[name]) for name in frozen)
    assert not any(name in optimizer.state for name in frozen)


def test_what_is_frozen_neither_decays_nor_is_clipped_by() -> None:
    given = model()
    optimizer = make_optimizer(given, DECAY, scales=[("layers", 0.0)])
    before = weights(given)
    found = draw_gradients(given, 1)
    result = apply(given, optimizer, BatchResult(torch.tensor(1.0)), RATE, clip=1.0)
    moved = {name for name, weight in weights(given).items() if not np.array_equal(weight, before[name])}
    assert moved == {"embed.weight", "close.norm.weight"} == set(optimizer.learned)
    assert result.norm == pytest.approx(math.sqrt(sum(float((found[name] ** 2).sum()) for name in moved)))
    assert all(one.grad is None for one in given.parameters())


def test_the_last_path_that_matches_counts() -> None:
    given = model()
    narrow, wide = ("layers.0.mixer.q", 0.25), ("layers", 0.5)
    assert factors(given, [wide, narrow])["layers.0.mixer.q.weight"] == 0.25
    assert factors(given, [narrow, wide])["layers.0.mixer.q.weight"] == 0.5
    assert set(factors(given, [("*", 3.0)]).values()) == {3.0}


@pytest.mark.parametrize(
    ("scales", "says"),
    [
        ([("layers.7.mixer", 0.5)], "--lr-scale layers.7.mixer=0.5: no parameter that learns is at 'layers.7.mixer'; "),
        ([("layers.0.mix", 0.5)], "paths begin with embed, layers.0, layers.1, close"),
        ([("head", 2.0)], "--lr-scale head=2: no parameter that learns is at 'head'"),
        ([("embed.weight.0", 2.0)], "--lr-scale embed.weight.0=2: no parameter"),
        ([("embed", 2.0), ("*", 0.0)], "--lr-scale: every factor is 0, so nothing would learn"),
    ],
)
def test_paths_that_lead_nowhere(scales: list[tuple[str, float]], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_optimizer(model(), DECAY, scales=scales)
    assert says in str(caught.value)


def test_where_all_matrices_are_frozen_muon_has_nothing_to_do() -> None:
    parts = make_optimizer(model(), DECAY, "muon", [("layers", 0.0)]).parts
    assert [type(part) for part in parts] == [torch.optim.AdamW]
    only = make_optimizer(model(), DECAY, "muon", [("*", 0.0), ("layers.*.mixer.q.weight", 1.0)])
    assert [type(part) for part in only.parts] == [torch.optim.Muon]
    assert isinstance(only, Optimizer)
