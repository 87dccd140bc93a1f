"""Residual blocks against the formulas of their papers, written as plain loops in numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.numerics.norms import sinkhorn
from heddle.parts.build import ResidualContext
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import FinalNorm, ResidualConfig
from heddle.parts.residuals.deep_norm import DeepNorm
from heddle.parts.residuals.hyper_connections import HyperConnections, MixingMaps
from heddle.parts.residuals.parallel import Parallel
from heddle.parts.residuals.post_norm import PostNorm, PostNormConfig
from heddle.parts.residuals.pre_norm import PreNorm
from heddle.parts.residuals.reordered import Reordered
from heddle.parts.residuals.residual_dual import DualFinalNorm, ResidualDual, ResidualDualConfig
from heddle.parts.residuals.sandwich import AltUp, LowRankResidual, Sandwich, StreamExpansion
from tests.cases import attention, design, latent, layer
from tests.laws.planting import Plant, calls, condition, reads, replaced, result

Array = NDArray[np.float64]
Weights = dict[str, Array]
Function = Callable[[Array], Array]

WIDTH, DEPTH = 6, 3
NAMES = ("mixer", "feedforward")
NORM = parse_config(NormConfig, {"kind": "layer", "bias": False})  # type: ignore[type-abstract]
FACTORS = {"alpha": 1.7, "feedforward_alpha": 0.6, "multiplier": 0.8, "feedforward_multiplier": 1.3}
KINDS: dict[str, dict[str, Any]] = {
    "pre_norm": {},
    "pre_norm, multiplied": {"kind": "pre_norm", "multiplier": 0.6},
    "pre_norm, gated": {"kind": "pre_norm", "gate_rank": 2},
    "pre_norm, bare end": {"kind": "pre_norm", "final_norm": False},
    "post_norm": {},
    "post_norm, outer sum": {"kind": "post_norm", "outer_sum": True},
    "deep_norm": {},
    "deep_norm, all factors": {"kind": "deep_norm", **FACTORS},
    "deep_norm, two factors": {"kind": "deep_norm", "alpha": 1.4, "multiplier": 0.7},
    "sandwich": {},
    "sandwich, multiplied": {"kind": "sandwich", "multiplier": 0.6},
    "sandwich, laurel": {"kind": "sandwich", "laurel_rank": 2},
    "sandwich, altup": {"kind": "sandwich", "altup_streams": 3},
    "sandwich, altup and laurel": {"kind": "sandwich", "altup_streams": 2, "laurel_rank": 2},
    "reordered": {},
    "reordered, norms first": {"kind": "reordered", "norms_first": ["second"]},
    "parallel, one norm": {"kind": "parallel"},
    "parallel, two norms": {"kind": "parallel", "norms": 2},
    "residual_dual": {},
    "hyper_connections": {"streams": 3, "iterations": 7},
}


def config(name: str, **fields: Any) -> ResidualConfig:
    return parse_config(ResidualConfig, {"kind": name} | KINDS[name] | fields)  # type: ignore[type-abstract]


class Stack(torch.nn.Module):
    """Blocks and their final norm, with random parameters."""

    def __init__(self, name: str, names: tuple[str, ...] = NAMES, depth: int = DEPTH) -> None:
        super().__init__()
        self.config = config(name)
        contexts = [
            ResidualContext(names, WIDTH, NORM, depth=depth, layer_index=i, mixer="second" if i == 1 else "other")
            for i in range(depth)
        ]
        self.layers = torch.nn.ModuleList(map(self.config.build, contexts))
        self.expansion = self.config.build_expansion(WIDTH)
        self.final_norm = self.config.build_final_norm(WIDTH, NORM)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(1.0 if parameter.dim() < 2 else 0.0, 0.5)

    def forward(self, x: Tensor, branches: dict[str, Callable[[Tensor], Tensor]]) -> Tensor:
        stream = self.config.expand(x) if self.expansion is None else self.expansion(x)
        for block in self.layers:
            stream = block(stream, {name: branches[name] for name in branches})
        hidden: Tensor = self.final_norm(stream)
        return hidden

    def weights(self) -> Weights:
        return {name: value.detach().numpy() for name, value in self.named_parameters()}


def mixer(x: Tensor) -> Tensor:
    return x.flip(1).tanh()


def feedforward(x: Tensor) -> Tensor:
    return x.roll(1, dims=-1).sin()


BRANCHES = {"mixer": mixer, "feedforward": feedforward}
PLAIN: dict[str, Function] = {
    "mixer": lambda x: np.tanh(x[:, ::-1]),
    "feedforward": lambda x: np.sin(np.roll(x, 1, axis=-1)),
}


def norm(x: Array, gain: Array) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    normed: Array = gain * centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    return normed


def serial(name: str, x: Array, weights: Weights, names: tuple[str, ...], depth: int) -> Array:
    """The kinds with a single stream and sequential branches."""
    for index in range(depth):
        if name.startswith("sandwich"):
            x = sandwich(name, x, weights, names, index)
            continue
        entered = x
        for branch in names:
            f, gain = PLAIN[branch], weights[f"layers.{index}.norms.{branch}.weight"]
            if name.startswith("pre_norm"):
                u = norm(x, gain)
                if name.endswith("gated"):
                    down, up = (weights[f"layers.{index}.gates.{branch}.{end}.weight"] for end in ("down", "up"))
                    u = u * sigmoid((u @ down.T * sigmoid(u @ down.T)) @ up.T)
                x = x + KINDS[name].get("multiplier", 1.0) * f(u)
            elif name.startswith("post_norm"):
                x = norm(x + f(x), gain)
            elif name == "deep_norm":
                x = norm((2 * depth) ** (1 / 4) * x + f(x), gain)
            elif name == "deep_norm, two factors":
                x = norm(1.4 * x + 0.7 * f(x), gain)
            elif name == "deep_norm, all factors":
                x = norm(1.7 * x + 0.8 * f(x) if branch == "mixer" else 0.6 * x + 1.3 * f(x), gain)
            elif name == "reordered, norms first" and index == 1:
                x = x + f(norm(x, gain))
            else:
                x = x + norm(f(x), gain)
        if name.endswith("outer sum"):
            x = entered + x
    bare = name.startswith(("post_norm", "deep_norm")) or name.endswith("bare end")
    return x if bare else norm(x, weights["final_norm.norm.weight"])


def laurel(x: Array, u: Array, after: Array, weights: Weights, prefix: str) -> Array:
    """LAuReL of low rank as in Gemma 3n: the mixer's sum with a learned residual of its input."""
    low = u @ weights[prefix + "down.weight"].T @ weights[prefix + "up.weight"].T
    total: Array = (x + after + u + norm(low, weights[prefix + "norm.weight"])) / 2**0.5
    return total


