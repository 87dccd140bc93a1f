"""Attention residuals: random stacks against a plain loop over tokens, with dropped branches, and their options."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.build import ResidualContext
from heddle.parts.modules.dropout import BranchDropout, Dropout
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Residual, ResidualConfig
from heddle.parts.residuals.attention_residuals import (
    AttentionResiduals,
    AttentionResidualsConfig,
    MixFinalNorm,
    SourceMix,
)
from tests.cases import attention, by_day, design, layer
from tests.laws.planting import Plant, calls, condition, reads, result

ROWS, LENGTH = 3, 2
BRANCHES = (("mixer", "feedforward"), ("mixer",), ("feedforward",))
Branch = Callable[[Tensor], Tensor]
FUNCTIONS: dict[str, Branch] = {
    "mixer": lambda x: x.flip(-2).tanh(),
    "feedforward": lambda x: x.roll(1, dims=-1).sin(),
}


class Stack(nn.Module):
    """Random options, layers, parameters and rates of stochastic depth, in float64 and in training."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        depth, self.width = draw.randint(2, 6), draw.randint(2, 9)
        names = [draw.choice(BRANCHES) for _ in range(depth)]
        fields: dict[str, Any] = {"value_norm": draw.random() < 0.5, "eps": draw.choice((1e-6, 1e-3, 0.3))}
        if draw.random() < 0.6:
            fields["block_size"] = draw.randint(1, depth)
        if draw.random() < 0.6:
            fields |= {"drop_path": draw.uniform(0.2, 0.9), "drop_path_first": draw.choice((0.0, 0.5))}
        self.config = config(**fields)
        norm = parse_config(NormConfig, {"kind": "rms"})  # type: ignore[type-abstract]
        self.layers = nn.ModuleList(
            self.config.build(ResidualContext(each, self.width, norm, self.config.drop_rate(i, depth), 0.0, depth, i))
            for i, each in enumerate(names)
        )
        self.final_norm = self.config.build_final_norm(self.width, norm)
        self.double()
        for site, module in enumerate(self.modules()):
            if isinstance(module, Dropout):
                module.site = site
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.7)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.config.expand(x)
        for block in self.layers:
            assert isinstance(block, Residual)
            stream = block(stream, {name: FUNCTIONS[name] for name in block.drops})
        hidden: Tensor = self.final_norm(stream)
        return hidden


def config(**fields: Any) -> AttentionResidualsConfig:
    parsed = parse_config(ResidualConfig, {"kind": "attention_residuals", **fields})  # type: ignore[type-abstract]
    assert isinstance(parsed, AttentionResidualsConfig)
    return parsed


def mixed(sources: list[Tensor], query: Tensor, fields: AttentionResidualsConfig) -> Tensor:
    """The mix [T, width] of one sample, token by token."""
    tokens = []
    for t in range(LENGTH):
        scores, values = [], []
        for source in sources:
            key = source[t] / torch.sqrt(torch.dot(source[t], source[t]) / len(source[t]) + fields.eps)
            scores.append(torch.dot(query, key).exp())
            values.append(key if fields.value_norm else source[t])
        total = torch.stack(scores).sum()
        tokens.append(torch.stack([score / total * value for score, value in zip(scores, values, strict=True)]).sum(0))
    return torch.stack(tokens)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def loop(stack: Stack, x: Tensor) -> Tensor:
    """Each sample alone: a branch that it drops is not in its lists."""
    kept: dict[Any, tuple[Tensor | None, float]] = {}
    blocks = [block for block in stack.layers if isinstance(block, AttentionResiduals)]
    for index, block in enumerate(blocks):
        for name, drop in block.drops.items():
            assert isinstance(drop, BranchDropout)
            kept[index, name] = drop.draw_path(x), drop.path.rate
    weights, size, rows = dict(stack.named_parameters()), stack.config.block_size, []
    for row in range(len(x)):
        sources, summed = [x[row]], list[Tensor]()
        for index, block in enumerate(blocks):
            for number, name in enumerate(block.drops):
                if size is not None and index % size == 0 and number == 0 and summed:
                    sources, summed = [*sources, sum_of(summed)], []
                seen = [*sources, sum_of(summed)] if summed else sources
                is_first = index == number == 0
                h = x[row] if is_first else mixed(seen, weights[f"layers.{index}.mixes.{name}.query"][0], stack.config)
                y = FUNCTIONS[name](normed(h, weights[f"layers.{index}.norms.{name}.weight"]))
                keep, rate = kept[index, name]
                if keep is None or bool(keep[row]):
                    y = y if keep is None else y / (1 - rate)
                    (sources if size is None else summed).append(y)
        seen = [*sources, sum_of(summed)] if summed else sources
        last = mixed(seen, weights["final_norm.mix.query"][0], stack.config)
        rows.append(normed(last, weights["final_norm.norm.weight"]))
    return torch.stack(rows)


def sum_of(outputs: list[Tensor]) -> Tensor:
    return torch.stack(outputs).sum(0)


