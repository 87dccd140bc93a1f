"""Alternating updates and learned residuals of low rank: a plain loop over tokens and streams, with gradients."""

import ast
import random

import pytest
import torch
from torch import Tensor

from heddle.config import parse_config
from heddle.laws.harness import model_under_test, normal_tensor
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.residuals.sandwich import AltUp, LowRankResidual, MergedFinalNorm, SandwichConfig, StreamExpansion
from tests.cases import Data, by_day, design, layer
from tests.laws.planting import Plant, calls, operator
from tests.parts.loops import Errors, assert_none, errors, normalized

LENGTH = 4


def random_design(seed: int, streams: bool) -> Data:
    """Layers of one or two feed-forward branches; with streams some have learned residuals, too."""
    draw = random.Random(seed)
    layers = [
        layer(None, {"kind": "mlp", "hidden": draw.randint(2, 9), "activation": "relu"})
        for _ in range(draw.randint(1, 4))
    ]
    rank = {"laurel_rank": draw.randint(1, 5)} if not streams or draw.random() < 0.5 else {}
    altup = {"altup_streams": draw.randint(2, 5)} if streams else {}
    residual = {"kind": "sandwich", "final_norm": draw.random() < 0.7, **rank, **altup}
    return design(*layers, width=draw.randint(2, 10), residual=residual)


class Loop:
    """The hidden state of one token."""

    def __init__(self, model: Decoder) -> None:
        residual = model.config.residual
        assert isinstance(residual, SandwichConfig)
        self.weights, self.width, self.depth = dict(model.named_parameters()), model.config.width, model.config.depth
        self.streams, self.has_laurel = residual.altup_streams, residual.laurel_rank is not None
        self.final = residual.final_norm

    def normed(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm with the named weight."""
        return normalized(x, self.weights[f"{name}.weight"])

    def times(self, name: str, x: Tensor) -> Tensor:
        """A matrix times a vector."""
        return self.weights[f"{name}.weight"] @ x

    def block(self, index: int, x: Tensor) -> Tensor:
        """x + N(f(N(x))); with a learned residual (x + N(f(u)) + u + N(B A u)) / sqrt(2)."""
        at = f"layers.{index}"
        u = self.normed(x, f"{at}.residual.norms.feedforward")
        f = self.times(f"{at}.feedforward.down", self.times(f"{at}.feedforward.up", u).clamp(min=0))
        after = self.normed(f, f"{at}.residual.after.feedforward")
        if not self.has_laurel:
            return x + after
        low = self.times(f"{at}.residual.laurel.up", self.times(f"{at}.residual.laurel.down", u))
        return (x + after + u + self.normed(low, f"{at}.residual.laurel.norm")) / 2**0.5

    def hidden(self, x: Tensor) -> Tensor:
        """From the embedding."""
        if self.streams is None:
            for index in range(self.depth):
                x = self.block(index, x)
        else:
            x = self.alternating(x, self.streams)
        return self.normed(x, "final_norm.norm") if self.final else x

    def alternating(self, x: Tensor, n: int) -> Tensor:
        """The mean of the streams."""
        streams = [x, *(sized(self.times(f"expansion.projections.{i}", x), x) for i in range(n - 1))]
        for index in range(self.depth):
            at = f"layers.{index}.residual.altup"
            mixing = self.times(f"{at}.prediction", self.routed(at, streams[0]))
            predicted = []
            for i in range(n):
                own = streams[i]
                for j in range(n):
                    own = own + mixing[i * n + j] * streams[j]
                predicted.append(own)
            y = self.block(index, predicted[0])
            factors = self.times(f"{at}.correction", self.routed(at, y))
            streams = [predicted[i] + (1 + factors[i]) * (y - predicted[0]) for i in range(n)]
        first, *rest = streams
        total = first
        for i, each in enumerate(rest):
            total = total + sized(self.times(f"final_norm.projections.{i}", each), first)
        return total / n

    def routed(self, at: str, x: Tensor) -> Tensor:
        """tanh(R N(x) / width)."""
        return torch.tanh(self.times(f"{at}.router", self.normed(x, f"{at}.norm") / self.width))


def sized(y: Tensor, other: Tensor) -> Tensor:
    """y with the root mean square of another vector."""
    return y * ((other * other).mean() / (y * y).mean().clamp(min=1e-5)).sqrt()


def largest_errors(streams: bool, seed: int) -> Errors:
    """Of the hidden states, and of the gradients of the embeddings and of all weights but the table's."""
    model = model_under_test(parse_config(ModelConfig, random_design(seed, streams)))
    x = normal_tensor((1, LENGTH, model.config.width), torch.Generator().manual_seed(seed)).requires_grad_()
    weights = [each for name, each in model.named_parameters() if not name.startswith(("embed", "head"))]
    expected = torch.stack([Loop(model).hidden(token) for token in x[0]])
    return errors(model(x)[0][0], expected, [x, *weights])


@pytest.mark.parametrize("streams", [False, True], ids=["laurel", "altup"])
@pytest.mark.parametrize("seed", by_day(12, 48))
def test_values_and_gradients_are_those_of_a_plain_loop(seed: int, streams: bool) -> None:
    assert_none(largest_errors(streams, seed))


WRONG: dict[str, tuple[bool, Plant]] = {
    "a learned residual without its input": (False, calls(LowRankResidual.forward, "norm", lambda x, y: x.norm(y) - y)),
    "corrections of the other sign": (True, operator(AltUp.correct, ast.Sub, ast.Add)),
    "projected streams of any size": (True, calls(StreamExpansion.forward, "with_size_of", lambda _, y, x: y)),
    "merged streams of any size": (True, calls(MergedFinalNorm.forward, "with_size_of", lambda _, y, x: y)),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_a_wrong_formula(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, plant = WRONG[bug]
    plant(monkeypatch)
    assert any(largest_errors(streams, seed)[0] > 1e-3 for seed in range(3))