def parallel(x: Array, weights: Weights, names: tuple[str, ...], depth: int) -> Array:
    for index in range(depth):
        inputs, shared = x, weights.get(f"layers.{index}.norms.shared.weight")
        for branch in names:
            gain = shared if shared is not None else weights[f"layers.{index}.norms.{branch}.weight"]
            x = x + PLAIN[branch](norm(inputs, gain))
    return norm(x, weights["final_norm.norm.weight"])


def altup(name: str, x: Array, weights: Weights, names: tuple[str, ...], depth: int) -> Array:
    """Alternating updates as in Gemma 3n, token by token; each layer is a sandwich of the first stream."""
    n = KINDS[name]["altup_streams"]

    def sized(y: Array, other: Array) -> Array:
        result: Array = y * np.sqrt((other**2).mean() / max((y**2).mean(), 1e-5))
        return result

    streams = np.zeros((*x.shape[:2], n, WIDTH))
    for row, token in np.ndindex(x.shape[:2]):
        own = x[row, token]
        others = [sized(weights[f"expansion.projections.{i}.weight"] @ own, own) for i in range(n - 1)]
        streams[row, token] = [own, *others]
    for index in range(depth):
        prefix = f"layers.{index}.altup."
        gain, router = weights[prefix + "norm.weight"], weights[prefix + "router.weight"]
        predicted = np.zeros_like(streams)
        for row, token in np.ndindex(x.shape[:2]):
            shares = np.tanh(router @ norm(streams[row, token, 0], gain) / WIDTH)
            mixing = (weights[prefix + "prediction.weight"] @ shares).reshape(n, n)
            for i in range(n):
                predicted[row, token, i] = streams[row, token, i] + sum(
                    mixing[i, j] * streams[row, token, j] for j in range(n)
                )
        block = "sandwich, laurel" if "laurel" in name else "sandwich"
        y = sandwich(block, predicted[:, :, 0], weights, names, index)
        for row, token in np.ndindex(x.shape[:2]):
            shares = np.tanh(router @ norm(y[row, token], gain) / WIDTH)
            factors = 1 + weights[prefix + "correction.weight"] @ shares
            new = y[row, token] - predicted[row, token, 0]
            streams[row, token] = [predicted[row, token, i] + factors[i] * new for i in range(n)]
    merged = np.zeros_like(x)
    for row, token in np.ndindex(x.shape[:2]):
        first, *rest = streams[row, token]
        projected = [weights[f"final_norm.projections.{i}.weight"] @ each for i, each in enumerate(rest)]
        merged[row, token] = sum([first, *(sized(each, first) for each in projected)]) / n
    return norm(merged, weights["final_norm.norm.weight"])


