"""AdamW and Muon against plain loops from their papers, which weights each updates, and learning rates by path."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.parts.modules.linear import SelfInitialized
from heddle.training.optimizer import (
    EagerAdamw,
    Optimizer,
    StackedMuon,
    build_optimizer,
    learning_rate_factors,
    share_buffers,
)
from heddle.training.settings import OPTIMIZERS
from heddle.training.step import BatchResult, apply_gradients
from tests import small
from tests.cases import CASES

RATE, DECAY = 0.02, 0.1
LEARNED_MAP = {"kind": "linear_attention", "heads": 2, "feature_map": "learned"}


def model(mixer: dict[str, Any] | None = None, **fields: Any) -> Decoder:
    """A stack of matrices (the learned map, one a head), wide and tall matrices, norms and a tied head."""
    layer = {"mixer": mixer or LEARNED_MAP, "feedforward": {"kind": "gated", "hidden": 24, "bias": True}}
    return build(small.config(small.design(layers=[layer, layer], **fields)), dtype=torch.float64)


def weights(decoder: Decoder) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in decoder.named_parameters()}


def draw_gradients(decoder: Decoder, seed: int) -> dict[str, np.ndarray]:
    """Random gradients of very different sizes."""
    rng = np.random.default_rng(seed)
    gradients = {}
    for index, (name, parameter) in enumerate(decoder.named_parameters()):
        gradients[name] = rng.normal(0, 10.0 ** (index % 5 - 3), parameter.shape)
        parameter.grad = torch.from_numpy(gradients[name].copy())
    return gradients


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Five Newton–Schulz steps (Jordan 2024) that bring the singular values near 1, on the smaller side."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / max(float(np.sqrt((wide**2).sum())), 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class PlainMuon:
    """Muon for one matrix, from the formulas."""

    def __init__(self, weight: np.ndarray) -> None:
        self.weight, self.momentum = weight, np.zeros_like(weight)

    def step(self, gradient: np.ndarray, rate: float = RATE, decay: float = DECAY) -> None:
        self.momentum = 0.95 * self.momentum + 0.05 * gradient
        update = orthogonal(0.05 * gradient + 0.95 * self.momentum)
        scale = 0.2 * math.sqrt(max(self.weight.shape))
        self.weight = self.weight - rate * decay * self.weight - rate * scale * update


class PlainAdamW:
    """AdamW for one parameter of any shape, from the formulas."""

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
    """All weights of a model: matrices of layers, and of stacks, by PlainMuon, the rest by PlainAdamW."""

    def __init__(self, decoder: Decoder, kind: str) -> None:
        self.rules: dict[str, list[PlainMuon | PlainAdamW]] = {}
        for name, weight in weights(decoder).items():
            use_muon = kind == "muon" and name.startswith("layers.") and weight.ndim > 1
            matrices = list(weight) if weight.ndim == 3 else [weight]
            self.rules[name] = [PlainMuon(matrix) for matrix in matrices] if use_muon else [PlainAdamW(weight)]

    def step(self, gradients: dict[str, np.ndarray], rates: dict[str, float] | None = None) -> None:
        for name, rules in self.rules.items():
            pieces = list(gradients[name]) if len(rules) > 1 else [gradients[name]]
            for rule, gradient in zip(rules, pieces, strict=True):
                rule.step(gradient, RATE * (rates or {}).get(name, 1.0))

    def furthest(self, decoder: Decoder) -> float:
        """The largest difference to a model's weights."""
        actual = weights(decoder)
        return max(
            float(np.abs(np.stack([rule.weight for rule in rules]).reshape(actual[name].shape) - actual[name]).max())
            for name, rules in self.rules.items()
        )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_three_steps_are_those_of_the_paper(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch iterates Muon's matrices in bfloat16; without that it is the plain loop."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    decoder = model()
    plain, optimizer = Plain(decoder, kind), build_optimizer(decoder, DECAY, kind)
    for seed in range(3):
        plain.step(draw_gradients(decoder, seed))
        optimizer.step(RATE)
        assert plain.furthest(decoder) <= 1e-12


def test_in_bfloat16_an_update_is_as_large_and_nearly_the_same() -> None:
    decoder = model()
    before = weights(decoder)
    plain, optimizer = Plain(decoder, "muon"), build_optimizer(decoder, DECAY, "muon")
    plain.step(draw_gradients(decoder, 1))
    optimizer.step(RATE)
    after = weights(decoder)
    for name, rules in plain.rules.items():
        for index, rule in enumerate(rules):
            if isinstance(rule, PlainMuon):
                old, new = (
                    weights_then[name] if len(rules) == 1 else weights_then[name][index]
                    for weights_then in (before, after)
                )
                update, expected = new - (1 - RATE * DECAY) * old, rule.weight - (1 - RATE * DECAY) * old
                assert np.sqrt((update**2).mean()) == pytest.approx(0.2 * RATE, rel=0.25)  # AdamW's is about this
                assert np.sqrt(((update - expected) ** 2).sum() / (expected**2).sum()) < 0.05


@pytest.mark.parametrize("planted", ["scale", "decay", "iteration", "stack"])
def test_a_mistake_in_muon_is_caught(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    decoder = model()
    plain, optimizer = Plain(decoder, "muon"), build_optimizer(decoder, 0.0 if planted == "decay" else DECAY, "muon")
    if planted == "scale":
        for group in optimizer.optimizers[1].param_groups:
            group["adjust_lr_fn"] = "original"
    if planted == "iteration":
        for group in optimizer.optimizers[1].param_groups:
            group["ns_steps"] = 4
    if planted == "stack":  # one gradient for all slices
        name = "layers.0.mixer.k_map.weight"
        monkeypatch.setattr(Tensor, "unbind", lambda stack: (stack[0],) * len(stack))
        assert decoder.get_parameter(name).dim() == 3
    plain.step(draw_gradients(decoder, 1))
    optimizer.step(RATE)
    assert plain.furthest(decoder) > 1e-6


IN_STACKS = r"(encoder\.)?(layers|multi_token)\."


class Leaf(NamedTuple):
    """A parameter of a case. stated: whether its module says which of its parameters are matrices."""

    muon: bool
    path: str
    dims: int
    stated: bool


def leaves(name: str) -> Iterator[Leaf]:
    """The trained parameters of a case."""
    decoder = build(load_config(CASES[name]), device="meta")
    optimizer = build_optimizer(decoder, DECAY, "muon")
    optimizer_of = {
        id(parameter): torch_optimizer
        for torch_optimizer in optimizer.optimizers
        for group in torch_optimizer.param_groups
        for parameter in group["params"]
    }
    for path, parameter in optimizer.trainable.items():
        updated = next(tensor for tag, tensor in optimizer.updated_tensors.items() if tag in (path, f"{path}.0"))
        module = type(decoder.get_submodule(path.rpartition(".")[0]))
        stated = any("matrix_parameters" in vars(cls) for cls in module.__mro__ if cls is not SelfInitialized)
        of_norm = module.__module__.startswith("heddle.parts.norms.")  # no norm multiplies vectors by a matrix
        muon = isinstance(optimizer_of[id(updated)], torch.optim.Muon)
        yield Leaf(muon, path, parameter.dim(), stated or of_norm)


def test_muon_takes_every_matrix_of_a_layer_and_nothing_else() -> None:
    """A module with parameters of two dims must list its matrices in `matrix_parameters`, if only as `()`.

    The head is not a layer, nor are the transform of a masked language model's head, the last mix of sources and what
    projects the embedding for all layers or for further streams.
    """
    rows = list(itertools.chain.from_iterable(leaves(name) for name in CASES))
    assert {leaf.dims for leaf in rows if leaf.muon} == {2, 3}
    assert [leaf for leaf in rows if leaf.muon and not re.match(IN_STACKS, leaf.path)] == []
    tables = [leaf for leaf in rows if re.match(IN_STACKS, leaf.path) and not leaf.muon and leaf.dims >= 2]
    assert {leaf.path for leaf in tables if not (leaf.stated or leaf.path.endswith(".bias"))} == set()


def test_states_are_kept_by_name_those_of_a_stack_by_slice() -> None:
    endings = []
    for loaded_names in (
        [],
        ["embed"],
        ["layers", "final_norm", "embed"],
    ):  # what of the state another optimizer takes over
        decoder = model()
        optimizer = build_optimizer(decoder, DECAY, "muon")
        draw_gradients(decoder, 1)
        optimizer.step(RATE)
        if loaded_names:
            state = {name: tensors for name, tensors in optimizer.state.items() if name.split(".")[0] in loaded_names}
            optimizer = build_optimizer(decoder, DECAY, "muon")
            optimizer.load_state(state)
        draw_gradients(decoder, 2)
        optimizer.step(RATE)
        endings.append(weights(decoder))
    whole, partly, loaded = endings
    assert all(np.array_equal(whole[name], loaded[name]) for name in whole)
    stack = "layers.0.mixer.k_map.weight"
    assert [np.array_equal(whole[name], partly[name]) for name in ("embed.weight", stack)] == [True, False]
    assert state.keys() >= {f"{stack}.0", f"{stack}.1", "embed.weight"}
    assert stack not in state
    assert state[f"{stack}.1"]["momentum_buffer"].shape == (8, 8)


def test_only_matrices_decay() -> None:
    decoder = model({"kind": "attention", "heads": 2, "qk_norm": "per_head"}, norm={"kind": "layer"})
    matrices, others = build_optimizer(decoder, 0.3).optimizers[0].param_groups
    assert matrices["weight_decay"] == 0.3
    assert others["weight_decay"] == 0.0
    assert {parameter.dim() for parameter in matrices["params"]} == {2}
    bias = decoder.get_parameter("layers.0.mixer.q_norm.bias")  # of each head
    assert bias.dim() == 2
    assert [parameter.dim() for parameter in others["params"] if parameter is bias] == [2]
    assert all(parameter.dim() == 1 for parameter in others["params"] if parameter.shape != bias.shape)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_norm_is_clipped_over_all(kind: str) -> None:
    decoder = model()
    optimizer = build_optimizer(decoder, 0.0, kind)
    gradients = draw_gradients(decoder, 1)
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
    clipped: list[Tensor] = []
    for part in optimizer.optimizers:
        part.register_step_pre_hook(
            lambda torch_optimizer, *_: clipped.extend(
                p.grad.clone() for group in torch_optimizer.param_groups for p in group["params"]
            )
        )
    result = apply_gradients(decoder, optimizer, BatchResult(torch.tensor(1.0)), RATE, max_gradient_norm=norm / 4)
    assert result.gradient_norm == pytest.approx(norm, rel=1e-12)
    assert math.sqrt(sum(float(g.square().sum()) for g in clipped)) == pytest.approx(norm / 4, rel=1e-5)


SCALES = [("layers.*.mixer", 0.5), ("embed", 2.0), ("layers.1.mixer.q", 0.25), ("layers.*.residual.norms", 0.0)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_factor_is_a_rate_of_ones_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    decoder = model()
    factors = learning_rate_factors(decoder, SCALES)
    assert factors["layers.0.mixer.k_map.weight"] == factors["layers.1.mixer.v.weight"] == 0.5
    assert (factors["embed.weight"], factors["layers.1.mixer.q.weight"]) == (2.0, 0.25)
    assert (factors["layers.0.mixer.q.weight"], factors["final_norm.norm.weight"]) == (0.5, 1.0)
    before = weights(decoder)
    plain, optimizer = Plain(decoder, kind), build_optimizer(decoder, DECAY, kind, SCALES)
    for seed in range(2):
        plain.step(draw_gradients(decoder, seed), factors)
        optimizer.step(RATE)
    assert plain.furthest(decoder) <= 1e-12
    frozen = [name for name in before if ".residual.norms." in name]
    assert len(frozen) == 4
    assert all(np.array_equal(before[name], weights(decoder)[name]) for name in frozen)
    assert not any(name in optimizer.state for name in frozen)


def test_what_is_frozen_neither_decays_nor_is_clipped_by() -> None:
    decoder = model()
    optimizer = build_optimizer(decoder, DECAY, lr_scale=[("layers", 0.0)])
    before = weights(decoder)
    gradients = draw_gradients(decoder, 1)
    result = apply_gradients(decoder, optimizer, BatchResult(torch.tensor(1.0)), RATE, max_gradient_norm=1.0)
    moved = {name for name, weight in weights(decoder).items() if not np.array_equal(weight, before[name])}
    assert moved == {"embed.weight", "final_norm.norm.weight"} == set(optimizer.trainable)
    assert result.gradient_norm == pytest.approx(math.sqrt(sum(float((gradients[name] ** 2).sum()) for name in moved)))
    assert all(parameter.grad is None for parameter in decoder.parameters())


def test_the_last_path_that_matches_counts() -> None:
    decoder = model()
    narrow, wide = ("layers.0.mixer.q", 0.25), ("layers", 0.5)
    assert learning_rate_factors(decoder, [wide, narrow])["layers.0.mixer.q.weight"] == 0.25
    assert learning_rate_factors(decoder, [narrow, wide])["layers.0.mixer.q.weight"] == 0.5
    assert set(learning_rate_factors(decoder, [("*", 3.0)]).values()) == {3.0}


@pytest.mark.parametrize(
    ("scales", "says"),
    [
        ([("layers.7.mixer", 0.5)], "lr_scale layers.7.mixer=0.5:"),
        ([("layers.0.mix", 0.5)], "layers.0, layers.1, final_norm"),
        ([("head", 2.0)], "lr_scale head=2:"),
        ([("embed.weight.0", 2.0)], "lr_scale embed.weight.0=2:"),
        ([("embed", 2.0), ("*", 0.0)], "lr_scale:"),
    ],
)
def test_paths_that_lead_nowhere(scales: list[tuple[str, float]], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(model(), DECAY, lr_scale=scales)
    assert says in str(caught.value)


def test_where_all_matrices_are_frozen_muon_has_nothing_to_do() -> None:
    parts = build_optimizer(model(), DECAY, "muon", [("layers", 0.0)]).optimizers
    assert [type(part) for part in parts] == [EagerAdamw]
    only = build_optimizer(model(), DECAY, "muon", [("*", 0.0), ("layers.*.mixer.q.weight", 1.0)])
    assert [type(part) for part in only.optimizers] == [StackedMuon]
    assert isinstance(only, Optimizer)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_skips_a_bad_step_by_itself(kind: str, bad: float) -> None:
    """As on a GPU: nothing is read, and weights, moments and step counts stay, bit for bit."""
    decoder, undisturbed = model(), model()
    optimizer, other = build_optimizer(decoder, DECAY, kind), build_optimizer(undisturbed, DECAY, kind)
    assert optimizer.skips_on_device
    for step in range(3):
        draw_gradients(decoder, step)
        optimizer.step(RATE, torch.tensor(0.0))
        draw_gradients(undisturbed, step)
        other.step(RATE)
        before = contents(decoder, optimizer)
        draw_gradients(decoder, step + 9)
        for parameter in decoder.parameters():
            assert parameter.grad is not None
            parameter.grad.view(-1)[-1] = bad
        optimizer.step(RATE, torch.tensor(1.0))
        assert all(torch.equal(a, b) for a, b in zip(before, contents(decoder, optimizer), strict=True))
        assert all(parameter.grad is None for parameter in decoder.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, contents(undisturbed, other), strict=True))


def contents(decoder: Decoder, optimizer: Optimizer) -> list[Tensor]:
    """Copies of the weights and of all that the optimizer stores."""
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [tensor.detach().clone() for tensor in (*decoder.parameters(), *state)]


def test_where_the_optimizer_is_not_fused_a_bad_step_is_read() -> None:
    decoder = build(small.config(), device="meta")
    assert not build_optimizer(decoder, DECAY).skips_on_device


def test_small_moments_lie_in_one_buffer_and_keep_their_numbers() -> None:
    shapes = [(), (3,), (4, 5), (17, 2), (600, 600)]
    states = [{"step": torch.ones(()), "exp_avg": torch.randn(shape or (1,))} for shape in shapes]
    states[1]["exp_avg"] = torch.randn(6, dtype=torch.float64)[::2]
    before = [state["exp_avg"].clone() for state in states]
    checked = share_buffers(states)
    assert len(checked) == 3, "a buffer of each dtype, and the moment that is not small"
    for state, moment in zip(states, before, strict=True):
        assert torch.equal(state["exp_avg"], moment)
        assert state["exp_avg"].is_contiguous()
        state["exp_avg"].view(-1)[-1] = math.nan
        assert sum(int(tensor.isnan().sum()) for tensor in checked) == 1, (
            "the last number of each is in what is checked"
        )
        state["exp_avg"].copy_(moment)
    states[0]["exp_avg"].fill_(7.0)
    assert torch.equal(states[2]["exp_avg"], before[2]), "moments do not overlap"
