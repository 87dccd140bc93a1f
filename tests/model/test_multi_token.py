"""Multi-token modules against a plain loop of DeepSeek-V3's formula, a document and a token at a time."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.laws.harness import model_under_test
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.model.multi_token import MultiTokenModule
from heddle.parts.layout import Layout
from tests.cases import by_day
from tests.random_layouts import random_layout

DESIGNS = 48
VOCABULARY = 29
EPS = 1e-5


def random_design(draw: random.Random) -> dict[str, Any]:
    """Attention of one of many shapes in two layers; the modules have that of the last."""
    heads, head_dim = draw.choice(((2, 4), (4, 6), (3, 2), (6, 4)))
    position = draw.choice(({"kind": "rope", "base": draw.choice((10.0, 1000.0))}, None))
    window = draw.choice((None, None, 1, 3))
    feedforward = draw.choice(
        (None, {"kind": "gated", "hidden": draw.choice((5, 16))}, {"kind": "mlp", "hidden": 7, "activation": "relu"})
    )

    def layer(kv_heads: int, hidden: dict[str, Any] | None) -> dict[str, Any]:
        mixer = {"kind": "attention", "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "position": position}
        return {"mixer": mixer | ({} if window is None else {"window": window}), "feedforward": hidden}

    kv_heads = draw.choice([each for each in range(1, heads + 1) if heads % each == 0])
    return {
        "vocab_size": VOCABULARY,
        "width": draw.choice((8, 12, 24)),
        "layers": [layer(heads, {"kind": "mlp", "hidden": 6}), layer(kv_heads, feedforward)],
        "norm": {"kind": "rms", "eps": EPS},
        "head": {"tied": draw.random() < 0.5},
        "multi_token": {"depth": draw.choice((1, 2, 3)), "loss_weight": 0.3},
    }


class Loop:
    """The module of the loop: its weights by name, and what a design says of its layer."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.mixer: Any = config.layers[-1].mixer
        self.feedforward: Any = config.layers[-1].feedforward
        self.weights = weights

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + EPS) * self.weights[name]

    def rotate(self, x: Tensor, position: int) -> Tensor:
        if self.mixer.position is None:
            return x
        half, parts = len(x) // 2, list(x)
        for pair in range(half):
            angle = position * self.mixer.position.base ** (-2 * pair / len(x))
            a, b = x[pair], x[pair + half]
            parts[pair] = a * math.cos(angle) - b * math.sin(angle)
            parts[pair + half] = b * math.cos(angle) + a * math.sin(angle)
        return torch.stack(parts)

    def attention(self, xs: list[Tensor], t: int) -> Tensor:
        heads, dim = self.mixer.heads, self.mixer.head_dim
        shared, out = heads // self.mixer.kv_heads, []
        for head in range(heads):
            rows, kv = slice(head * dim, (head + 1) * dim), slice(head // shared * dim, (head // shared + 1) * dim)
            q = self.rotate(self.weights["layer.mixer.q.weight"][rows] @ xs[t], t)
            first = 0 if self.mixer.window is None else max(0, t + 1 - self.mixer.window)
            keys = [self.rotate(self.weights["layer.mixer.k.weight"][kv] @ xs[s], s) for s in range(first, t + 1)]
            values = [self.weights["layer.mixer.v.weight"][kv] @ xs[s] for s in range(first, t + 1)]
            scores = [torch.exp(q @ k / math.sqrt(dim)) for k in keys]
            total = sum(scores, torch.zeros((), dtype=q.dtype))
            out.append(
                sum((s / total * v for s, v in zip(scores, values, strict=True)), torch.zeros(dim, dtype=q.dtype))
            )
        return self.weights["layer.mixer.out.weight"] @ torch.cat(out)

    def branch(self, x: Tensor) -> Tensor:
        up = self.weights["layer.feedforward.up.weight"] @ x
        if self.feedforward.kind == "gated":
            gate = self.weights["layer.feedforward.gate.weight"] @ x
            return self.weights["layer.feedforward.down.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        return self.weights["layer.feedforward.down.weight"] @ up.clamp(min=0)

    def predict(self, hidden: list[Tensor], embedding: list[Tensor]) -> list[Tensor]:
        """The states of one document: hidden[t] with embedding[t], which is that of the token ahead."""
        joined = zip(hidden, embedding, strict=True)
        xs = [
            self.weights["projection.weight"]
            @ torch.cat((self.norm("embedding_norm.weight", e), self.norm("hidden_norm.weight", h)))
            for h, e in joined
        ]
        normed = [self.norm("layer.residual.norms.mixer.weight", x) for x in xs]
        xs = [x + self.attention(normed, t) for t, x in enumerate(xs)]
        if self.feedforward is not None:
            xs = [x + self.branch(self.norm("layer.residual.norms.feedforward.weight", x)) for x in xs]
        return [self.norm("final_norm.norm.weight", x) for x in xs]


def documents(layout: Layout) -> list[tuple[int, list[int]]]:
    """Row and columns of each document, in order."""
    ids = layout.dense_segment_ids.tolist()
    found: dict[tuple[int, int], list[int]] = {}
    for row, positions in enumerate(layout.positions.tolist()):
        for column, position in enumerate(positions):
            if position >= 0:
                found.setdefault((row, ids[row][column]), []).append(column)
    return [(row, columns) for (row, _), columns in found.items()]


@pytest.mark.parametrize("number", by_day(12, DESIGNS))
def test_modules_are_those_of_a_plain_loop(number: int) -> None:
    draw = random.Random(number)
    config = load_config(random_design(draw))
    model, depth = model_under_test(config), config.multi_token.depth  # type: ignore[union-attr]
    rows, length = draw.choice(((1, 7), (2, 9), (3, 5)))
    layout = Layout.causal(rows, length) if number % 4 == 0 else random_layout(draw, rows, length)
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(number))
    hidden = model(tokens, layout)[0].detach().requires_grad_()
    predicted = model.predict_ahead(hidden, tokens, layout)
    assert len(predicted) == min(depth, length - 1)
    texts = documents(layout)
    by_token = {(row, column): hidden[row, column] for row, columns in texts for column in columns}
    wanted_sum = got_sum = torch.zeros((), dtype=torch.float64)
    probe = torch.linspace(-1.0, 2.0, config.width, dtype=torch.float64)
    worst = 0.0
    for ahead, (got, ahead_layout) in enumerate(predicted, start=1):
        module = model.multi_token[ahead - 1]
        assert isinstance(module, MultiTokenModule)
        loop = Loop(config, dict(module.named_parameters()))
        next_states: dict[tuple[int, int], Tensor] = {}
        for row, columns in texts:
            first, later = columns[: max(0, len(columns) - ahead)], columns[ahead:]
            embedded = [model.embed.weight[tokens[row, column]] for column in later]
            states = loop.predict([by_token[row, column] for column in first], embedded)
            next_states |= {(row, column): state for column, state in zip(first, states, strict=True)}
        by_token = next_states
        is_token = ahead_layout.positions >= 0
        assert {(row, column) for row, column in is_token.nonzero().tolist()} == by_token.keys()
        if not by_token:
            continue
        wanted = torch.stack(list(by_token.values()))
        kept = torch.stack([got[place] for place in by_token])
        worst = max(worst, float((kept - wanted).detach().abs().max()))
        wanted_sum, got_sum = wanted_sum + (wanted @ probe).sin().sum(), got_sum + (kept @ probe).sin().sum()
    assert worst <= 1e-10
    trained = [hidden, model.embed.weight, *model.multi_token.parameters()]
    if got_sum.requires_grad:
        found, expected = (
            torch.autograd.grad(each, trained, allow_unused=True, materialize_grads=True, retain_graph=True)
            for each in (got_sum, wanted_sum)
        )
        assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) <= 1e-9