def sandwich(name: str, x: Array, weights: Weights, names: tuple[str, ...], index: int) -> Array:
    """One layer, without the final norm."""
    for branch in names:
        u = norm(x, weights[f"layers.{index}.norms.{branch}.weight"])
        after = norm(PLAIN[branch](u), weights[f"layers.{index}.after.{branch}.weight"])
        if "laurel" in name and branch == names[0]:
            x = laurel(x, u, after, weights, f"layers.{index}.laurel.")
        else:
            x = x + KINDS[name].get("multiplier", 1.0) * after
    return x


def residual_dual(x: Array, weights: Weights, names: tuple[str, ...], depth: int) -> Array:
    """Xie et al. 2023, equation 3: each sublayer is a layer of the paper."""
    post, dual = x, x
    for index in range(depth):
        for branch in names:
            f = PLAIN[branch](post)
            post, dual = norm(post + f, weights[f"layers.{index}.norms.{branch}.weight"]), dual + f
    return post + norm(dual, weights["final_norm.norm.weight"])


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def balanced(logits: Array, iterations: int) -> Array:
    matrix = np.exp(logits)
    for _ in range(iterations):
        matrix = matrix / matrix.sum(0, keepdims=True)
        matrix = matrix / matrix.sum(1, keepdims=True)
    return matrix


def hyper(x: Array, weights: Weights, names: tuple[str, ...], depth: int) -> Array:
    """Xie et al. 2025, token by token; with φ, b and α of the paper, and the constants included in b."""
    n = KINDS["hyper_connections"]["streams"]
    streams = np.stack([x] * n, axis=2)
    rows, length = x.shape[:2]
    for index in range(depth):
        for branch in names:
            prefix = f"layers.{index}.maps.{branch}."
            gain, bias, phi = weights[prefix + "gain"], weights[prefix + "bias"], weights[prefix + "projection.weight"]
            read, inputs = np.zeros((rows, length, WIDTH)), streams
            maps: dict[tuple[int, int], tuple[Array, Array]] = {}
            for row in range(rows):
                for token in range(length):
                    z = phi @ norm(streams[row, token].reshape(-1), weights[prefix + "norm.weight"])
                    pre = sigmoid(gain[0] * z[:n] + bias[:n] - np.log(n - 1))
                    post = 2 * sigmoid(gain[1] * z[n : 2 * n] + bias[n : 2 * n])
                    logits = (gain[2] * z[2 * n :] + bias[2 * n :]).reshape(n, n) + 4 * np.eye(n)
                    maps[row, token] = (post, balanced(logits, KINDS["hyper_connections"]["iterations"]))
                    read[row, token] = pre @ streams[row, token]
            y = PLAIN[branch](norm(read, weights[f"layers.{index}.norms.{branch}.weight"]))
            streams = np.zeros_like(inputs)
            for (row, token), (post, mixing) in maps.items():
                streams[row, token] = mixing @ inputs[row, token] + np.outer(post, y[row, token])
    return norm(streams.mean(2), weights["final_norm.norm.weight"])


def oracle(name: str, x: Array, weights: Weights, names: tuple[str, ...] = NAMES, depth: int = DEPTH) -> Array:
    oracles = {"residual_dual": residual_dual, "hyper_connections": hyper}
    if name in oracles:
        return oracles[name](x, weights, names, depth)
    if "altup" in name:
        return altup(name, x, weights, names, depth)
    if name.startswith("parallel"):
        return parallel(x, weights, names, depth)
    return serial(name, x, weights, names, depth)


def check(name: str, names: tuple[str, ...] = NAMES) -> None:
    """The stack agrees with the loop of its paper."""
    stack, x = Stack(name, names), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    got = stack(x, {branch: BRANCHES[branch] for branch in names}).detach()
    want = torch.from_numpy(oracle(name, x.numpy(), stack.weights(), names))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("names", [NAMES, ("mixer",), ("feedforward",)], ids="+".join)
@pytest.mark.parametrize("name", KINDS)
def test_stack_equals_its_formula(name: str, names: tuple[str, ...]) -> None:
    check(name, names)