def difference(seed: int) -> float:
    """The largest difference of outputs and gradients between a random stack and the loop."""
    stack = Stack(seed)
    torch.manual_seed(100 + seed)
    x = torch.randn(ROWS, LENGTH, stack.width, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(ROWS, LENGTH, stack.width, dtype=torch.float64)
    inputs = [x, *stack.parameters()]
    with use_random_key(RandomKey(seed, 1, torch.arange(ROWS))):
        outputs = (stack(x), loop(stack, x))
    pairs = [(y, *torch.autograd.grad((y * direction).sum(), inputs, materialize_grads=True)) for y in outputs]
    return max(float((got - want).detach().abs().max()) for got, want in zip(*pairs, strict=True))


@pytest.mark.parametrize("share", by_day(1, 4))
def test_random_stacks_equal_the_plain_loop(share: int) -> None:
    assert max(difference(seed) for seed in range(share, 80, 4)) < 1e-10


BUGS: dict[str, Plant] = {
    "a dropped branch that counts as a zero": condition(SourceMix.forward, "present", False, nth=0),
    "a block without a branch that counts as a zero": calls(
        AttentionResiduals._written, "maximum", lambda torch, present, kept: torch.ones_like(kept)
    ),
    "a block that a dropped branch takes out": calls(
        AttentionResiduals._written, "maximum", lambda torch, present, kept: kept
    ),
    "keys that are not normed": result(SourceMix._inverse_rms, torch.ones_like),
    "values that are normed": condition(SourceMix.forward, "value_norm", True),
    "values that are not normed": condition(SourceMix.forward, "value_norm", False),
    "scores divided by the root of the width": calls(
        SourceMix.forward, "sum", lambda x, *rest, **options: x.sum(*rest, **options) / 2
    ),
    "no last mix": calls(MixFinalNorm.forward, "mix", lambda mix, stream: stream[0]),
    "blocks of one layer more": reads(AttentionResiduals.__init__, "layer_index", lambda index: index + 1, nth=1),
    "weights that do not reach the keys": calls(
        SourceMix.forward, "_inverse_rms", lambda mix, source, dtype: mix._inverse_rms(source.detach(), dtype)
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    assert any(difference(seed) > 1e-3 for seed in range(30))


@pytest.mark.parametrize("fields", [{}, {"block_size": 2}, {"block_size": 1}], ids=str)
def test_they_start_as_pre_norm(fields: dict[str, int]) -> None:
    """Queries are zero: a mix is the sum of all outputs over their number, which the next norm takes out."""
    norm = {"kind": "rms", "eps": 1e-18}
    layers = (layer(attention(kv_heads=2), repeat=2), layer(attention(), None), layer(None))
    tokens, hidden = torch.arange(30).view(3, 10), []
    for residual in ({"kind": "pre_norm"}, {"kind": "attention_residuals", **fields}):
        data = design(*layers, norm=norm, residual=residual)
        hidden.append(heddle.build(parse_config(ModelConfig, data), dtype=torch.float64, seed=2)(tokens)[0].detach())
    torch.testing.assert_close(hidden[1], hidden[0], rtol=0, atol=1e-9)


def test_a_gain_of_keys_is_a_factor_of_the_query() -> None:
    """The paper's keys are γ ⊙ v / rms(v): as here with γ ⊙ q."""
    torch.manual_seed(1)
    stream = tuple(torch.randn(2, 3, 8, dtype=torch.float64) for _ in range(4))
    query, gain = torch.randn(2, 8, dtype=torch.float64)
    mix = SourceMix(config(), 8).double()
    mix.query.data[0] = gain * query
    values = torch.stack((*stream[1:], stream[0]))
    keys = nn.functional.rms_norm(values, (8,), gain, 1e-6)
    weights = (keys @ query).softmax(0)
    torch.testing.assert_close(mix(stream), (weights[..., None] * values).sum(0), rtol=0, atol=1e-12)


def model(residual: dict[str, Any], layers: int = 3) -> ModelConfig:
    return parse_config(ModelConfig, design(layer(attention(), repeat=layers), residual=residual))


@pytest.mark.parametrize(
    ("fields", "layers", "field"),
    [
        ({"block_size": 4}, [layer(attention(), repeat=3)], "block_size"),
        ({"block_size": 1}, [layer(attention(), None), layer(None)], "block_size"),
        ({"block_size": 0}, [layer(attention(), repeat=3)], "block_size"),
        ({"eps": 0.0}, [layer(attention(), repeat=3)], "eps"),
        ({"drop_path": 0.1}, [layer(attention())], "drop_path"),
    ],
)
def test_refused(fields: dict[str, Any], layers: list[Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"residual.{field}"):
        parse_config(ModelConfig, design(*layers, residual={"kind": "attention_residuals", **fields}))


@pytest.mark.parametrize("fields", [{}, {"block_size": 2}, {"block_size": 5}], ids=str)
def test_flops_of_the_mixes(fields: dict[str, int]) -> None:
    """4 · width for each source that a token's mix reads, layer by layer."""
    depth, kind = 7, "attention_residuals"
    sizes = [heddle.size(model({"kind": name, **more}, depth), 16) for name, more in (("pre_norm", {}), (kind, fields))]
    size, seen = fields.get("block_size"), []
    for number in range(1, 2 * depth + 1):
        layer_index, is_second = divmod(number, 2)
        if size is None:
            seen.append(number + 1)
        else:
            first = layer_index < depth and layer_index % size == 0 and not is_second
            finished = min(layer_index, depth) // size if layer_index < depth else (depth - 1) // size
            seen.append(finished + 1 + (not first))
    width = model({"kind": "pre_norm"}).width
    assert sizes[1].flops_per_token - sizes[0].flops_per_token == 4 * width * sum(seen)
    assert sizes[1].parameters - sizes[0].parameters == 2 * depth * width