def multiplied_stream(block: Any, stream: Tensor, branches: Any) -> Tensor:
    for name, branch in branches.items():
        stream = block.multiplier * (stream + block.drops[name](branch(block.norms[name](stream))))
    return stream


def norms_after(block: Any, stream: Tensor, branches: Any) -> Tensor:
    for name, branch in branches.items():
        stream = stream + block.norms[name](branch(stream))
    return stream


def normed_dual(block: Any, streams: tuple[Tensor, Tensor], branches: Any) -> tuple[Tensor, Tensor]:
    x, dual = streams
    for name, branch in branches.items():
        y = block.drops[name](branch(x))
        x, dual = block.norms[name](x + y), block.norms[name](dual + y)
    return x, dual


BUGS: dict[str, tuple[str, Plant]] = {
    "a multiplier of the stream": ("pre_norm, multiplied", replaced(PreNorm.forward, multiplied_stream)),
    "a final norm left on post-norm": (
        "post_norm",
        replaced(PostNormConfig.build_final_norm, lambda config, width, norm: FinalNorm(width, norm)),
    ),
    "a sandwich without its multiplier": ("sandwich, multiplied", condition(Sandwich._process, "multiplier", True)),
    "a learned residual without its input": (
        "sandwich, laurel",
        replaced(LowRankResidual.forward, lambda module, u: module.norm(module.up(module.down(u)))),
    ),
    "predictions that mix along the other axis": (
        "sandwich, altup",
        calls(AltUp.predict, "unflatten", lambda x, dim, shape: x.unflatten(dim, shape).mT, 0),
    ),
    "corrections of the size of the prediction": (
        "sandwich, altup",
        replaced(AltUp.correct, lambda module, predicted, y: predicted + (y - predicted[:, :, 0])[:, :, None]),
    ),
    "streams of another size than the embedding": (
        "sandwich, altup",
        calls(StreamExpansion.forward, "with_size_of", lambda size, y, x: y, 0),
    ),
    "no final norm": ("reordered", replaced(FinalNorm.forward, lambda final, stream: stream)),
    "norms after the branches of every layer": ("reordered, norms first", replaced(Reordered.forward, norms_after)),
    "a norm around ResiDual's sum": (
        "residual_dual",
        replaced(DualFinalNorm.forward, lambda final, streams: final.norm(streams[0] + streams[1])),
    ),
    "ResiDual that forgets its first stream": (
        "residual_dual",
        replaced(DualFinalNorm.forward, lambda final, streams: final.norm(streams[1])),
    ),
    "a dual stream that is normed": ("residual_dual", replaced(ResidualDual.forward, normed_dual)),
    "a dual stream that starts at zero": (
        "residual_dual",
        result(ResidualDualConfig.expand, lambda streams: (streams[0], 0 * streams[1])),
    ),
    "DeepNorm that weights the sum instead of the stream": (
        "deep_norm",
        calls(DeepNorm.forward, "norms", lambda norm, x, *, alpha, y: norm(x + (alpha - 1) * y)),
    ),
    "DeepNorm's constant of a decoder with an encoder": (
        "deep_norm",
        reads(DeepNorm.__init__, "depth", lambda depth: 1.5 * depth),
    ),
    "DeepNorm with the mixer's factor of the stream in both branches": (
        "deep_norm, all factors",
        condition(DeepNorm.__init__, "feedforward_alpha", False),
    ),
    "DeepNorm that multiplies the stream and not the branch": (
        "deep_norm, two factors",
        reads(DeepNorm.forward, "multiplier", lambda multiplier: 1 / multiplier, nth=1),
    ),
    "DeepNorm whose feed-forward has no multiplier of its own": (
        "deep_norm, all factors",
        condition(DeepNorm.__init__, "feedforward_multiplier", False),
    ),
    "a post-norm block that reads the normed stream twice": (
        "post_norm",
        calls(PostNorm.forward, "branch", lambda branch, stream, *, self, name: branch(self.norms[name](stream))),
    ),
    "a sandwich without its second norm": ("sandwich", calls(Sandwich._process, "after", lambda norm, y: y)),
    "parallel branches in turn": (
        "parallel, two norms",
        calls(Parallel.forward, "norms", lambda norm, stream, *, total: norm(total), nth=1),
    ),
    "writing weights up to 1": (
        "hyper_connections",
        calls(MixingMaps.forward, "sigmoid", lambda write: write.sigmoid() / 2, nth=1),
    ),
    "streams mixed backwards": (
        "hyper_connections",
        calls(HyperConnections.forward, "_mix_streams", lambda mix, maps, stream: mix(maps.mT, stream)),
    ),
    "rows before columns": (
        "hyper_connections",
        calls(sinkhorn, "logsumexp", lambda logs, dim, keepdim: logs.logsumexp(-1, keepdim=keepdim), nth=0),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = BUGS[bug]
    check(name)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        check(name)


def test_hyper_connections_start_as_pre_norm() -> None:
    data = design(layer(attention(kv_heads=2)), layer(attention(), None), layer(None), norm={"kind": "layer"})
    tokens = torch.arange(30).view(3, 10)
    hidden = []
    for residual in ({"kind": "pre_norm"}, {"kind": "hyper_connections", "streams": 5}):
        model = heddle.build(parse_config(ModelConfig, data | {"residual": residual}), dtype=torch.float64, seed=2)
        hidden.append(model(tokens)[0].detach())
    torch.testing.assert_close(hidden[1], hidden[0], rtol=0, atol=1e-12)


def sum_of_branches(kind: str, depth: int, scaled: bool) -> float:
    """The root mean square of what all layers of a new model add to the stream (for ResiDual, the dual stream)."""
    data = design(layer(attention(), repeat=depth), residual={"kind": kind})
    model = heddle.build(parse_config(ModelConfig, data | {"initialization": {"std": 0.1, "depth_scaled": scaled}}))
    layout = heddle.Layout.causal(2, 30)
    initial = stream = model.config.residual.expand(model.embed(torch.arange(60).view(2, 30), layout))
    for block in model.layers:
        stream, _ = block(stream, layout)
    added = stream - initial if isinstance(stream, Tensor) else stream[1] - initial[1]
    return float(added.detach().square().mean().sqrt())


@pytest.mark.parametrize("kind", ["pre_norm", "parallel", "residual_dual", "hyper_connections"])
def test_a_deep_stack_starts_as_a_shallow_one(kind: str) -> None:
    """The sum of all branches does not grow with the depth, since each starts 1/sqrt(2 · layers) as large."""
    assert sum_of_branches(kind, 12, True) < 1.5 * sum_of_branches(kind, 3, True)
    assert sum_of_branches(kind, 12, False) > 1.7 * sum_of_branches(kind, 3, False)


@pytest.mark.parametrize("kind", ["attention", "latent_attention", "linear_attention"])
def test_deep_norm_scales_the_first_values_outputs_and_feedforwards(kind: str) -> None:
    """β = (8N)^(−1/4) for N layers; queries and keys are as in any other model (Wang et al. 2022, figure 2)."""
    mixers = {
        "attention": attention(kv_heads=2),
        "latent_attention": latent(),
        "linear_attention": {"kind": kind, "heads": 3},
    }
    values = {"attention": "mixer.v", "latent_attention": "mixer.v_up", "linear_attention": "mixer.v"}
    experts = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 9, "shared": 1}
    layers = [layer(mixers[kind], {"kind": "gated", "hidden": 9}), layer(mixers[kind], experts)]
    scaled = {values[kind], "mixer.out"} | {f"feedforward.{name}" for name in ("gate", "up", "down")}
    scaled |= {f"feedforward.shared.{name}" for name in ("gate", "up", "down")}
    weights = {}
    for on in (True, False):
        data = design(*layers, residual={"kind": "deep_norm"}, initialization={"depth_scaled": on})
        weights[on] = dict(heddle.build(parse_config(ModelConfig, data)).named_parameters())
    for name, weight in weights[True].items():
        factor = (8 * 2) ** (-1 / 4) if name.removesuffix(".weight").partition(".")[2][2:] in scaled else 1.0
        torch.testing.assert_close(weight, factor * weights[False][name], rtol=1e-6, atol=0.0, msg=name)


def test_a_training_step_makes_the_streams_differ() -> None:
    """The gradient of α is not zero at initialization, so that the streams do not stay equal."""
    residual = {"kind": "hyper_connections", "streams": 3}
    model = heddle.build(parse_config(ModelConfig, design(layer(attention(), repeat=2), residual=residual)), seed=2)
    tokens = torch.arange(30).view(3, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens)[0].square().cos().sum().backward()
        optimizer.step()
    streams: list[Tensor] = []
    model.final_norm.register_forward_pre_hook(lambda _module, inputs: streams.append(inputs[0]))
    model(tokens)
    assert float(streams[0].detach().std(2).max()) > 1e-6


@pytest.mark.parametrize("field", [{"streams": 1}, {"streams": 65}, {"iterations": 0}])
def test_errors_of_hyper_connections(field: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        config("hyper_connections", **field)
